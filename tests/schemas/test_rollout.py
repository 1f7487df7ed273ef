"""The wire format is checked on both sides, and old payloads stay readable."""

import math
import random
import tracemalloc
from pathlib import Path

import msgspec
import pytest

import hostile_records
import wire_examples
from penstock.schemas.prompt import Message, Prompt
from penstock.schemas.rollout import (
    MAX_ENTRY_BYTES,
    MAX_REASON_CHARACTERS,
    RecordError,
    RolloutGroup,
    Segment,
    TopLogprobs,
    VersionSpan,
    decode_group,
    encode_group,
    origin_in,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from penstock.schemas.routes import Routes

WIRE = Path(__file__).parents[1] / "golden" / "wire"


def with_segment(**changes) -> RolloutGroup:
    group = wire_examples.group()
    first = group.rollouts[0]
    segment = msgspec.structs.replace(first.segments[0], **changes)
    return msgspec.structs.replace(group, rollouts=(msgspec.structs.replace(first, segments=(segment,)),))


def test_payloads_of_schema_version_1_still_decode():
    for name in ("", "_penalties", "_missing", "_task", "_tries", "_samplers"):
        assert decode_group((WIRE / f"group_v1{name}.msgpack").read_bytes()) == wire_examples.group(), name
    for name in ("_teacher", "_tries_teacher", "_samplers_teacher"):
        assert decode_group((WIRE / f"group_v1{name}.msgpack").read_bytes()) == wire_examples.taught_group(), name


def test_today_s_encoder_writes_the_golden_payload():
    examples = {"": wire_examples.group, "_teacher": wire_examples.taught_group, "_routes": wire_examples.routed_group}
    examples |= {
        "_released": wire_examples.released_group,
        "_top": wire_examples.top_group,
        "_images": wire_examples.image_group,
    }
    for name, example in examples.items():
        group = example()
        assert encode_group(group) == (WIRE / f"group_v1_samplers{name}.msgpack").read_bytes()
        assert decode_group(encode_group(group)) == group


def test_today_s_encoder_writes_the_golden_progress():
    golden, group = (WIRE / "group_v1_samplers_in_flight.msgpack").read_bytes(), wire_examples.group_in_flight()
    assert encode_group(group, dead=True) == golden and decode_group(golden, dead=True) == group
    for name in ("in_flight", "tries_in_flight"):
        assert decode_group((WIRE / f"group_v1_{name}.msgpack").read_bytes(), dead=True) == group


def test_packed_numbers_keep_ids_exactly_and_logprobs_to_float32():
    ids = [0, 1, 151_935, 2**31 - 1]
    assert list(unpack_ids(pack_ids(ids))) == ids
    assert list(unpack_floats(pack_floats([-0.5, -1e-7]))) == [-0.5, pytest.approx(-1e-7, rel=1e-6)]


def test_no_byte_of_a_logprob_hides_that_it_is_none():
    group = wire_examples.group()
    spoiled = bytearray(group.rollouts[0].segments[0].behavior_logprobs)
    for highest in range(256):
        for others in (b"\0\0\0", b"\xff\xff\xff", b"\0\0\x7f", b"\0\0\x80"):
            spoiled[-4:] = others + bytes([highest])
            value = unpack_floats(bytes(spoiled))[-1]
            payload = encode_group(with_segment(behavior_logprobs=bytes(spoiled)))
            if math.isfinite(value) and value <= 1e-3:
                assert decode_group(payload).rollouts[0].segments[0].behavior_logprobs == bytes(spoiled)
            else:
                with pytest.raises(RecordError, match=r"segments\[0\]\.behavior_logprobs"):
                    decode_group(payload)


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


def test_a_segment_that_disagrees_with_itself_is_refused_on_both_sides():
    for changes, message in [
        ({"behavior_logprobs": pack_floats([-0.5])}, r"loss_mask covers 3 tokens but behavior_logprobs holds 1"),
        ({"token_ids": b"12345"}, r"token_ids: 5 bytes, expected a multiple of 4"),
        ({"loss_mask": ((3, 7),)}, r"loss_mask: run \(3, 7\), expected 0 <= start < end <= 6"),
        ({"loss_mask": ((4, 6), (3, 4))}, r"loss_mask: run \(3, 4\)"),
        ({"version_spans": (VersionSpan(7, 3, 5),)}, r"version_spans .* do not tile loss_mask"),
        ({"version_spans": (VersionSpan(-2, 3, 6),)}, r"version -2, expected -1 \(unknown\) or more"),
        ({"sampling_mask": (b"",)}, r"sampling_mask: 1 entries for 3 sampled tokens"),
        ({"routes": Routes(2, 1, "B", bytes(12))}, r"routes: 12 bytes, expected 5 rows of 2"),
        ({"routes": Routes(2, 1, "Q", bytes(10))}, r"routes: 2 layers, 1 experts of kind 'Q', expected kind 'B' or"),
        ({"routes": Routes(0, 1, "B", b"")}, r"routes: 0 layers, 1 experts of kind 'B', expected"),
        ({"top_logprobs": TopLogprobs(2, bytes(24), bytes(12))}, r"top_logprobs: \(24, 12\) bytes, expected 24 each"),
        ({"top_logprobs": TopLogprobs(0, b"", b"")}, r"top_logprobs: \(0, 0\) bytes, expected 0 each: 0 ids"),
        ({"teacher_logprobs": b""}, r"teacher_logprobs: 0 bytes for 3 sampled tokens, expected 12"),
        ({"teacher_logprobs": pack_floats([-1.0] * 4)}, r"teacher_logprobs: 16 bytes for 3 sampled tokens"),
    ]:
        group = with_segment(**changes)
        with pytest.raises(RecordError, match=message):
            encode_group(group)
        with pytest.raises(RecordError, match=message):
            decode_group(msgspec.msgpack.encode(group))
    for changes, message in [
        ({"index": 0}, "index: 0, expected 1 or more"),
        ({"rollouts": ()}, "rollouts is empty"),
        ({"schema_version": 2}, "schema_version: 2, this reader knows 1 to 1"),
    ]:
        with pytest.raises(RecordError, match=message):
            encode_group(msgspec.structs.replace(wire_examples.group(), **changes))


REWARD, REFUSED = ("rollouts", 0, "reward"), "not a rollout group"
MANY = {str(n): "" for n in range(5000)}


def test_what_would_spoil_a_batch_or_the_books_is_refused_at_decode() -> None:
    for changes, message in [
        ({"behavior_logprobs": pack_floats([-0.5, math.nan, -1])}, "behavior_logprobs holds a value that is not"),
        ({"behavior_logprobs": pack_floats([-0.5, 0.5, -1])}, "behavior_logprobs: 0.5, expected at most 0"),
        ({"token_ids": pack_ids([1, 2, 3, -4, 5, 6])}, "token_ids: -4, expected 0 or more"),
        ({"teacher_logprobs": pack_floats([-0.5, math.nan, -1])}, "teacher_logprobs holds a value that is not"),
        ({"teacher_logprobs": pack_floats([-0.5, 0.5, -1])}, "teacher_logprobs: 0.5, expected at most 0"),
        ({"top_logprobs": TopLogprobs(1, pack_ids([1, -2, 3]), bytes(12))}, "top_logprobs: id -2, expected 0 or more"),
        (
            {"top_logprobs": TopLogprobs(1, bytes(12), pack_floats([-1, 0.5, -1]))},
            "top_logprobs: 0.5, expected at most",
        ),
    ]:
        with pytest.raises(RecordError, match=message):
            decode_group(encode_group(with_segment(**changes)))
    for path, value, message in [
        ((*REWARD, "value"), 1e308, r"rollouts\[0\].reward.value: 1e\+308, expected a finite number of"),
        ((*REWARD, "value"), -math.inf, r"rollouts\[0\].reward.value: -inf, expected"),
        ((*REWARD, "parts"), {"a": math.nan}, r"rollouts\[0\].reward.parts\['a'\]: nan, expected a"),
        ((*REWARD, "parts"), dict.fromkeys(MANY, 0), r"reward.parts: 5,000 entries"),
        (("sampling", "temperature"), math.nan, "sampling.temperature: nan, expected a finite number, 0 or more"),
        (("sampling", "temperature"), -1.0, "sampling.temperature: -1.0, expected a finite number, 0 or more"),
        (("sampling", "top_p"), math.nan, "sampling.top_p: nan, expected 0 to 1"),
        (("sampling", "presence_penalty"), math.nan, "sampling.presence_penalty: nan, expected a finite number"),
        (("sampling", "frequency_penalty"), math.inf, "sampling.frequency_penalty: inf, expected a finite number"),
        (("sampling", "repetition_penalty"), 0.0, "repetition_penalty: 0.0, expected a finite number above 0"),
        (("sampling", "repetition_penalty"), math.inf, "repetition_penalty: inf, expected a finite number above 0"),
        (("sampling", "stop_token_ids"), [1] * 5000, "sampling.stop_token_ids: 5,000 entries, expected at most 4,096"),
        (("timings", "claimed_s"), math.inf, "timings.claimed_s: inf, expected a finite number"),
        (("prompt", "metadata"), MANY, "prompt.metadata: 5,000 entries"),
        (("fingerprint", "other"), MANY, "fingerprint.other: 5,000 entries"),
        (("schema_version",), 2, "schema_version: 2, this reader knows 1 to 1"),
        (("index",), msgspec.Raw(b"\xcf" + b"\xff" * 9), f"payload: {REFUSED}"),
        (("index",), "41", f"payload: {REFUSED}: Expected `int`, got `str`"),
        (("index",), 41.5, f"payload: {REFUSED}: Expected `int`"),
    ]:
        with pytest.raises(RecordError, match=message):
            decode_group(hostile_records.with_value(path, value))


def test_of_a_key_that_is_there_twice_the_last_one_counts_and_is_checked():
    payload = encode_group(wire_examples.group())
    assert payload[0] == 0x8E
    twice = b"\x8f" + payload[1:] + msgspec.msgpack.encode("index")
    assert decode_group(twice + b"\x07").index == 7
    with pytest.raises(RecordError, match="index: 0, expected 1 or more"):
        decode_group(twice + b"\x00")


def test_a_refusal_is_one_short_line_whatever_the_record_holds():
    for path, value in [
        (("rollouts", 0, "segments", 0, "finish_reason"), "x\n\x1b[31m" * 100_000),
        (("prompt",), {"text": "line\n" * 100_000, "messages": []}),
        (("rollouts", 0, "segments", 0, "version_spans"), [[7, n, n + 1] for n in range(100_000)]),
        (("rollouts", 0, "reward", "parts"), {"\u2028" * 100_000: math.nan}),
    ]:
        with pytest.raises(RecordError) as caught:
            decode_group(hostile_records.with_value(path, value))
        assert str(caught.value).isprintable() and len(str(caught.value)) < 5 * MAX_REASON_CHARACTERS, path


FILLINGS = {
    "loss_mask": (("rollouts", 0, "segments", 0, "loss_mask"), b"\x92\x00\x01"),
    "version_spans": (("rollouts", 0, "segments", 0, "version_spans"), b"\x93\x00\x00\x01"),
    "sampling_mask": (("rollouts", 0, "segments", 0, "sampling_mask"), b"\xc4\x02ab"),
    "rollouts": (("rollouts",), b"\x82\xa8segments\x90\xa6reward\x81\xa5value\x00"),
    "messages": (("prompt", "messages"), b"\x82\xa4role\xa0\xa7content\xa0"),
    "stop_token_ids": (("sampling", "stop_token_ids"), b"\xcd\x7f\x00"),
}


@pytest.mark.parametrize(
    "name", ["version_spans", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FILLINGS)]
)
def test_a_record_full_of_small_things_is_refused_with_bounded_memory(name: str) -> None:
    path, item = FILLINGS[name]
    count = (MAX_ENTRY_BYTES - 2000) // len(item)
    payload = hostile_records.with_value(
        path, msgspec.Raw(hostile_records.header(hostile_records.ARRAY, count) + item * count)
    )
    tracemalloc.start()
    try:
        with pytest.raises(RecordError):
            decode_group(payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * len(payload), f"{peak / len(payload):.0f} times the payload"


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


def test_unknown_fields_of_a_newer_writer_are_ignored():
    fields = msgspec.to_builtins(wire_examples.group(), builtin_types=(bytes,))
    fields["added_later"] = 1
    assert decode_group(msgspec.msgpack.encode(fields)) == wire_examples.group()


def test_a_prompt_is_exactly_one_of_text_and_messages():
    with pytest.raises(ValueError, match="exactly one of text and messages"):
        Prompt(answer="46")
    with pytest.raises(ValueError, match=r"content holds {'type': 'audio'}, expected parts of the types text"):
        Message(role="user", content=[{"type": "text", "text": "What is it?"}, {"type": "audio"}])


def test_a_group_that_is_refused_still_says_who_sampled_it():
    group = msgspec.structs.replace(
        with_segment(behavior_logprobs=pack_floats([math.nan] * 3)), sampled_by=("i1", "i2")
    )
    payload = encode_group(group)
    with pytest.raises(RecordError, match="not finite"):
        decode_group(payload)
    origin = origin_in(payload)
    assert (origin.producer_id, origin.samplers) == (group.producer_id, ("i1", "i2"))
    assert origin_in(encode_group(msgspec.structs.replace(group, sampled_by=()))).samplers == (group.producer_id,)
    fields = {**hostile_records.builtins(), "rollouts": "none", "sampling": None}
    assert origin_in(hostile_records.encode(fields)).producer_id == wire_examples.group().producer_id


def test_bytes_that_are_no_group_are_refused_and_say_nothing_of_who_sampled_them():
    good, names = encode_group(wire_examples.group()), hostile_records.builtins()
    no_groups = [
        b"",
        b"\xc1",
        b"not msgpack",
        msgspec.msgpack.encode({"index": "x"}),
        good + b"\x00",
        b"\x91" * 100_000,
    ]
    for payload in no_groups:
        with pytest.raises(RecordError, match="payload: not a rollout group"):
            decode_group(payload)
    for changes in (
        {"producer_id": ""},
        {"producer_id": None},
        {"producer_id": "x" * (MAX_REASON_CHARACTERS + 1)},
        {"sampled_by": ["i1", ""]},
        {"sampled_by": ["x" * (MAX_REASON_CHARACTERS + 1)]},
        {"sampled_by": ["x"] * 5000},
        {"sampled_by": 7},
        {"prompt": b"x" * MAX_ENTRY_BYTES},
    ):
        assert origin_in(hostile_records.encode({**names, **changes})) is None, str(changes)[:80]
    for payload in (b"", b"\xc1", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"x" * MAX_ENTRY_BYTES):
        assert origin_in(payload) is None, payload[:20]
