"""The trainer's Prometheus metrics."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from penstock.consumers.stream.ledger import OUTCOMES, Ledger
from penstock.schemas.attrition import UNKNOWN, Attrition, LengthTest
from penstock.schemas.config import MetricsConfig, RunConfig
from penstock.schemas.metrics import (
    LAG_LABELS,
    REWARD,
    TRAINER_GAUGES,
    TRAINER_GAUGES_BY_ENVIRONMENT,
    TRAINER_GAUGES_BY_LAG,
    lag_key,
    part_key,
    parts_of,
)
from penstock.schemas.metrics import TrainerMetric as M
from penstock.schemas.process.prometheus import LabelledRegistry
from penstock.schemas.producer_parity import ProducerParity

log = logging.getLogger(__name__)

_SECONDS = ("wait_s", "step_s", "publish_s")
_LINE_FLOATS = frozenset(("time_s", *_SECONDS))
"""The floats in a line of updates.jsonl that are no metrics."""


class TrainerMetrics:
    """Every metric of the trainer under the names of `penstock.schemas.metrics.TrainerMetric`.

    labels: on every sample, such as `run="demo"`.
    """

    def __init__(self, **labels: str) -> None:
        self.registry = LabelledRegistry(labels)
        make = self.registry.make
        self._gauges = {key: make(Gauge, metric) for key, metric in TRAINER_GAUGES.items()}
        for gauge in self._gauges.values():
            gauge.set(math.nan)
        self._by_lag = {name: make(Gauge, metric) for name, metric in TRAINER_GAUGES_BY_LAG.items()}
        self._lag_keys = {lag_key(name, label) for name in self._by_lag for label in LAG_LABELS}
        self._objective = make(Gauge, M.OBJECTIVE)
        self._lag = make(Histogram, M.TOKEN_LAG)
        self._tokens_trained = make(Counter, M.TOKENS_TRAINED)
        self._tokens_masked = make(Counter, M.TOKENS_MASKED)
        self._updates = make(Counter, M.UPDATES)
        self._last_update = make(Gauge, M.LAST_UPDATE)
        self._credit = make(Gauge, M.CREDIT)
        self._lag_bound = make(Gauge, M.LAG_BOUND)
        self._optimizer_steps = make(Counter, M.OPTIMIZER_STEPS)
        self._steps_skipped = make(Counter, M.STEPS_SKIPPED)
        self._seconds = make(Histogram, M.STEP_SECONDS)
        self._parts = make(Gauge, M.REWARD_PART)
        self._evaluation_reward = make(Gauge, M.EVALUATION_REWARD)
        self._evaluation_reward.set(math.nan)
        self._evaluation_parts = make(Gauge, M.EVALUATION_REWARD_PART)
        self._fill_skipped_groups = make(Counter, M.FILL_SKIPPED_GROUPS)
        self._fill_skipped_tokens = make(Counter, M.FILL_SKIPPED_TOKENS)
        self._by_environment = {name: make(Gauge, metric) for name, metric in TRAINER_GAUGES_BY_ENVIRONMENT.items()}
        self._environment_groups = make(Counter, M.ENVIRONMENT_GROUPS)
        self._environment_evaluation = make(Gauge, M.ENVIRONMENT_EVALUATION_REWARD)
        self._evaluation_figures = make(Gauge, M.EVALUATION_FIGURE)
        self._groups_settled = make(Counter, M.GROUPS_SETTLED)
        self._groups_released = make(Counter, M.GROUPS_RELEASED)
        self.groups_open = make(Gauge, M.GROUPS_OPEN)
        self._groups_released_again = make(Counter, M.GROUPS_RELEASED_AGAIN)
        self._duplicates = make(Counter, M.DUPLICATES)
        self._rollout_tokens = make(Histogram, M.ROLLOUT_TOKENS)
        self._rollouts = make(Counter, M.ROLLOUTS)
        self._rollout_tokens_masked = make(Counter, M.ROLLOUT_TOKENS_MASKED)
        self._rollouts_scored = make(Gauge, M.ROLLOUTS_SCORED)
        self._rollouts_reward = make(Gauge, M.ROLLOUTS_REWARD)
        self._tries_lost = make(Counter, M.TRIES_LOST)
        self._lost = make(Gauge, M.LOST)
        self._long_lost = make(Gauge, M.LONG_LOST)
        self._counted: dict[Any, int] = {}
        """By counter, the total of the ledger that it has counted up to."""
        self.groups_abandoned = make(Gauge, M.GROUPS_ABANDONED)
        self.prompts_open = make(Gauge, M.PROMPTS)
        self.weight_bytes = make(Counter, M.WEIGHT_BYTES)
        self.weight_anchors = make(Counter, M.WEIGHT_ANCHORS)
        self._weight_redis_limit = make(Gauge, M.WEIGHT_REDIS_LIMIT)
        self.parity_alert = make(Gauge, M.PARITY_ALERT)
        self.mismatch_band = make(Gauge, M.MISMATCH_BAND)
        self.mismatch_mean = make(Gauge, M.MISMATCH_MEAN)
        self.mismatch_mean.set(math.nan)
        self._producer_mismatch = make(Gauge, M.PRODUCER_MISMATCH)
        self._producer_quarantined = make(Gauge, M.PRODUCER_QUARANTINED)
        self._rechecks = make(Counter, M.PARITY_RECHECKS)
        self._recheck_tokens = make(Counter, M.PARITY_RECHECK_TOKENS)
        self.checkpoint_seconds = make(Histogram, M.CHECKPOINT_SECONDS)
        self.stream_errors = make(Counter, M.STREAM_ERRORS)
        self.sink_errors = make(Counter, M.SINK_ERRORS)

    def begin(self, config: RunConfig, ledger: Ledger) -> None:
        """Sets what the run file fixes, and starts to count from here: groups, and the time to the next update."""
        self._counted = self._totals(ledger)
        self._set_rewards(ledger.attrition)
        self.test_lengths(ledger.attrition.last)
        self._credit.set(config.credit)
        self._lag_bound.set(config.lag_bound)
        self._weight_redis_limit.set(config.weights.redis_mb << 20)
        self._last_update.set_to_current_time()

    def count_groups(self, ledger: Ledger) -> None:
        """Counts the groups that were released, settled or dropped since the last call."""
        totals = self._totals(ledger)
        for counter, total in totals.items():
            counter.inc(total - self._counted.get(counter, 0))
        self._counted = totals
        self._set_rewards(ledger.attrition)

    def _totals(self, ledger: Ledger) -> dict[Any, int]:
        settled = {outcome: ledger.count(outcome) for outcome in OUTCOMES}
        settled["dead"] += ledger.released_again["requeued"]  # a requeued group is dead no longer, but was
        return {
            self._groups_released: ledger.num_released,
            self._duplicates: ledger.num_duplicates_dropped,
            **{self._groups_settled.labels(outcome): count for outcome, count in settled.items()},
            **{self._groups_released_again.labels(why): count for why, count in ledger.released_again.items()},
            self._tries_lost: ledger.attrition.num_tries_lost,
            **self._rollout_totals(ledger.attrition),
        }

    def _rollout_totals(self, attrition: Attrition) -> dict[Any, int]:
        """By counter, or by a part of the histogram."""
        found: dict[Any, int] = defaultdict(int)
        for environment, outcome, length, counts in attrition.counts():
            found[self._rollout_tokens_masked.labels(outcome, environment)] += counts.num_tokens_masked
            for reason, num in counts.finish_reasons.items():
                found[self._rollouts.labels(outcome, environment, reason)] += num
            if length == UNKNOWN:
                found[self._rollouts.labels(outcome, environment, UNKNOWN)] += counts.num
                continue
            histogram = self._rollout_tokens.labels(outcome)
            found[histogram._buckets[histogram._upper_bounds.index(float(length))]] += counts.num
            found[histogram._sum] += counts.num_tokens
        return found

    def _set_rewards(self, attrition: Attrition) -> None:
        """Rewards may be negative: gauges, and of the whole run, so that a resume is no jump."""
        for environment, outcomes in attrition.by_environment().items():
            for outcome, total in outcomes.items():
                self._rollouts_scored.labels(outcome, environment).set(total.num_scored)
                self._rollouts_reward.labels(outcome, environment).set(total.reward_sum)

    def test_lengths(self, found: LengthTest | None) -> None:
        """Sets what the last window of groups says of the lost ones."""
        shares = (math.nan, math.nan)
        if found is not None:
            shares = found.num_long_lost / found.num_long, found.num_other_lost / found.num_other
        for length, share in zip(M.LOST.values, shares, strict=True):
            self._lost.labels(length).set(share)
        self._long_lost.set(found is not None and found.is_alarm)

    def record(self, line: dict[str, Any]) -> None:
        """Sets the metrics from one line of updates.jsonl; one that the line lacks is unset."""
        self._set_gauges(line)
        for lag, num_tokens in line["lag_histogram"].items():
            # One observation per token, without a call per token.
            self._lag._sum.inc(float(lag) * num_tokens)
            for bound, bucket in zip(self._lag._upper_bounds, self._lag._buckets, strict=True):
                if float(lag) <= bound:
                    bucket.inc(num_tokens)
                    break
        self._tokens_trained.inc(line["num_tokens_trained"] - line["num_tokens_rejected"])
        self._tokens_masked.labels("lag").inc(line["num_tokens_masked_lag"])
        self._tokens_masked.labels("correction").inc(line["num_tokens_rejected"])
        self._updates.inc()
        self._last_update.set(line["time_s"])
        self._fill_skipped_groups.inc(line["fill_skipped_groups"])
        self._fill_skipped_tokens.inc(line["fill_skipped_tokens"])
        self._credit.set(line["credit"])
        self._optimizer_steps.inc(line["num_optimizer_steps"])
        for reason, num_steps in line["steps_skipped"].items():
            self._steps_skipped.labels(reason).inc(num_steps)
        environments = line["environments"]
        for key, gauge in self._by_environment.items():
            _set_labelled(gauge, {name: found[key] for name, found in environments.items() if key in found})
        for name, found in environments.items():
            for outcome in ("trained", "skipped"):
                self._environment_groups.labels(name, outcome).inc(found[f"num_groups_{outcome}"])
        for phase in _SECONDS:
            self._seconds.labels(phase.removesuffix("_s")).observe(line[phase])

    def watch_producers(self, found: Mapping[str, ProducerParity]) -> None:
        """Sets what is known of the producers that are alive, by id; of others nothing is left."""
        _set_labelled(self._producer_mismatch, {name: each.gap for name, each in found.items() if each.gap is not None})
        self._producer_quarantined.clear()
        for name, each in found.items():
            if each.quarantined_s:
                self._producer_quarantined.labels(name, each.cause).set(1)

    def count_recheck(self, outcome: str, num_tokens: int) -> None:
        """What became of a group that was drawn to be recomputed at a lag above 0."""
        self._rechecks.labels(outcome).inc()
        self._recheck_tokens.inc(num_tokens)

    def _set_gauges(self, line: dict[str, Any]) -> None:
        for key, gauge in self._gauges.items():
            value = line.get(key)
            gauge.set(math.nan if value is None else value)
        for name, gauge in self._by_lag.items():
            for label in LAG_LABELS:
                value = line.get(lag_key(name, label))
                if value is None:
                    gauge.remove(label)
                else:
                    gauge.labels(label).set(value)
        parts = parts_of(line)
        _set_labelled(self._parts, parts)
        known = self._gauges.keys() | self._lag_keys | _LINE_FLOATS | set(map(part_key, parts))
        _set_labelled(
            self._objective,
            {key: value for key, value in line.items() if isinstance(value, float) and key not in known},
        )

    def evaluate(self, figures: Mapping[str, float], environments: Mapping[str, Mapping[str, float]]) -> None:
        """Sets the metrics of the last evaluation. figures: as of `held_out_figures`; the same by environment."""
        _set_labelled(self._environment_evaluation, {name: own[REWARD] for name, own in environments.items()})
        self._evaluation_reward.set(figures[REWARD])
        _set_labelled(self._evaluation_parts, parts_of(figures))
        self._evaluation_figures.clear()
        for environment, own in environments.items():
            for key in own.keys() - {REWARD, *map(part_key, parts_of(own))}:
                self._evaluation_figures.labels(environment, key).set(own[key])

    def serve(self, config: MetricsConfig, run_folder: Path) -> int:
        """Serves `/metrics` until `close`; returns the port. See `LabelledRegistry.serve`."""
        port = self.registry.serve(config, run_folder, "trainer")
        log.info("metrics at http://%s:%d/metrics", config.host, port)
        return port

    def close(self) -> None:
        """Stops serving, if `serve` was called."""
        self.registry.close()


def _set_labelled(gauge: Any, values: Mapping[str, float]) -> None:
    """Sets a gauge's samples, by its one label, to exactly these."""
    for family in gauge.collect():
        for gone in {label for sample in family.samples for label in sample.labels.values()} - values.keys():
            gauge.remove(gone)
    for label, value in values.items():
        gauge.labels(label).set(value)
