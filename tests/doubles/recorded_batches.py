"""Writes batches as a trainer records them, without a trainer or a model."""

import random
from pathlib import Path

import wire_examples
from mini_producer import unscored_fields
from penstock.consumers.observe.record_files import RecordFiles
from penstock.schemas.keys import Field
from penstock.schemas.record import (
    FOLDER,
    BatchHead,
    GroupEntry,
    RecordedGroup,
    RecordHeader,
    Rows,
    SegmentFindings,
    dead_group,
    encode_batch,
)
from penstock.schemas.rollout import encode_group, pack_floats


def header(epoch: int = 0, line: dict[int, int] | None = None) -> RecordHeader:
    return RecordHeader(run="run-1", epoch=epoch, line=line or {}, config={"name": "run-1"})


def batch(position: int, *, num_groups: int = 2, padding: int = 0) -> tuple[BatchHead, list[RecordedGroup]]:
    """Returns a batch of the groups `10 * position + 1 ...`; `padding` adds so many incompressible bytes to each."""
    groups = []
    for n in range(num_groups):
        group = wire_examples.group(10 * position + n + 1)
        findings = (
            (SegmentFindings((1, 0), pack_floats([-0.5, -1.0, -0.125]), pack_floats([1.0, 1.25, 0.0]), b"\1\1\0"),),
            (SegmentFindings((1, 1, 0)),),
        )
        groups.append(RecordedGroup(encode_group(group) + noise(padding, position + n), findings))
    entries = tuple(
        GroupEntry(
            index=10 * position + n + 1,
            outcome="trained",
            rewards=(1.0, 0.0),
            advantages=(0.5, -0.5),
            finish_reasons=("stop", "length"),
            num_sampled_tokens=(3, 4),
        )
        for n in range(num_groups)
    )
    head = BatchHead(
        position=position,
        update=position + 1,
        policy_version=position,
        counts=True,
        metrics={"loss": 0.5 * position},
        groups=entries,
    )
    return head, groups


def rows(position: int, *, padding: int = 0) -> dict[str, Rows]:
    return encode_batch(*batch(position, padding=padding))


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def write_record(
    run_folder: Path,
    positions: range,
    *,
    epoch: int = 0,
    line: dict[int, int] | None = None,
    close: bool = True,
    padding: int = 0,
) -> RecordFiles:
    files = RecordFiles(run_folder / FOLDER, header(epoch, line), max_mb=2, file_mb=1)
    for position in positions:
        files.append(rows(position, padding=padding))
    if close:
        files.close()
    return files


def dead_batch(position: int) -> dict[str, Rows]:
    """Returns two groups that died before they could be trained: one unscored, one without a prompt."""
    payload = unscored_fields(301, "")[Field.PAYLOAD]
    found = [dead_group(301, "reward: KeyError: 'x'", "p1", payload), dead_group(302, "prompt: boom", "p1", b"")]
    entries, groups = zip(*found, strict=True)
    head = BatchHead(position=position, update=1, policy_version=1, counts=False, groups=entries)
    return encode_batch(head, groups)
