"""Progress of rollouts in flight, on a real server: it survives its producer and fails nobody."""

import logging
import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from redis.exceptions import ConnectionError

from penstock.producers.rollout.episode import UNSCORED
from penstock.producers.stream import journals, progress_store
from penstock.producers.stream import rollout_progress as module
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.in_flight import Claim, Dead
from penstock.producers.stream.journals import Journal, JournalHolder
from penstock.producers.stream.progress_store import SHORTEST_TTL_S
from penstock.schemas.rollout import (
    MAX_ENTRY_BYTES,
    RolloutGroup,
    encode_group,
)
from pipelines import intercept, lose_answers
from producer_desk import ProducerDesk
from producer_run import KEYS
from wire_examples import group_of_lengths


def so_far(index: int, num_tokens: int) -> RolloutGroup:
    group = group_of_lengths(num_tokens, index=index, reward=UNSCORED.value)
    (rollout,) = group.rollouts
    segments = (replace(rollout.segments[0], finish_reason="abort"),)
    return replace(group, rollouts=(replace(rollout, segments=segments),))


class SoFar:
    """A group of which so many tokens are sampled."""

    def __init__(self, index: int, num_tokens: int) -> None:
        self.index, self.num_tokens = index, num_tokens

    def so_far(self) -> RolloutGroup:
        return so_far(self.index, self.num_tokens)


def hold(desk: ProducerDesk, index: int, num_tokens: int | None = None, attempt: int = 1) -> Claim:
    made = Claim(stream=KEYS.prompts, entry_id=b"%d-1" % index, index=index, version=0, attempt=attempt)
    if num_tokens is not None:
        made.in_flight = SoFar(index, num_tokens)
    desk.table.add(made)
    return made


async def talk(desk: ProducerDesk, index: int, *entries: bytes) -> Journal:
    """The journal of a claim that converses, saved with these entries."""
    journal = Journal(claim=hold(desk, index))
    journal.claim.converses = True
    for entry in entries:
        journal.add(entry, 1)
    await desk.journals.append(journal)
    return journal


def saved(desk: ProducerDesk) -> list[int]:
    """The indexes whose progress Redis has."""
    return [n for n in range(1, 10) if desk.client.exists(KEYS.progress(n))]


def tokens(desk: ProducerDesk, what: str) -> float:
    return desk.metrics.registry.get_sample_value("penstock_progress_tokens_total", {"what": what})


def failures(desk: ProducerDesk, reason: str) -> float:
    return desk.metrics.registry.get_sample_value("penstock_progress_failures_total", {"reason": reason})


async def test_what_one_producer_has_saved_is_found_by_the_next(desk) -> None:
    one, other = desk(), desk()
    claim = hold(one, 3, 5)
    hold(one, 4)  # nothing sampled yet
    await one.progress.save()
    claim.in_flight = SoFar(3, 9)
    await one.progress.save()
    assert saved(one) == [3] and tokens(one, "saved") == 9
    found = await other.progress.find(hold(other, 3, attempt=2))
    assert encode_group(found, dead=True) == encode_group(so_far(3, 9).finished_by("i1"), dead=True)
    assert await other.progress.find(hold(other, 4)) is None
    assert 0 < one.client.ttl(KEYS.progress(3)) <= SHORTEST_TTL_S


async def test_what_a_write_without_an_answer_may_have_left_goes_with_the_append(desk, streams) -> None:
    one = desk()
    lose_answers(streams.connection, [ConnectionError("reset")])
    claim = hold(one, 1, 5)
    await one.progress.save()
    assert saved(one) == [1] and tokens(one, "saved") == 0
    one.writer.put(claim, Dead("why"))
    await one.written()
    assert saved(one) == []


async def test_progress_written_beside_the_append_does_not_stay(desk, streams) -> None:
    one = desk()
    claim = hold(one, 1, 5)

    async def late(execute) -> object:
        """Redis executes the append while the progress is on its way."""
        one.table.remove(claim)
        return await execute()

    intercept(streams.connection, late)
    await one.progress.save()
    assert saved(one) == []


