"""Rollouts as they cross the stream: one record per prompt group, dense numbers as packed bytes."""

import math
import sys
from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

from schemas.prompt import Prompt, Reward

SCHEMA_VERSION = 1
MAX_ENTRY_BYTES = 4 * 1024 * 1024
"""The largest encoded group a stream entry may hold."""

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]

if sys.byteorder != "little" or array("i").itemsize != 4:
    raise ImportError(
        "schemas.rollout packs numbers as little-endian 4-byte values; this platform is not little-endian"
    )


class RecordError(ValueError):
    """A record that breaks the contract; the message names the field, what it holds and what was expected."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids[start:end]` of a segment were sampled by policy `version` (-1: unknown)."""

    version: int
    start: int
    end: int


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence exactly as the engine saw it: context and sampled tokens.

    A rollout of two turns, as one segment of 9 tokens (prompt 3, answer 2, tool result 2, answer 2)::

        token_ids            [9] int32    11 12 13 | 21 22 | 31 32 | 41 42
        loss_mask            runs         (3, 5) (7, 9)                      half-open, ascending, disjoint
        behavior_logprobs    [4] float32  one for each token in the runs, in order
        version_spans        runs         (7, 3, 5) (7, 7, 8) (8, 8, 9)      tile the loss mask, token by token

    token_ids: int32 little-endian bytes, `[num_tokens]`.
    behavior_logprobs: float32 little-endian bytes, `[num_sampled_tokens]`, natural log, of the processed distribution
        that the token was sampled from.
    sampling_mask: per sampled token the ids that the sampler kept (top-k/top-p), int32 bytes each; None without one.
    """

    token_ids: bytes
    behavior_logprobs: bytes
    loss_mask: tuple[tuple[int, int], ...]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason = "stop"
    sampling_mask: tuple[bytes, ...] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def num_sampled_tokens(self) -> int:
        return len(self.behavior_logprobs) // 4


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One sibling: its segments (normally one) and the reward of the whole."""

    segments: tuple[Segment, ...]
    reward: Reward

    @property
    def num_sampled_tokens(self) -> int:
        return sum(segment.num_sampled_tokens for segment in self.segments)


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled: the part of the behavior policy that is not its weights."""

    temperature: float = 1.0
    """Softmax temperature; below 1e-5 sampling is greedy and logprobs are those of temperature 1, as in vLLM."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    max_tokens: int = 256
    """The most tokens one completion may have."""
    stop_token_ids: tuple[int, ...] = ()


class EngineFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What produced the logprobs: every setting that can move them, as the running engine reports it."""

    engine: str
    version: str
    model: str
    dtype: str
    head_dtype: str
    logprobs_mode: str
    prefix_caching: bool
    async_scheduling: bool
    other: dict[str, str] = {}
    """Every other engine argument that the run file sets."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Wall-clock seconds since the epoch."""

    claimed_s: float = 0.0
    generated_s: float = 0.0
    appended_s: float = 0.0


class RolloutGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The siblings sampled from one prompt: what one entry of the rollout stream holds.

    `index` is the released task index and the group's id. An evaluation group has `evaluation_id`
    (`"<version>-<n>"`), index 0, and never crosses the rollout stream.
    """

    index: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    producer_id: str
    fingerprint: EngineFingerprint
    sampling: SamplingSettings
    timings: Timings = Timings()
    evaluation_id: str | None = None
    schema_version: int = SCHEMA_VERSION


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RolloutGroup)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32 little-endian bytes."""
    return array("i", token_ids).tobytes()


def pack_floats(values: Sequence[float]) -> bytes:
    """Numbers as float32 little-endian bytes."""
    return array("f", values).tobytes()


def unpack_ids(data: bytes) -> "array[int]":
    return array("i", data)


def unpack_floats(data: bytes) -> "array[float]":
    return array("f", data)


def encode_group(group: RolloutGroup) -> bytes:
    """Encodes a group as msgpack. Lengths are checked here, the numbers themselves by whoever decodes.

    Raises:
        RecordError: parts that disagree with each other, or more than `MAX_ENTRY_BYTES`.
    """
    _check_structure(group)
    payload = _encoder.encode(group)
    if len(payload) > MAX_ENTRY_BYTES:
        raise RecordError(
            f"group {group.index}: {len(payload):,} bytes encoded, at most {MAX_ENTRY_BYTES:,} fit one stream entry; "
            "lower group_size or sampling.max_tokens"
        )
    return payload


def decode_group(payload: bytes) -> RolloutGroup:
    """Decodes and checks one group.

    Raises:
        RecordError: not msgpack of this schema, a schema version from the future, lengths that disagree, or numbers
            that are no ids and no logprobs.
    """
    if len(payload) > MAX_ENTRY_BYTES:
        raise RecordError(f"payload: {len(payload):,} bytes, expected at most {MAX_ENTRY_BYTES:,}")
    try:
        group = _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RecordError(f"payload: not a rollout group: {error}") from error
    _check_structure(group)
    for r, rollout in enumerate(group.rollouts):
        for s, segment in enumerate(rollout.segments):
            _check_values(segment, f"group {group.index}: rollouts[{r}].segments[{s}]")
    return group


