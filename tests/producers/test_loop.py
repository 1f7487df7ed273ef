"""A whole producer in the test's own event loop, on a real server, with the engine scripted."""

import asyncio
import contextlib
import logging
import time

import msgspec
import pytest

from penstock.producers import loop as module
from penstock.producers.interfaces import EngineError
from penstock.producers.loop import QuarantinedError
from penstock.schemas.config import ProducersConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Commit, Field, Kind
from penstock.schemas.producer_parity import ProducerParity, encode_parity
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import decode_group, encode_group, unpack_ids
from producer_run import KEYS, PATIENT, QUICK, Numbers, ids
from scripted_engine import ScriptedEngine
from waiting import until
from wire_examples import group_of_lengths

pytestmark = pytest.mark.redis


async def test_two_producers_answer_every_prompt_once_between_them(run) -> None:
    one = run(producers=PATIENT)
    engines = [ScriptedEngine(), ScriptedEngine()]
    for name, engine in zip("ab", engines, strict=True):
        engine.may_sample.clear()
        await one.producer(engine, name)
    one.trainer.release(101, 200)
    await until(lambda: [engine.num_active for engine in engines] == [PATIENT.groups_in_flight] * 2)
    for engine in engines:
        engine.may_sample.set()
    groups = [decode_group(fields[Field.PAYLOAD]) for fields in await one.read(100)]
    assert sorted(group.index for group in groups) == list(range(101, 201))
    assert one.num_open() == 0 and one.client.xpending(KEYS.prompts, PRODUCERS_GROUP)["pending"] == 0


async def test_a_failing_group_does_not_end_the_others(run) -> None:
    one = run()
    await one.producer(ScriptedEngine(refuse_prompt=ids("15")))
    one.trainer.release(11, 20)
    entries = {int(fields[Field.INDEX]): fields for fields in await one.read(10)}
    dead = {n: fields[Field.REASON].decode() for n, fields in entries.items() if fields[Field.KIND] == Kind.DEAD}
    assert dead == {
        13: "prompt: LookupError: task 13 is missing",
        14: "reward: ZeroDivisionError: division by zero",
        15: "engine: ValueError: the scripted engine refuses this prompt",
    }


async def test_a_prompt_that_cancels_its_own_task_is_dead(run, monkeypatch) -> None:
    def cancelling(self, index: int) -> Prompt:
        if index == 2:
            asyncio.current_task().cancel()
        return Prompt(text=str(index))

    monkeypatch.setattr(Numbers, "prompt", cancelling)
    monkeypatch.setattr(Numbers, "evaluation_prompt", cancelling)
    one = run()
    await one.producer()
    one.trainer.release(1, 3)
    one.trainer.evaluate(0, 3)
    reasons = {fields[Field.INDEX]: fields.get(Field.REASON) for fields in await one.read(3)}
    assert reasons == {b"1": None, b"2": b"producer: CancelledError", b"3": None}
    await until(lambda: one.client.xlen(KEYS.evaluation_results) == 3)


@pytest.mark.parametrize("gives_up", [False, True])
async def test_what_cannot_be_within_the_lag_bound_is_given_up_if_the_run_says_so(run, gives_up: bool) -> None:
    one = run(max_lag=1, producers=msgspec.structs.replace(PATIENT, abort_past_lag=gives_up))
    engine = ScriptedEngine(token_s=0.001)
    engine.stepped = lambda *_: engine.may_sample.clear()  # type: ignore[method-assign]
    await one.producer(engine)
    one.trainer.release(1, 1)
    await until(lambda: not engine.may_sample.is_set())
    for version in (1, 2):
        one.trainer.announce(version)
        await until(lambda version=version: engine.loaded_versions[-1] == version)
        engine.may_sample.set()
    engine.stepped = lambda *_: None  # type: ignore[method-assign]
    (entry,) = await one.read(1)
    assert entry[Field.KIND] == (Kind.DEAD if gives_up else Kind.GROUP)
    if gives_up:
        assert entry[Field.REASON].startswith(b"lag: not finished after 2 optimizer steps, more than max_lag = 1")
        assert decode_group(entry[Field.PAYLOAD], dead=True).rollouts[0].num_sampled_tokens > 0


