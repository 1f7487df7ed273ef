"""Fixtures of the producer's tests: servers that can be stopped and restarted, a tokenizer, a trainer operated by the
test."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy
import pytest
import redis

from forked_programs import ForkedProgram
from one_environment import alone
from penstock.producers.loop import Producer
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.rollout.episode import load_tokenizer
from penstock.producers.stream import claims, heartbeat
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.context import ProducerContext
from penstock.producers.weights import follower
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig
from penstock.schemas.keys import Commit, Field, Keys
from penstock.schemas.policy import WeightManifest
from producer_process import ProducerProcesses
from producer_run import QUICK, Numbers, ProducerRun
from real_server import RealServer
from scripted_engine import ScriptedEngine
from weight_writer import WeightWriter

CHARACTERS = "0123456789+= -abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def redis_server(server_binary: Path) -> Iterator[Callable[..., RealServer]]:
    """Starts servers: `redis_server("--maxmemory", "2mb")`. All are removed afterwards."""
    servers: list[RealServer] = []

    def start(*arguments: str) -> RealServer:
        servers.append(server := RealServer(server_binary, *arguments))
        return server

    yield start
    for server in servers:
        server.remove()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder with a character-level tokenizer: ids follow CHARACTERS, after two special ones."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    vocabulary = {"<pad>": 0, "<eos>": 1} | {character: n for n, character in enumerate(CHARACTERS, 2)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 64}))
    return folder


@pytest.fixture
def make_config(model_folder: Path) -> Callable[..., RunConfig]:
    """Makes a run configuration with short time limits; keyword arguments replace whole fields."""

    def make(**changes: object) -> RunConfig:
        fields: dict = {
            "name": "test",
            "group_size": 4,
            "model": ModelConfig(path=str(model_folder)),
            "environment": EnvironmentConfig(
                path="penstock.producers.environments.arithmetic:Arithmetic",
                kwargs={"width": 2, "num_evaluation_prompts": 64},
            ),
        }
        config = RunConfig(**{**fields, **changes})
        return msgspec.structs.replace(config, metrics=msgspec.structs.replace(config.metrics, port=0))

    return make


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer soon looks again: blocking reads wait in the server for 0.2 s instead of 2, and so do heartbeats."""
    for module in (claims, follower):
        monkeypatch.setattr(module, "BLOCK_MS", 200)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.1)


class HandTrainer:
    """The trainer's side of the streams, operated by the test with plain commands.

    run_id: of the run that it leads; empty for none.
    """

    def __init__(self, client: redis.Redis, config: RunConfig, runs: Path) -> None:
        self.keys = Keys(config.name)
        self.log = WeightWriter(client, config.name)
        self._cursor: bytes = b"0-0"
        self.run_id = ""

    def begin_anew(self, run_id: str) -> None:
        """Empties Redis and begins another run of the same name."""
        self.client.flushall()
        self._cursor, self.run_id = b"0-0", run_id
        if run_id:
            self.client.hset(self.keys.commit, mapping={Commit.EPOCH: 0, Commit.RUN_ID: run_id})

    @property
    def client(self) -> redis.Redis:
        return self.log.client

    @client.setter
    def client(self, client: redis.Redis) -> None:
        self.log.client = client

    def announce(self, version: int, **changes: object) -> WeightManifest:
        """Announces a whole policy with one tensor that holds `version`, or `number` if it is given; `changes` replace
        fields of the manifest."""
        bits = numpy.array([changes.pop("number", version)], numpy.float32).view(numpy.uint32)
        return self.log.whole(version, {"weight": bits}, **{"run_id": self.run_id, **changes})

    def release(self, first: int, last: int, version: int = 0, environment: str = "") -> None:
        for index in range(first, last + 1):
            fields = {Field.INDEX: index, Field.VERSION: version, Field.ENVIRONMENT: environment}
            if self.run_id:
                fields[Field.RUN_ID] = self.run_id
            self.client.xadd(self.keys.prompts, fields)

    def evaluate(self, version: int, last: int, first: int = 1, environment: str = "") -> None:
        for n in range(first, last + 1):
            self.client.xadd(self.keys.evaluations, {Field.ENVIRONMENT: environment}, id=f"{version}-{n}")

    def read(self, num_entries: int, timeout_s: float = 90.0) -> list[dict[bytes, bytes]]:
        """Waits for the next entries of the rollout stream; fails after `timeout_s`."""
        entries: list[dict[bytes, bytes]] = []
        deadline = time.monotonic() + timeout_s
        while len(entries) < num_entries:
            assert time.monotonic() < deadline, f"{len(entries)} of {num_entries} entries after {timeout_s} s"
            reply = self.client.xread({self.keys.rollouts: self._cursor}, count=64, block=500)
            for entry_id, fields in reply[0][1] if reply else []:
                self._cursor = entry_id
                entries.append(fields)
        return entries


