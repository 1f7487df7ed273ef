"""A run's complete record: every rollout group that its trainer took, and what the trainer found.

`<run>/record/<epoch>-<number>.segment`, one trainer's files numbered from 0. Framed as a recording is
(`penstock.schemas.rollout_file`), with its version 2 in the header:

    magic     8 bytes  b"PENSTOCK"
    header    u32 length, then a `SegmentHeader` as msgpack
    batches   each: u32 length, u32 CRC-32 of what the length counts: u32 length of the head, the head
              (a `BatchHead`), then each group's blob (a `RecordedGroup`)
    end       u32 0, u32 length, u32 CRC-32, the index (a tuple of `BatchEntry`), u32 length again, b"PENSTEND"

Numbers are little-endian; head, blobs and index are msgpack under zlib. A batch is written whole before the next. A
segment without its end is the one being written, or was left by a kill: it is good up to its last whole batch.

Batches count from 0 along a line of policies (`position`). A trainer that continues from a checkpoint goes on counting
there, in files of its own epoch, and says in their headers where the epochs before it were cut: what they wrote behind
that was undone. `penstock.schemas.record_reader.Record` follows the line.
"""

import re
import struct
import zlib
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from penstock.schemas.rollout import RolloutGroup, Segment, decode_group, one_line, unpack_floats
from penstock.schemas.rollout_file import MAGIC, SEGMENT_VERSION

T = TypeVar("T")

FOLDER = "record"
SUFFIX = ".segment"
END = b"PENSTEND"
COMPRESSION_LEVEL = 1
"""Of token ids and logprobs level 6 saves 2% more, and takes twice as long."""
MAX_FRAME_BYTES = 2**31
MAX_UNPACKED_BYTES = 2**28
"""Of a head, a blob or an index: what claims to be more is refused before it fills the memory."""
_LENGTH = struct.Struct("<I")
_FRAME = struct.Struct("<II")
_NAME = re.compile(r"(\d+)-(\d+)\.segment")

Outcome = Literal["trained", "skipped", "dead"]


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for every batch of a segment.

    epoch, number: of the trainer, and of its segments from 0.
    line: for each earlier epoch on the way to this trainer's first policy, the position where it was cut (the first one
        that does not count).
    forks, announced: by epoch, as `penstock.schemas.policy.lag` takes them.
    config: the run's settings, as `penstock.schemas.config.RunConfig` becomes builtins.
    model_digest: `penstock.schemas.rollout_file.model_digest` of the base model.
    """

    run: str
    epoch: int
    number: int
    line: dict[int, int] = {}
    forks: dict[int, int] = {}
    announced: dict[int, int] = {}
    config: dict[str, Any] = {}
    model_digest: str = ""
    recording_version: int = SEGMENT_VERSION

    @property
    def first_position(self) -> int:
        """Where this trainer's own batches begin."""
        return max(self.line.values(), default=0)


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded group in short: what a list of groups shows, and where the rest is.

    outcome: `trained`, `skipped` (no reward variance) or `dead`, with the `reason` of its letter.
    rewards, advantages, finish_reasons, num_sampled_tokens: by rollout; the finish reason is its last segment's.
    min_version, max_version: of the policies that sampled it, unknown ones left out; -1 where all are.
    min_lag, max_lag: over its sampled tokens, in optimizer steps.
    num_masked: sampled tokens without weight in the loss: past the lag bound, or rejected by the correction; None for
        a group without a token that was scored.
    ess_fraction: effective sample size over its scored tokens, of exp(proximal - behavior) untruncated; None likewise.
    max_weight: the largest importance weight applied; None likewise. Both are None where they are not finite.
    offset, length: of its blob within the batch's frame.
    """

    index: int
    outcome: Outcome
    reason: str = ""
    producer_id: str = ""
    rewards: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    num_sampled_tokens: tuple[int, ...] = ()
    min_version: int = -1
    max_version: int = -1
    min_lag: int = 0
    max_lag: int = 0
    num_masked: int | None = None
    ess_fraction: float | None = None
    max_weight: float | None = None
    offset: int = 0
    length: int = 0


class BatchHead(msgspec.Struct, frozen=True, kw_only=True):
    """One batch that the trainer took, as it found it.

    update: the run's update that it made, from 1; for a batch that made none, the last one before it.
    policy_version: of the trainer when it took the batch: lags are counted from there.
    skipped_reason: why no optimizer step was taken; None where one was.
    counts: whether it made an update. One that failed as a whole does not: only its dead groups are recorded, the
        others were taken again later.
    metrics: every number of the step's report, such as `loss`, by the names of updates.jsonl; may be NaN.
    groups: in the order in which they were trained.
    """

    position: int
    update: int
    policy_version: int
    counts: bool
    time_s: float = 0.0
    skipped_reason: str | None = None
    num_optimizer_steps: int = 0
    metrics: dict[str, float] = {}
    lag_histogram: dict[int, int] = {}
    groups: tuple[GroupEntry, ...] = ()


class SegmentFindings(msgspec.Struct, frozen=True, array_like=True):
    """What the trainer found of one segment of a rollout (`penstock.schemas.rollout.Segment`).

    lags: one for each of its version spans, in optimizer steps; an unknown version counts as the trainer counted it.
    proximal_logprobs, importance_weights: float32 bytes, one value per sampled token, of the first epoch; the weight
        is the one applied, 0 where the token is masked.
    kept: one byte per sampled token, 1 where it may reach the loss.

    All but `lags` are empty where nothing was scored: no reward variance, or every token past the lag bound.
    """

    lags: tuple[int, ...]
    proximal_logprobs: bytes = b""
    importance_weights: bytes = b""
    kept: bytes = b""


class RecordedGroup(msgspec.Struct, frozen=True, array_like=True):
    """payload: the group as it crosses the wire (`penstock.schemas.rollout.encode_group`).
    findings: by rollout and segment."""

    payload: bytes
    findings: tuple[tuple[SegmentFindings, ...], ...]

    def decode(self) -> RolloutGroup:
        """The group itself. Raises `penstock.schemas.rollout.RecordError` for one that breaks the contract."""
        return decode_group(self.payload)


class SampledToken(NamedTuple):
    """One sampled token and every number about it. What was not scored is None, and is neither kept nor masked."""

    position: int
    """In the segment's token ids."""
    version: int
    lag: int
    behavior_logprob: float
    proximal_logprob: float | None = None
    importance_weight: float | None = None
    is_kept: bool | None = None


