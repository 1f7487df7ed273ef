"""`penstock trainer` with `trainer.num_processes = 2`: a real model, a real Redis, and ranks that are lost."""

import os
import re
import signal

import pytest

from forked_programs import rank_file
from mini_producer import group_fields
from trainer_process import BARE
from training_groups import tiny_model
from waiting import wait_for

# On one server: what the ranks ask of it is what one process asks.
pytestmark = [
    *(pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("ranks")),
    pytest.mark.parametrize("server_binary", ["redis"], indirect=True, scope="session"),
]

NUM_UPDATES = 80
RUN_S = 300.0
"""Two ranks from their first import to their end, on a machine that they have little of."""
FORKED_RANKS = BARE.format(setup="from forked_programs import fork_ranks\nfork_ranks()")
"""The imports of the ranks are shared as well."""


class Allowance:
    """A producer answers no index beyond `last`: a trainer does not come to its end before a test has seen it train."""

    last = 100

    def answer(self, index: int, version: int) -> dict:
        wait_for(lambda: index <= self.last, timeout_s=RUN_S)
        return group_fields(index, version)


@pytest.fixture
def allowance():
    allowance = Allowance()
    yield allowance
    allowance.last = 10**9


@pytest.fixture
def two_ranks(bench, redis_client, processes, allowance):
    """Starts `penstock trainer` of two ranks, beside a producer."""
    tiny_model(bench.runs / "model")
    bench.overrides = [
        *(f"model.path='{bench.runs / 'model'}'", "trainer.device='cpu'", "trainer.num_processes=2"),
        *("trainer.rank_timeout_s=10", "trainer.lease_s=2.0", "checkpoint.every=10", f"num_updates={NUM_UPDATES}"),
    ]
    bench.producer(allowance.answer)

    def start(log: str, *arguments: str, program: str = FORKED_RANKS):
        return processes.start(log, *arguments, program=program)

    return start


def wait_for_checkpoint(bench, client, epoch: int) -> None:
    """Until one of a trainer's own is committed."""
    pattern = rb"\d\d-.*" if epoch == 0 else rb"%d0000000\d\d-.*" % epoch
    wait_for(lambda: re.match(pattern, client.hget(bench.keys.commit, "checkpoint") or b""), timeout_s=RUN_S)


def rank(bench, process, number: int) -> int:
    """Its process id."""
    return int(rank_file(bench.runs, process.pid, number).read_text())


def errors(log: str) -> list[str]:
    return [line for line in log.splitlines() if " ERROR " in line or "Traceback" in line]


def assert_trained_once(bench, num_updates: int = NUM_UPDATES) -> None:
    """Every index that was released is settled once, as trained, and each update had its own."""
    ledger = bench.ledger()
    assert ledger["finished"] and ledger["num_updates"] == num_updates
    assert ledger["num_groups_trained"] == 4 * num_updates
    assert ledger["num_groups_dead"] == ledger["num_groups_skipped"] == ledger["num_groups_open"] == 0
    assert ledger["num_groups_released"] == ledger["num_groups_trained"] + ledger["num_groups_cancelled"]


def test_a_run_of_two_ranks_survives_a_killed_rank_and_a_signal_and_ends(
    bench, redis_client, processes, two_ranks, allowance
) -> None:
    first = two_ranks("first")
    wait_for_checkpoint(bench, redis_client, 0)
    os.kill(rank(bench, first, 1), signal.SIGKILL)
    assert first.wait(RUN_S) == 1
    (line,) = errors(processes.log("first"))
    assert re.search(r"rank 1 \(.+\) has died or is frozen: not heard of for \d+ s .*--resume continues it", line)
    allowance.last = 200
    second = two_ranks("second", "--resume")
    wait_for_checkpoint(bench, redis_client, 1)
    second.send_signal(signal.SIGTERM)
    assert second.wait(RUN_S) == 0
    allowance.last = 10**9
    assert errors(processes.log("second")) == [] and "continue it with --resume" in processes.log("second")
    # As a user's shell starts it, ranks included.
    assert two_ranks("third", "--resume", program=BARE.format(setup="")).wait(RUN_S) == 0
    assert errors(processes.log("third")) == []
    assert_trained_once(bench)


@pytest.mark.exhaustive  # test_watch has the frozen rank, test_standby the process that takes over
def test_a_standby_of_two_ranks_takes_over_from_one_whose_rank_0_is_frozen(
    bench, redis_client, processes, two_ranks, allowance
) -> None:
    first = two_ranks("first")
    second = two_ranks("second", "--standby")
    wait_for_checkpoint(bench, redis_client, 0)
    wait_for(lambda: "standing by" in processes.log("second"), timeout_s=RUN_S)
    os.kill(rank(bench, first, 0), signal.SIGSTOP)
    allowance.last = 10**9
    assert second.wait(RUN_S) == 0
    assert "taking it over" in processes.log("second") and errors(processes.log("second")) == []
    assert first.wait(RUN_S) == 1
    (line,) = errors(processes.log("first"))
    assert re.search(r"rank 0 \(.+\) has died or is frozen: not heard of for \d+ s", line)
    assert_trained_once(bench)


def test_another_models_checkpoint_and_half_a_checkpoint_are_refused_once_and_nothing_is_lost(
    bench, redis_client, processes, two_ranks
) -> None:
    bench.overrides += ["num_updates=4", "trainer.num_processes=1"]
    assert two_ranks("first").wait(RUN_S) == 0
    committed = redis_client.hget(bench.keys.commit, "checkpoint")
    own = [*bench.overrides, "num_updates=12"]
    tiny_model(bench.runs / "other", hidden_size=8)
    files = {file: file.read_bytes() for file in (bench.folder / "checkpoints").rglob("*.safetensors")}
    for name, status, said, overrides in (
        ("other", 2, "of another model: ", [f"model.path='{bench.runs / 'other'}'"]),
        ("half", 1, "no checkpoint is whole", []),
    ):
        for file, content in files.items():
            file.write_bytes(content[: len(content) // 2] if name == "half" else content)
        bench.overrides = [*own, "trainer.num_processes=2", *overrides]
        assert two_ranks(name, "--resume").wait(RUN_S) == status
        (line,) = errors(processes.log(name))
        assert said in line and committed.decode() in line
    assert redis_client.hget(bench.keys.commit, "checkpoint") == committed
    for file, content in files.items():
        file.write_bytes(content)
    bench.overrides = own
    bench.producer()
    assert two_ranks("fourth", "--resume").wait(RUN_S) == 0
    assert_trained_once(bench, 12)
