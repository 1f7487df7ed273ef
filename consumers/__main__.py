"""Starts the trainer of a run."""

import logging
import os
import signal
import uuid
from pathlib import Path

from consumers.checkpoints import CheckpointError, Checkpoints, CheckpointState
from consumers.connection import Connection, RedisGoneError
from consumers.learner import Learner
from consumers.metrics import TrainerMetrics
from consumers.scripts import FencedError, Scripts, announced_of, forks_of
from consumers.settlement import RunFailedError
from consumers.trainer import Trainer
from schemas.config import ConfigError, RunConfig
from schemas.endpoint import redis_url
from schemas.keys import Commit, Keys

log = logging.getLogger(__name__)


def main(config: RunConfig, *, runs: Path, resume: bool = False) -> int:
    """Runs one trainer until the run is complete or a signal asks it to stop. Returns the exit status."""
    connection = None
    try:
        metrics = TrainerMetrics()
        connection = Connection(
            redis_url(config, runs),
            config.redis.outage_s,
            on_error=lambda kind: metrics.stream_errors.labels(kind).inc(),
        )
        trainer = open_trainer(config, runs, connection, metrics, resume=resume)
        metrics.serve(config.metrics, config.folder(runs))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(trainer, "stopping", True))
        try:
            finished = trainer.run()
        finally:
            trainer.close()
        log.info("run %s", "complete" if finished else "stopped; continue it with --resume")
        return 0
    except ConfigError as error:
        log.error("%s", error)
        return 2
    except (RedisGoneError, FencedError, CheckpointError, RunFailedError, OSError) as error:
        log.error("%s", error)
        return 1
    finally:
        if connection is not None:
            connection.close()


def open_trainer(
    config: RunConfig, runs: Path, connection: Connection, metrics: TrainerMetrics, *, resume: bool
) -> Trainer:
    """A trainer of a new epoch, from the committed checkpoint when resuming.

    Raises:
        ConfigError: the run exists and `resume` is not set, or a setting does not fit.
        CheckpointError: no checkpoint is whole.
    """
    if config.evaluation.num_prompts is None:
        raise ConfigError("evaluation.num_prompts is not set: the trainer alone cannot know what the environment has")
    keys = Keys(config.name)
    commit = connection.call(lambda client: client.hgetall(keys.commit))
    checkpoints = Checkpoints(config.folder(runs) / "checkpoints", config.checkpoint.keep, Path(config.model.path))
    epoch = checkpoints.claim_epoch(int(commit.get(Commit.EPOCH, -1)) + 1)
    if epoch and not resume:
        raise ConfigError(f"name = {config.name!r}: this run exists; continue it with --resume or choose another name")
    learner = _load_learner(config)
    owner = f"{os.getpid()}-{uuid.uuid4().hex}"
    commit = connection.call(lambda client: Scripts(client, keys).open_epoch(epoch, owner))
    pointer = commit.get(Commit.CHECKPOINT)
    state = checkpoints.load(pointer.decode() if pointer else None, learner) if epoch else None
    if state is None:
        state = CheckpointState(
            policy_version=0 if epoch else -1, num_batches=0, ledger={}, forks={}, announced={}, counters={}
        )
    else:
        log.info("resuming after update %d, policy %d", state.num_batches, state.policy_version)
    state.forks.update(forks_of(commit))
    state.announced.update(announced_of(commit))
    if epoch:
        state.forks[epoch] = state.policy_version
    trainer = Trainer(config, runs, connection, learner, checkpoints, metrics, epoch=epoch, state=state)
    trainer.adopt_release_cursor(int(commit.get(Commit.RELEASED, 0)))
    return trainer


def _load_learner(config: RunConfig) -> Learner:
    folder = Path(config.model.path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path = {config.model.path!r}: no model there; expected a folder with config.json "
            "(`penstock make-model` makes one)"
        )
    return Learner(config)
