"""The run log: lines of updates and evaluations, metrics, sinks, the ledger file. Training depends on none of it."""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.consumers.checkpoints.state import PassedOver
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.learning.learner.warm_start import WarmStep
from penstock.consumers.learning.outcome import outcome
from penstock.consumers.observe.completions import CompletionTexts
from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.consumers.observe.sinks.feeding import Sinks
from penstock.consumers.observe.traces import GroupTraces
from penstock.consumers.parity.gate import Alert
from penstock.consumers.stream.evaluation import EvaluationResult
from penstock.consumers.stream.ledger import OUTCOMES, Ledger
from penstock.consumers.stream.run_progress import RunProgress, longest_s
from penstock.consumers.weights.publisher import Publication
from penstock.schemas.attrition import WINDOW
from penstock.schemas.config import RunConfig
from penstock.schemas.figures import missing_figures
from penstock.schemas.metrics import TrainerMetric as M
from penstock.schemas.metrics import figures_of
from penstock.schemas.process import clock
from penstock.schemas.process.files import write_whole
from penstock.schemas.process.json_lines import JsonLines
from penstock.schemas.rollout import RolloutGroup

log = logging.getLogger(__name__)

WARM_LINE_S = 30.0
"""How often a step of the warm start is logged."""


def by_environment(
    groups: Sequence[RolloutGroup], report: StepReport, passed: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Returns for each environment the `outcome` of its groups in the batch, its finite `StepReport.environments`, and
    the numbers of its groups that were trained and skipped.

    passed: by environment the number of groups skipped while the batch was filled, which count as skipped.
    """
    own: dict[str, list[RolloutGroup]] = {name: [] for name in passed}
    for group in groups:
        own.setdefault(group.environment, []).append(group)
    found: dict[str, dict[str, float]] = {}
    for name, of_it in sorted(own.items()):
        num_trained = sum(report.teaches(group.index) for group in of_it)
        found[name] = {
            **outcome(of_it),
            **{key: value for key, value in report.environments.get(name, {}).items() if math.isfinite(value)},
            "num_groups_trained": num_trained,
            "num_groups_skipped": len(of_it) - num_trained + passed.get(name, 0),
        }
    return found


class RunLog:
    """Writes `updates.jsonl`, `evaluations.jsonl` and `trainer.json` of the run folder, and feeds metrics and sinks.

    clock_ahead_s: this host's clock against Redis'.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        metrics: TrainerMetrics,
        ledger: Ledger,
        progress: RunProgress,
        clock_ahead_s: float = 0.0,
        traces: GroupTraces | None = None,
    ) -> None:
        self._completions = CompletionTexts(config)
        self.alert = Alert(config)
        self.metrics = metrics
        self._ledger = ledger
        self._progress = progress
        self._config = config
        self._clock_ahead_s = clock_ahead_s
        self.traces = traces or GroupTraces()
        self._is_first = True
        """True until this trainer's first batch is logged."""
        self._warned: set[str] = set()
        """Settings that name a figure missing from evaluations."""
        self._rollouts = ledger.attrition.copied()
        """As of the last line of updates.jsonl."""
        self._lost_by_length = ledger.attrition.last
        self._published: dict[str, float] = {}
        """The figures of the policy announced last."""
        self._updates = JsonLines(folder / "updates.jsonl")
        self._evaluations = JsonLines(folder / "evaluations.jsonl")
        self._warm_steps = JsonLines(folder / "warm_start.jsonl") if config.warm_start is not None else None
        self._warm_line_at = 0.0
        self._ledger_file = LedgerFile(folder / "trainer.json")
        self._sinks = Sinks(
            config, folder, progress.num_batches, on_error=lambda name: metrics[M.SINK_ERRORS].labels(name).inc()
        )
        metrics.begin(config, ledger)

    def queue(self, num_open_prompts: int, num_abandoned: int) -> None:
        """Sets the metrics of the queue. Called before a batch is settled, which makes room: producers wait for a queue
        that is full at this point."""
        self.metrics[M.GROUPS_OPEN].set(self._ledger.num_open)
        self.metrics[M.PROMPTS].set(num_open_prompts)
        self.metrics[M.GROUPS_ABANDONED].set(num_abandoned)
        self.metrics.count_groups(self._ledger)

    def update(
        self,
        groups: Sequence[RolloutGroup],
        report: StepReport,
        *,
        received_s: Mapping[int, float],
        passed: PassedOver,
        policy_version: int,
        credit: int,
        num_ready: int,
        wait_s: float,
        step_s: float,
        publish_s: float,
        publish_blocked_s: float,
    ) -> None:
        """Logs one batch. received_s: when each group was read, by index. passed: groups skipped while it was filled.
        credit: for the next batch. publish_blocked_s: the time that training waited for publications."""
        stepped_s = clock.steady_s() - publish_s
        traced = self.traces.batch(
            groups,
            report,
            received_s,
            update=self._progress.num_batches,
            policy_version=policy_version,
            step_s=step_s,
            stepped_s=stepped_s,
        )
        if self._is_first:  # the time in which engines booted is no wait for rollouts
            wait_s = min(wait_s, longest_s(groups))
        self._is_first = False
        line: dict[str, Any] = {
            "update": self._progress.num_batches,
            "policy_version": policy_version,
            **clock.stamp(),
            "clock_ahead_s": self._clock_ahead_s,
            **{name: value if math.isfinite(value) else None for name, value in report.metrics.items()},
            "lag_histogram": {str(lag): count for lag, count in sorted(report.lag_histogram.items())},
            "num_tokens_trained": report.num_tokens_trained,
            "num_tokens_masked_lag": report.num_tokens_masked_lag,
            "num_tokens_rejected": report.num_tokens_rejected,
            "num_optimizer_steps": report.num_optimizer_steps,
            "steps_skipped": report.steps_skipped,
            "num_groups_trained": len(report.advantages) - report.num_groups_skipped,
            "num_groups_skipped": report.num_groups_skipped,
            "fill_skipped_groups": passed.count,
            "fill_skipped_tokens": passed.num_tokens,
            "credit": credit,
            "environments": by_environment(groups, report, passed.num_groups),
            "rollouts": self._take_rollouts(),
            "queue_depth": num_ready,
            "skipped_reason": report.skipped_reason,
            "wait_s": wait_s,
            "step_s": step_s,
            "phase_s": report.phase_s,
            "publish_s": publish_s,
            "publish_blocked_s": publish_blocked_s,
            **traced,
            "mismatch_lag0_band": self.alert.band,
            **self._published,
        }
        self._updates.write(**line)
        self._sinks.update(line, self._completions.of(groups, self._progress.num_batches))
        self.metrics.record(line)
        self.metrics.count_groups(self._ledger)
        self._watch_lengths()
        self.alert.watch(report.metrics)
        self.metrics[M.PARITY_ALERT].set(self.alert.is_raised)
        self.metrics[M.MISMATCH_MEAN].set(self.alert.gap)
        self.metrics[M.MISMATCH_BAND].set(self.alert.band)

    def warm_step(self, step: WarmStep) -> None:
        """Logs a step of the warm start."""
        if self._warm_steps is not None:
            figures = {name: value if math.isfinite(value) else None for name, value in step._asdict().items()}
            self._warm_steps.write(**clock.stamp(), **figures)
        if step.step == step.num_steps or time.monotonic() >= self._warm_line_at:
            self._warm_line_at = time.monotonic() + WARM_LINE_S
            log.info("warm start: step %d of %d, loss %.4f", step.step, step.num_steps, step.loss)

    def _take_rollouts(self) -> Any:
        """Returns the `penstock.schemas.attrition.Counts` since the last line, as builtins."""
        attrition = self._ledger.attrition
        before, self._rollouts = self._rollouts, attrition.copied()
        return msgspec.to_builtins(attrition.since(before))

    def _watch_lengths(self) -> None:
        found, before = self._ledger.attrition.last, self._lost_by_length
        if found is before:
            return
        self._lost_by_length = found
        self.metrics.show_lost(found)
        if found is not None and found.is_alarm:
            log.warning("long rollouts are lost: %s (of %d groups)", found, WINDOW)
        elif before is not None and before.is_alarm:
            log.info("long rollouts are no longer lost at a rate that short ones are not")

    def publication(self, publication: Publication) -> None:
        """Counts published weights; the next line has the last publication's figures. May be called in any thread."""
        self.metrics[M.WEIGHT_BYTES].inc(publication.num_bytes)
        self.metrics[M.WEIGHT_ANCHORS].inc(publication.is_whole)
        figures: dict[str, float] = {"weight_chain": publication.chain, "weight_redis_bytes": publication.redis_bytes}
        if publication.changed_frac is not None:
            self.traces.announced(publication.version, publication.num_bytes)
            figures |= {"weight_changed_frac": publication.changed_frac, "weight_chunk_bytes": publication.num_bytes}
        self._published = {**self._published, **figures}

    def evaluation(self, result: EvaluationResult) -> None:
        """Logs a complete evaluation."""
        self.metrics.evaluate(result.figures, result.environments)
        fields = result._asdict()
        line = {**clock.stamp(), **fields.pop("figures"), **fields}
        self._evaluations.write(**line)
        self._sinks.evaluation(line)
        missing = missing_figures(self._config, result.figures, result.environments)
        for setting in missing.keys() - self._warned:
            log.warning("%s: %s", setting, missing[setting])
        self._warned |= missing.keys()
        log.info(
            "policy %d: held-out %s",
            result.policy_version,
            ", ".join(f"{name} {value:.4f}" for name, value in figures_of(result.figures).items()),
        )

    def commit(
        self, policy_version: int, *, finished: bool, took_s: float | None = None, ended_early: str = ""
    ) -> None:
        """Writes the ledger file. took_s: seconds that the checkpoint took; None at the end of the run. ended_early:
        the reason if that is before the last update."""
        self.metrics.count_groups(self._ledger)
        self._ledger_file.write(
            self._ledger, self._progress, policy_version, finished=finished, ended_early=ended_early
        )
        if took_s is not None:
            self.metrics[M.CHECKPOINT_SECONDS].observe(took_s)

    def close(self) -> None:
        """Waits for each sink, for `penstock.consumers.observe.sinks.feeding.CLOSE_S` at most."""
        self._updates.close()
        self._evaluations.close()
        if self._warm_steps is not None:
            self._warm_steps.close()
        self._sinks.close()
        self.traces.close()


