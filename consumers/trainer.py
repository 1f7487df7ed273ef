"""The trainer's loop, from a prompt to published weights.

The stages of the pipeline, what each waits for and, in brackets, who unblocks it:

    warm start   steps on demonstrations, if the run has any: before   -
                 the first policy: learning/learner/warm_start.py
    release      a task index is released while the credit lasts       waits for room under the lag bound
                 stream/release.py                                     [settlement: each settled group makes room]
    rollout      a producer claims the index, samples a group          waits for a prompt [release]
                 of siblings and appends it to the stream
                 producers/loop.py
    take         the groups that were released first, none stale; a    waits for `groups_per_batch` ready groups, and
                 group is passed by those of `max_lag` at most         for one that enough have passed [producers]
                 stream/release.py
    gate         engine and trainer agree, or nothing is trained       -
                 parity/gate.py, on the first batch of new weights
    batch        lag, advantages, packed tensors                       -
                 learning/packing.py
    step         loss, backward, optimizer: per epoch and mini-batch   -
                 learning/learner.py
    record       the batch as it was trained, if the run keeps one     waits for the previous batch to be written
                 observe/record.py                                     [the record's thread]
    settle       each index is trained, skipped or dead                -
                 stream/settlement.py; a producer whose groups keep
                 differing from the trainer's logprobs is
                 quarantined: parity/producers.py
    publish      changes are copied, written and announced while       waits for the previous one: room in the store
                 training continues: weights/publisher.py              [the operator]
    evaluate     held-out prompts, requested and collected             waits for the last evaluation only [producers]
                 stream/evaluation.py; the best policy is kept by
                 weights/best.py, stream/early_end.py may end the run
    commit       a snapshot is written while training continues;       waits for the previous one, and for the last one
                 once it is on the disk, the stream is acknowledged    at the end of the run [the checkpoint's thread]
                 up to it: stream/acknowledgement.py

Every command waits while Redis is away, for `redis.outage_s` at most; its return or `stop` unblocks it
(stream/connection.py). What Redis has lost by then is restored (stream/recovery.py).

Shutdown, in this order:

1. `stop` (a signal handler may call it) lets the loop end after the update under way.
2. The loop commits, and the newest policy is announced. At the end of the run it first waits for the last evaluation,
   and afterwards marks the run finished. A best model that is being written is completed.
3. The lease is given up, so that a standby trainer takes over at once.
4. `close` writes waiting lines and the record, and waits for the sinks.
5. `__main__` stops serving metrics and closes the connection.

A run that cannot continue (`RunFailedError`) commits before it raises; after any other error the last checkpoint
stands. In both cases a best model that is being written is left to the next trainer.
"""

import logging
import time
from dataclasses import dataclass

from penstock.consumers.checkpoints.checkpoints import CheckpointWriteError
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.learning.learner.warm_start import warm_steps
from penstock.consumers.observe.record import RunRecord
from penstock.consumers.observe.run_log import RunLog
from penstock.consumers.parity.gate import Gate, ParityRefusedError
from penstock.consumers.parity.producers import ProducerGaps
from penstock.consumers.stream.acknowledgement import Commits
from penstock.consumers.stream.early_end import EarlyEnd
from penstock.consumers.stream.evaluation import Evaluator
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.leadership import Leadership
from penstock.consumers.stream.ledger import RunFailedError
from penstock.consumers.stream.recovery import Recovery
from penstock.consumers.stream.run_progress import RunProgress
from penstock.consumers.weights.best import BestPolicy
from penstock.consumers.weights.published_policy import PublishedPolicy
from penstock.consumers.weights.publisher import Publisher
from penstock.schemas.config import RunConfig
from penstock.schemas.rollout import RolloutGroup

log = logging.getLogger(__name__)

WAITING_LOG_S = 30.0
"""How often a trainer that waits for rollouts logs that it does, and looks for lost ones."""


