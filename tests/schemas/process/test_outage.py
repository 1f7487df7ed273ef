"""The pauses between attempts, and answers recognized by their code."""

import pytest
from redis.exceptions import ResponseError

from penstock.schemas.process.outage import has_code, pause_s


def test_pauses_grow_up_to_a_limit_however_long_the_wait() -> None:
    assert 0.025 <= pause_s(1) <= 0.05
    assert all(1.0 <= pause_s(num_failures) <= 2.0 for num_failures in (10, 100, 100_000))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("BUSY Redis is busy running a script", True),
        ("BUSYGROUP Consumer Group name already exists", False),
        ("Command # 1 (EXISTS a) of pipeline caused error: BUSY Redis is busy", True),
    ],
)
def test_an_answer_is_recognized_by_its_whole_code(answer: str, expected: bool) -> None:
    assert has_code(ResponseError(answer), "MISCONF", "BUSY") is expected