def _check_structure(group: RolloutGroup) -> None:
    if not 1 <= group.schema_version <= SCHEMA_VERSION:
        raise RecordError(f"schema_version: {group.schema_version}, this reader knows 1 to {SCHEMA_VERSION}")
    if group.index < (0 if group.evaluation_id is not None else 1):
        raise RecordError(f"index: {group.index}, expected 1 or more")
    if not group.rollouts:
        raise RecordError(f"group {group.index}: rollouts is empty, expected at least one")
    for r, rollout in enumerate(group.rollouts):
        where = f"group {group.index}: rollouts[{r}]"
        if not math.isfinite(rollout.reward.value):
            raise RecordError(f"{where}.reward.value: {rollout.reward.value}, expected a finite number")
        if not rollout.segments:
            raise RecordError(f"{where}.segments is empty, expected at least one")
        for s, segment in enumerate(rollout.segments):
            _check_segment(segment, f"{where}.segments[{s}]")


def _check_segment(segment: Segment, where: str) -> None:
    for name in ("token_ids", "behavior_logprobs"):
        if len(getattr(segment, name)) % 4:
            raise RecordError(f"{where}.{name}: {len(getattr(segment, name))} bytes, expected a multiple of 4")
    num_tokens, num_sampled = segment.num_tokens, segment.num_sampled_tokens
    covered = _check_runs(segment.loss_mask, num_tokens, f"{where}.loss_mask")
    if covered != num_sampled:
        raise RecordError(
            f"{where}: loss_mask covers {covered} tokens but behavior_logprobs holds {num_sampled}; "
            "expected equal lengths"
        )
    runs = tuple((span.start, span.end) for span in segment.version_spans)
    _check_runs(runs, num_tokens, f"{where}.version_spans")
    if _merge(runs) != _merge(segment.loss_mask):
        raise RecordError(f"{where}: version_spans {runs} do not tile loss_mask {segment.loss_mask}")
    for span in segment.version_spans:
        if span.version < -1:
            raise RecordError(f"{where}.version_spans: version {span.version}, expected -1 (unknown) or more")
    if segment.sampling_mask is not None and len(segment.sampling_mask) != num_sampled:
        raise RecordError(
            f"{where}.sampling_mask: {len(segment.sampling_mask)} entries for {num_sampled} sampled tokens"
        )


def _check_values(segment: Segment, where: str) -> None:
    ids, logprobs = unpack_ids(segment.token_ids), unpack_floats(segment.behavior_logprobs)
    if ids and min(ids) < 0:
        raise RecordError(f"{where}.token_ids: {min(ids)}, expected 0 or more")
    # A sum is finite exactly when every term is, as far as float32 values in a Python float go: one C loop, no scan.
    if not math.isfinite(sum(logprobs)):
        raise RecordError(f"{where}.behavior_logprobs holds a value that is not finite")
    if logprobs and max(logprobs) > 1e-3:
        raise RecordError(f"{where}.behavior_logprobs: {max(logprobs)}, expected at most 0")
    if segment.sampling_mask is not None:
        _check_sampling_mask(segment.sampling_mask, ids, segment.loss_mask, where)


def _check_sampling_mask(
    kept: tuple[bytes, ...], ids: "array[int]", runs: Sequence[tuple[int, int]], where: str
) -> None:
    """Each sampled token must be among the ids that the sampler kept there."""
    positions = (position for start, end in runs for position in range(start, end))
    for n, (position, entry) in enumerate(zip(positions, kept, strict=True)):
        if len(entry) % 4:
            raise RecordError(f"{where}.sampling_mask[{n}]: {len(entry)} bytes, expected a multiple of 4")
        choices = unpack_ids(entry)
        if ids[position] not in choices:
            raise RecordError(
                f"{where}.sampling_mask[{n}]: {len(choices)} ids without the sampled token {ids[position]}, "
                "expected it among them"
            )
        if min(choices) < 0:
            raise RecordError(f"{where}.sampling_mask[{n}]: id {min(choices)}, expected 0 or more")


def _check_runs(runs: Sequence[tuple[int, int]], num_tokens: int, where: str) -> int:
    """The number of tokens that `runs` cover; raises unless they ascend, are disjoint and lie in [0, num_tokens)."""
    covered = previous_end = 0
    for start, end in runs:
        if not previous_end <= start < end <= num_tokens:
            raise RecordError(f"{where}: run ({start}, {end}), expected {previous_end} <= start < end <= {num_tokens}")
        covered += end - start
        previous_end = end
    return covered


def _merge(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
