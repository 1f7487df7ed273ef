"""A tiny model, and trainers with a scripted learner on a real server."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock.consumers.__main__ as entry
from penstock.schemas.heartbeat import encode_heartbeat
from penstock.schemas.keys import Keys
from real_server import LossyServer
from scripted_learner import ScriptedLearner
from trainer_bench import TrainerBench
from trainer_process import TrainerProcesses
from training_groups import tiny_model
from wire_examples import heartbeat


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, which no test changes."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model(folder)
    return folder


@pytest.fixture
def bench(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerBench]:
    monkeypatch.setattr(entry, "load_learner", ScriptedLearner)
    bench = TrainerBench(redis_url, tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def beat(redis_client) -> Callable[..., None]:
    """Writes the heartbeat of an instance, which does not expire. Its producer is the part before the dash."""

    def send(keys: Keys, instance: str, unreadable_version: int = -1) -> None:
        name = instance.partition("-")[0]
        changes = {"instance": instance, "unreadable_version": unreadable_version}
        sent = heartbeat(name, policy_version=0, in_flight=(), **changes)
        redis_client.set(keys.producer(name), encode_heartbeat(sent))

    return send


@pytest.fixture
def processes(bench: TrainerBench) -> Iterator[TrainerProcesses]:
    processes = TrainerProcesses(bench)
    yield processes
    processes.close()


@pytest.fixture
def start_server(server_binary: Path) -> Iterator[Callable[..., LossyServer]]:
    servers: list[LossyServer] = []

    def start(*arguments: str) -> LossyServer:
        servers.append(LossyServer(server_binary, *arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.remove()
