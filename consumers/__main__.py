"""Starts the trainer of a run."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import redis
from penstock.consumers.learning.learner import Learner
from penstock.consumers.observe.errors import RunFailedError
from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.consumers.observe.sinks.feeding import check_sinks
from penstock.consumers.parity.gate import ParityRefusedError
from penstock.consumers.stream.checkpoints import CheckpointError, Checkpoints, CheckpointState
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.leadership import Leadership
from penstock.consumers.stream.scripts import FencedError, announced_of, forks_of
from penstock.consumers.trainer import Trainer
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.keys import Commit, Keys
from penstock.schemas.process import logs
from penstock.schemas.process.outage import RedisGoneError
from penstock.schemas.process.redis_url import redis_url
from penstock.schemas.process.stop_signals import StoppedError, StopSignals

log = logging.getLogger(__name__)


def main(
    config: RunConfig,
    *,
    runs: Path,
    resume: bool = False,
    standby: bool = False,
    signals: StopSignals | None = None,
    check_server: Callable[[Mapping[str, Any]], None] = lambda info: None,
    on_open: Callable[[], None] = lambda: None,
) -> int:
    """Runs one trainer until the run is complete or a signal asks it to stop. Returns the exit status: 0 in both cases,
    2 for settings that cannot be used, 1 for any other failure, each with one logged line.

    standby: wait until the run has no trainer any more, and continue it then.
    signals: of a caller that has taken them over before this module was imported. They stay taken over.
    check_server: called with Redis' answer to INFO before anything else; raises ConfigError for one that will not do.
    on_open: called once the run is this trainer's.
    """
    signals = StopSignals() if signals is None else signals
    try:
        return _main(config, runs, signals, check_server, on_open, resume=resume, standby=standby)
    except StoppedError as stopped:
        log.info("%s", stopped)
        return 0
    finally:
        signals.ignore()


def _main(
    config: RunConfig,
    runs: Path,
    signals: StopSignals,
    check_server: Callable[[Mapping[str, Any]], None],
    on_open: Callable[[], None],
    *,
    resume: bool,
    standby: bool,
) -> int:
    logs.adopt()
    connection = None
    try:
        check_sinks(config.metrics)  # before the run is taken over from a trainer that can use them
        metrics = TrainerMetrics(run=config.name)
        connection = TrainerConnection(
            redis_url(config, runs),
            config.redis.outage_s,
            on_error=lambda kind: metrics.stream_errors.labels(kind).inc(),
        )
        check_server(connection.call(lambda client: client.info()))
        trainer = open_trainer(config, runs, connection, metrics, resume=resume, standby=standby)
        if trainer is None:
            log.info("the run is finished: nothing to stand by for")
            return 0
        try:
            signals.hand_to(trainer.stop)
            logs.bind(policy_version=lambda: trainer.policy_version)
            on_open()
            metrics.serve(config.metrics, config.folder(runs))
            finished = trainer.run()
        finally:
            metrics.close()
            trainer.close()
        log.info("run %s", "complete" if finished else "stopped; continue it with --resume")
        return 0
    except ConfigError as error:
        log.error("%s", error)
        return 2
    except (RedisGoneError, FencedError, CheckpointError, RunFailedError, ParityRefusedError, OSError) as error:
        log.error("%s", error)
        return 1
    except redis.RedisError as error:
        log.error("Redis refuses a command: %s", error)
        return 1
    finally:
        if connection is not None:
            connection.close()


def open_trainer(
    config: RunConfig,
    runs: Path,
    connection: TrainerConnection,
    metrics: TrainerMetrics,
    *,
    resume: bool,
    standby: bool = False,
) -> Trainer | None:
    """A trainer of a new epoch, from the committed checkpoint when resuming.

    With `standby` it waits until the run has no trainer any more, then continues the run; None where it is finished.

    Raises:
        ConfigError: the run exists and `resume` is not set, or a setting does not fit.
        CheckpointError: no checkpoint is whole.
        FencedError: a newer trainer has taken the run over meanwhile.
    """
    if config.evaluation.num_prompts is None:
        raise ConfigError("evaluation.num_prompts is not set: the trainer alone cannot know what the environment has")
    keys = Keys(config.name)
    connection.restarted()  # from here on a restart of Redis is one
    checkpoints = Checkpoints(config.folder(runs) / "checkpoints", config.checkpoint.keep, Path(config.model.path))
    leadership = Leadership(connection, keys, checkpoints, config.trainer.lease_s)
    try:
        if standby and not leadership.stand_by():
            return None
        return _open(config, runs, connection, metrics, checkpoints, leadership, resume=resume or standby)
    except StoppedError:
        leadership.end(hand_over=True)
        raise
    except BaseException:
        leadership.end()
        raise


def _open(
    config: RunConfig,
    runs: Path,
    connection: TrainerConnection,
    metrics: TrainerMetrics,
    checkpoints: Checkpoints,
    leadership: Leadership,
    *,
    resume: bool,
) -> Trainer:
    keys = Keys(config.name)
    known = int(connection.call(lambda client: client.hget(keys.commit, Commit.EPOCH)) or -1)
    exists = f"name = {config.name!r}: this run exists; continue it with --resume or choose another name"
    if max(known, checkpoints.newest_epoch()) >= 0 and not resume:
        raise ConfigError(exists)
    learner = _load_learner(config)
    # Claimed late: a trainer that ends before it opens its epoch leaves no sign of a newer one.
    epoch = checkpoints.claim_epoch(known + 1)
    if epoch and not resume:
        raise ConfigError(exists)
    commit = leadership.open(epoch)
    pointer = commit.get(Commit.CHECKPOINT)
    state = _load_checkpoint(checkpoints, pointer, learner, leadership) if epoch else None
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
    trainer = Trainer(config, runs, connection, learner, checkpoints, metrics, leadership=leadership, state=state)
    trainer.adopt_release_cursor(int(commit.get(Commit.RELEASED, 0)))
    return trainer


def _load_checkpoint(
    checkpoints: Checkpoints, pointer: bytes | None, learner: Learner, leadership: Leadership
) -> CheckpointState | None:
    try:
        return checkpoints.load(pointer.decode() if pointer else None, learner)
    except Exception:
        # Whatever it looks like: a successor deletes the checkpoints that it no longer needs, this one perhaps.
        leadership.check()
        raise


def _load_learner(config: RunConfig) -> Learner:
    folder = Path(config.model.path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path = {config.model.path!r}: no model there; expected a folder with config.json "
            "(`penstock make-model` makes one)"
        )
    return Learner(config)
