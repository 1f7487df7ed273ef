"""The decoder meets what a hostile or broken producer can send: it returns a sound group or raises RecordError.

FUZZ_SEED takes another seed than the fixed one, FUZZ_ROUNDS another number of rounds; a failure names both.
"""

import copy
import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import hostile_records
import wire_examples
from penstock.schemas.rollout import (
    MAX_REASON_CHARACTERS,
    RecordError,
    decode_group,
    encode_group,
    origin_in,
    unpack_floats,
    unpack_ids,
)

SEED = int(os.environ.get("FUZZ_SEED", 20250611))
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", 20_000))

GOLDEN = [file.read_bytes() for file in sorted((Path(__file__).parents[1] / "golden" / "wire").glob("group_*.msgpack"))]
SEEDS = [*GOLDEN, encode_group(wire_examples.group())]
PLACES = list(hostile_records.places(hostile_records.builtins()))
LEAVES = [
    None, True, False, 0, 1, -1, -(2**63), 2**31, 2**32, 2**63, 2**64 - 1, 10**9 + 1, 0.0, -0.0, 1e-320, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"), "", "stop", "length", "\x00", "a\nb", "\u202e", "9" * 5000, b"", b"\x00",
    b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f", b"\xff" * 24, bytes(24), [], [[]], [[3, 6]], [[0, 2**40]], [[5, 4]],
    [[3, 4], [4, 6]], [[3, 6], [3, 6]], [[7, 3, 6]], [[-1, 3, 6]], [[2**63, 3, 6]], [[-(2**63), 3, 6]], [1] * 50, {},
    {"value": 1.0}, {"value": float("nan")}, {"text": "a"}, {"text": "a", "messages": []}, {"a": {"b": {"c": []}}},
]  # fmt: skip


def flip(payload: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4)):
        payload[rng.randrange(len(payload))] = rng.randrange(256)


def cut(payload: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(payload))
    del payload[start : start + rng.choice((1, 2, 4, 16, len(payload)))]


def repeat(payload: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(payload))
    part = payload[start : start + rng.randint(1, 64)]
    where = rng.randrange(len(payload) + 1)
    payload[where:where] = part * rng.choice((1, 2, 50))


def splice(payload: bytearray, rng: random.Random) -> None:
    other = rng.choice(SEEDS)
    payload[rng.randrange(len(payload)) :] = other[rng.randrange(len(other)) :]


def claim(payload: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(payload))
    payload[start : start + rng.randint(0, 6)] = rng.choice(list(hostile_records.CLAIMS.values()))


def nest(payload: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(payload))
    payload[start : start + 1] = rng.choice((b"\x91", b"\x81\xa1a", b"\xdc\x00\x01")) * rng.choice((10, 200, 5000))


def from_bytes(rng: random.Random) -> bytes:
    """A good payload with one to three damages."""
    payload = bytearray(rng.choice(SEEDS))
    for _ in range(rng.randint(1, 3)):
        rng.choice((flip, flip, cut, repeat, splice, claim, nest))(payload, rng)
        if not payload:
            break
    return bytes(payload)


def from_values(rng: random.Random) -> bytes:
    """Sound msgpack of a group in which one to three places hold something else, or one is missing or there twice."""
    group = hostile_records.builtins()
    for _ in range(rng.randint(1, 3)):
        node, path = group, rng.choice(PLACES[1:])
        try:
            for key in path[:-1]:
                node = node[key]
            what = rng.randrange(8)
            if what == 0:
                del node[path[-1]]
            elif what == 1 and isinstance(node, list):
                node.insert(0, node[path[-1]])
            elif what == 2:
                node[path[-1]] = msgspec.Raw(rng.choice(list(hostile_records.CLAIMS.values())))
            else:
                node[path[-1]] = copy.deepcopy(rng.choice(LEAVES))
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken the place away
    return hostile_records.encode(group)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(400_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("make", [from_bytes, from_values])
def test_whatever_arrives_is_a_sound_group_or_a_record_error(
    make: Callable[[random.Random], bytes], rounds: int
) -> None:
    print(f"FUZZ_SEED={SEED} FUZZ_ROUNDS={rounds}")
    rng = random.Random(SEED)
    num_refused = 0
    for number in range(rounds):
        payload = make(rng)
        try:
            origin = origin_in(payload)
            group = decode_group(payload)
            assert origin is None or (origin.producer_id, origin.samplers) == (group.producer_id, group.samplers)
            # What is accepted says the same when it is written again, and its numbers are ids and logprobs.
            assert decode_group(encode_group(group)) == group
            for segment in (segment for rollout in group.rollouts for segment in rollout.segments):
                assert all(number >= 0 for number in unpack_ids(segment.token_ids))
                assert all(-math.inf < number <= 1e-3 for number in unpack_floats(segment.behavior_logprobs))
        except RecordError as error:
            num_refused += 1
            message = str(error)
            assert message.isprintable() and len(message) < 5 * MAX_REASON_CHARACTERS, f"{SEED=} {number=}: {message}"
        except BaseException as error:
            raise AssertionError(f"{SEED=} {number=}: {error!r} from {payload[:2000].hex()}") from error
    # Some damage must pass, or the seeds would be no groups: a changed text, another reward.
    assert rounds // 2 < num_refused < rounds
