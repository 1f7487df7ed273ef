"""The two servers of the gateway row, started as their users start them: a producer with an endpoint, and vLLM's."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.result import BenchError
from bench.section import ended_early, redis_server, started
from penstock.deploy.launch.child import Child
from penstock.deploy.launch.run_folder import resolved_toml
from penstock.producers.engines.settings import engine_arguments
from penstock.schemas.config import RunConfig
from penstock.schemas.heartbeat import decode_heartbeat
from penstock.schemas.keys import Keys

Json = dict[str, Any]

PRODUCER_ID = "producer-0"
BOOT_LIMIT_S = 300.0
CALL_LIMIT_S = 300.0
CREDIT_LIMIT_S = 60.0
NO_KEYS = {"PENSTOCK_API_KEY": "", "PENSTOCK_API_KEY_FILE": "", "VLLM_API_KEY": ""}
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The producer's engine runs in it on a CPU, where vLLM's default costs a small model a third of its time."""
NEVER_PER_S = 1e-6


class Answer(NamedTuple):
    """seconds: from sending the request to the last byte of the response, before parsing. message: as received."""

    seconds: float
    message: Json
    num_sampled_tokens: int


class ChatServer:
    """One connection to an OpenAI-compatible server on this machine."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_LIMIT_S)

    def chat(self, path: str, request: Json) -> Answer:
        """
        Raises:
            BenchError: no connection, or an answer with another status than 200.
        """
        body = json.dumps(request).encode()
        began = time.perf_counter()
        status, answer = self._send("POST", path, body)
        seconds = time.perf_counter() - began
        found = json.loads(self._checked(status, answer))
        message, usage = found["choices"][0]["message"], found["usage"]
        return Answer(seconds, message, usage["completion_tokens"])

    def open(self) -> str:
        """Begins a conversation; returns the path of its calls."""
        return "/v1/chat/completions"

    def finish(self, path: str) -> None:
        """Ends a conversation."""

    def _send(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        try:
            self._connection.request(method, path, body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise BenchError(f"{self.name}: {type(error).__name__}: {error}") from error

    def _checked(self, status: int, answer: bytes) -> bytes:
        if status != 200:
            raise BenchError(f"{self.name}: status {status}: {answer[:500].decode(errors='replace')}")
        return answer

    def close(self) -> None:
        self._connection.close()


class PenstockServer(ChatServer):
    """The endpoint of a producer: a conversation is a rollout."""

    def open(self) -> str:
        """Waits for credit, as an agent does."""
        deadline = time.monotonic() + CREDIT_LIMIT_S
        while (found := self._send("POST", "/r"))[0] == 429 and time.monotonic() < deadline:
            time.sleep(0.1)
        return f"/r/{json.loads(self._checked(*found))['id']}/v1/chat/completions"

    def finish(self, path: str) -> None:
        self._checked(*self._send("POST", path.removesuffix("v1/chat/completions") + "finish", b"0.0"))


class VllmServer(ChatServer):
    """vLLM's own server."""

    def is_ready(self) -> bool:
        try:
            return self._send("GET", "/health")[0] == 200
        except BenchError:
            return False


@contextmanager
def penstock_server(config: RunConfig, folder: Path) -> Iterator[PenstockServer]:
    """Starts a producer of `config`, with a Redis and a trainer that releases prompts and never updates.

    Raises:
        BenchError, ServerError: it does not come up.
    """
    folder.mkdir()
    run_file, weights = folder / "run.toml", Path(config.model.path) / "model.safetensors"
    run_file.write_text(resolved_toml(config), encoding="utf-8")
    commands = {
        "feeder": ["bench.feeder", str(run_file), "--weights", str(weights), "--updates-per-s", str(NEVER_PER_S)],
        "penstock": ["penstock.deploy.cli", "producer", str(run_file), "--runs", str(folder), "--id", PRODUCER_ID],
    }
    with (
        redis_server(folder / "redis") as redis,
        started(commands, folder, {"REDIS_URL": redis.url, **NO_KEYS}) as children,
    ):
        key = Keys(config.name).producer(PRODUCER_ID)

        def port() -> int:
            data: Any = redis.client.get(key)
            return int(decode_heartbeat(data).endpoint.rpartition(":")[2] or 0) if data is not None else 0

        wait_until_ready(children, port)
        with closing(PenstockServer("penstock", port())) as server:
            yield server


@contextmanager
def vllm_server(config: RunConfig, folder: Path) -> Iterator[VllmServer]:
    """Starts vLLM's own server on the model and with the engine settings of `config`.

    Raises:
        BenchError: it does not come up.
    """
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    commands = {"vllm": ["vllm.entrypoints.openai.api_server", *serve_arguments(config, port)]}
    with (
        started(commands, folder, serve_environment(config)) as children,
        closing(VllmServer("vllm", port)) as server,
    ):
        wait_until_ready(children, server.is_ready)
        yield server


def serve_arguments(config: RunConfig, port: int) -> list[str]:
    """Returns the command line with the settings of the producer's engine."""
    import torch

    cpu = not torch.cuda.is_available()
    asked = engine_arguments(config, config.seed, cpu=cpu)
    model = asked.pop("model")
    if cpu:
        asked["distributed_executor_backend"] = UNIPROC
    arguments = ["--model", model, "--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    for name, value in asked.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return arguments


def serve_environment(config: RunConfig) -> dict[str, str]:
    """Returns the variables that the producer's engine sets for itself, and a keep-alive as long as a connection may
    idle."""
    return NO_KEYS | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.producers.num_threads),
        "VLLM_USE_AOT_COMPILE": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(int(CALL_LIMIT_S)),
    }


def wait_until_ready(children: Sequence[Child], is_ready: Callable[[], object]) -> None:
    """Waits until `is_ready`. Raises BenchError if a child ends first or the time is up."""
    deadline = time.monotonic() + BOOT_LIMIT_S
    while not is_ready():
        for child in children:
            if child.poll() is not None:
                raise ended_early(child)
        if time.monotonic() > deadline:
            name = children[-1].name
            raise BenchError(f"{name}: not up after {BOOT_LIMIT_S:g} s; its log ends:\n{children[-1].last_lines()}")
        time.sleep(0.2)