def sampled_tokens(segment: Segment, findings: SegmentFindings) -> list[SampledToken]:
    """Every sampled token of a segment, in order."""
    behavior = unpack_floats(segment.behavior_logprobs)
    proximal = unpack_floats(findings.proximal_logprobs)
    weights = unpack_floats(findings.importance_weights)
    tokens: list[SampledToken] = []
    for span, lag in zip(segment.version_spans, findings.lags, strict=True):
        for position in range(span.start, span.end):
            n = len(tokens)
            scores = (proximal[n], weights[n], bool(findings.kept[n])) if findings.kept else ()
            tokens.append(SampledToken(position, span.version, lag, behavior[n], *scores))
    return tokens


class BatchEntry(msgspec.Struct, frozen=True, array_like=True):
    """Where a batch is in its segment. offset, length: of the frame's content, its CRC and own length left out."""

    position: int
    update: int
    policy_version: int
    offset: int
    length: int
    indexes: tuple[int, ...]


_heads = msgspec.msgpack.Decoder(BatchHead)
_groups = msgspec.msgpack.Decoder(RecordedGroup)
_indexes = msgspec.msgpack.Decoder(tuple[BatchEntry, ...])


def segment_name(epoch: int, number: int) -> str:
    return f"{epoch:05d}-{number:06d}{SUFFIX}"


def segment_key(file: Path) -> tuple[int, int] | None:
    """(epoch, number) of a segment's file name; None for another file."""
    match = _NAME.fullmatch(file.name)
    return None if match is None else (int(match[1]), int(match[2]))


def encode_header(header: SegmentHeader) -> bytes:
    """The beginning of a segment."""
    body = msgspec.msgpack.encode(header)
    return MAGIC + _LENGTH.pack(len(body)) + body


def encode_batch(head: BatchHead, groups: list[RecordedGroup]) -> tuple[bytes, BatchHead]:
    """A batch as one frame, and its head with the blobs' places filled in. `groups` are those of `head.groups`.

    Raises:
        ValueError: it is larger than a reader takes.
    """
    blobs = [_packed(group) for group in groups]
    placed, offset = [], 0
    for entry, blob in zip(head.groups, blobs, strict=True):
        placed.append(msgspec.structs.replace(entry, offset=offset, length=len(blob)))
        offset += len(blob)
    head = msgspec.structs.replace(head, groups=tuple(placed))
    packed = _packed(head)
    body = b"".join((_LENGTH.pack(len(packed)), packed, *blobs))
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"batch {head.position}: {len(body):,} bytes packed, expected at most {MAX_FRAME_BYTES:,}")
    return _FRAME.pack(len(body), zlib.crc32(body)) + body, head


def entry_of(head: BatchHead, offset: int, length: int) -> BatchEntry:
    indexes = tuple(group.index for group in head.groups)
    return BatchEntry(head.position, head.update, head.policy_version, offset, length, indexes)


def encode_end(entries: tuple[BatchEntry, ...]) -> bytes:
    """The end of a segment."""
    index = _packed(entries)
    return _LENGTH.pack(0) + _FRAME.pack(len(index), zlib.crc32(index)) + index + _LENGTH.pack(len(index)) + END


def decode_head(data: bytes) -> tuple[BatchHead, int]:
    """The head of a batch, and where its blobs begin, from the beginning of a frame's content.

    Raises:
        ValueError: these bytes are none.
    """
    start = blobs_start(data)
    return _decoded(_heads, data[_LENGTH.size : start]), start


def blobs_start(data: bytes) -> int:
    """Where the blobs begin in a frame's content, from its first 4 bytes. Raises ValueError where there are fewer."""
    if len(data) < _LENGTH.size:
        raise ValueError(f"{len(data)} bytes, expected at least {_LENGTH.size}")
    return _LENGTH.size + int(_LENGTH.unpack_from(data)[0])


def decode_blob(data: bytes) -> RecordedGroup:
    """Raises ValueError where these bytes are none."""
    return _decoded(_groups, data)


def decode_index(data: bytes) -> tuple[BatchEntry, ...]:
    """Raises ValueError where these bytes are none."""
    return _decoded(_indexes, data)


def _packed(value: object) -> bytes:
    data = msgspec.msgpack.encode(value)
    if len(data) > MAX_UNPACKED_BYTES:
        raise ValueError(f"{type(value).__name__}: {len(data):,} bytes, expected at most {MAX_UNPACKED_BYTES:,}")
    return zlib.compress(data, COMPRESSION_LEVEL)


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        unpacking = zlib.decompressobj()
        unpacked = unpacking.decompress(data, MAX_UNPACKED_BYTES)
        if not unpacking.eof:
            raise ValueError(f"cut off, or more than {MAX_UNPACKED_BYTES:,} bytes unpacked")
        return decoder.decode(unpacked)
    except (zlib.error, msgspec.DecodeError, RecursionError) as error:
        raise ValueError(one_line(str(error))) from None
