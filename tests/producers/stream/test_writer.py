"""Appends on a real server: the group arrives and its prompt leaves in one step, or neither does."""

import math

import pytest
from msgspec.structs import replace

from penstock.producers.stream.in_flight import Dead, DeadRollout
from penstock.producers.stream.writer import MAX_APPEND_GROUPS
from penstock.schemas.images import MAX_IMAGES_BYTES, digest_of
from penstock.schemas.keys import Field, Kind, stored_images
from penstock.schemas.prompt import ImagePart, Message, Prompt, Reward, TextPart
from penstock.schemas.rollout import (
    MAX_ENTRY_BYTES,
    MAX_REASON_CHARACTERS,
    RecordError,
    RolloutGroup,
    decode_entry,
    decode_group,
    died_of_length,
)
from pipelines import intercept
from producer_desk import ProducerDesk
from producer_run import KEYS
from wire_examples import group_of_lengths


def a_group(index: int, *, num_tokens: int = 3, evaluation_id: str | None = None) -> RolloutGroup:
    return replace(group_of_lengths(num_tokens, index=index, reward=1.0), evaluation_id=evaluation_id)


@pytest.fixture
def one(desk) -> ProducerDesk:
    return desk(groups_in_flight=200)


def rollouts(one: ProducerDesk) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in one.client.xrange(KEYS.rollouts)]


async def test_a_dead_claim_arrives_with_its_reason_and_its_prompt_leaves(one: ProducerDesk, caplog) -> None:
    (claim,) = await one.claimed(1)
    one.writer.put(claim, Dead("prompt: too long"))
    await one.written()
    assert rollouts(one) == [
        {Field.INDEX: b"1", Field.KIND: Kind.DEAD, Field.PRODUCER: b"a", Field.REASON: b"prompt: too long"}
    ]
    assert one.num_open() == (0, 0) and len(one.table) == 0
    assert "group 1 is dead: prompt: too long" in caplog.text