@pytest.fixture
def hand_trainer() -> type[HandTrainer]:
    return HandTrainer


@pytest.fixture
def metrics() -> ProducerMetrics:
    return ProducerMetrics()


@pytest.fixture
async def connect(metrics: ProducerMetrics) -> AsyncIterator[Callable[..., ProducerConnection]]:
    """`connect(server)` opens a producer's connection to a real server; all are closed afterwards."""
    opened: list[ProducerConnection] = []

    def open_connection(server: RealServer, outage_s: float = 30.0) -> ProducerConnection:
        opened.append(ProducerConnection.open(server.url, outage_s=outage_s, metrics=metrics))
        return opened[-1]

    yield open_connection
    for connection in opened:
        await connection.close()


class Streams(NamedTuple):
    """A producer's connection, and a plain client of the same server."""

    connection: ProducerConnection
    client: Any

    def count(self, stream: str) -> int:
        return self.client.xlen(stream)


@pytest.fixture
async def streams(redis_url: str, redis_client: redis.Redis, metrics: ProducerMetrics) -> AsyncIterator[Streams]:
    connection = ProducerConnection.open(redis_url, outage_s=30.0, metrics=metrics)
    yield Streams(connection, redis_client)
    await connection.close()


@pytest.fixture
async def run(
    redis_server, connect, make_config, hand_trainer, metrics, tmp_path
) -> AsyncIterator[Callable[..., ProducerRun]]:
    """`run(**changes)` starts a server with policy 0 announced, for producers in this event loop."""
    started: list[ProducerRun] = []

    def begin(*arguments: str, **changes: object) -> ProducerRun:
        server, config = redis_server(*arguments), make_config(**{"producers": QUICK, **changes})
        tokenizer, environment = load_tokenizer(config), Numbers()

        def build(engine: ScriptedEngine, producer_id: str, address: Any) -> Producer:
            context = ProducerContext(
                config, runs=tmp_path, producer_id=producer_id, connection=connect(address), metrics=metrics
            )
            return Producer(context, engine, alone(config, environment), tokenizer)

        started.append(ProducerRun(server, config, hand_trainer(server.client, config, tmp_path), build))
        started[-1].trainer.announce(0)
        return started[-1]

    yield begin
    for one in started:
        for task in one.tasks:
            task.cancel()
        await asyncio.gather(*one.tasks, return_exceptions=True)


@pytest.fixture
def start_producer(tmp_path: Path) -> Iterator[ProducerProcesses]:
    """Starts producer processes: `start_producer(config, url, "producer-0", token_s=60)`."""
    processes = ProducerProcesses(tmp_path)
    yield processes
    processes.kill_all()


class ProcessRun(NamedTuple):
    """A real server, a trainer operated by the test, and the producer processes that the test starts."""

    server: RealServer
    config: RunConfig
    trainer: HandTrainer
    processes: ProducerProcesses

    def start(self, producer_id: str = "producer-0", **settings: Any) -> ForkedProgram:
        return self.processes(self.config, self.server.url, producer_id, **settings)

    def log(self, producer_id: str = "producer-0") -> str:
        return self.processes.log(producer_id)

    def stop(self, process: ForkedProgram) -> None:
        """Ends a producer by SIGTERM; its status is 0."""
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=90) == 0


@pytest.fixture
def begin(redis_server, make_config, start_producer, tmp_path: Path) -> Callable[..., ProcessRun]:
    """`begin(8, **changes)` starts a server with policy 0 announced and 8 prompts released, for producer processes."""

    def make(num_prompts: int = 0, **changes: object) -> ProcessRun:
        server, config = redis_server(), make_config(**changes)
        trainer = HandTrainer(server.client, config, tmp_path)
        trainer.announce(0)
        trainer.release(1, num_prompts)
        return ProcessRun(server, config, trainer, start_producer)

    return make