class LedgerFile:
    """`trainer.json`: the counts of the ledger as of the last checkpoint. It is replaced whole or not at all."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_behind = False

    def write(
        self, ledger: Ledger, progress: RunProgress, policy_version: int, *, finished: bool, ended_early: str = ""
    ) -> None:
        """Replaces the file. If the disk is full the old one stays until a later checkpoint: each checkpoint has the
        ledger itself."""
        contents = {
            "num_updates": progress.num_batches,
            "epoch": progress.epoch,
            "policy_version": policy_version,
            "num_groups_released": ledger.num_released,
            **{f"num_groups_{outcome}": ledger.count(outcome) for outcome in OUTCOMES},
            "num_groups_cancelled": ledger.num_open if finished else 0,
            "num_groups_open": 0 if finished else ledger.num_open,
            "dead_reasons": dict(ledger.dead_reasons),
            "num_groups_released_again": dict(ledger.released_again),
            "num_duplicates_dropped": ledger.num_duplicates_dropped,
            "attrition": msgspec.to_builtins(ledger.attrition),
            **progress.totals,
            "finished": finished,
            "ended_early": ended_early,
        }
        try:
            write_whole(self._file, json.dumps(contents, indent=1))
        except OSError as error:
            if not self._is_behind:
                log.warning("%s cannot be written: %s; it is written with a later checkpoint", self._file, error)
            self._is_behind = True
            return
        if self._is_behind:
            log.info("%s is written again", self._file)
        self._is_behind = False
