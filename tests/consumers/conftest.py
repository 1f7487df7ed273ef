"""A trainer whose learner is scripted, on a real server."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock.consumers.__main__ as entry
from lossy_server import LossyServer
from scripted_learner import ScriptedLearner
from trainer_bench import TrainerBench
from trainer_process import TrainerProcesses


@pytest.fixture
def bench(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerBench]:
    monkeypatch.setattr(entry, "_load_learner", ScriptedLearner)
    bench = TrainerBench(redis_url, tmp_path)
    yield bench
    bench.close()


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
