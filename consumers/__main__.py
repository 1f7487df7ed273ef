"""Starts the trainer of a run."""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import redis

from penstock.consumers.checkpoints.checkpoints import CheckpointError, Checkpoints, restore_rng
from penstock.consumers.checkpoints.state import CheckpointState
from penstock.consumers.distributed.watch import Watch
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.batch.trainable import check_trainable
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.consumers.observe.record import RolloutRecorder, RunRecord
from penstock.consumers.observe.run_log import RunLog
from penstock.consumers.observe.sinks.feeding import check_sinks
from penstock.consumers.observe.traces import GroupTraces
from penstock.consumers.observe.tracing import Tracing, check_tracing
from penstock.consumers.parity.gate import Gate, ParityRefusedError
from penstock.consumers.parity.loaded import LoadedChecks
from penstock.consumers.parity.producers import ProducerGaps
from penstock.consumers.parity.tolerance import Tolerance
from penstock.consumers.stop_signals import StoppedError, StopSignals
from penstock.consumers.stream.acknowledgement import Commits
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.early_end import EarlyEnd
from penstock.consumers.stream.evaluation import Evaluator
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.leadership import Leadership
from penstock.consumers.stream.ledger import Ledger, RunFailedError
from penstock.consumers.stream.recovery import Recovery
from penstock.consumers.stream.run_progress import RunProgress
from penstock.consumers.stream.scripts import FencedError, announced_of, forks_of, new_run_id
from penstock.consumers.stream.tasks import TaskPlan
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights.best import BestPolicy
from penstock.consumers.weights.published_policy import PublishedPolicy
from penstock.consumers.weights.publisher import Publisher
from penstock.consumers.weights.shard import open_shard
from penstock.consumers.weights.writer import WeightPlaces
from penstock.schemas.best import BEST_FOLDER
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.description import describe, encode_description
from penstock.schemas.keys import Commit, Keys
from penstock.schemas.metrics import TrainerMetric
from penstock.schemas.model_digest import model_digest
from penstock.schemas.policy import make_version
from penstock.schemas.process import clock, logs
from penstock.schemas.process.outage import RedisGoneError
from penstock.schemas.process.redis_url import redis_url
from penstock.schemas.record import FOLDER as RECORD_FOLDER
from penstock.schemas.rollout import shown_error
from penstock.schemas.weights.reading import WeightReader

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
    ranks: Ranks | None = None,
    watch: Watch | None = None,
) -> int:
    """Runs one trainer until the run is complete or a signal asks it to stop. Returns the exit status: 0 in both cases,
    2 for settings that cannot be used, 1 for any other failure, each with one logged line.

    standby: wait until the run has no trainer, then continue it.
    signals: of a caller that installed its handlers before it imported this module; they stay installed.
    check_server: called first with Redis' answer to INFO; raises ConfigError for an unsuitable server.
    on_open: called once this trainer leads the run.
    ranks, watch: of several ranks, of which this is the lead.
    """
    signals = StopSignals() if signals is None else signals
    ranks = ranks or Ranks()
    if ranks.size > 1:
        log.info("%d ranks share the model", ranks.size)
    try:
        return _main(config, runs, signals, check_server, on_open, ranks, resume=resume, standby=standby)
    except StoppedError as stopped:
        log.info("%s", stopped)
        return 0
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # objective, advantage and curriculum may be the user's
        if watch is not None:
            watch.leave(error)
        elif not isinstance(error, Exception):
            log.error("the trainer ends: the user's code raised %s", shown_error(error), exc_info=error)
        else:
            raise
        return 1
    finally:
        signals.ignore()