def seen_group(index: int, num_bytes: int) -> RolloutGroup:
    """Returns a group that is shown two files, of this size together."""
    files = [bytes([n]) * (num_bytes // 2) for n in (index, index + 100)]
    content = (TextPart(text="see "), *(ImagePart(digest=digest_of(file)) for file in files))
    prompt = Prompt(messages=(Message(role="user", content=content),))
    return replace(a_group(index), prompt=prompt, images={digest_of(file): file for file in files})


async def test_images_that_an_entry_has_no_room_for_are_beside_it(one: ProducerDesk) -> None:
    groups = [seen_group(1, MAX_ENTRY_BYTES), seen_group(2, 1000), seen_group(3, MAX_IMAGES_BYTES)]
    for claim, group in zip(await one.claimed(3), groups, strict=True):
        assert one.writer.put(claim, group)
    await one.written()
    stored = one.client.hgetall(KEYS.images)
    for fields, group in zip(sorted(rollouts(one), key=lambda each: each[Field.INDEX]), groups, strict=True):
        assert len(fields[Field.PAYLOAD]) < MAX_ENTRY_BYTES
        own = stored_images(fields.get(Field.IMAGES))
        assert set(own) == (set() if group.index == 2 else set(group.images))
        found = decode_entry(fields[Field.PAYLOAD], image=lambda digest, own=own: stored.pop(own[digest]))
        assert replace(found, sampled_by=()) == group
    assert stored == {} and one.num_open() == (0, 0)


async def test_images_are_in_redis_with_their_entry_or_not_at_all(one: ProducerDesk, streams) -> None:
    (claim,) = await one.claimed(1)
    how = iter(["before", "after", "well"])

    async def lost(execute) -> None:
        when = next(how)
        if when == "before":
            raise ConnectionError
        answers = await execute()
        if when == "after":
            raise ConnectionError
        return answers

    intercept(streams.connection, lost)
    one.writer.put(claim, group := seen_group(1, MAX_ENTRY_BYTES))
    await one.written()
    first, second = (stored_images(fields[Field.IMAGES]) for fields in rollouts(one))
    assert set(first) == set(second) == set(group.images), "an answer was lost, so it is appended twice"
    assert set(one.client.hkeys(KEYS.images)) == {*first.values(), *second.values()}
    assert len({*first.values(), *second.values()}) == 4, "each entry has its own"


async def test_a_group_that_died_keeps_the_images_that_fit_and_too_many_kill_it(one: ProducerDesk) -> None:
    small, large, too_large = seen_group(1, 1000), seen_group(2, MAX_ENTRY_BYTES), seen_group(3, MAX_IMAGES_BYTES + 2)
    claims = await one.claimed(3)
    one.writer.put(claims[0], Dead("reward: boom", group=small))
    one.writer.put(claims[1], Dead("reward: boom", group=large))
    assert not one.writer.put(claims[2], too_large)
    await one.written()
    reason = rollouts(one)[2][Field.REASON]
    assert reason == b"record: group 3: images: 67,108,866 bytes in 2 files, expected at most 67,108,864"
    found = [decode_group(fields[Field.PAYLOAD], dead=True) for fields in rollouts(one)]
    assert found[0] == small and not one.client.exists(KEYS.images)
    for each, group in zip(found[1:], (large, too_large), strict=True):
        assert each == replace(group, images=dict.fromkeys(group.images, b""))


async def test_a_group_that_died_of_an_error_arrives_with_its_traceback_and_as_far_as_it_came(
    one: ProducerDesk, caplog
) -> None:
    scored, unscored, posed = a_group(1), a_group(2), a_group(3)
    unscored = replace(unscored, rollouts=tuple(replace(r, reward=Reward(value=math.nan)) for r in unscored.rollouts))
    too_large = replace(posed.rollouts[0], reward=Reward(value=0.0, parts={"x" * MAX_ENTRY_BYTES: 1.0}))
    claims = await one.claimed(3)
    for claim, group in zip(claims, (scored, unscored, replace(posed, rollouts=(too_large,))), strict=True):
        try:
            raise LookupError("no such\nanswer")
        except LookupError as error:
            one.writer.put(claim, Dead(f"reward: LookupError: {error}", error, group))
    await one.written()
    entries = rollouts(one)
    assert [fields[Field.KIND] for fields in entries] == [Kind.DEAD] * 3
    for fields in entries:
        assert fields[Field.REASON] == b"reward: LookupError: no such\\nanswer"
        assert b'raise LookupError("no such' in fields[Field.TRACEBACK]
    came = [decode_group(fields[Field.PAYLOAD], dead=True) for fields in entries]
    assert came[0] == scored and came[2] == replace(posed, rollouts=())
    assert [math.isnan(rollout.reward.value) for rollout in came[1].rollouts] == [True] * len(unscored.rollouts)
    for number in (1, 2):  # the trainer cannot take them for good ones
        with pytest.raises(RecordError):
            decode_group(entries[number][Field.PAYLOAD])
    assert 'raise LookupError("no such' in caplog.text


async def test_rollouts_that_died_leave_a_letter_each_and_the_last_are_kept(one: ProducerDesk, monkeypatch) -> None:
    monkeypatch.setattr("penstock.producers.stream.writer.DEAD_ROLLOUTS_KEPT", 250)
    first, second = await one.claimed(2)
    one.writer.put_letter(first, DeadRollout("a.1", "idle for 3 s"))
    one.writer.put(first, a_group(1))
    one.writer.put_letter(second, DeadRollout("a.2", "x\nPROBLEM" + "y" * 9999))
    await one.written()
    letters = [fields for _, fields in one.client.xrange(KEYS.dead_rollouts)]
    assert letters[0] == {
        Field.INDEX: b"1",
        Field.ROLLOUT: b"a.1",
        Field.PRODUCER: b"a",
        Field.REASON: b"idle for 3 s",
    }
    assert [letter[Field.INDEX] for letter in letters] == [b"1", b"2"]
    assert b"\n" not in letters[1][Field.REASON] and len(letters[1][Field.REASON]) <= MAX_REASON_CHARACTERS
    assert [int(fields[Field.INDEX]) for fields in rollouts(one)] == [1]
    assert list(one.table) == [second] and one.num_open() == (1, 1), "a letter settles no claim"
    assert one.writer.num_groups_appended == 1
    for number in range(1000):
        one.writer.put_letter(second, DeadRollout(f"a.{number}", "idle"))
    await one.written()
    assert 250 <= one.client.xlen(KEYS.dead_rollouts) <= 250 + 2 * 100, "trimmed by whole nodes of the stream"


async def test_a_group_over_the_entry_cap_is_dead_and_the_reason_names_the_cap(one: ProducerDesk) -> None:
    (claim,) = await one.claimed(1)
    one.writer.put(claim, a_group(1, num_tokens=MAX_ENTRY_BYTES // 8))
    await one.written()
    (fields,) = rollouts(one)
    assert fields[Field.KIND] == Kind.DEAD
    assert b"at most 4,194,304 fit one stream entry; lower group_size or sampling.max_tokens" in fields[Field.REASON]
    assert died_of_length(fields[Field.REASON].decode())
    assert one.num_open() == (0, 0)


async def test_what_waits_together_is_appended_together(one: ProducerDesk, streams) -> None:
    claims = await one.claimed(MAX_APPEND_GROUPS + 6)
    sizes: list[int] = []

    async def counted(execute) -> None:
        answers = await execute()
        sizes.append(len(answers) - 2)  # XADD for each; one XACK, one XDEL
        return answers

    intercept(streams.connection, counted)
    for claim in claims:
        one.writer.put(claim, a_group(claim.index))
    await one.written()
    assert sizes == [MAX_APPEND_GROUPS, 6]
    assert sorted(int(fields[Field.INDEX]) for fields in rollouts(one)) == [claim.index for claim in claims]
    assert one.num_open() == (0, 0)
