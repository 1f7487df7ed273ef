"""The pauses between attempts, and answers recognized by their code."""

import pytest
from redis.exceptions import AskError, MovedError, ResponseError

from penstock.schemas.process.outage import OutageTracker, RedisGoneError, has_code, pause_s


def test_pauses_grow_up_to_a_limit_however_long_the_wait() -> None:
    assert 0.025 <= pause_s(1) <= 0.05
    assert all(1.0 <= pause_s(num_failures) <= 2.0 for num_failures in (10, 100, 100_000))


def test_an_answer_is_recognized_by_its_whole_code() -> None:
    for answer, expected in [
        ("BUSY Redis is busy running a script", True),
        ("BUSYGROUP Consumer Group name already exists", False),
        ("Command # 1 (EXISTS a) of pipeline caused error: BUSY Redis is busy", True),
    ]:
        assert has_code(ResponseError(answer), "MISCONF", "BUSY") is expected, answer


def test_a_node_of_a_cluster_that_does_not_hold_the_run_names_the_one_that_does() -> None:
    for kind in (MovedError, AskError):
        with pytest.raises(RedisGoneError) as caught:
            OutageTracker("redis://user:secret@one:7000", 9).check_refused(kind("5798 10.0.0.2:7001"))
        assert str(caught.value).startswith(
            "Redis at one:7000 is a node of a Redis cluster, and the run's keys are on node"
        )
        assert "10.0.0.2:7001 (slot 5798); set REDIS_URL or redis.url to that node" in str(caught.value)