def _main(
    config: RunConfig,
    runs: Path,
    signals: StopSignals,
    check_server: Callable[[Mapping[str, Any]], None],
    on_open: Callable[[], None],
    ranks: Ranks,
    *,
    resume: bool,
    standby: bool,
) -> int:
    logs.adopt()
    connection = None
    try:
        check_tracing(config)
        check_sinks(config.metrics)  # before it takes the run over from a trainer that has their packages
        metrics = TrainerMetrics(run=config.name)
        connection = TrainerConnection(
            redis_url(config, runs),
            config.redis.outage_s,
            on_error=lambda kind: metrics[TrainerMetric.STREAM_ERRORS].labels(kind).inc(),
        )
        check_server(connection.call(lambda client: client.info()))
        trainer = open_trainer(config, runs, connection, metrics, resume=resume, standby=standby, ranks=ranks)
        if trainer is None:
            log.info("the run is finished: nothing to stand by for")
            return 0
        try:
            signals.hand_to(trainer.stop)
            logs.bind(policy_version=lambda: trainer.policy.version)
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
    ranks: Ranks | None = None,
) -> Trainer | None:
    """Returns a trainer of a new epoch, from the committed checkpoint when resuming.

    With `standby` it first waits until the run has no trainer (`Leadership.stand_by`); None if the run is finished.

    Raises:
        ConfigError: the run exists and `resume` is not set, or a setting does not fit.
        CheckpointError: no checkpoint is whole.
        FencedError: a newer trainer has taken over the run.
    """
    if None in config.num_evaluation_prompts.values():
        raise ConfigError("evaluation.num_prompts is not set: the trainer alone cannot know what the environment has")
    keys = Keys(config.name)
    connection.restarted()  # later restarts of Redis count
    checkpoints = Checkpoints(config.folder(runs) / "checkpoints", config.checkpoint.keep, Path(config.model.path))
    leadership = Leadership(connection, keys, checkpoints, config.trainer.lease_s)
    try:
        if standby and not leadership.stand_by():
            return None
        return _open(config, runs, metrics, leadership, ranks or Ranks(), resume=resume or standby)
    except StoppedError:
        leadership.end(hand_over=True)
        raise
    except BaseException:
        leadership.end()
        raise


def _open(
    config: RunConfig, runs: Path, metrics: TrainerMetrics, leadership: Leadership, ranks: Ranks, *, resume: bool
) -> Trainer:
    connection, checkpoints = leadership.scripts.connection, leadership.checkpoints
    key = leadership.scripts.keys.commit
    known = int(connection.call(lambda client: client.hget(key, Commit.EPOCH)) or -1)
    there = (connection.call(lambda client: client.hget(key, Commit.RUN_ID)) or b"").decode()
    exists = f"name = {config.name!r}: this run exists; continue it with --resume or choose another name"
    if max(known, checkpoints.newest_epoch()) >= 0 and not resume:
        raise ConfigError(exists)
    here = checkpoints.run_id()
    if there and here and there != here:
        raise ConfigError(
            f"name = {config.name!r}: Redis holds another run of this name ({there}) than the folder "
            f"{config.folder(runs)} ({here}); expected the Redis and the folder of one run, or another name"
        )
    run_id = there or here or new_run_id()
    description = encode_description(describe(config))
    learner = load_learner(config, ranks)
    description["image_processor"] = msgspec.json.encode(learner.sees.settings if learner.sees else {})
    # Claimed late: a trainer that ends before it opens its epoch leaves no trace of one.
    epoch = checkpoints.claim_epoch(known + 1, run_id)
    if epoch and not resume:
        raise ConfigError(exists)
    commit = leadership.open(epoch, description, run_id)
    state = _load_checkpoint(commit.get(Commit.CHECKPOINT), learner, leadership) if epoch else None
    if state is None:
        state = CheckpointState(policy_version=0 if epoch else -1)
    else:
        log.info("resuming after update %d, policy %d", state.num_batches, state.policy_version)
    state.forks.update(forks_of(commit))
    state.announced.update(announced_of(commit))
    if epoch:
        state.forks[epoch] = state.policy_version
    ledger = Ledger.from_state(state.ledger)
    released = connection.call(lambda client: client.hgetall(leadership.scripts.keys.tasks))
    TaskPlan(config, ledger).catch_up(int(commit.get(Commit.RELEASED, 0)), released)
    return _assemble(config, runs, learner, metrics, leadership, ledger, state)


def _clock_ahead_s(connection: TrainerConnection) -> float:
    before_s = time.time()
    ahead_s = clock.seconds_ahead(connection.call(lambda client: client.time()), before_s, time.time())
    clock.tell_if_wrong(ahead_s)
    return ahead_s