async def test_evaluations_are_answered_by_the_policy_they_ask_about(run) -> None:
    one = run()
    engine = ScriptedEngine(token_s=0.01)
    await one.producer(engine)
    one.trainer.evaluate(1, 5)
    await asyncio.sleep(0.2)
    assert one.client.xlen(KEYS.evaluation_results) == 0
    one.trainer.announce(1)
    await until(lambda: one.client.xlen(KEYS.evaluation_results) == 5)
    for _, fields in one.client.xrange(KEYS.evaluation_results):
        group = decode_group(fields[Field.PAYLOAD])
        assert group.evaluation_id == fields[Field.EVALUATION].decode() and fields[Field.KIND] == Kind.GROUP
        assert {span.version for span in group.rollouts[0].segments[0].version_spans} == {1}
    assert one.client.xlen(KEYS.evaluations) == one.client.xlen(KEYS.rollouts) == 0


async def test_a_producer_too_far_behind_claims_nothing_until_it_has_caught_up(run) -> None:
    one = run(max_lag=2)
    engine = ScriptedEngine(refuse_versions=(3,))
    await one.producer(engine)
    await until(lambda: engine.loaded_versions == [0])
    one.trainer.announce(3)
    await asyncio.sleep(0.1)
    one.trainer.release(1, 4, version=3)
    await asyncio.sleep(0.5)
    assert engine.requests == []
    one.trainer.announce(4)
    assert len(await one.read(4)) == 4


async def test_a_prompt_of_newer_weights_waits_for_them(run) -> None:
    one = run(mode="synchronous")
    engine = ScriptedEngine()
    await one.producer(engine)
    one.trainer.release(1, 2, version=1)
    await asyncio.sleep(0.3)
    assert engine.requests == []
    one.trainer.announce(1)
    for fields in await one.read(2):
        group = decode_group(fields[Field.PAYLOAD])
        assert group.rollouts[0].segments[0].version_spans[0].version == 1


def release_again(one, first: int, last: int, attempt: int) -> None:
    """Prompts that are about to be handed out for the `attempt`-th time."""
    for index in range(first, last + 1):
        one.client.xadd(KEYS.prompts, {Field.INDEX: index, Field.VERSION: 0, Field.ATTEMPT: attempt - 1})


@pytest.mark.parametrize(("max_attempts", "alone_from"), [(4, 3), (3, 3), (2, 2), (1, None)])
async def test_from_the_third_attempt_on_or_at_the_last_a_prompt_runs_alone(run, max_attempts, alone_from) -> None:
    one = run(producers=ProducersConfig(groups_in_flight=8, max_attempts=max_attempts))
    for attempt in range(1, max_attempts + 1):
        release_again(one, 3 * attempt - 2, 3 * attempt, attempt)
    engine = ScriptedEngine(token_s=0.005)
    most_active: dict[int, int] = {}

    def stepped(request_id: str, num_sampled: int) -> None:
        attempt = int(request_id.split(":")[-2])
        most_active[attempt] = max(most_active.get(attempt, 0), engine.num_active)

    engine.stepped = stepped  # type: ignore[method-assign]
    await one.producer(engine)
    entries = await one.read(3 * max_attempts)
    assert {fields[Field.KIND] for fields in entries} == {Kind.GROUP}
    assert {attempt for attempt, most in most_active.items() if most == 1} == set(
        range(alone_from, max_attempts + 1) if alone_from else ()
    )


