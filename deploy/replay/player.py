"""Trains on recorded batches in their order, without Redis, engine or randomness."""

import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.consumers.checkpoints.checkpoints import (
    CHECKPOINTS,
    CheckpointError,
    load_checkpoint,
    names_from,
    read_state,
)
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.learning.learner.warm_start import warm_steps
from penstock.consumers.learning.ranks import Ranks
from penstock.deploy.replay.variants import RECORDED, ReplayVariant, steps_alike
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.model_digest import model_digest
from penstock.schemas.record import BatchHead, RecordReadError
from penstock.schemas.record_reader import BatchAt, Record
from penstock.schemas.rollout import RecordError


class Start(NamedTuple):
    """Where a replay begins. position: of the first batch; checkpoint: None for the base model."""

    position: int
    checkpoint: Path | None


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One update of one variant. update, policy_version: as recorded."""

    variant: str
    update: int
    policy_version: int
    metrics: dict[str, float]
    skipped_reason: str | None = None


def find_start(record: Record, run_folder: Path, checkpoint: str | None) -> Start:
    """Returns the base model's start, or that of a checkpoint of the run by its name or folder.

    Raises:
        ConfigError: no such checkpoint, or one that is not on the record's line.
    """
    if checkpoint is None:
        return Start(0, None)
    folder = next((f for f in (Path(checkpoint), run_folder / CHECKPOINTS / checkpoint) if f.is_dir()), None)
    if folder is None:
        there = ", ".join(names_from(run_folder / CHECKPOINTS)) or "none"
        raise ConfigError(f"--from {checkpoint}: no such checkpoint; expected one of the run's ({there}) or a folder")
    try:
        taken = read_state(folder).taken
    except CheckpointError as error:
        raise ConfigError(f"--from {checkpoint}: {error}") from None
    if not taken:
        raise ConfigError(f"--from {checkpoint}: written before runs kept records; expected a later one")
    epoch, position = max(taken.items())
    newest = record.header
    end = newest.line.get(epoch, -1) if epoch != newest.epoch else position
    if position > end or any(newest.line.get(e) != cut for e, cut in taken.items() if e != epoch):
        raise ConfigError(f"--from {checkpoint}: the run was rolled back before it; expected a checkpoint on its line")
    return Start(position, folder)


def batches_from(record: Record, start: Start, num_updates: int | None) -> list[BatchAt]:
    """Returns the batches to replay: those that made an update, at most `num_updates`.

    Raises:
        ConfigError: some of them are missing, or there are none.
    """
    batches = [at for at in record.batches if at.position >= start.position]
    if not batches:
        raise ConfigError(f"{record.folder}: no batch from position {start.position} on; nothing to replay")
    first = batches[0]
    if first.position > start.position or (start.checkpoint is None and first.update > first.counts):
        raise ConfigError(
            f"{record.folder}: its first batch is of update {first.update}: the oldest were dropped for their size "
            "(recording.max_mb) or never recorded; expected --from a checkpoint of the run at or after that update"
        )
    played: list[BatchAt] = []
    position = start.position
    for at in batches:
        if num_updates is not None and len(played) == num_updates:
            break
        if at.position != position:
            raise ConfigError(
                f"{record.folder}: batches {position} to {at.position - 1} are missing; expected --updates of "
                f"at most {len(played)}"
            )
        position += 1
        if at.counts:
            played.append(at)
    if not played:
        raise ConfigError(f"{record.folder}: holds no update; nothing to replay")
    return played


def check_model(record: Record, config: RunConfig) -> None:
    """Raises ConfigError if the base model is gone, or another one."""
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path = {config.model.path!r}: no model there; expected the run's base model "
            "(--set model.path=FOLDER names another place)"
        )
    found, recorded = model_digest(path), record.header.model_digest
    if found != recorded:
        raise ConfigError(
            f"model.path = {config.model.path!r}: another model than the one that was trained: digest {found[:12]}, "
            f"recorded {recorded[:12]}; expected the run's base model"
        )


def num_ranks(record: Record, batches: list[BatchAt], variants: Iterable[ReplayVariant]) -> int:
    """Returns the number of ranks to replay on: that of the training, unless the variants set it.

    Raises:
        ConfigError: it is not the same for all.
    """
    headers = {at.file.path: at.file.header for at in batches}.values()
    found = {v.config(each.config, record.folder).trainer.num_processes for v in variants for each in headers}
    if len(found) > 1:
        raise ConfigError(
            f"{record.folder}: to be played on {' and '.join(map(str, sorted(found)))} ranks; expected one number for "
            "all updates and variants, as with --set trainer.num_processes=1"
        )
    return found.pop()


def ranks_of(batches: list[BatchAt]) -> set[int]:
    """Returns the numbers of ranks that trained the batches."""
    return {at.file.header.config["trainer"].get("num_processes", 1) for at in batches}


def play(
    record: Record, batches: list[BatchAt], start: Start, variant: ReplayVariant, ranks: Ranks
) -> Iterator[Played]:
    """Trains one variant on the recorded batches. ranks: this process leads them.

    If the run was continued with other settings, so is the replay, from the same batch on.

    Raises:
        ConfigError: settings that do not fit, or the checkpoint to begin with is not whole any more.
        RecordReadError: a batch cannot be read.
    """
    learner: Learner | None = None
    for at in batches:
        header = at.file.header
        config = variant.config(header.config, record.folder)
        if learner is None:
            learner = _opened(config, ranks)
            if start.checkpoint is not None:
                _load(start.checkpoint, learner)
            else:
                deque(warm_steps(learner), maxlen=0)
        elif not steps_alike(config, learner.config):
            learner = _resumed(learner, config)
        head, recorded = record.batch(at)
        lag_of = LagTable(head.policy_version, header.forks, header.announced)
        try:
            batch = learner.pack([each.decode() for each in recorded], lag_of)
        except RecordError as error:
            raise RecordReadError(f"{at.file.path}: batch {head.position}: {error}") from error
        yield _played(variant.name, head, learner.step(batch))


def recorded_updates(record: Record, batches: list[BatchAt]) -> list[Played]:
    """Returns the run's own numbers."""
    return [_played(RECORDED, head, head) for head in map(record.head, batches)]


def _played(variant: str, head: BatchHead, found: BatchHead | StepReport) -> Played:
    return Played(
        variant=variant,
        update=head.update,
        policy_version=head.policy_version,
        metrics=found.metrics,
        skipped_reason=found.skipped_reason,
    )


def _opened(config: RunConfig, ranks: Ranks) -> Learner:
    ranks.order("learner", lambda _: (config,))
    return Learner(config, ranks)


def _load(checkpoint: Path, learner: Learner) -> None:
    try:
        load_checkpoint(checkpoint, learner)
    except (CheckpointError, OSError) as error:  # a live run deletes its older ones
        raise ConfigError(f"--from {checkpoint.name}: {error}") from None


def _resumed(learner: Learner, config: RunConfig) -> Learner:
    """Returns a learner with other settings, as after a trainer's resume from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        learner.begin_checkpoint(Path(folder)).result()
        fresh = _opened(config, learner.ranks)
        fresh.load_checkpoint(Path(folder), learner.state())
    return fresh
