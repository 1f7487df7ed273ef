"""One rank is lost: the others end within the time-out, and one line says which, where and why."""

import re
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from penstock.schemas.config import TrainerConfig
from rank_processes import log_of, ranks_running
from rank_work import train_until
from training_groups import configuration, random_group, tiny_model

pytestmark = pytest.mark.xdist_group("ranks")

TIMEOUT_S = 30.0
"""On a busy machine a process may stand still for half of it."""
SILENT = r"has died or is frozen: not heard of for \d+ s"
NO_ANSWER = r"did not answer: hung, or slower than trainer\.rank_timeout_s = 30"


class LostRank(NamedTuple):
    """What becomes of the culprit where, and the message."""

    fate: str
    place: str
    culprit: int
    message: str


CASES = (
    LostRank("killed", "forward", 1, rf"rank 1 \(forward\) {SILENT}"),
    LostRank("killed", "checkpoint", 1, rf"rank 1 \(waiting for orders, checkpoint beside\) {SILENT}"),
    LostRank("frozen", "backward", 1, rf"rank 1 \(backward\) {SILENT}"),
    LostRank("frozen", "between steps", 0, rf"rank 0 \(between steps\) {SILENT}"),
    LostRank("hung", "optimizer", 1, rf"rank 1 \(optimizer\) {NO_ANSWER}"),
    LostRank(
        "out of memory", "backward", 1, r"rank 1 failed in backward: OutOfMemoryError: Tried to allocate 20\.00 GiB"
    ),
)


class EndedRanks(NamedTuple):
    """status: of the rank that nothing happened to. messages: of both."""

    status: int
    messages: list[str]


def _name(case: LostRank) -> str:
    return f"rank {case.culprit} {case.fate} {case.place}"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[LostRank, EndedRanks]:
    """Several cases at once: most of each is waiting."""
    folder = tmp_path_factory.mktemp("watch")
    tiny_model(folder / "model")
    trainer = TrainerConfig(device="cpu", rank_timeout_s=TIMEOUT_S)
    config = configuration(folder / "model", trainer=trainer)
    groups = [random_group(index, 1) for index in range(1, 5)]
    found = {}
    with ExitStack() as stack:
        started = {}
        for case in CASES:
            own = folder / _name(case)
            work = config, groups, own / "checkpoints", case.culprit, case.place, case.fate
            started[case] = stack.enter_context(ranks_running(2, train_until, *work, folder=own, timeout_s=TIMEOUT_S))
        for case, processes in started.items():
            status = processes[1 - case.culprit].wait(timeout=300)
            if case.fate == "out of memory":
                assert processes[case.culprit].wait(timeout=120) == 1
            lines = "".join(log_of(folder / _name(case), rank) for rank in (0, 1)).splitlines()
            found[case] = EndedRanks(status, lines)
    return found


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_the_others_end_and_one_line_names_rank_phase_and_cause(
    ended: dict[LostRank, EndedRanks], case: LostRank
) -> None:
    status, messages = ended[case]
    assert len(messages) == 1, messages
    assert re.search(case.message, messages[0]), messages[0]
    assert status == 1
