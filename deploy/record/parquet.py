"""The record as a table: a row per segment of a rollout, its tokens in list columns."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.schemas.process.files import replacing
from penstock.schemas.record import RecordedGroup, RecordReadError, sampled_tokens
from penstock.schemas.record_reader import BatchAt, GroupAt, Record
from penstock.schemas.rollout import RecordError, unpack_ids

COLUMNS = pa.schema(
    {
        "epoch": pa.int64(),
        "position": pa.int64(),
        "update": pa.int64(),
        "policy_version": pa.int64(),
        "time_s": pa.float64(),
        "index": pa.int64(),
        "outcome": pa.string(),
        "reason": pa.string(),
        "producer_id": pa.string(),
        "environment": pa.string(),
        "task": pa.int64(),
        "ess_fraction": pa.float64(),
        "rollout": pa.int32(),
        "segment": pa.int32(),
        "prompt": pa.string(),
        "messages": pa.string(),
        "answer": pa.string(),
        "metadata": pa.map_(pa.string(), pa.string()),
        "reward": pa.float64(),
        "reward_parts": pa.map_(pa.string(), pa.float64()),
        "advantage": pa.float64(),
        "finish_reason": pa.string(),
        "images": pa.list_(pa.struct({"digest": pa.string(), "start": pa.int32(), "end": pa.int32()})),
        "image_files": pa.map_(pa.string(), pa.binary()),
        "token_ids": pa.list_(pa.int32()),
        "positions": pa.list_(pa.int32()),
        "versions": pa.list_(pa.int64()),
        "lags": pa.list_(pa.int32()),
        "behavior_logprobs": pa.list_(pa.float32()),
        "proximal_logprobs": pa.list_(pa.float32()),
        "importance_weights": pa.list_(pa.float32()),
        "kept": pa.list_(pa.bool_()),
    }
)
"""`token_ids` are all tokens of a segment; the lists after it have one value per sampled token, at `positions`.
`image_files` are the group's by digest, in its first row alone."""


def tables(record: Record) -> Iterator[pa.Table]:
    """Yields a table per batch. Raises RecordReadError for one that cannot be read."""
    for at in record.batches:
        yield pa.Table.from_pylist(list(_rows(record, at)), COLUMNS)


def write_parquet(record: Record, file: Path) -> int:
    """Writes the file, whole or not at all, one row group per batch; returns the number of rows.

    Raises:
        RecordReadError: a batch cannot be read.
        OSError: the file cannot be written.
    """
    num_rows = 0
    with replacing(file) as partial, pq.ParquetWriter(partial, COLUMNS, compression="zstd") as writer:
        for table in tables(record):
            writer.write_table(table)
            num_rows += table.num_rows
    return num_rows


def _rows(record: Record, at: BatchAt) -> Iterator[dict[str, Any]]:
    head, groups = record.batch(at)
    fields = {
        "epoch": at.file.header.epoch,
        "position": head.position,
        "update": head.update,
        "policy_version": head.policy_version,
        "time_s": head.time_s,
    }
    for place, recorded in enumerate(groups):
        if not recorded.payload:
            continue
        try:
            yield from (fields | row for row in _rows_of_group(GroupAt(at, head, place), recorded))
        except RecordError as error:
            raise RecordReadError(f"{at.file.path}: batch {head.position}: {error}") from error


def _rows_of_group(at: GroupAt, recorded: RecordedGroup) -> Iterator[dict[str, Any]]:
    group, entry = recorded.decode(), at.entry
    messages = group.prompt.messages
    fields = {
        "index": entry.index,
        "outcome": entry.outcome,
        "reason": entry.reason or None,
        "producer_id": entry.producer_id,
        "environment": entry.environment,
        "task": entry.task,
        "ess_fraction": entry.ess_fraction,
        "prompt": group.prompt.text,
        "messages": None if messages is None else msgspec.json.encode(messages).decode(),
        "answer": group.prompt.answer,
        "metadata": list(group.prompt.metadata.items()),
    }
    for r, (rollout, found) in enumerate(zip(group.rollouts, recorded.findings, strict=True)):
        reward = rollout.reward
        parts = {
            "reward": reward.value if math.isfinite(reward.value) else None,
            "reward_parts": list(reward.parts.items()),
            "advantage": entry.advantages[r] if entry.advantages else None,
        }
        for s, (segment, findings) in enumerate(zip(rollout.segments, found, strict=True)):
            tokens = sampled_tokens(segment, findings)
            is_scored = bool(findings.kept)
            yield (
                fields
                | parts
                | {
                    "rollout": r,
                    "segment": s,
                    "finish_reason": segment.finish_reason,
                    "images": [msgspec.structs.asdict(place) for place in segment.images or ()],
                    "image_files": None if r or s else [(d, data) for d, data in (group.images or {}).items() if data],
                    "token_ids": unpack_ids(segment.token_ids),
                    "positions": [token.position for token in tokens],
                    "versions": [token.version for token in tokens],
                    "lags": [token.lag for token in tokens],
                    "behavior_logprobs": [token.behavior_logprob for token in tokens],
                    "proximal_logprobs": [token.proximal_logprob for token in tokens] if is_scored else None,
                    "importance_weights": [token.importance_weight for token in tokens] if is_scored else None,
                    "kept": [token.is_kept for token in tokens] if is_scored else None,
                }
            )