async def test_what_is_finished_is_appended_before_a_prompt_runs_alone_and_after(run) -> None:
    """Else a prompt that kills its producer would cost what is finished an attempt, its last one perhaps."""
    one = run(producers=ProducersConfig(groups_in_flight=8, max_attempts=3))
    engine = ScriptedEngine()
    producer, _ = await one.producer(engine)
    append, num_begun, begun = producer.writer._append, [], asyncio.Event()
    engine.stepped = lambda *_: begun.set()  # type: ignore[method-assign]

    async def slow(batch) -> None:
        begun.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(begun.wait(), 0.3)
        num_begun.append(len(engine.requests))
        await append(batch)

    producer.writer._append = slow  # type: ignore[method-assign]
    for index, attempt in enumerate((1, 3, 1), 1):
        release_again(one, index, index, attempt)
    await one.read(3)
    assert num_begun == [1, 2, 3]


@pytest.mark.parametrize("is_known", [True, False], ids=["sampled", "unreadable"])
async def test_a_prompt_handed_out_too_often_is_dead(run, is_known) -> None:
    """Its letter has what the last holder had sampled, which is longer than most if its length has ended it."""
    one = run(producers=ProducersConfig(max_attempts=2, claim_idle_s=0.4))
    came = encode_group(group_of_lengths(70, 90, index=5), dead=True)
    one.client.set(KEYS.progress(5), came if is_known else b"what an earlier holder sampled")
    one.client.xadd(KEYS.prompts, {Field.INDEX: 5, Field.VERSION: 0, Field.ATTEMPT: 2})
    engine = ScriptedEngine()
    await one.producer(engine)
    (fields,) = await one.read(1)
    assert fields[Field.KIND] == Kind.DEAD and not one.client.exists(KEYS.progress(5))
    assert fields[Field.REASON] == b"attempts: handed out 2 times without a result"
    assert (Field.PAYLOAD in fields) == is_known
    if is_known:
        group = decode_group(fields[Field.PAYLOAD], dead=True)
        assert [rollout.num_sampled_tokens for rollout in group.rollouts] == [70, 90]
    assert engine.requests == [] and one.num_open() == 0


async def test_a_producer_told_to_stop_finishes_what_is_nearly_done(run, monkeypatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 60.0)
    one = run()
    engine = ScriptedEngine()
    engine.may_sample.clear()
    producer, task = await one.producer(engine)
    one.trainer.release(1, 2)
    await until(lambda: engine.num_active == 2)
    producer.stop.set()
    await asyncio.sleep(0.2)
    engine.may_sample.set()
    await asyncio.wait_for(task, 90)
    assert len(await one.read(2)) == 2 and one.num_open() == 0
    assert one.client.get(KEYS.producer("a")) is None


