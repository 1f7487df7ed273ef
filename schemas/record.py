"""The record of rollouts: every group that a run's trainer took, with the trainer's findings about each token.

`<run>/record/<epoch>-<number>.sqlite` are SQLite databases in WAL mode. Each trainer epoch has its own files, numbered
from 0, and is their only writer. A batch is one transaction.

Batches are numbered from 0 along a line of policies (`position`). A trainer that continues from a checkpoint continues
the numbering, in files of its own epoch, and its `RecordHeader` says where earlier epochs were cut: batches after the
cut were undone. `penstock.schemas.record_reader.Record` follows the line.
"""

import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from penstock.schemas.rollout import RecordError, RolloutGroup, Segment, decode_group, one_line, unpack_floats

S = TypeVar("S", bound=msgspec.Struct)

FOLDER = "record"
FORMAT = 2
"""SQLite's `user_version` of each file."""
SCHEMA = """
CREATE TABLE trainer (run TEXT, epoch INTEGER, header BLOB);
CREATE TABLE batches (
    position INTEGER PRIMARY KEY, update_number INTEGER, policy_version INTEGER, counts INTEGER, time_s REAL,
    skipped_reason TEXT, num_optimizer_steps INTEGER, lag_histogram TEXT, metrics TEXT
);
CREATE TABLE groups (
    position INTEGER, place INTEGER, group_index INTEGER, outcome TEXT, reason TEXT, producer_id TEXT,
    min_version INTEGER, max_version INTEGER, min_lag INTEGER, max_lag INTEGER, num_masked INTEGER, ess_fraction REAL,
    max_weight REAL, rewards TEXT, advantages TEXT, finish_reasons TEXT, num_sampled_tokens TEXT,
    environment TEXT, task INTEGER,
    PRIMARY KEY (position, place)
) WITHOUT ROWID;
CREATE TABLE contents (position INTEGER, place INTEGER, payload BLOB, findings BLOB, PRIMARY KEY (position, place));
CREATE VIEW metrics AS
    SELECT position, update_number, policy_version, key AS name, value FROM batches, json_each(batches.metrics);
CREATE VIEW rollouts AS
    SELECT position, place, group_index, outcome, key AS sibling, value AS reward,
        json_extract(advantages, '$[' || key || ']') AS advantage,
        json_extract(finish_reasons, '$[' || key || ']') AS finish_reason,
        json_extract(num_sampled_tokens, '$[' || key || ']') AS num_sampled_tokens
    FROM groups, json_each(groups.rewards);
"""
"""Columns are the fields of `BatchHead` and `GroupEntry`, in their order; a list or a table of numbers is JSON, where
null is a number that is not finite. `trainer.header` is a `RecordHeader` as msgpack. `contents` has the two parts of a
`RecordedGroup`, each as msgpack under zlib; `payload` is the group as it crossed the wire."""
COMPRESSION_LEVEL = 1
"""Level 6 makes token ids and logprobs 2% smaller and takes twice as long."""
MAX_UNPACKED_BYTES = 2**28
"""A larger group is refused before it fills the memory."""
_NAME = re.compile(r"(\d+)-(\d+)\.sqlite")

Outcome = Literal["trained", "skipped", "dead", "spared"]
Rows = list[tuple[Any, ...]]


class RecordReadError(ValueError):
    """A record that is missing or cannot be read; the message says where and what was expected."""


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about every batch of a file.

    line: for each earlier epoch on the way to this trainer's first policy, the position where it was cut (the first one
        that does not count).
    forks, announced: by epoch, as `penstock.schemas.policy.lag` takes them.
    config: the run's settings, `penstock.schemas.config.RunConfig` as builtins; `trainer.num_processes` is the number
        of ranks that trained, over all machines.
    model_digest: `penstock.schemas.model_digest.model_digest` of the base model.
    """

    run: str
    epoch: int
    line: dict[int, int] = {}
    forks: dict[int, int] = {}
    announced: dict[int, int] = {}
    config: dict[str, Any] = {}
    model_digest: str = ""

    @property
    def first_position(self) -> int:
        """The position of this trainer's first batch."""
        return max(self.line.values(), default=0)


class SegmentFindings(msgspec.Struct, frozen=True, array_like=True):
    """The trainer's findings about one segment of a rollout (`penstock.schemas.rollout.Segment`).

    lags: one for each of its version spans, in optimizer steps; an unknown version counts as the trainer counted it.
    proximal_logprobs, importance_weights: float32 bytes, one value per sampled token, of the first epoch; the weight
        is the one applied, 0 if the token is masked.
    kept: one byte per sampled token, 1 if it may reach the loss.

    All but `lags` are empty if nothing was scored: no reward variance, or every token beyond the lag bound.
    """

    lags: tuple[int, ...]
    proximal_logprobs: bytes = b""
    importance_weights: bytes = b""
    kept: bytes = b""


