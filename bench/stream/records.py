"""The record on the wire: bytes per completion token, and encoding against copying the same bytes."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
from msgspec.structs import replace

from bench.groups import random_group
from bench.result import Figure, Goal, in_turns
from penstock.schemas.rollout import RolloutGroup, Segment, TopLogprobs, decode_group, encode_group
from penstock.schemas.routes import Routes

GROUP_SIZE = 8
COMPLETION_TOKENS = 4096
PROMPT_TOKENS = 16
VERSIONS_SEEN = 4
"""Version spans of a completion: one more than the updates during it."""
ROUTED_TOKENS = 1024
"""Longer ones would not fit an entry with their routes."""
LAYERS, PER_TOKEN = 48, 8
"""Of Qwen3-30B-A3B."""
NUM_TOP = 20
"""`sampling.top_logprobs`: what vLLM returns unless told otherwise."""
ROUNDS = 100


def record_figures() -> list[Figure]:
    group = make_group()
    payload = encode_group(group)
    num_tokens = sum(rollout.num_sampled_tokens for rollout in group.rollouts)
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: encode_group(group),
        "copy": lambda: bytes(memoryview(payload)),
        "decode": lambda: decode_group(payload),
    }
    seconds = in_turns(ROUNDS, {name: partial(_seconds, call) for name, call in calls.items()})
    encode_s, copy_s, decode_s = (median(values) for values in seconds.values())
    shape = {"num_siblings": GROUP_SIZE, "completion_tokens": COMPLETION_TOKENS, "prompt_tokens": PROMPT_TOKENS}
    short = make_group(completion_tokens=ROUTED_TOKENS)
    variants = short, with_routes(short), with_top(short)
    plain, routed, with_likeliest = (len(encode_group(each)) / GROUP_SIZE / ROUTED_TOKENS for each in variants)
    return [
        Figure(
            "rollout bytes per completion token",
            unit="B",
            measured=len(payload) / num_tokens,
            reference=1.0,
            reference_is="one completion token (id and logprob alone are 8 B)",
            goal=Goal(at_most=8.1),
            details={"payload_bytes": len(payload), "version_spans": VERSIONS_SEEN, **shape},
        ),
        Figure(
            f"the same with the routes of a mixture, {ROUTED_TOKENS} tokens a completion",
            unit="B",
            measured=routed,
            reference=plain,
            reference_is="the same group without routes",
            details={"layers": LAYERS, "experts_per_token": PER_TOKEN, "share_of_routes": 1 - plain / routed},
        ),
        Figure(
            f"the same with the {NUM_TOP} likeliest ids of each token, {ROUTED_TOKENS} tokens a completion",
            unit="B",
            measured=with_likeliest,
            reference=plain,
            reference_is="the same group without them",
        ),
        Figure(
            "encoding a group",
            unit="µs",
            measured=encode_s * 1e6,
            reference=copy_s * 1e6,
            reference_is="copying the payload into a new bytes object",
            goal=Goal(at_most=5.0),
            details={
                "decoding_and_checking_us": decode_s * 1e6,
                **shape,
            },
        ),
    ]


def make_group(prompt_tokens: int = PROMPT_TOKENS, completion_tokens: int = COMPLETION_TOKENS) -> RolloutGroup:
    """Makes a group as a producer sends it: siblings that repeat the prompt's ids, each sampled by several policies."""
    return random_group(
        123_456,
        [completion_tokens] * GROUP_SIZE,
        50_000,
        prompt_tokens=prompt_tokens,
        versions=range(1000, 1000 + VERSIONS_SEEN),
    )


def with_routes(group: RolloutGroup) -> RolloutGroup:
    """Returns a group whose tokens have experts, in one byte each."""
    draw = np.random.default_rng(0)

    def routed(segment: Segment) -> Segment:
        ids = draw.integers(0, 128, (segment.num_tokens - 1, LAYERS, PER_TOKEN), dtype=np.uint8)
        return replace(segment, routes=Routes(LAYERS, PER_TOKEN, "B", ids.tobytes()))

    rollouts = [replace(one, segments=tuple(map(routed, one.segments))) for one in group.rollouts]
    return replace(group, rollouts=tuple(rollouts))


def with_top(group: RolloutGroup) -> RolloutGroup:
    """Returns a group whose tokens have their likeliest ids."""
    draw = np.random.default_rng(0)

    def listed(segment: Segment) -> Segment:
        shape = segment.num_sampled_tokens, NUM_TOP
        ids, logprobs = draw.integers(0, 150_000, shape, dtype=np.int32), -draw.random(shape, dtype=np.float32)
        return replace(segment, top_logprobs=TopLogprobs(NUM_TOP, ids.tobytes(), logprobs.tobytes()))

    rollouts = [replace(one, segments=tuple(map(listed, one.segments))) for one in group.rollouts]
    return replace(group, rollouts=tuple(rollouts))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
