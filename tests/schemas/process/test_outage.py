"""Outages as they are logged, the pauses between attempts, and answers recognized by their code."""

import logging
from types import SimpleNamespace

import pytest
from redis.exceptions import AskError, ConnectionError, MovedError, ReadOnlyError, ResponseError

from penstock.schemas.process import outage
from penstock.schemas.process.outage import OutageTracker, RedisGoneError, has_code, pause_s, said_by


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


def test_a_pipelines_error_is_told_without_its_command():
    for text in (
        "Command # 1 (XADD a * b c) of pipeline caused error: MISCONF no room",
        "Command # 2 (XADD a * b c) of pipeline caused error: ('MISCONF no room',)",
        "MISCONF\n no room",
    ):
        assert said_by(ResponseError(text)) == "MISCONF no room"
    assert said_by(ReadOnlyError()) == "ReadOnlyError"


def test_refused_writes_are_one_outage_whatever_is_read_meanwhile(monkeypatch, caplog):
    """It ends with the command that was refused, or once none was refused for a while, and is told each minute."""
    caplog.set_level(logging.INFO)
    now = [100.0]
    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tracker = OutageTracker("redis://one", 90)
    refusal = ResponseError("NOREPLICAS Not enough good replicas to write.")
    for _ in range(32):
        tracker.failed(refusal)
        now[0] += 1.0
        tracker.answered(now[0])
        now[0] += 1.0
    first, repeated = caplog.messages
    remedy = "start its replicas, or lower its min-replicas-to-write"
    assert first == f"Redis at one refuses to write ({refusal}): {remedy}; trying again for up to 90 s"
    assert "still refuses to write" in repeated and remedy in repeated
    now[0] += 40.0
    with pytest.raises(
        RedisGoneError, match=r"has refused to write for 104 s \(redis.outage_s = 90\): NOREPLICAS .*; start"
    ):
        tracker.failed(refusal)
    tracker.answered(now[0], was_refused=True)
    assert tracker.num_ended == 1
    tracker.failed(refusal)
    now[0] += 6.0
    tracker.answered(now[0])
    assert (tracker.num_begun, tracker.num_ended) == (2, 2), "who was refused has given up"
    tracker.failed(ConnectionError("refused"))
    tracker.answered(now[0])
    assert tracker.num_ended == 3


def test_a_node_of_a_cluster_that_does_not_hold_the_run_names_the_one_that_does() -> None:
    for kind in (MovedError, AskError):
        with pytest.raises(RedisGoneError) as caught:
            OutageTracker("redis://user:secret@one:7000", 9).check_refused(kind("5798 10.0.0.2:7001"))
        assert str(caught.value).startswith(
            "Redis at one:7000 is a node of a Redis cluster, and the run's keys are on node"
        )
        assert "10.0.0.2:7001 (slot 5798); set REDIS_URL or redis.url to that node" in str(caught.value)