async def test_a_producer_told_to_stop_hands_back_what_is_not(run, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    one = run()
    slow = ScriptedEngine(token_s=30)
    producer, task = await one.producer(slow, "a")
    one.trainer.release(1, 2)
    await until(lambda: slow.num_active == 2)
    producer.stop.set()
    await asyncio.wait_for(task, 60)
    assert len(slow.cancelled) == 2 and "stopped: 2 unfinished claims handed back" in caplog.text
    await one.producer(ScriptedEngine(), "b")
    groups = [decode_group(fields[Field.PAYLOAD]) for fields in await one.read(2)]
    assert [group.num_tries_lost for group in groups] == [1, 1], "the trainer cannot see what these tries had sampled"
    assert {(group.index, group.producer_id) for group in groups} == {(1, "b"), (2, "b")}


async def test_a_producer_told_to_stop_while_its_server_is_frozen_ends_all_the_same(run, monkeypatch, caplog) -> None:
    for limit in ("GRACE_S", "LAST_SAVE_S", "SHUTDOWN_TIMEOUT_S"):
        monkeypatch.setattr(module, limit, 0.1)
    one = run()
    engine = ScriptedEngine(token_s=60)
    producer, task = await one.producer(engine)
    one.trainer.release(1, 2)
    await until(lambda: engine.num_active == 2)
    one.server.freeze()
    producer.stop.set()
    await asyncio.wait_for(task, 60)
    one.server.thaw()
    assert "stopped without Redis: 2 claims are free for others in 0.4 s" in caplog.text


async def test_an_engine_that_dies_ends_the_producer_and_leaves_its_claims(run) -> None:
    one = run()
    _, task = await one.producer(ScriptedEngine(token_s=0.01, die_on_prompt=ids("3")))
    one.trainer.release(1, 5)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(task, 60)
    assert caught.value.subgroup(EngineError) is not None and caught.value.split(EngineError)[1] is None
    assert 3 in {int(fields[Field.INDEX]) for _, fields in one.client.xrange(KEYS.prompts)}


def sampled(rollout) -> list[int]:
    (segment,) = rollout.segments
    start = segment.loss_mask[0][0]
    return unpack_ids(segment.token_ids).tolist()[start:]


def holders(one) -> list[tuple[str, int]]:
    """The producer of each claimed prompt, and how often it was delivered."""
    rows = one.client.xpending_range(KEYS.prompts, PRODUCERS_GROUP, "-", "+", 9)
    return [(row["consumer"].decode(), row["times_delivered"]) for row in rows]


def saved(one, index: int = 1) -> list[list[int]]:
    """The tokens of each sibling in an index's progress."""
    payload = one.client.get(KEYS.progress(index))
    return [] if payload is None else [sampled(each) for each in decode_group(payload, dead=True).rollouts]


def so_far(producer) -> list[list[int]]:
    """The tokens of each sibling that the engine of a producer has sampled of its one group."""
    groups = [group for claim in producer.table if claim.in_flight and (group := claim.in_flight.so_far()) is not None]
    return [sampled(rollout) for group in groups for rollout in group.rollouts]


SAVING = msgspec.structs.replace(QUICK, progress_s=0.05)


def uneven(prompt: list[int], sibling: int) -> list[int]:
    """Sibling 0 ends after two tokens, the others never within a test."""
    return [2 + sibling] * (2 if sibling == 0 and len(prompt) == 1 else 200)


def check_continued(fields, before: list[list[int]], engine: ScriptedEngine) -> None:
    """The group holds what was saved, under policy 0, and goes on under policy 1."""
    group = decode_group(fields[Field.PAYLOAD])
    assert group.producer_id == "b" and len(before) == 4 and group.num_tries_lost == 0
    for rollout, tokens in zip(group.rollouts, before, strict=True):
        (segment,), num_before = rollout.segments, len(tokens)
        assert sampled(rollout)[:num_before] == tokens and num_before
        spans = [(span.version, span.end - span.start) for span in segment.version_spans]
        rest = len(sampled(rollout)) - num_before
        assert spans == [(0, num_before), *([(1, rest)] if rest else [])]
    assert len(sampled(group.rollouts[0])) == 2  # it was finished, and nothing of it is sampled again
    assert all(len(sampled(each)) > len(tokens) for each, tokens in zip(group.rollouts[1:], before[1:], strict=True))
    assert len(engine.requests) == 3  # one for each that was not
    assert len(group.sampled_by) == 2, "both starts are named"
    assert [each.max_tokens for each in engine.samplings] == [256 - len(tokens) for tokens in before[1:]]


@pytest.mark.parametrize(
    "end", ["told to stop", "killed", "killed and restarted", "engine", "killed, on a clock ahead"]
)
async def test_what_a_producer_has_sampled_is_gone_on_with_by_the_next(run, monkeypatch, end: str) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    monkeypatch.setattr(module, "LAST_SAVE_S", 60.0)
    one = run(producers=msgspec.structs.replace(QUICK, progress_s=3600.0) if end == "told to stop" else SAVING)
    clock = time.time
    if end == "killed, on a clock ahead":
        monkeypatch.setattr(time, "time", lambda: clock() + 600.0)
    first = ScriptedEngine(token_s=0.02, script=uneven, die_after=1)
    producer, task = await one.producer(first, "b" if end == "restarted" else "a")
    one.trainer.release(1, 1)
    if end == "told to stop":
        await until(lambda: [len(row) for row in so_far(producer)] >= [2, 4, 4, 4])
        first.may_sample.clear()
        assert saved(one) == []
        producer.stop.set()
    else:
        await until(lambda: [len(row) for row in saved(one)] >= [2, 4, 4, 4])
        first.may_sample.clear()
        task.cancel() if end != "engine" else one.client.xadd(KEYS.prompts, {Field.INDEX: 2, Field.VERSION: 0})
    await asyncio.wait({task}, timeout=60)
    if end == "engine":
        assert isinstance(task.exception(), ExceptionGroup)
        one.client.xdel(KEYS.prompts, one.client.xrevrange(KEYS.prompts, count=1)[0][0])
    before = saved(one)
    monkeypatch.setattr(time, "time", clock)
    one.trainer.announce(1)
    second = ScriptedEngine(script=lambda prompt, sibling: [9] * 3)
    await one.producer(second, "b")
    check_continued((await one.read(1))[0], before, second)
    assert saved(one) == []


async def test_a_rollout_is_finished_however_many_producers_it_outlives(run) -> None:
    """Each had it for long and came further: what has ended them was not the rollout."""
    one = run(producers=msgspec.structs.replace(SAVING, max_attempts=2))
    one.trainer.release(1, 1)
    for name in ("a", "b"):
        engine = ScriptedEngine(token_s=0.2, script=lambda prompt, sibling: [5] * (240 - len(prompt) + 1))
        _, task = await one.producer(engine, name)
        await until(lambda name=name: holders(one) == [(name, 0)])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert saved(one), "it is not finished"
    await one.producer(ScriptedEngine(script=lambda prompt, sibling: [5] * (240 - len(prompt) + 1)), "last")
    group = decode_group((await one.read(1))[0][Field.PAYLOAD])
    assert [sampled(rollout) for rollout in group.rollouts] == [[5] * 240] * 4
    assert len(group.sampled_by) == 3 and group.num_tries_lost == 0


async def test_all_groups_of_a_killed_producer_go_on_together(run) -> None:
    one = run(producers=SAVING)
    indexes = range(1, SAVING.groups_in_flight + 1)
    first = ScriptedEngine(token_s=0.02, script=lambda prompt, sibling: [5] * 200)
    _, task = await one.producer(first, "a")
    one.trainer.release(indexes[0], indexes[-1])
    await until(lambda: all(len(rows := saved(one, n)) == 4 and len(rows[0]) >= 4 for n in indexes))
    first.may_sample.clear()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    before = {n: saved(one, n) for n in indexes}
    second = ScriptedEngine(script=lambda prompt, sibling: [9] * 3)
    second.may_sample.clear()
    await one.producer(second, "b")
    await until(lambda: second.num_active == 4 * len(indexes))
    second.may_sample.set()
    groups = {(g := decode_group(fields[Field.PAYLOAD])).index: g for fields in await one.read(len(indexes))}
    for n in indexes:
        assert [sampled(rollout) for rollout in groups[n].rollouts] == [[*tokens, 9, 9, 9] for tokens in before[n]]
        assert groups[n].producer_id == "b" and groups[n].num_tries_lost == 0


async def test_of_two_holders_of_a_claim_both_may_save_and_none_of_it_stays(run) -> None:
    """The first has lost its claim without knowing: both groups arrive, and the reader drops the second."""
    one = run(producers=SAVING)
    first = ScriptedEngine(token_s=0.02, script=lambda prompt, sibling: [5] * 100)
    producer, _ = await one.producer(first, "a")
    one.trainer.release(1, 1)
    await until(lambda: len(saved(one)) == 4)
    first.may_sample.clear()
    producer.claims.refresh = lambda by_stream: asyncio.sleep(0)  # type: ignore[method-assign]
    second = ScriptedEngine(script=lambda prompt, sibling: [6] * 100)
    await one.producer(second, "b")
    await until(lambda: second.requests)
    first.may_sample.set()
    entries = await one.read(2)
    groups = {(g := decode_group(fields[Field.PAYLOAD])).producer_id: g for fields in entries}
    assert set(groups) == {"a", "b"}
    assert all(sampled(rollout) == [5] * 100 for rollout in groups["a"].rollouts)
    for rollout in groups["b"].rollouts:
        tokens = sampled(rollout)
        assert 0 < tokens.count(5) < 100 and tokens == [5] * tokens.count(5) + [6] * 100
    assert one.num_open() == 0
    await until(lambda: saved(one) == [])


async def left_by_a(run):
    """A run in which producer `a` is killed with progress saved of group 1; returns it and the producer."""
    one = run(producers=SAVING)
    producer, task = await one.producer(ScriptedEngine(token_s=0.02, script=uneven), "a")
    one.trainer.release(1, 1)
    await until(lambda: len(saved(one)) == 4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return one, producer


async def test_progress_of_another_engine_is_of_no_use_and_said_so(run, caplog, metrics) -> None:
    one, _ = await left_by_a(run)
    num_saved = sum(map(len, saved(one)))
    other = ScriptedEngine()
    other.fingerprint = msgspec.structs.replace(other.fingerprint, version="2")
    await one.producer(other, "b")
    group = decode_group((await one.read(1))[0][Field.PAYLOAD])
    assert all(len(sampled(rollout)) == 5 for rollout in group.rollouts)
    why = f"group 1 starts again, {num_saved} tokens of a cannot be used: fingerprint.version = '1', expected '2'"
    assert [line for line in caplog.messages if "starts again" in line] == [why]
    assert metrics.progress_tokens.labels("ignored")._value.get() == num_saved


async def test_progress_that_the_engine_refuses_is_of_no_use_either(run, caplog) -> None:
    one, _ = await left_by_a(run)
    await one.producer(ScriptedEngine(refuse_prompt=(*ids("1"), 3)), "b")
    fields = (await one.read(1))[0]
    assert fields[Field.KIND] == Kind.GROUP
    assert "group 1 starts again, the engine refuses to continue its progress: " in caplog.text


async def test_a_finished_run_ends_its_producers_and_leaves_no_progress(run) -> None:
    one = run(producers=SAVING)
    engine = ScriptedEngine(token_s=0.02, script=uneven)
    _, task = await one.producer(engine)
    one.trainer.release(1, 1)
    await until(lambda: len(saved(one)) == 4)
    one.client.hset(KEYS.commit, Commit.FINISHED, b"1")
    await asyncio.wait_for(task, 60)
    assert saved(one) == [] and one.num_open() == 1


def quarantine(one, producer) -> None:
    """As the trainer does."""
    found = ProducerParity(producer_id="a", quarantined_s=1.0, reason="another temperature")
    one.client.hset(KEYS.parity, producer.context.instance, encode_parity(found))


async def test_a_quarantined_producer_ends_and_leaves_its_prompts_to_others_until_it_is_started_again(run):
    one = run(producers=SAVING)
    slow = ScriptedEngine(token_s=0.05, script=lambda prompt, sibling: [9] * 200)
    producer, task = await one.producer(slow, "a")
    one.trainer.release(1, 2)
    await until(lambda: saved(one, 1) and saved(one, 2))
    quarantine(one, producer)
    with pytest.raises(QuarantinedError, match="it is quarantined: another temperature"):
        await asyncio.wait_for(asyncio.shield(task), 60)
    assert len(slow.cancelled) == 2 and saved(one, 1) == saved(one, 2) == [] and one.num_claimed() == 0
    assert one.client.get(KEYS.producer("a")) is None
    again, _ = await one.producer(ScriptedEngine(), "a")
    groups = [decode_group(fields[Field.PAYLOAD]) for fields in await one.read(2)]
    assert {group.index for group in groups} == {1, 2}
    assert {group.sampled_by for group in groups} == {(again.context.instance,)}


async def test_nobody_goes_on_from_what_a_quarantined_producer_has_sampled(run, caplog):
    one, producer = await left_by_a(run)
    quarantine(one, producer)
    second, _ = await one.producer(ScriptedEngine(), "b")
    group = decode_group((await one.read(1))[0][Field.PAYLOAD])
    assert all(len(sampled(rollout)) == 5 for rollout in group.rollouts)
    assert group.sampled_by == (second.context.instance,)
    assert "group 1 starts again, its progress is of a quarantined producer: a" in caplog.text