def _assemble(
    config: RunConfig,
    runs: Path,
    learner: Learner,
    metrics: TrainerMetrics,
    leadership: Leadership,
    ledger: Ledger,
    state: CheckpointState,
) -> Trainer:
    """Returns a trainer whose parts share one ledger, one lag table and one progress, continued from `state`."""
    connection, scripts = leadership.scripts.connection, leadership.scripts
    keys, epoch = scripts.keys, scripts.epoch
    folder = config.folder(runs)
    restore_rng(state.rng)
    lag_of = LagTable(make_version(epoch, 0), state.forks, state.announced)
    leadership.restore_from(ledger, lag_of)
    progress = RunProgress(epoch, state)
    check = partial(
        check_trainable,
        vocabulary=learner.vocabulary,
        needs_teacher=config.teacher_url is not None,
        experts=learner.experts,
        top_logprobs=config.sampling.top_logprobs,
        sees=learner.sees,
    )
    shard = open_shard(config, learner.ranks, connection.call, learner)
    recomputes = config.correction.proximal == "sampled_version"
    is_kept = (lambda version: shard.policy(version) is not None) if recomputes else None
    intake = Intake(config, scripts, ledger, lag_of, progress, check, is_kept)
    evaluator = Evaluator(scripts, config.held_out, intake.quarantine.holds)
    recorder = None
    # An existing record has to say where this trainer continued, also without `record`.
    if config.record or (folder / RECORD_FOLDER).is_dir():
        recorder = RolloutRecorder(config, folder, epoch, state.taken, lag_of, learner.ranks.size)

    record = RunRecord(recorder, intake, progress, keeps_batches=config.record)
    traces = GroupTraces(Tracing(config) if config.metrics.traces else None, scripts.run_id)
    intake.on_ended, intake.reader.on_spans = traces.ended, traces.sampled
    run_log = RunLog(config, folder, metrics, ledger, progress, _clock_ahead_s(connection), traces)
    best = BestPolicy(config, folder / BEST_FOLDER, WeightReader(connection.call, keys), epoch)
    publisher = Publisher(
        scripts,
        shard,
        learner.ranks,
        WeightPlaces.of(config.weights, config.name, folder),
        max(config.weights.keep_versions, shard.snapshots.num_kept),  # a resume reads them from the log
        run_log.publication,
        msgspec.UNSET if config.lora is None else model_digest(Path(config.model.path)),
        lambda: best.pinned,
    )
    learner.before_update = publisher.wait_for_snapshot
    producers = ProducerGaps(config)

    def judge_by(tolerance: Tolerance) -> None:
        run_log.alert.judge_by(tolerance)
        producers.judge_by(tolerance)

    return Trainer(
        config=config,
        learner=learner,
        leadership=leadership,
        progress=progress,
        intake=intake,
        policy=PublishedPolicy(publisher, learner, lag_of, epoch, state.policy_version),
        publisher=publisher,
        evaluator=evaluator,
        best=best,
        early_end=EarlyEnd(config, progress),
        commits=Commits(leadership, learner, intake, progress, config.checkpoint.every, record.sync, traces),
        recovery=Recovery(leadership, intake, evaluator, publisher.announce_again),
        gate=Gate(config, folder, LoadedChecks(config), judge_by, learner.ranks),
        producers=producers,
        record=record,
        run_log=run_log,
    )


def _load_checkpoint(pointer: bytes | None, learner: Learner, leadership: Leadership) -> CheckpointState | None:
    try:
        return leadership.checkpoints.load(pointer.decode() if pointer else None, learner)
    except Exception:
        # A newer trainer may have deleted this checkpoint: then that is the error.
        leadership.check()
        raise


def load_learner(config: RunConfig, ranks: Ranks) -> Learner:
    folder = Path(config.model.path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path = {config.model.path!r}: no model there; expected a folder with config.json "
            "(`penstock make-model` makes one)"
        )
    ranks.order("learner", lambda _: (config,))
    return Learner(config, ranks)
