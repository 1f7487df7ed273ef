"""The end of a trainer with a rank that was hit: which ends the fault suite accepts."""

from tests.chaos.aim import Aim
from tests.chaos.hits import ENDED_WITHIN_S, complaint, endings_in

LOG = """10:00:00.000 INFO trainer 2 ranks share the model
10:00:01.000 ERROR trainer v1:6 checkpoint 5-a cannot be written: no room; training goes on, next try in 1 s
10:00:07.000 ERROR trainer v1:9 rank 1 (backward) has died or is frozen: not heard of for 4 s (gloo: closed); \
the trainer ends, and --resume continues it from its last checkpoint
"""
SILENT = "has died or is frozen: not heard of for 4 s"
LINE = f"rank 1 (backward) {SILENT} (gloo: closed)"
BACKWARD = Aim(launcher=7, rank=1, place="backward", fate="killed", nth=1)
CHECKPOINT = Aim(launcher=7, rank=0, place="checkpoint", fate="killed", nth=1)


def test_status_1_and_one_line_that_names_rank_phase_and_cause_are_as_they_must_be():
    assert endings_in(LOG) == [LINE]
    for aim, doing in (
        (BACKWARD, "1 (backward)"),
        (BACKWARD, "1 (backward, checkpoint beside)"),
        (BACKWARD, "1 (backward, checkpoint, publish beside)"),
        (CHECKPOINT, "0 (step, checkpoint beside)"),
        (CHECKPOINT, "0 (between steps, checkpoint, publish beside)"),
        (CHECKPOINT, "0 (checkpoint)"),
    ):
        assert complaint(aim, 1, [f"rank {doing} {SILENT}"], 4.0) is None, doing


def test_any_other_end_is_complained_of():
    for what, aim, status, lines, ended_s in (
        ("status 0", BACKWARD, 0, [LINE], 4.0),
        ("killed", BACKWARD, -9, [LINE], 4.0),
        ("nothing said", BACKWARD, 1, [], 4.0),
        ("said by both", BACKWARD, 1, [LINE, LINE], 4.0),
        ("another rank", BACKWARD, 1, [f"rank 0 (backward) {SILENT}"], 4.0),
        ("another phase", BACKWARD, 1, [f"rank 1 (forward) {SILENT}"], 4.0),
        ("no rank", BACKWARD, 1, ["the ranks have lost their connections to each other"], 4.0),
        ("no checkpoint", CHECKPOINT, 1, [f"rank 0 (step) {SILENT}"], 4.0),
        ("another phase beside", CHECKPOINT, 1, [f"rank 0 (step, publish beside) {SILENT}"], 4.0),
        ("late", BACKWARD, 1, [LINE], ENDED_WITHIN_S + 0.1),
    ):
        assert "expected" in (complaint(aim, status, lines, ended_s) or ""), what