@dataclass
class Trainer:
    """One trainer epoch. All state that it needs after a crash is in its checkpoint or on the streams."""

    config: RunConfig
    learner: Learner
    leadership: Leadership
    progress: RunProgress
    intake: Intake
    policy: PublishedPolicy
    publisher: Publisher
    evaluator: Evaluator
    best: BestPolicy
    early_end: EarlyEnd
    commits: Commits
    recovery: Recovery
    gate: Gate
    producers: ProducerGaps
    record: RunRecord
    run_log: RunLog

    def stop(self) -> None:
        """Ends `run` after the update under way. May be called by a signal handler."""
        self.leadership.scripts.connection.stop()

    @property
    def stopping(self) -> bool:
        return self.leadership.scripts.connection.stopping

    def run(self) -> bool:
        """Trains until the run is complete (True) or `stop` is called (False); commits in either case.

        Raises:
            RunFailedError: the run cannot continue; what was trained is committed.
            ParityRefusedError: engine and trainer disagree. Nothing was trained.
            FencedError: a newer trainer leads the run. Nothing was written that affects it.
            RedisGoneError, OSError: what was trained since the last checkpoint cannot be committed.
        """
        try:
            finished = self._train()
            self.best.wait()  # the trainer that takes over renames in the same folder
            self.leadership.end(hand_over=True)
            return finished
        except RunFailedError:
            try:
                self._commit(reconcile=False)
            except CheckpointWriteError as error:
                log.error("%s", error)
            raise
        finally:
            self.best.abandon()
            self.publisher.end()
            self.commits.abandon()
            self.leadership.end()

    def close(self) -> None:
        self.leadership.end()
        self.record.close()
        self.run_log.close()  # last: sinks may take their time

    def _train(self) -> bool:
        progress, lag_of = self.progress, self.intake.lag_of
        if not self._warm_up():
            return False
        self.policy.publish_first()
        self._request_evaluation()
        self.intake.reconcile()
        while progress.num_batches < self.config.num_updates and not self.early_end.reason:
            began_s = time.monotonic()
            groups = self._take()
            if groups is None:
                self._commit()
                self.publisher.wait()
                return False
            if self.gate.is_pending:
                self._check_parity(groups)
            took_s = time.monotonic()
            batch = self.learner.pack(groups, lag_of)
            report = self.learner.step(batch)
            stepped_s = time.monotonic()
            self.run_log.queue(self.intake.num_open_prompts(), self.intake.num_abandoned)
            self.record.add(groups, batch, report)  # before the ledger, which is not committed without it
            self.intake.settle(groups, report)
            if report.skipped_reason is None:
                self.policy.publish()
            self.intake.release()
            progress.add(groups, report, step_s=stepped_s - took_s)
            self.run_log.update(
                groups,
                report,
                received_s=self.intake.received_s,
                passed=progress.take_passed(),
                policy_version=self.policy.version,
                credit=self.intake.credit,
                num_ready=self.intake.num_ready,
                wait_s=took_s - began_s,
                step_s=stepped_s - took_s,
                publish_s=time.monotonic() - stepped_s,
                publish_blocked_s=self.publisher.take_blocked_s(),
            )
            self._judge_producers(groups, report)
            self._evaluate()
            self._commit_if_due(busy=True)
        self._finish()
        return True

    def _warm_up(self) -> bool:
        """Takes the steps of the warm start that are left, if no update was made; returns False once `stop` was called.

        Commits every `checkpoint.every` steps and at the end: what was committed is not done again."""
        for step in () if self.progress.num_batches else warm_steps(self.learner):
            self.policy.advance()
            self.run_log.warm_step(step)
            self.leadership.check()
            if self.stopping or step.step == step.num_steps or step.step % self.config.checkpoint.every == 0:
                self._commit(reconcile=False)
            if self.stopping:
                return False
        return True

    def _take(self) -> list[RolloutGroup] | None:
        """Returns the groups of the next batch; None once `stop` was called.

        Waits for `groups_per_batch` ready groups whose turn it is. Producers unblock it, fed by the releases made here,
        and so does `stop`.
        """
        num_groups = self.config.groups_per_batch
        began_s = time.monotonic()
        log_at = began_s + WAITING_LOG_S
        while not self.stopping:
            if self.intake.is_short(num_groups):
                if not self.intake.read():
                    self.run_log.queue(self.intake.num_open_prompts(), self.intake.num_abandoned)
                    self._commit_if_due(busy=False)
                if time.monotonic() > log_at:
                    log_at = time.monotonic() + WAITING_LOG_S
                    self._log_waiting(num_groups)
                    if self.intake.num_abandoned:
                        log.warning("waiting for agents: they abandoned the last %d groups", self.intake.num_abandoned)
                    self.recovery.look_for_losses(time.monotonic() - began_s)
            self.publisher.check()
            self.recovery.check()
            groups = self.intake.batch(num_groups)
            if groups is not None:
                return groups
            self._collect_evaluations()
        return None

    def _log_waiting(self, num_groups: int) -> None:
        num_ready, oldest = self.intake.num_ready, self.intake.waits_for
        if num_ready < num_groups or oldest is None:
            log.info("waiting for rollouts: %d of %d are ready", num_ready, num_groups)
        else:
            log.info("waiting for index %d, which is being sampled: %d released after it are ready", oldest, num_ready)

    def _check_parity(self, groups: list[RolloutGroup]) -> None:
        """Opens the gate. Raises ParityRefusedError; a trainer that resumes has what these producers sampled, and what
        is on the stream, sampled again by others or by their next start."""
        try:
            self.gate.check(groups, self.learner.model, self.policy.version, self.intake.lag_of)
        except ParityRefusedError as error:
            self.intake.quarantine.hold(groups, str(error))
            raise

    def _judge_producers(self, groups: list[RolloutGroup], report: StepReport) -> None:
        """Quarantines the producers that this batch shows to be bad. Raises RunFailedError for the last one alive."""
        quarantine = self.intake.quarantine
        settled = [group for group in groups if report.settles(group.index)]
        for instance, finding in self.producers.observe(settled, report.gaps).items():
            quarantine.add(instance, finding, refuses=self.config.parity.gate == "refuse")
        quarantine.note(self.producers.table())
        self.run_log.metrics.measure_producers(quarantine.shown)

    def _evaluate(self) -> None:
        num_batches = self.progress.num_batches
        if num_batches % self.config.evaluation.every == 0 or num_batches == self.config.num_updates:
            self._request_evaluation()
        self._collect_evaluations()

    def _request_evaluation(self) -> None:
        if self.evaluator.request(self.policy.version, self.progress.num_batches):
            self.best.expect(self.policy.version)
            self.best.expect_only(self.evaluator.pending)

    def _collect_evaluations(self) -> None:
        for result in self.evaluator.collect():
            self.best.consider(result)  # first: a best figure that was logged has its model, also after a kill
            self.run_log.evaluation(result)
            self.early_end.consider(result)

    def _commit_if_due(self, *, busy: bool) -> None:
        """Commits if it is time. If the disk is full, training continues and a later call tries again."""
        try:
            self._complete_commit(wait=False)
            if self.commits.is_due(busy=busy):
                self.leadership.check()  # a trainer that was suspended and replaced writes nothing more
                self.commits.begin()
        except CheckpointWriteError as error:
            log.error("%s; training goes on, next try in %.0f s", error, self.commits.schedule.failed())

    def _commit(self, *, reconcile: bool = True) -> None:
        """Commits everything trained so far. Waits for the checkpoint to be written; the disk unblocks it.

        Raises:
            CheckpointWriteError: nothing has changed.
        """
        self._await_commit(reconcile=reconcile)
        self.commits.begin()
        self._complete_commit(wait=True, reconcile=reconcile)

    def _await_commit(self, *, reconcile: bool = True) -> None:
        """Waits for a checkpoint that is being written, and commits it."""
        try:
            self._complete_commit(wait=True, reconcile=reconcile)
        except CheckpointWriteError as error:
            log.error("%s", error)

    def _complete_commit(self, *, wait: bool, reconcile: bool = True) -> None:
        """Commits the checkpoint that was being written if it is complete, then looks for lost indexes."""
        done = self.commits.complete(wait=wait)
        if done is None:
            return
        if reconcile:
            self.intake.reconcile()
        self.run_log.commit(self.policy.version, finished=False, took_s=done.took_s)
        log.info(
            "checkpoint %s at update %d: %.2f s (training waited %.2f s), %d entries trimmed",
            done.name,
            done.num_batches,
            done.took_s,
            done.snapshot_s,
            done.num_trimmed,
        )

    def _finish(self) -> None:
        """Commits and tells the producers that the run is complete.

        Waits for open evaluations; producers unblock it, and so does `stop`.
        """
        self._request_evaluation()  # of a run that ends early
        log.info("trained %d updates; waiting for the last evaluation", self.progress.num_batches)
        began_s = time.monotonic()
        look_at = began_s + WAITING_LOG_S
        while self.evaluator.pending and not self.stopping:
            self._collect_evaluations()
            self.publisher.check()
            self.recovery.check()
            if time.monotonic() > look_at:
                look_at = time.monotonic() + WAITING_LOG_S
                self.recovery.look_for_losses(time.monotonic() - began_s)
            time.sleep(0.05)
        self._await_commit()
        if self.commits.schedule.num_batches != self.progress.num_batches:
            self._commit()
        self.publisher.wait()
        self.best.wait()
        log.info("the model is in %s", self.leadership.checkpoints.hand_out_model(self.learner.export))
        if open_prompts := self.leadership.scripts.finish():
            log.info("%d prompts are cancelled", open_prompts)
        self.run_log.commit(self.policy.version, finished=True, ended_early=self.early_end.reason)
