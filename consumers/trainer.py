"""The trainer: takes groups off the stream, trains, publishes, and commits at checkpoints."""

import logging
import math
import time
from pathlib import Path
from typing import Any

from penstock.consumers.learning.batch import Batch
from penstock.consumers.learning.learner import Learner
from penstock.consumers.learning.packing import pack
from penstock.consumers.learning.staleness import LagTable, is_stale
from penstock.consumers.learning.step_report import NOTHING_TO_TRAIN, StepReport
from penstock.consumers.learning.trainable import check_trainable
from penstock.consumers.observe.errors import RunFailedError
from penstock.consumers.observe.ledger_file import LedgerFile
from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.consumers.observe.record import RolloutRecorder, Taken
from penstock.consumers.observe.sinks.feeding import Sinks
from penstock.consumers.parity.gate import Alert, Gate
from penstock.consumers.stream.checkpoints import (
    Checkpoints,
    CheckpointState,
    CheckpointWriteError,
    restore_rng,
    rng_state,
)
from penstock.consumers.stream.commit_schedule import CommitSchedule
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.evaluation import Evaluator
from penstock.consumers.stream.leadership import CommitState, Leadership
from penstock.consumers.stream.ledger import OUTCOMES, Ledger
from penstock.consumers.stream.reader import Reader
from penstock.consumers.stream.release import Releaser
from penstock.consumers.stream.settlement import Settlement
from penstock.consumers.weights.publisher import Publisher
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Commit, Keys
from penstock.schemas.policy import make_version
from penstock.schemas.process.json_lines import JsonLines
from penstock.schemas.record import FOLDER as RECORD_FOLDER
from penstock.schemas.rollout import RolloutGroup

log = logging.getLogger(__name__)

WAITING_LOG_S = 30.0


