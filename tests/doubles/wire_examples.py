"""Makes the group whose encodings are the golden payloads: two siblings, the second of two turns."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from penstock.schemas.heartbeat import Heartbeat, InFlight
from penstock.schemas.images import ImagePlace, digest_of
from penstock.schemas.prompt import ImagePart, Message, Prompt, Reward, TextPart
from penstock.schemas.rollout import (
    EngineFingerprint,
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Segment,
    Timings,
    TopLogprobs,
    VersionSpan,
    pack_floats,
    pack_ids,
)
from penstock.schemas.routes import Routes

FINGERPRINT = EngineFingerprint(
    engine="vllm",
    version="0.32.0",
    model="Qwen3ForCausalLM",
    dtype="float32",
    head_dtype="float32",
    logprobs_mode="processed_logprobs",
    prefix_caching=False,
    async_scheduling=False,
    other={"max_num_seqs": "64"},
)


def heartbeat(producer_id: str, **changes: Any) -> Heartbeat:
    """Returns the heartbeat of a producer on the host `h` with five groups of policy 7 in flight."""
    sent = Heartbeat(
        producer_id=producer_id,
        host="h",
        pid=1,
        policy_version=7,
        in_flight=(InFlight(index=1, claimed_s=0.0, attempt=1),) * 5,
        tokens_per_s=2500.0,
        num_tokens_generated=0,
        num_groups_appended=0,
        num_weight_loads_failed=0,
        metrics_port=0,
        fingerprint=FINGERPRINT,
        sent_s=0.0,
    )
    return replace(sent, **changes)


def spans(versions: Sequence[int], start: int = 0) -> tuple[VersionSpan, ...]:
    """Returns the version spans of tokens from `start` on, given the version of each."""
    found: list[VersionSpan] = []
    for position, version in enumerate(versions, start):
        if found and found[-1].version == version:
            found[-1] = VersionSpan(version, found[-1].start, position + 1)
        else:
            found.append(VersionSpan(version, position, position + 1))
    return tuple(found)


def single_turn() -> Rollout:
    return Rollout(
        segments=(
            Segment(
                token_ids=pack_ids([11, 12, 13, 21, 22, 2]),
                behavior_logprobs=pack_floats([-0.5, -1.25, -0.0625]),
                loss_mask=((3, 6),),
                version_spans=(VersionSpan(7, 3, 5), VersionSpan(8, 5, 6)),
            ),
        ),
        reward=Reward(value=1.0, parts={"exact": 1.0}),
    )


def two_turns() -> Rollout:
    return Rollout(
        segments=(
            Segment(
                token_ids=pack_ids([11, 12, 13, 21, 22, 31, 32, 41, 42]),
                behavior_logprobs=pack_floats([-0.5, -0.25, -2.0, -0.125]),
                loss_mask=((3, 5), (7, 9)),
                version_spans=(VersionSpan(7, 3, 5), VersionSpan(7, 7, 8), VersionSpan(8, 8, 9)),
                finish_reason="length",
            ),
        ),
        reward=Reward(value=0.0),
    )


def group(index: int = 41) -> RolloutGroup:
    return RolloutGroup(
        index=index,
        prompt=Prompt(text="12+34=", answer="46", metadata={"width": "2"}),
        rollouts=(single_turn(), two_turns()),
        producer_id="producer-0",
        fingerprint=FINGERPRINT,
        sampling=SamplingSettings(temperature=0.7, max_tokens=16),
        timings=Timings(claimed_s=1.5, generated_s=2.5, appended_s=2.75),
    )


def group_of_lengths(
    *lengths: int, index: int = 41, version: int = 7, reward: float = 0.0, tries_lost: int = 0
) -> RolloutGroup:
    """Returns a group of single-turn rollouts with these numbers of sampled tokens."""
    return replace(
        group(index),
        rollouts=tuple(
            Rollout(
                segments=(
                    Segment(
                        token_ids=pack_ids([11] * (1 + length)),
                        behavior_logprobs=pack_floats([-0.5] * length),
                        loss_mask=((1, 1 + length),),
                        version_spans=(VersionSpan(version, 1, 1 + length),),
                    ),
                ),
                reward=Reward(value=reward),
            )
            for length in lengths
        ),
        num_tries_lost=tries_lost,
    )


AT_TEMPERATURE_1 = SamplingSettings(temperature=1.0, max_tokens=16)


def taught_group() -> RolloutGroup:
    """Returns the group with the logprobs of a teacher."""
    plain = group()
    (one,), (two,) = (rollout.segments for rollout in plain.rollouts)
    taught = (
        replace(one, teacher_logprobs=pack_floats([-0.25, -3.5, -0.125])),
        replace(two, teacher_logprobs=pack_floats([-0.5, -1.0, -0.0625, -9.0])),
    )
    rollouts = (replace(each, segments=(own,)) for each, own in zip(plain.rollouts, taught, strict=True))
    return replace(plain, rollouts=tuple(rollouts))


def released_group() -> RolloutGroup:
    """Returns the group with the time of its release."""
    plain = group()
    return replace(plain, timings=replace(plain.timings, released_s=1_700_000_000.25))


def routed_group() -> RolloutGroup:
    """Returns the group as an engine with experts samples it: two layers of one expert a token, the first one unknown
    in the second rollout."""
    plain = group()
    routed = []
    for rollout, kind in zip(plain.rollouts, ("B", "H"), strict=True):
        (segment,) = rollout.segments
        num_bytes = 2 * (segment.num_tokens - 1) * (1 if kind == "B" else 2)
        ids = bytes(n % 7 for n in range(num_bytes)) if kind == "B" else b"\xff\xff" + bytes(num_bytes - 2)
        routed.append(replace(rollout, segments=(replace(segment, routes=Routes(2, 1, kind, ids)),)))
    return replace(plain, rollouts=tuple(routed), fingerprint=replace(plain.fingerprint, route_bytes=2))


def top_group() -> RolloutGroup:
    """Returns the group with the two likeliest ids of each sampled token."""
    plain = group()
    rollouts = []
    for rollout in plain.rollouts:
        (segment,) = rollout.segments
        num = segment.num_sampled_tokens
        top = TopLogprobs(2, pack_ids(range(20, 20 + 2 * num)), pack_floats([-0.5, -1.5] * num))
        rollouts.append(replace(rollout, segments=(replace(segment, top_logprobs=top),)))
    return replace(plain, rollouts=tuple(rollouts), sampling=replace(plain.sampling, top_logprobs=2))


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000020000000108020000007b40e8dd"
    "0000000f49444154789c63f8cfc0c0c0f01f00070001ff7e08b1d00000000049454e44ae426082"
)
"""An image file of two pixels."""


def image_group() -> RolloutGroup:
    """Returns the group with an image in its prompt, whose place is two tokens long."""
    plain, digest = group(), digest_of(PNG)
    rollouts = []
    for rollout in plain.rollouts:
        (segment,) = rollout.segments
        rollouts.append(replace(rollout, segments=(replace(segment, images=(ImagePlace(digest, 1, 3),)),)))
    content = (TextPart(text="What is "), ImagePart(digest=digest), TextPart(text="?"))
    prompt = replace(plain.prompt, text=None, messages=(Message(role="user", content=content),))
    return replace(plain, rollouts=tuple(rollouts), prompt=prompt, images={digest: PNG})


def group_in_flight() -> RolloutGroup:
    """Returns the group while it is sampled: one sibling is finished, one is not, and one has no token yet."""
    (segment,) = single_turn().segments
    part = replace(
        segment,
        token_ids=segment.token_ids[:-4],
        behavior_logprobs=segment.behavior_logprobs[:-4],
        loss_mask=((3, 5),),
        version_spans=(VersionSpan(7, 3, 5),),
        finish_reason="abort",
    )
    none = replace(part, token_ids=pack_ids([11, 12, 13]), behavior_logprobs=b"", loss_mask=(), version_spans=())
    unscored = Reward(value=-1.0)  # NaN in flight, which equals nothing
    rollouts = tuple(Rollout(segments=(each,), reward=unscored) for each in (segment, part, none))
    return replace(group(), rollouts=rollouts, timings=Timings(claimed_s=1.5))