Findings = tuple[tuple[SegmentFindings, ...], ...]
"""By rollout and segment."""


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of a recorded group, as shown in a list of groups.

    outcome: `trained`, `skipped` (no reward variance), `dead`, with the `reason` of its dead letter, or `spared`: its
        step was not finite because of another group, and a later batch has it again.
    min_version, max_version: of the policies that sampled it, without unknown ones; -1 if all are unknown.
    min_lag, max_lag: over its sampled tokens, in optimizer steps.
    num_masked: sampled tokens without weight in the loss: beyond the lag bound, or rejected by the correction; None for
        a group without a scored token.
    ess_fraction: effective sample size over its scored tokens, of exp(proximal - behavior) before truncation.
    max_weight: the largest importance weight applied. Both are None without a scored token and if they are not finite.
    rewards, advantages, finish_reasons, num_sampled_tokens: by rollout; the finish reason is its last segment's. No
        rewards of a group that died before it was scored.
    environment, task: the name of the environment and the number of its task.
    """

    index: int
    outcome: Outcome
    reason: str = ""
    producer_id: str = ""
    min_version: int = -1
    max_version: int = -1
    min_lag: int = 0
    max_lag: int = 0
    num_masked: int | None = None
    ess_fraction: float | None = None
    max_weight: float | None = None
    rewards: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    num_sampled_tokens: tuple[int, ...] = ()
    environment: str = ""
    task: int = 0


def group_entry(group: RolloutGroup, findings: Findings, outcome: Outcome, **fields: Any) -> GroupEntry:
    """Summarizes a group; `fields` are those that the group and its findings do not contain. Negative versions and lags
    are unknown and do not count."""
    segments = [segment for rollout in group.rollouts for segment in rollout.segments]
    versions = {span.version for segment in segments for span in segment.version_spans if span.version >= 0}
    lags = {lag for of_rollout in findings for found in of_rollout for lag in found.lags if lag >= 0}
    return GroupEntry(
        index=group.index,
        outcome=outcome,
        producer_id=group.producer_id,
        min_version=min(versions, default=-1),
        max_version=max(versions, default=-1),
        min_lag=min(lags, default=0),
        max_lag=max(lags, default=0),
        rewards=tuple(rollout.reward.value for rollout in group.rollouts),
        finish_reasons=tuple(rollout.segments[-1].finish_reason for rollout in group.rollouts),
        num_sampled_tokens=tuple(rollout.num_sampled_tokens for rollout in group.rollouts),
        environment=group.environment,
        task=group.task,
        **fields,
    )


class BatchHead(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's findings about one batch, without its rollouts.

    update: the number of its update in the run, from 1; for a batch without an update, that of the last one before it.
    policy_version: the trainer's when it took the batch: lags are relative to it.
    skipped_reason: why no optimizer step was taken; None if one was.
    counts: whether it made an update. Of a batch that failed as a whole only the dead groups are recorded; the others
        were taken again later. Groups that died before the trainer could take them are a batch of their own.
    metrics: every number of the step's report, such as `loss`, by its name in updates.jsonl; NaN if it was not finite.
    groups: in the order in which they were trained.
    """

    position: int
    update: int
    policy_version: int
    counts: bool
    time_s: float = 0.0
    skipped_reason: str | None = None
    num_optimizer_steps: int = 0
    lag_histogram: dict[int, int] = {}
    metrics: dict[str, float] = {}
    groups: tuple[GroupEntry, ...] = ()


class RecordedGroup(NamedTuple):
    """payload: the group as it crosses the wire (`penstock.schemas.rollout.encode_group`); of a dead one as far as it
    came, empty for one that had no prompt yet or cannot be read."""

    payload: bytes
    findings: Findings

    def decode(self) -> RolloutGroup:
        """Decodes the group. Raises `penstock.schemas.rollout.RecordError` if it breaks the contract."""
        return decode_group(self.payload, dead=True)


PASSED_OVER = "skipped while a batch was filled: its rewards do not differ"
"""The recorded reason of a group that no batch took (`batch.fill`)."""