NEWER = encode_group(so_far(3, 5), dead=True).replace(b"\xaeschema_version\x01", b"\xaeschema_version\x02")


async def test_progress_that_cannot_be_read_is_ignored_with_one_warning(desk, caplog) -> None:
    for number, (payload, message) in enumerate(
        [
            (encode_group(so_far(3, 5), dead=True)[:-9], "payload: not a rollout group: Input data was truncated"),
            (b"\xc1", "payload: not a rollout group"),
            (bytes(MAX_ENTRY_BYTES + 1), "payload: 4,194,305 bytes, expected at most 4,194,304"),
            (NEWER, "schema_version: 2, this reader knows 1 to 1"),
            (encode_group(so_far(4, 5), dead=True), "index: 4, expected 3"),
        ],
        1,
    ):
        one = desk()
        one.client.set(KEYS.progress(3), payload)
        claim = hold(one, 3)
        caplog.clear()
        assert await one.progress.find(claim) is None
        (warning,) = caplog.messages
        assert warning.startswith("group 3 starts again, its progress cannot be read: ") and message in warning
        assert failures(one, "record") == number and claim.has_progress  # its append drops it


async def test_the_last_attempt_begins_anew(desk, caplog) -> None:
    one = desk(max_attempts=3)
    hold(one, 1, 5)
    await one.progress.save()
    assert await one.progress.find(hold(one, 1, attempt=2)) is not None
    assert await one.progress.find(hold(one, 1, attempt=3)) is None
    assert caplog.messages == ["group 1 starts again at its last attempt"]


@pytest.mark.parametrize("converses", [False, True])
async def test_progress_that_has_grown_for_long_says_that_the_group_ends_no_producer(
    desk, monkeypatch, converses
) -> None:
    """Not one that another producer has left, nor one that grows and stops."""
    now = [1000.0]
    for each in (module, progress_store):
        monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: 0.0))
    one = desk(claim_idle_s=30.0)
    journal = await talk(one, 1, *[b"said"] * 5) if converses else None
    claim = hold(one, 1, 5) if journal is None else journal.claim
    proved = []
    for num_tokens, passed_s in [(5, 40.0), (5, 40.0), (9, 40.0), (9, 20.0), (12, 29.0), (20, 2.0)]:
        if journal is None:
            claim.in_flight = SoFar(1, num_tokens)
            await one.progress.save()
        else:
            for _ in range(journal.num_entered, num_tokens):
                journal.add(b"more", 1)
            await one.journals.append(journal)
        proved.append(claim.has_proved)
        now[0] += passed_s
    assert proved == [False, False, False, False, True, True]


async def test_evaluations_have_no_progress_and_with_an_interval_of_0_nothing_has(desk) -> None:
    one = desk()
    hold(one, 1, 5)
    await one.progress.save()
    evaluation = Claim(stream=KEYS.evaluations, entry_id=b"0-1", index=1, version=0, evaluation_id="0-1")
    assert await one.progress.find(evaluation) is None
    evaluation.in_flight = SoFar(1, 7)
    one.table.add(evaluation)
    await one.progress.save()
    found = await one.progress.find(hold(one, 1, attempt=2))
    assert found is not None and len(found.rollouts[0].segments[0].behavior_logprobs) == 5 * 4
    off = desk(progress_s=0.0)
    hold(off, 2, 5)
    await off.progress.run()
    await off.progress.save()
    assert saved(one) == [1] and await off.progress.find(hold(off, 1)) is None


async def test_progress_is_bounded_the_oldest_first(desk, caplog, monkeypatch) -> None:
    monkeypatch.setattr(progress_store, "MAX_PROGRESS_MB", 1)
    one = desk()
    claims = [hold(one, n, 50_000) for n in (1, 2, 3)]  # 8 bytes a token
    await one.progress.save()
    assert saved(one) == [1, 2] and failures(one, "size") == 1
    one.table.remove(claims[0])
    await one.progress.save()
    assert saved(one) == [1, 2, 3]
    assert caplog.messages == ["progress of rollouts is not kept: group 3: no room left (1 MB)"]


