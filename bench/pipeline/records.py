"""The record on the wire: bytes per completion token, and encoding against copying the same bytes."""

import random
import time
from collections.abc import Callable
from functools import partial
from statistics import median

from bench.result import Figure, Goal, compare, in_turns
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import (
    EngineFingerprint,
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Segment,
    VersionSpan,
    decode_group,
    encode_group,
    pack_floats,
    pack_ids,
)

GROUP_SIZE = 8
COMPLETION_TOKENS = 4096
PROMPT_TOKENS = 16
VERSIONS_SEEN = 4
"""Version spans of a completion: one more than the updates during it."""
ROUNDS = 100
FINGERPRINT = EngineFingerprint(
    engine="vllm",
    version="0.32.0",
    model="runs/models/demo",
    dtype="bfloat16",
    head_dtype="float32",
    logprobs_mode="processed_logprobs",
    prefix_caching=False,
    async_scheduling=False,
)


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
    return [
        compare(
            "rollout bytes per completion token",
            unit="B",
            measured=len(payload) / num_tokens,
            reference=1.0,
            reference_is="one completion token (id and logprob alone are 8 B)",
            goal=Goal(at_most=8.1),
            details={"payload_bytes": len(payload), "version_spans": VERSIONS_SEEN, **shape},
        ),
        compare(
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
    draw = random.Random(0)
    prompt_ids = [draw.randrange(50_000) for _ in range(prompt_tokens)]
    return RolloutGroup(
        index=123_456,
        prompt=Prompt(text="What is 12 + 34? Think aloud, then answer.", answer="46"),
        rollouts=tuple(_rollout(prompt_ids, completion_tokens, draw) for _ in range(GROUP_SIZE)),
        producer_id="producer-0",
        fingerprint=FINGERPRINT,
        sampling=SamplingSettings(max_tokens=completion_tokens),
    )


def _rollout(prompt_ids: list[int], completion_tokens: int, draw: random.Random) -> Rollout:
    start, end = len(prompt_ids), len(prompt_ids) + completion_tokens
    bounds = [start + completion_tokens * n // VERSIONS_SEEN for n in range(VERSIONS_SEEN + 1)]
    segment = Segment(
        token_ids=pack_ids(prompt_ids + [draw.randrange(50_000) for _ in range(completion_tokens)]),
        behavior_logprobs=pack_floats([-draw.expovariate(1.0) for _ in range(completion_tokens)]),
        loss_mask=((start, end),),
        version_spans=tuple(VersionSpan(1000 + n, *bounds[n : n + 2]) for n in range(VERSIONS_SEEN)),
        finish_reason="length",
    )
    return Rollout(segments=(segment,), reward=Reward(value=1.0, parts={"exact": 1.0, "digits": 1.0}))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
