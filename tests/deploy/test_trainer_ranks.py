"""`penstock trainer` as several ranks: what it refuses, in one message, and how it ends."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch.distributed as dist

from forked_programs import start_program
from penstock.consumers.stop_signals import StoppedError
from penstock.deploy import cli
from training_groups import tiny_model

pytestmark = pytest.mark.xdist_group("ranks")

_PROGRAM = "import sys; from penstock.deploy import cli; sys.exit(cli.main(sys.argv[1:]))"
RUN_FILE = """
name = "test"
groups_per_batch = 2
group_size = 2
model.path = {model!r}
environment.path = "none:None"
evaluation.num_prompts = 0
trainer.device = "cpu"
trainer.rank_timeout_s = 20.0
"""


class EndedTrainer(NamedTuple):
    statuses: list[int]
    lines: list[str]
    """All that the ranks have said, without what is said for information."""


def trainer_on_ranks(
    folder: Path, arguments: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None
) -> EndedTrainer:
    """`penstock trainer` with the arguments of each rank, beside a store as torchrun's agent has it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {name: value for name, value in os.environ.items() if name != "REDIS_URL"} | dict(environment or {})
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    given |= {"WORLD_SIZE": str(len(arguments)), "TORCHELASTIC_RUN_ID": "test", "PENSTOCK_LOG": "text"}
    files = [folder / f"rank-{rank}.log" for rank in range(len(arguments))]
    ranks = [
        start_program(
            _PROGRAM,
            ["trainer", *each, "--runs", str(folder / "runs")],
            {**given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            files[rank],
            fresh=False,
        )
        for rank, each in enumerate(arguments)
    ]
    statuses = [rank.wait(timeout=180) for rank in ranks]
    return EndedTrainer(
        statuses, [line for file in files for line in file.read_text().splitlines() if " INFO " not in line]
    )


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    tiny_model(tmp_path / "model")
    (tmp_path / "run.toml").write_text(RUN_FILE.format(model=str(tmp_path / "model")))
    return str(tmp_path / "run.toml")


def test_without_redis_rank_0_alone_says_so(tmp_path: Path, run_file: str) -> None:
    ended = trainer_on_ranks(tmp_path, [[run_file]] * 2)
    assert ended.statuses == [2, 2]
    (line,) = ended.lines
    assert "REDIS_URL" in line


def test_ranks_of_different_run_files_are_told_field_and_rank(tmp_path: Path, run_file: str) -> None:
    other = [run_file, "--set", "trainer.learning_rate=0.5"]
    ended = trainer_on_ranks(tmp_path, [[run_file], other, [run_file]])
    assert ended.statuses == [2, 2, 2]
    (line,) = ended.lines
    assert "trainer.learning_rate = 0.5 on rank 1, and 1e-05 on rank 0" in line


@pytest.mark.redis
def test_a_model_whose_blocks_cannot_be_found_is_refused_once(
    tmp_path: Path, run_file: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import torch\n"
        "import penstock.consumers.learning.model.shards as shards\n"
        "import penstock.consumers.learning.model.packed_model as model\n"
        "find = shards.blocks\n"
        "shards.blocks = lambda module, *said: find(torch.nn.Linear(1, 1), *said)\n" + _PROGRAM
    )
    monkeypatch.setitem(globals(), "_PROGRAM", program)
    ended = trainer_on_ranks(tmp_path, [[run_file]] * 2, {"REDIS_URL": redis_url})
    assert ended.statuses == [2, 2]
    (line,) = ended.lines
    assert "the blocks of Linear cannot be found" in line and "model.path" in line
    assert not list((tmp_path / "runs" / "test").glob("checkpoints/epoch-*")), "it left no sign of a run"


@pytest.mark.parametrize("place", ["penstock.consumers.distributed.start.check_alike", "penstock.deploy.cli._lead"])
def test_a_signal_before_training_began_ends_all_ranks_with_status_0(
    run_file: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    ended: list[int] = []
    met = SimpleNamespace(is_lead=True), SimpleNamespace(ended=ended.append)

    def told_to_stop(*_: object, **__: object) -> None:
        raise StoppedError

    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("penstock.consumers.distributed.start.join", lambda config: met)
    monkeypatch.setattr("penstock.consumers.distributed.start.check_alike", lambda config, ranks: None)
    monkeypatch.setattr(place, told_to_stop)
    for of_the_process in ("penstock.deploy.cli.limit_threads", "penstock.schemas.process.logs.configure"):
        monkeypatch.setattr(of_the_process, lambda *_, **__: None)
    assert cli.main(["trainer", run_file]) == 0
    assert ended == [0]