def dead_group(index: int, reason: str, producer: str, payload: bytes) -> tuple[GroupEntry, RecordedGroup]:
    """Records a group that no batch took, without findings about its tokens: `dead`, or `skipped` by its reason."""
    outcome: Outcome = "skipped" if reason == PASSED_OVER else "dead"
    try:
        group = decode_group(payload, dead=True)
    except RecordError:
        entry = GroupEntry(index=index, outcome="dead", reason=reason, producer_id=producer)
        return entry, RecordedGroup(b"", ())
    unknown = tuple(
        tuple(SegmentFindings((-1,) * len(segment.version_spans)) for segment in rollout.segments)
        for rollout in group.rollouts
    )
    entry = group_entry(msgspec.structs.replace(group, index=index), unknown, outcome, reason=reason)
    is_scored = all(math.isfinite(reward) for reward in entry.rewards)
    return (entry if is_scored else msgspec.structs.replace(entry, rewards=())), RecordedGroup(payload, unknown)


class SampledToken(NamedTuple):
    """One sampled token with its numbers. Those of a token that was not scored are None."""

    position: int
    """In the segment's token ids."""
    version: int
    lag: int
    behavior_logprob: float
    proximal_logprob: float | None = None
    importance_weight: float | None = None
    is_kept: bool | None = None


def sampled_tokens(segment: Segment, findings: SegmentFindings) -> list[SampledToken]:
    """Returns every sampled token of a segment, in order."""
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


def file_name(epoch: int, number: int) -> str:
    return f"{epoch:05d}-{number:06d}.sqlite"


def file_key(path: Path) -> tuple[int, int] | None:
    """Returns (epoch, number) of a record file, by its name; None for another file."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else (int(match[1]), int(match[2]))


def encode_batch(head: BatchHead, groups: Sequence[RecordedGroup]) -> dict[str, Rows]:
    """Returns the rows of a batch by table. `groups` are those of `head.groups`.

    Raises:
        ValueError: a group is larger than a reader takes.
    """
    position = head.position
    return {
        "batches": [to_row(head)],
        "groups": [(position, place, *to_row(entry)) for place, entry in enumerate(head.groups)],
        "contents": [
            (position, place, _packed(group.payload), _packed(msgspec.msgpack.encode(group.findings)))
            for place, (_, group) in enumerate(zip(head.groups, groups, strict=True))
        ],
    }


def decode_head(batch: tuple[Any, ...], groups: Rows) -> BatchHead:
    """Decodes a batch from its row of `batches` and its rows of `groups`. Raises ValueError if they are invalid."""
    try:
        return msgspec.structs.replace(
            from_row(BatchHead, batch), groups=tuple(from_row(GroupEntry, entry) for _, _, *entry in groups)
        )
    except (msgspec.MsgspecError, TypeError) as error:
        raise ValueError(one_line(str(error))) from None


def decode_group_row(payload: bytes, findings: bytes) -> RecordedGroup:
    """Decodes a group from its two columns of `contents`. Raises ValueError if they are invalid."""
    try:
        return RecordedGroup(_unpacked(payload), msgspec.msgpack.decode(_unpacked(findings), type=Findings))
    except (zlib.error, msgspec.MsgspecError, TypeError, RecursionError) as error:
        raise ValueError(one_line(str(error))) from None


def _packed(data: bytes) -> bytes:
    if len(data) > MAX_UNPACKED_BYTES:
        raise ValueError(f"a group of {len(data):,} bytes, expected at most {MAX_UNPACKED_BYTES:,}")
    return zlib.compress(data, COMPRESSION_LEVEL)


def _unpacked(data: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    unpacked = unpacking.decompress(data, MAX_UNPACKED_BYTES)
    if not unpacking.eof:
        raise ValueError(f"cut off, or more than {MAX_UNPACKED_BYTES:,} bytes unpacked")
    return unpacked


_JSON = {"lag_histogram", "metrics", "rewards", "advantages", "finish_reasons", "num_sampled_tokens"}


def to_row(struct: BatchHead | GroupEntry) -> tuple[Any, ...]:
    """Returns the row of `batches` or `groups` of a head or an entry, for `groups` without position and place."""
    fields = {name: getattr(struct, name) for name in struct.__struct_fields__ if name != "groups"}
    return tuple(msgspec.json.encode(v).decode() if name in _JSON else v for name, v in fields.items())


def from_row(type: type[S], row: Sequence[Any]) -> S:
    """Decodes what `to_row` has returned. Raises msgspec.MsgspecError or TypeError if it is invalid."""
    fields = dict(zip(type.__struct_fields__, row, strict=False))
    for name in _JSON & fields.keys():
        found = msgspec.json.decode(fields[name])
        items = found.items() if isinstance(found, dict) else enumerate(found)
        values = {key: math.nan if value is None else value for key, value in items}
        fields[name] = values if isinstance(found, dict) else tuple(values.values())
    return msgspec.convert(fields, type, strict=False)