async def test_a_redis_that_is_away_costs_a_log_line_and_no_more(metrics, caplog) -> None:
    connection = ProducerConnection.open("redis://127.0.0.1:1/0", outage_s=30.0, metrics=metrics)
    one = ProducerDesk(connection, None, metrics)
    hold(one, 1, 5)
    for _ in range(3):
        await one.progress.save()
    assert len(caplog.messages) == 1 and failures(one, "redis") == 3
    await connection.close()


@pytest.mark.redis
async def test_at_the_memory_limit_progress_is_the_first_to_go(
    redis_server, connect, metrics, caplog, monkeypatch
) -> None:
    caplog.set_level(logging.WARNING)
    server = redis_server()
    one = ProducerDesk(connect(server), server.client, metrics)
    hold(one, 1, 5)
    journal = await talk(one, 2, b"said")
    await one.progress.save()
    assert saved(one) == [1, 2]
    server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] - 1)
    hold(one, 3, 5)
    await one.progress.save()
    assert saved(one) == [] and failures(one, "memory") == 1
    server.client.config_set("maxmemory", 0)
    await one.progress.save()
    await one.journals.append(journal)
    assert saved(one) == []  # what is free now is the groups'
    monkeypatch.setattr(one.store, "_full_until", 0.0)
    await one.progress.save()
    await one.journals.append(journal)
    assert saved(one) == [1, 2, 3] and await one.journals.read(journal.claim) == [b"said"]
    (warning,) = caplog.messages
    assert warning.startswith("progress of rollouts is not kept: Redis is at its memory limit: ")


async def test_progress_in_redis_is_gone_on_with_though_redis_fails_once(desk, monkeypatch) -> None:
    one, other = desk(), desk(instance="i2")
    hold(one, 1, 5)
    await one.progress.save()
    await talk(one, 2, b"said")
    errors = []
    for command in ("get", "lrange"):
        read = getattr(one.connection.commands, command)

        async def fails(*arguments: object, read=read) -> object:
            if errors:
                raise errors.pop()
            return await read(*arguments)

        monkeypatch.setattr(one.connection.commands, command, fails)
    errors += [ConnectionError("reset"), TimeoutError()]
    assert (await other.progress.find(hold(other, 1, attempt=2))).rollouts[0].num_sampled_tokens == 5 and not errors
    errors += [ConnectionError("reset"), TimeoutError()]
    assert await other.journals.read(hold(other, 2, attempt=2)) == [b"said"] and not errors


async def test_a_journal_is_appended_to_and_read_as_it_was_written(desk) -> None:
    one, other = desk(), desk(instance="i2")
    journal = await talk(one, 1, b"one", b"two")
    journal.add(b"three", 1)
    sent = one.metrics.registry.get_sample_value("penstock_progress_bytes_total")
    await one.journals.append(journal)
    await one.journals.append(journal)
    sent = one.metrics.registry.get_sample_value("penstock_progress_bytes_total") - sent
    assert sent == len(b"i1/three") and tokens(one, "saved") == 3
    claim = hold(other, 1, attempt=2)
    assert await other.journals.read(claim) == [b"one", b"two", b"three"] and claim.has_progress
    assert await one.journals.holder_of(1) == JournalHolder("i1", "a") and await one.journals.holder_of(2) is None
    assert 0 < one.client.ttl(KEYS.progress(1)) <= SHORTEST_TTL_S
    other.writer.put(claim, Dead("why"))
    await other.written()
    assert saved(one) == []


