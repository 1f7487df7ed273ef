"""The trainer: takes groups off the stream, trains, publishes, and commits at checkpoints."""

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from consumers.batch import Batch, check_trainable, pack
from consumers.checkpoints import Checkpoints, CheckpointState
from consumers.connection import Connection
from consumers.evaluation import Evaluator
from consumers.learner import NOTHING_TO_TRAIN, Learner, StepReport
from consumers.ledger import OUTCOMES, Ledger
from consumers.metrics import Lines, TrainerMetrics
from consumers.reader import Reader
from consumers.release import Releaser
from consumers.scripts import Scripts
from consumers.settlement import RunFailedError, Settlement
from consumers.staleness import LagTable, is_stale
from consumers.weights import Publisher
from schemas.config import RunConfig
from schemas.keys import Keys
from schemas.policy import make_version
from schemas.rollout import RolloutGroup

log = logging.getLogger(__name__)

MEMORY_HIGH = 0.7
"""Share of Redis' maxmemory at which a checkpoint is due, since only a commit trims the stream."""
WAITING_LOG_S = 30.0


class Trainer:
    """One trainer epoch. Everything it must know after a crash is in its checkpoint or on the streams."""

    def __init__(
        self,
        config: RunConfig,
        runs: Path,
        connection: Connection,
        learner: Learner,
        checkpoints: Checkpoints,
        metrics: TrainerMetrics,
        *,
        epoch: int,
        state: CheckpointState,
    ) -> None:
        self.config = config
        self.learner = learner
        self.epoch = epoch
        self.stopping = False
        self._folder = config.folder(runs)
        self._connection = connection
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._keys = Keys(config.name)
        self._scripts = Scripts(connection.client, self._keys)
        self._ledger = Ledger.from_state(state.ledger) if state.ledger else Ledger()
        self._num_batches = state.num_batches
        self._counters: dict[str, int | float] = {
            "num_tokens_trained": 0, "num_tokens_masked_lag": 0, "num_tokens_rejected": 0, "num_steps_skipped": 0,
            "train_s": 0.0, "first_prompt_s": 0.0, "last_update_s": 0.0, **state.counters,
        }  # fmt: skip
        self._committed_at = -1
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
        self._releaser = Releaser(connection, self._scripts, self._keys, self._ledger, config, epoch)
        self._publisher = Publisher(connection, self._scripts, config.weights_folder(runs), config.weights.keep, epoch)
        self._evaluator = Evaluator(connection, self._scripts, self._keys, epoch, config.evaluation.num_prompts or 0)
        self._evaluated_at: dict[int, int] = {}
        """The update after which each policy under evaluation was published."""
        self._updates = Lines(self._folder / "updates.jsonl")
        self._evaluations = Lines(self._folder / "evaluations.jsonl")

    def adopt_release_cursor(self, released: int) -> None:
        """Takes over what Redis knows to be released, where the checkpoint is older."""
        self._ledger.num_released = max(self._ledger.num_released, released)

    def run(self) -> bool:
        """Trains until the run is complete (True) or `stopping` is set (False); commits in either case.

        Waits for groups on the rollout stream; a producer that appends one unblocks it.

        Raises:
            RunFailedError: the run cannot go on; what was trained is committed.
            FencedError, RedisGoneError, OSError: it cannot be committed either.
        """
        try:
            return self._train()
        except RunFailedError:
            self._commit(reconcile=False)
            raise

    def _train(self) -> bool:
        self._publish(first=True)
        self._request_evaluation()
        self._heal()
        while self._num_batches < self.config.num_updates:
            began_s = time.monotonic()
            groups = self._take(self.config.groups_per_step)
            if groups is None:
                self._commit()
                return False
            took_s = time.monotonic()
            batch = pack(groups, self._lag_of, self.config)
            report = self.learner.step(batch)
            stepped_s = time.monotonic()
            self._settle(groups, report)
            if report.skipped_reason is None:
                self._publish()
            self._release()
            published_s = time.monotonic()
            self._record(groups, batch, report, took_s - began_s, stepped_s - took_s, published_s - stepped_s)
            self._evaluate()
            if self._num_batches % self.config.checkpoint.every == 0 or self._memory_is_high():
                self._commit()
        self._finish()
        return True

    def _take(self, num_groups: int) -> list[RolloutGroup] | None:
        """The next groups in order of arrival, none of them stale; None when asked to stop.

        Waits for `num_groups` in hand; producers unblock it, fed by the releases made here.
        """
        waiting_since = time.monotonic()
        while not self.stopping:
            if len(self._reader.hand) < num_groups:
                num_read = self._reader.read(self._lag_of, block=True)
                if not num_read and self._memory_is_high():
                    self._commit()
                if time.monotonic() - waiting_since > WAITING_LOG_S:
                    waiting_since = time.monotonic()
                    log.info("waiting for rollouts: %d of %d in hand", len(self._reader.hand), num_groups)
            if self._connection.restarted():
                log.warning("redis is another process now: reading the stream from its start and reconciling")
                self._reader.rewind()
                self._evaluator.request_again()
                self._heal()
            self._settle_refused()
            if len(self._reader.hand) >= num_groups:
                self._drop_stale()
            self._release()
            if len(self._reader.hand) >= num_groups:
                taken = list(self._reader.hand)[:num_groups]
                return [self._reader.hand[index].group for index in taken]
            self._collect_evaluations()
        return None

    def _settle(self, groups: list[RolloutGroup], report: StepReport) -> None:
        for group in groups:
            del self._reader.hand[group.index]
        for reason in sorted(set(report.failed.values())):
            self._settlement.kill_batch([group for group in groups if report.failed.get(group.index) == reason], reason)
        if report.skipped_reason in (None, NOTHING_TO_TRAIN):
            self._settlement.settle_batch([group for group in groups if group.index not in report.failed])
            self._num_batches += 1

    def _settle_refused(self) -> None:
        self._settlement.settle_refused(self._reader.take_refused(), self._reader.num_received)

    def _dead_letter(self, index: int | None, reason: str, payload: bytes) -> None:
        self._connection.call(lambda _: self._scripts.dead_letter(self.epoch, index, reason, payload))

    def _drop_stale(self) -> None:
        """A group that only holds tokens past the lag bound would be trained fully masked: sample it again instead."""
        bound = self.config.lag_bound
        stale = [index for index, held in self._reader.hand.items() if is_stale(held.group, self._lag_of, bound)]
        for index in stale:
            del self._reader.hand[index]
        self._releaser.release_again(stale, "stale", self.policy_version)
        if stale:
            self._metrics.groups_released_again.labels("stale").inc(len(stale))

    def _release(self) -> None:
        self._metrics.groups_released.inc(self._releaser.top_up(self.policy_version))

    def _heal(self) -> None:
        """Releases what was lost between Redis and the books, then what the credit allows."""
        lost = self._releaser.reconcile(self._reader, self._lag_of, self.policy_version)
        self._metrics.groups_released_again.labels("lost").inc(lost)
        self._settle_refused()
        self._release()

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
            "queue_depth": len(self._reader.hand),
            "skipped_reason": report.skipped_reason,
            "wait_s": wait_s,
            "step_s": step_s,
            "phase_s": report.phase_s,
            "publish_s": publish_s,
        }
        self._updates.write(**line)
        self._metrics.record(line)

    def _evaluate(self) -> None:
        last = self._num_batches == self.config.num_updates
        if self._num_batches % self.config.evaluation.every == 0 or last:
            self._request_evaluation()
            self._metrics.prompts_open.set(self._releaser.num_open_prompts())
        self._collect_evaluations()

    def _request_evaluation(self) -> None:
        self._evaluated_at.setdefault(self.policy_version, self._num_batches)
        self._evaluator.request(self.policy_version)

    def _collect_evaluations(self) -> None:
        for result in self._evaluator.collect():
            self._metrics.accuracy.set(result.accuracy)
            self._evaluations.write(
                update=self._evaluated_at.pop(result.policy_version), time_s=time.time(), **result._asdict()
            )
            log.info("policy %d: held-out accuracy %.4f", result.policy_version, result.accuracy)

    def _memory_is_high(self) -> bool:
        memory = self._connection.call(lambda client: client.info("memory"))
        limit = memory.get("maxmemory", 0)
        return bool(limit) and memory["used_memory"] > MEMORY_HIGH * limit

    def _commit(self, *, reconcile: bool = True) -> None:
        """Checkpoints, and only then acknowledges: the stream is trimmed to the first entry not settled in it."""
        began_s = time.monotonic()
        state = CheckpointState(
            policy_version=self.policy_version,
            num_batches=self._num_batches,
            ledger=self._ledger.to_state(),
            forks=self._lag_of.forks,
            announced={**self._lag_of.announced, self.epoch: self.policy_version},
            counters=self._counters,
        )
        name = self._checkpoints.write(self.learner, state)
        keep_rollouts, keep_results = self._reader.first_unsettled(), self._evaluator.first_needed()
        trimmed = self._connection.call(lambda _: self._scripts.commit(self.epoch, name, keep_rollouts, keep_results))
        self._checkpoints.committed(name)
        self._committed_at = self._num_batches
        if reconcile:
            self._heal()
        self._write_books(finished=False)
        took_s = time.monotonic() - began_s
        self._metrics.checkpoint_seconds.observe(took_s)
        log.info("checkpoint %s at update %d: %.2f s, %d entries trimmed", name, self._num_batches, took_s, trimmed)

    def _finish(self) -> None:
        """Waits for the evaluations still open, commits, and tells the producers that the run is complete."""
        log.info("trained %d updates; waiting for the last evaluation", self._num_batches)
        while self._evaluator.pending and not self.stopping:
            self._collect_evaluations()
            if self._connection.restarted():
                self._evaluator.request_again()
            time.sleep(0.05)
        if self._committed_at != self._num_batches:
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
        partial = self._folder / "trainer.json.partial"
        partial.write_text(json.dumps(books, indent=1))
        partial.replace(self._folder / "trainer.json")

    def close(self) -> None:
        self._updates.close()
        self._evaluations.close()
