"""What crosses the stream is checked on both sides, and old payloads stay readable."""

import random
from pathlib import Path

import msgspec
import pytest
import wire_examples

from schemas.prompt import Prompt
from schemas.rollout import (
    MAX_ENTRY_BYTES,
    RecordError,
    RolloutGroup,
    Segment,
    VersionSpan,
    decode_group,
    encode_group,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)

WIRE = Path(__file__).parents[1] / "golden" / "wire"


def with_segment(**changes) -> RolloutGroup:
    group = wire_examples.group()
    first = group.rollouts[0]
    segment = msgspec.structs.replace(first.segments[0], **changes)
    return msgspec.structs.replace(group, rollouts=(msgspec.structs.replace(first, segments=(segment,)),))


def test_a_group_survives_the_round_trip():
    group = wire_examples.group()
    assert decode_group(encode_group(group)) == group


def test_payload_of_schema_version_1_still_decodes():
    payload = (WIRE / "group_v1.msgpack").read_bytes()
    assert decode_group(payload) == wire_examples.group()


def test_today_s_encoder_writes_the_golden_payload():
    assert encode_group(wire_examples.group()) == (WIRE / "group_v1.msgpack").read_bytes()


def test_packed_numbers_keep_ids_exactly_and_logprobs_to_float32():
    ids = [0, 1, 151_935, 2**31 - 1]
    assert list(unpack_ids(pack_ids(ids))) == ids
    assert list(unpack_floats(pack_floats([-0.5, -1e-7]))) == [-0.5, pytest.approx(-1e-7, rel=1e-6)]


def test_4096_tokens_take_at_most_8_1_bytes_each():
    rng = random.Random(0)
    num_tokens = 4096
    segment = Segment(
        token_ids=pack_ids([rng.randrange(150_000) for _ in range(num_tokens + 32)]),
        behavior_logprobs=pack_floats([-rng.random() for _ in range(num_tokens)]),
        loss_mask=((32, num_tokens + 32),),
        version_spans=(VersionSpan(3, 32, 2000), VersionSpan(4, 2000, num_tokens + 32)),
    )
    group = wire_examples.group()
    siblings = tuple(msgspec.structs.replace(group.rollouts[0], segments=(segment,)) for _ in range(8))
    payload = encode_group(msgspec.structs.replace(group, rollouts=siblings))
    assert len(payload) / (8 * num_tokens) <= 8.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"behavior_logprobs": pack_floats([-0.5])}, r"loss_mask covers 3 tokens but behavior_logprobs holds 1"),
        ({"token_ids": b"12345"}, r"token_ids: 5 bytes, expected a multiple of 4"),
        ({"loss_mask": ((3, 7),)}, r"loss_mask: run \(3, 7\), expected 0 <= start < end <= 6"),
        ({"loss_mask": ((4, 6), (3, 4))}, r"loss_mask: run \(3, 4\)"),
        ({"version_spans": (VersionSpan(7, 3, 5),)}, r"version_spans .* do not tile loss_mask"),
        ({"version_spans": (VersionSpan(-2, 3, 6),)}, r"version -2, expected -1 \(unknown\) or more"),
        ({"sampling_mask": (b"",)}, r"sampling_mask: 1 entries for 3 sampled tokens"),
    ],
)
def test_a_segment_that_disagrees_with_itself_is_refused_on_both_sides(changes, message):
    group = with_segment(**changes)
    with pytest.raises(RecordError, match=message):
        encode_group(group)
    with pytest.raises(RecordError, match=message):
        decode_group(msgspec.msgpack.encode(group))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"behavior_logprobs": pack_floats([-0.5, float("nan"), -1])}, r"behavior_logprobs holds a value that is not"),
        ({"behavior_logprobs": pack_floats([-0.5, float("-inf"), -1])}, r"behavior_logprobs holds a value that is not"),
        ({"behavior_logprobs": pack_floats([-0.5, 0.5, -1])}, r"behavior_logprobs: 0.5, expected at most 0"),
        ({"token_ids": pack_ids([1, 2, 3, -4, 5, 6])}, r"token_ids: -4, expected 0 or more"),
    ],
)
def test_numbers_that_are_no_ids_or_logprobs_are_refused_by_the_reader(changes, message):
    with pytest.raises(RecordError, match=message):
        decode_group(encode_group(with_segment(**changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": 0}, "index: 0, expected 1 or more"),
        ({"rollouts": ()}, "rollouts is empty"),
        ({"schema_version": 2}, "schema_version: 2, this reader knows 1 to 1"),
    ],
)
def test_a_group_that_breaks_the_contract_is_refused(changes, message):
    with pytest.raises(RecordError, match=message):
        encode_group(msgspec.structs.replace(wire_examples.group(), **changes))


def test_a_reward_that_is_not_finite_is_refused():
    group = wire_examples.group()
    reward = msgspec.structs.replace(group.rollouts[0].reward, value=float("nan"))
    rollouts = (msgspec.structs.replace(group.rollouts[0], reward=reward),)
    with pytest.raises(RecordError, match=r"rollouts\[0\].reward.value: nan, expected a finite number"):
        encode_group(msgspec.structs.replace(group, rollouts=rollouts))


def test_a_group_over_the_entry_cap_is_an_error_that_names_the_cap():
    num_tokens = MAX_ENTRY_BYTES // 8
    segment = {
        "token_ids": pack_ids(range(num_tokens)),
        "behavior_logprobs": bytes(4 * num_tokens),
        "loss_mask": ((0, num_tokens),),
        "version_spans": (VersionSpan(0, 0, num_tokens),),
    }
    with pytest.raises(RecordError, match=f"at most {MAX_ENTRY_BYTES:,} fit one stream entry; lower group_size"):
        encode_group(with_segment(**segment))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"not msgpack", msgspec.msgpack.encode({"index": "x"})])
def test_bytes_that_are_no_group_are_refused(payload):
    with pytest.raises(RecordError, match="payload: not a rollout group"):
        decode_group(payload)


def test_deeply_nested_bytes_are_refused_with_bounded_memory():
    with pytest.raises(RecordError):
        decode_group(b"\x91" * 1_000_000)


def test_random_damage_never_escapes_as_another_error():
    payload = encode_group(wire_examples.group())
    rng = random.Random(7)
    num_refused = 0
    for _ in range(3000):
        damaged = bytearray(payload)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            decode_group(bytes(damaged))
        except RecordError:
            num_refused += 1
    assert 1000 < num_refused < 3000, "most damage is seen; a changed digit of a reward or a text cannot be"


def test_unknown_fields_of_a_newer_writer_are_ignored():
    fields = msgspec.to_builtins(wire_examples.group(), builtin_types=(bytes,))
    fields["added_later"] = 1
    assert decode_group(msgspec.msgpack.encode(fields)) == wire_examples.group()


def test_a_prompt_needs_exactly_one_of_text_and_messages():
    with pytest.raises(ValueError, match="exactly one of text and messages"):
        Prompt(answer="46")