async def test_what_is_no_journal_or_too_much_or_of_the_other_kind_is_not_read(desk, monkeypatch, caplog) -> None:
    one, other = desk(), desk(instance="i2")
    await talk(one, 1, b"said", b"said")
    one.client.set(KEYS.progress(2), b"of a single turn")
    one.client.rpush(KEYS.progress(3), b"i1/said")
    monkeypatch.setattr(journals, "LARGEST_JOURNAL", 7)
    claims = [hold(other, n, attempt=2) for n in (1, 2, 3)]
    assert [await other.journals.read(claim) for claim in claims] == [[], [], []]
    assert await other.progress.find(claims[0]) is None
    assert failures(one, "record") == 3 and all(claim.has_progress for claim in claims)
    assert "group 1 starts again, its progress cannot be read: 8 bytes, expected at most 7" in caplog.text
    assert caplog.text.count("starts again, its progress cannot be read: WRONGTYPE") == 2


@pytest.mark.parametrize("away", [False, True], ids=["suspended", "cut off"])
async def test_of_two_that_keep_one_journal_the_last_to_begin_counts(desk, away) -> None:
    """Whatever the first one does: it was suspended, or Redis was out of its reach, and it has the same id perhaps."""
    one, other = desk(), desk(instance="i2")
    first = await talk(one, 1, b"said")
    second = await talk(other, 1, *await other.journals.read(hold(other, 1)), b"new")
    if away:
        one.connection._outage.num_ended += 1
    first.add(b"late")
    await one.journals.append(first)
    assert first.has_moved and not second.has_moved
    second.add(b"newer")
    await other.journals.append(second)
    await other.journals.find_moved([second])
    assert not second.has_moved
    assert await desk().journals.read(hold(desk(), 1, attempt=2)) == [b"said", b"new", b"newer"]


async def test_who_only_asks_finds_that_another_goes_on(desk) -> None:
    one, other = desk(), desk(instance="i2")
    kept = [await talk(one, n, b"said") for n in (1, 2)]
    await talk(other, 2, b"said")
    one.client.expire(KEYS.progress(1), 9)
    await one.journals.find_moved(kept)
    assert one.client.ttl(KEYS.progress(1)) > 9  # agents may be silent for longer than it lives
    assert [journal.has_moved for journal in kept] == [False, True]


async def test_a_journal_that_redis_has_lost_or_may_have_is_written_again_as_a_whole(desk, streams) -> None:
    """It was emptied between two calls, which no command has noticed; or an answer was lost on its way."""
    one, cuts = desk(), []
    journal = await talk(one, 1, b"said")
    one.client.flushall()
    journal.add(b"more")
    await one.journals.append(journal)
    assert await one.journals.read(journal.claim) == [b"said", b"more"] and not journal.has_moved
    lose_answers(streams.connection, cuts)
    cuts.append(ConnectionError("reset"))
    for entry in (b"lost", b"last"):
        journal.add(entry)
        await one.journals.append(journal)
    assert await one.journals.read(journal.claim) == [b"said", b"more", b"lost", b"last"] and not cuts
    journal.restart()
    journal.add(b"anew")
    await one.journals.append(journal)
    assert await one.journals.read(journal.claim) == [b"anew"]


async def test_a_journal_without_room_is_given_up_as_a_whole(desk, caplog, monkeypatch) -> None:
    monkeypatch.setattr(progress_store, "MAX_PROGRESS_MB", 1)
    one = desk()
    journal = await talk(one, 1, b"said")
    journal.add(bytes(1_000_001))
    await one.journals.append(journal)
    assert saved(one) == [] and not journal.claim.has_progress and failures(one, "size") == 1
    journal.add(b"more")
    await one.journals.append(journal)
    assert saved(one) == [] and journal.entries == []
    assert caplog.messages == ["progress of rollouts is not kept: group 1: no room left (1 MB)"]


async def test_groups_that_may_be_done_before_the_next_time_are_left_out_unless_it_is_the_last(desk) -> None:
    one = desk()
    for n, age_s in ((1, 0.0), (2, 60.0)):
        hold(one, n, 5).generating_since = time.monotonic() - age_s
    await one.progress.save(30.0)
    assert saved(one) == [2]
    await one.progress.save()
    assert saved(one) == [1, 2]