class Trainer:
    """One trainer epoch. Everything it must know after a crash is in its checkpoint or on the streams."""

    def __init__(
        self,
        config: RunConfig,
        runs: Path,
        connection: TrainerConnection,
        learner: Learner,
        checkpoints: Checkpoints,
        metrics: TrainerMetrics,
        *,
        leadership: Leadership,
        state: CheckpointState,
    ) -> None:
        self.config = config
        self.learner = learner
        self.epoch = epoch = leadership.epoch
        self._folder = config.folder(runs)
        self._connection = connection
        self._checkpoints = checkpoints
        self._metrics = metrics
        metrics.begin(config)
        self._keys = Keys(config.name)
        self._leadership = leadership
        self._scripts = leadership.scripts
        self._ledger = Ledger.from_state(state.ledger) if state.ledger else Ledger()
        self._num_batches = state.num_batches
        self._taken_before = dict(state.taken)
        self._num_taken = max(state.taken.values(), default=0)
        self._counters: dict[str, int | float] = {
            "num_tokens_trained": 0, "num_tokens_masked_lag": 0, "num_tokens_rejected": 0, "num_steps_skipped": 0,
            "train_s": 0.0, "first_prompt_s": 0.0, "last_update_s": 0.0, **state.counters,
        }  # fmt: skip
        restore_rng(state.rng)
        self._commits = CommitSchedule(connection, config.checkpoint.every)
        self._parent_version = state.policy_version
        self._steps_before = learner.num_steps
        self.policy_version = make_version(epoch, 0)
        self._lag_of = LagTable(self.policy_version, state.forks, state.announced)
        self._reader = Reader(
            connection,
            self._keys,
            self._ledger,
            config.group_size,
            lambda group: check_trainable(group, learner.vocabulary),
        )
        self._settlement = Settlement(self._ledger, metrics, config.trainer.max_dead_in_a_row, self._dead_letter)
        self._releaser = Releaser(
            connection,
            self._scripts,
            self._keys,
            self._ledger,
            config,
            epoch,
            lambda: config.num_updates - self._num_batches,
        )
        self._publisher = Publisher(
            connection, self._scripts, config.weights_folder(runs), config.weights.keep_versions, epoch
        )
        self._evaluator = Evaluator(connection, self._scripts, self._keys, epoch, config.evaluation.num_prompts or 0)
        self._evaluated_at: dict[int, int] = {}
        """The update after which each policy under evaluation was published."""
        leadership.standing = self._standing
        # Also without `record`, where there is one: it has to say that this trainer went back behind its end.
        keeps = config.record or (self._folder / RECORD_FOLDER).is_dir()
        self._recorder = RolloutRecorder(config, self._folder, epoch, state.taken, self._lag_of) if keeps else None
        self._updates = JsonLines(self._folder / "updates.jsonl")
        self._evaluations = JsonLines(self._folder / "evaluations.jsonl")
        self._sinks = Sinks(
            config, self._folder, state.num_batches, on_error=lambda name: metrics.sink_errors.labels(name).inc()
        )
        self._books = LedgerFile(self._folder / "trainer.json")
        self._alert = Alert(config, metrics.parity_alert.set)
        self._gate = Gate(config, self._folder, self._alert.narrow)

    def adopt_release_cursor(self, released: int) -> None:
        """Takes over what Redis knows to be released, where the checkpoint is older."""
        self._ledger.num_released = max(self._ledger.num_released, released)

    def stop(self) -> None:
        """Ends `run` after the update under way. May be called by a signal handler."""
        self._connection.stop()

    @property
    def stopping(self) -> bool:
        return self._connection.stopping

    def run(self) -> bool:
        """Trains until the run is complete (True) or `stop` is called (False); commits in either case.

        Waits for groups on the rollout stream; a producer that appends one unblocks it.

        Raises:
            RunFailedError: the run cannot go on; what was trained is committed.
            ParityRefusedError: engine and trainer disagree. Nothing was trained.
            FencedError: a newer trainer has the run. Nothing was written that it could notice.
            RedisGoneError, OSError: what was trained since the last checkpoint cannot be committed.
        """
        try:
            finished = self._train()
            self._leadership.end(hand_over=True)
            return finished
        except RunFailedError:
            try:
                self._commit(reconcile=False)
            except CheckpointWriteError as error:
                log.error("%s", error)
            raise
        finally:
            self._leadership.end()

    def _train(self) -> bool:
        self._publish(first=True)
        self._request_evaluation()
        self._heal()
        while self._num_batches < self.config.num_updates:
            began_s = time.monotonic()
            groups = self._take(self.config.groups_per_batch)
            if groups is None:
                self._commit()
                return False
            if self._gate.is_pending:
                self._gate.check(groups, self.learner.model, self.policy_version, self._lag_of)
            took_s = time.monotonic()
            batch = pack(groups, self._lag_of, self.config)
            report = self.learner.step(batch)
            stepped_s = time.monotonic()
            self._observe_queue()
            self._keep(groups, batch, report)
            self._settle(groups, report)
            if report.skipped_reason is None:
                self._publish()
            self._release()
            published_s = time.monotonic()
            self._record(groups, batch, report, took_s - began_s, stepped_s - took_s, published_s - stepped_s)
            self._evaluate()
            self._commit_if_due(busy=True)
        self._finish()
        return True

    def _take(self, num_groups: int) -> list[RolloutGroup] | None:
        """The next groups in order of arrival, none of them stale; None when asked to stop.

        Waits for `num_groups` in hand; producers unblock it, fed by the releases made here.
        """
        waiting_since = time.monotonic()
        while not self.stopping:
            if len(self._reader.ready) < num_groups:
                if not self._reader.read(self._lag_of, block=True):
                    self._observe_queue()
                    self._commit_if_due(busy=False)
                if time.monotonic() - waiting_since > WAITING_LOG_S:
                    waiting_since = time.monotonic()
                    log.info("waiting for rollouts: %d of %d in hand", len(self._reader.ready), num_groups)
                    self._heal()  # what is gone without Redis being another process would be waited for in vain
            self._notice_losses()
            self._settle_refused()
            if len(self._reader.ready) >= num_groups:
                self._drop_stale()
            self._release()
            if len(self._reader.ready) >= num_groups:
                taken = list(self._reader.ready)[:num_groups]
                return [self._reader.ready[index].group for index in taken]
            self._collect_evaluations()
        return None

    def _keep(self, groups: list[RolloutGroup], batch: Batch, report: StepReport) -> None:
        """Before the books have it: they are not committed without the record."""
        if self._recorder is not None and self.config.record:
            self._recorder.add(Taken(self._num_taken, self._num_batches, groups, batch, report, self._lag_of))
        self._num_taken += 1

    def _settle(self, groups: list[RolloutGroup], report: StepReport) -> None:
        """Books the whole batch before it judges the step: what the optimizer trained must not be trained again.

        Of a batch without any step, groups that are not to blame stay in hand.
        """
        failed = [group for group in groups if group.index in report.failed]
        rest = [group for group in groups if group.index not in report.failed]
        self._settlement.mark_batch_dead(failed, report.failed)
        is_done = report.skipped_reason in (None, NOTHING_TO_TRAIN)
        if is_done:
            self._settlement.settle_batch(rest)
            self._num_batches += 1
        for group in groups if is_done else failed:
            del self._reader.ready[group.index]
        self._settlement.count_step(None if is_done else report.skipped_reason)

    def _settle_refused(self) -> None:
        self._settlement.settle_refused(self._reader.take_refused())

    def _dead_letter(self, index: int | None, reason: str, payload: bytes, entry_id: bytes) -> None:
        self._connection.call(lambda _: self._scripts.dead_letter(self.epoch, index, reason, payload, entry_id))

    def _drop_stale(self) -> None:
        """A group that only holds tokens past the lag bound would be trained fully masked: sample it again instead."""
        bound = self.config.lag_bound
        stale = [index for index, held in self._reader.ready.items() if is_stale(held.group, self._lag_of, bound)]
        for index in stale:
            del self._reader.ready[index]
        self._releaser.postpone(stale, "stale")

    def _release(self) -> None:
        again = self._releaser.release_postponed(self._reader, self.policy_version)
        again["requeued"] += self._releaser.release_requeued(self.policy_version)
        for reason, count in again.items():
            self._metrics.groups_released_again.labels(reason).inc(count)
        self._metrics.groups_released.inc(self._releaser.top_up(self.policy_version))

    def _heal(self) -> None:
        """Releases what was lost between Redis and the books, then what the credit allows."""
        self._releaser.reconcile(self._reader, self._lag_of)
        self._settle_refused()
        self._release()

    def _notice_losses(self) -> None:
        """Ends a trainer that was replaced; puts back what a Redis has lost that was emptied, restarted or replaced by
        a replica, and has lost work done again."""
        self._leadership.check()
        restarted = self._connection.restarted()
        if restarted:
            log.warning("redis is another process now: reading the stream from its start and reconciling")
            self._connection.call(lambda _: self._leadership.restore())
        if self._leadership.has_restored() or restarted:
            self._publisher.announce_again()
            self._reader.rewind()
            self._evaluator.request_again()
            self._heal()

    def _standing(self) -> CommitState:
        fields: dict[str, str | int] = {}
        for prefix, by_epoch in ((Commit.FORK, self._lag_of.forks), (Commit.ANNOUNCED, self._lag_of.announced)):
            fields |= {f"{prefix.decode()}{epoch}": version for epoch, version in by_epoch.items()}
        if self._checkpoints.pointer is not None:
            fields[Commit.CHECKPOINT.decode()] = self._checkpoints.pointer
        return CommitState(self._ledger.num_released, fields)

    def _publish(self, *, first: bool = False) -> None:
        if not first:
            self._parent_version = self.policy_version
            self.policy_version = make_version(self.epoch, self.learner.num_steps - self._steps_before)
            self._lag_of.advance(self.policy_version)
        manifest = self._publisher.publish(
            self.learner.published_weights(),
            self.policy_version,
            self._parent_version,
            fork=first and self.epoch > 0,
        )
        self._metrics.weight_bytes.inc(manifest.total_bytes)

    def _record(
        self,
        groups: list[RolloutGroup],
        batch: Batch,
        report: StepReport,
        wait_s: float,
        step_s: float,
        publish_s: float,
    ) -> None:
        counters = self._counters
        counters["num_tokens_trained"] += report.num_tokens_trained
        counters["num_tokens_masked_lag"] += report.num_tokens_masked_lag
        counters["num_tokens_rejected"] += report.num_tokens_rejected
        counters["num_steps_skipped"] += sum(report.steps_skipped.values())
        counters["train_s"] += step_s
        counters["last_update_s"] = time.time()
        first_claimed_s = min(group.timings.claimed_s for group in groups)
        counters["first_prompt_s"] = counters["first_prompt_s"] or first_claimed_s
        # The first batch also waited for engines to boot; that is no waiting for rollouts.
        wait_s = min(wait_s, max(0.0, time.time() - first_claimed_s))
        line: dict[str, Any] = {
            "update": self._num_batches,
            "policy_version": self.policy_version,
            "time_s": time.time(),
            **{name: value if math.isfinite(value) else None for name, value in report.metrics.items()},
            "lag_histogram": {str(lag): count for lag, count in sorted(report.lag_histogram.items())},
            "num_tokens_trained": report.num_tokens_trained,
            "num_tokens_masked_lag": report.num_tokens_masked_lag,
            "num_tokens_rejected": report.num_tokens_rejected,
            "num_optimizer_steps": report.num_optimizer_steps,
            "steps_skipped": report.steps_skipped,
            "num_groups_trained": batch.num_groups_trained,
            "num_groups_skipped": batch.num_groups_skipped,
            "queue_depth": len(self._reader.ready),
            "skipped_reason": report.skipped_reason,
            "wait_s": wait_s,
            "step_s": step_s,
            "phase_s": report.phase_s,
            "publish_s": publish_s,
        }
        self._updates.write(**line)
        self._sinks.update(line)
        self._metrics.record(line)
        self._alert.watch(report.metrics)
        self._metrics.mismatch_mean.set(self._alert.gap)
        self._metrics.mismatch_band.set(self._alert.band)

    def _observe_queue(self) -> None:
        """Before a batch is settled, which makes room: a queue that is full now has kept producers waiting."""
        self._metrics.groups_open.set(self._ledger.num_open)
        self._metrics.prompts_open.set(self._releaser.num_open_prompts())

    def _evaluate(self) -> None:
        last = self._num_batches == self.config.num_updates
        if self._num_batches % self.config.evaluation.every == 0 or last:
            self._request_evaluation()
        self._collect_evaluations()

    def _request_evaluation(self) -> None:
        self._evaluated_at.setdefault(self.policy_version, self._num_batches)
        self._evaluator.request(self.policy_version)

    def _collect_evaluations(self) -> None:
        for result in self._evaluator.collect():
            self._metrics.accuracy.set(result.accuracy)
            update = self._evaluated_at.pop(result.policy_version)
            line = {"update": update, "time_s": time.time(), **result._asdict()}
            self._evaluations.write(**line)
            self._sinks.evaluation(line)
            log.info("policy %d: held-out accuracy %.4f", result.policy_version, result.accuracy)

    def _commit_if_due(self, *, busy: bool) -> None:
        """A full disk is no reason to lose what was trained since the last checkpoint: a new try follows."""
        if not self._commits.is_due(self._num_batches, len(self._ledger.settled), busy=busy):
            return
        try:
            self._commit()
        except CheckpointWriteError as error:
            log.error("%s; training goes on, next try in %.0f s", error, self._commits.failed())

    def _commit(self, *, reconcile: bool = True) -> None:
        """Checkpoints, and only then acknowledges: the stream is trimmed to the first entry not settled in it.

        Raises:
            CheckpointWriteError: nothing has changed.
        """
        began_s = time.monotonic()
        state = CheckpointState(
            policy_version=self.policy_version,
            num_batches=self._num_batches,
            ledger=self._ledger.to_state(),
            forks=self._lag_of.forks,
            announced={**self._lag_of.announced, self.epoch: self.policy_version},
            counters=self._counters,
            rng=rng_state(),
            taken={**self._taken_before, self.epoch: self._num_taken},
        )
        if self._recorder is not None:
            self._sync_record(self._recorder)
        name = self._checkpoints.write(self.learner, state)
        keep_rollouts, keep_results = self._reader.first_unsettled(), self._evaluator.first_needed()
        # Fenced here, the checkpoint stays: an earlier try may have committed it, its reply lost, and the successor
        # may stand on it. Where it does not, its next commit deletes it.
        trimmed = self._connection.call(lambda _: self._scripts.commit(self.epoch, name, keep_rollouts, keep_results))
        self._checkpoints.committed(name)
        self._reader.forget_trimmed()
        self._commits.committed(self._num_batches, len(self._ledger.settled), time.monotonic() - began_s)
        if reconcile:
            self._heal()
        self._write_books(finished=False)
        took_s = time.monotonic() - began_s
        self._metrics.checkpoint_seconds.observe(took_s)
        log.info("checkpoint %s at update %d: %.2f s, %d entries trimmed", name, self._num_batches, took_s, trimmed)

    def _sync_record(self, recorder: RolloutRecorder) -> None:
        try:
            recorder.sync()
        except (OSError, RunFailedError) as error:
            raise CheckpointWriteError(f"no checkpoint: the record of rollouts cannot be written: {error}") from error

    def _finish(self) -> None:
        """Waits for the evaluations still open, commits, and tells the producers that the run is complete."""
        log.info("trained %d updates; waiting for the last evaluation", self._num_batches)
        while self._evaluator.pending and not self.stopping:
            self._collect_evaluations()
            self._notice_losses()
            time.sleep(0.05)
        if self._commits.num_batches != self._num_batches:
            self._commit()
        open_prompts = self._connection.call(lambda _: self._scripts.finish(self.epoch))
        if open_prompts:
            log.info("%d prompts are cancelled", open_prompts)
        self._write_books(finished=True)

    def _write_books(self, *, finished: bool) -> None:
        ledger = self._ledger
        books = {
            "num_updates": self._num_batches,
            "epoch": self.epoch,
            "policy_version": self.policy_version,
            "num_groups_released": ledger.num_released,
            **{f"num_groups_{outcome}": ledger.count(outcome) for outcome in OUTCOMES},
            "num_groups_cancelled": ledger.num_open if finished else 0,
            "num_groups_open": 0 if finished else ledger.num_open,
            "dead_reasons": dict(ledger.dead_reasons),
            "num_groups_released_again": dict(ledger.released_again),
            "num_duplicates_dropped": ledger.num_duplicates_dropped,
            **self._counters,
            "finished": finished,
        }
        self._books.write(books)

    def close(self) -> None:
        self._leadership.end()
        self._updates.close()
        self._evaluations.close()
        if self._recorder is not None:
            self._recorder.close()
        self._sinks.close()  # last: it may take its time
