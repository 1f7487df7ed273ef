"""The trainer's Prometheus metrics."""

import logging
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.consumers.stream.ledger import OUTCOMES, Ledger
from penstock.schemas.attrition import UNKNOWN, Attrition, LostByLength
from penstock.schemas.config import MetricsConfig, RunConfig
from penstock.schemas.metrics import (
    LAG_LABELS,
    REWARD,
    TRAINER_GAUGES,
    TRAINER_GAUGES_BY_ENVIRONMENT,
    TRAINER_GAUGES_BY_LAG,
    Metric,
    lag_key,
    part_key,
    parts_of,
)
from penstock.schemas.metrics import TrainerMetric as M
from penstock.schemas.process.ports import authority
from penstock.schemas.process.prometheus import LabelledRegistry
from penstock.schemas.producer_parity import ProducerParity

log = logging.getLogger(__name__)

_SECONDS = ("wait_s", "step_s", "publish_s")
_LINE_FLOATS = frozenset(("time_s", "started_s", "uptime_s", "clock_ahead_s", *_SECONDS))
"""The floats of an updates.jsonl line that are not exported as metrics."""


class TrainerMetrics:
    """Every metric of the trainer; `metrics[TrainerMetric.UPDATES]` is one of them.

    labels: added to each sample, such as `run="demo"`.
    """

    def __init__(self, **labels: str) -> None:
        self.registry = LabelledRegistry(labels)
        make = self.registry.make
        self._made = {getattr(M, name): made for name, made in self.registry.make_all(M).items()}
        self._gauges = {key: make(metric) for key, metric in TRAINER_GAUGES.items()}
        self._by_lag = {key: make(metric) for key, metric in TRAINER_GAUGES_BY_LAG.items()}
        self._by_environment = {key: make(metric) for key, metric in TRAINER_GAUGES_BY_ENVIRONMENT.items()}
        self._lag_keys = {lag_key(name, label) for name in self._by_lag for label in LAG_LABELS}
        for gauge in (*self._gauges.values(), self[M.EVALUATION_REWARD], self[M.MISMATCH_MEAN]):
            gauge.set(math.nan)
        self._counted: dict[Any, int] = {}
        """The ledger's total that each counter has counted up to."""

    def __getitem__(self, metric: Metric) -> Any:
        """Returns the counter, gauge or histogram of a `TrainerMetric`."""
        return self._made[metric]

    def begin(self, config: RunConfig, ledger: Ledger) -> None:
        """Sets what the run file fixes, and starts counting groups and the time to the next update."""
        self._counted = self._totals(ledger)
        self._set_rewards(ledger.attrition)
        self.show_lost(ledger.attrition.last)
        self[M.CREDIT].set(config.credit)
        self[M.LAG_BOUND].set(config.lag_bound)
        self[M.WEIGHT_REDIS_LIMIT].set(config.weights.redis_mb << 20)
        self[M.LAST_UPDATE].set_to_current_time()

    def count_groups(self, ledger: Ledger) -> None:
        """Counts the groups released, settled or dropped since the last call."""
        totals = self._totals(ledger)
        for counter, total in totals.items():
            counter.inc(total - self._counted.get(counter, 0))
        self._counted = totals
        self._set_rewards(ledger.attrition)

    def _totals(self, ledger: Ledger) -> dict[Any, int]:
        settled = {outcome: ledger.count(outcome) for outcome in OUTCOMES}
        settled["dead"] += ledger.released_again["requeued"]  # a requeued group is dead no longer, but was
        return {
            self[M.GROUPS_RELEASED]: ledger.num_released,
            self[M.DUPLICATES]: ledger.num_duplicates_dropped,
            **{self[M.GROUPS_SETTLED].labels(outcome): count for outcome, count in settled.items()},
            **{self[M.GROUPS_RELEASED_AGAIN].labels(why): count for why, count in ledger.released_again.items()},
            self[M.TRIES_LOST]: ledger.attrition.num_tries_lost,
            **self._rollout_totals(ledger.attrition),
        }

    def _rollout_totals(self, attrition: Attrition) -> dict[Any, int]:
        """Returns totals by counter, or by a part of the histogram."""
        found: dict[Any, int] = defaultdict(int)
        for environment, outcome, length, counts in attrition.counts():
            found[self[M.ROLLOUT_TOKENS_MASKED].labels(outcome, environment)] += counts.num_tokens_masked
            for reason, num in counts.finish_reasons.items():
                found[self[M.ROLLOUTS].labels(outcome, environment, reason)] += num
            if length == UNKNOWN:
                found[self[M.ROLLOUTS].labels(outcome, environment, UNKNOWN)] += counts.num
                continue
            histogram = self[M.ROLLOUT_TOKENS].labels(outcome)
            found[histogram._buckets[histogram._upper_bounds.index(float(length))]] += counts.num
            found[histogram._sum] += counts.num_tokens
        return found

    def _set_rewards(self, attrition: Attrition) -> None:
        """Sets gauges, since rewards may be negative, over the whole run, so that they do not jump at a resume."""
        for environment, outcomes in attrition.by_environment().items():
            for outcome, total in outcomes.items():
                self[M.ROLLOUTS_SCORED].labels(outcome, environment).set(total.num_scored)
                self[M.ROLLOUTS_REWARD].labels(outcome, environment).set(total.reward_sum)

    def show_lost(self, found: LostByLength | None) -> None:
        """Sets the shares of long and other rollouts that were lost in the last window of groups."""
        shares = (math.nan, math.nan)
        if found is not None:
            shares = found.num_long_lost / found.num_long, found.num_other_lost / found.num_other
        for length, share in zip(M.LOST.values, shares, strict=True):
            self[M.LOST].labels(length).set(share)
        self[M.LONG_LOST].set(found is not None and found.is_alarm)

    def record(self, line: dict[str, Any]) -> None:
        """Sets the metrics from one line of updates.jsonl; those that the line lacks become NaN or are removed."""
        self._set_gauges(line)
        lags = self[M.TOKEN_LAG]
        for lag, num_tokens in line["lag_histogram"].items():
            # One observation per token, without a call per token.
            lags._sum.inc(float(lag) * num_tokens)
            lags._buckets[bisect_left(lags._upper_bounds, float(lag))].inc(num_tokens)
        self[M.TOKENS_TRAINED].inc(line["num_tokens_trained"] - line["num_tokens_rejected"])
        self[M.TOKENS_MASKED].labels("lag").inc(line["num_tokens_masked_lag"])
        self[M.TOKENS_MASKED].labels("correction").inc(line["num_tokens_rejected"])
        self[M.UPDATES].inc()
        self[M.LAST_UPDATE].set(line["time_s"])
        self[M.FILL_SKIPPED_GROUPS].inc(line["fill_skipped_groups"])
        self[M.FILL_SKIPPED_TOKENS].inc(line["fill_skipped_tokens"])
        self[M.CREDIT].set(line["credit"])
        self[M.OPTIMIZER_STEPS].inc(line["num_optimizer_steps"])
        for reason, num_steps in line["steps_skipped"].items():
            self[M.STEPS_SKIPPED].labels(reason).inc(num_steps)
        environments = line["environments"]
        for key, gauge in self._by_environment.items():
            _set_labelled(gauge, {name: found[key] for name, found in environments.items() if key in found})
        for name, found in environments.items():
            for outcome in ("trained", "skipped"):
                self[M.ENVIRONMENT_GROUPS].labels(name, outcome).inc(found[f"num_groups_{outcome}"])
        for phase, seconds in line["group_s"].items():
            self[M.GROUP_SECONDS].labels(phase).set(seconds)
        for phase in _SECONDS:
            self[M.STEP_SECONDS].labels(phase.removesuffix("_s")).observe(line[phase])

    def measure_producers(self, findings: Mapping[str, ProducerParity]) -> None:
        """Sets the series of the live producers, by id, and removes those of others."""
        _set_labelled(
            self[M.PRODUCER_MISMATCH],
            {name: finding.gap for name, finding in findings.items() if finding.gap is not None},
        )
        _set_labelled(
            self[M.PRODUCER_QUARANTINED], {name: 1.0 for name, finding in findings.items() if finding.quarantined_s}
        )

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
        _set_labelled(self[M.REWARD_PART], parts)
        known = self._gauges.keys() | self._lag_keys | _LINE_FLOATS | set(map(part_key, parts))
        _set_labelled(
            self[M.OBJECTIVE],
            {key: value for key, value in line.items() if isinstance(value, float) and key not in known},
        )

    def evaluate(self, figures: Mapping[str, float], environments: Mapping[str, Mapping[str, float]]) -> None:
        """Sets the metrics of the last evaluation. figures: see `held_out_figures`. environments: figures of each."""
        _set_labelled(self[M.ENVIRONMENT_EVALUATION_REWARD], {name: own[REWARD] for name, own in environments.items()})
        self[M.EVALUATION_REWARD].set(figures[REWARD])
        _set_labelled(self[M.EVALUATION_REWARD_PART], parts_of(figures))
        self[M.EVALUATION_FIGURE].clear()
        for environment, own in environments.items():
            for key in own.keys() - {REWARD, *map(part_key, parts_of(own))}:
                self[M.EVALUATION_FIGURE].labels(environment, key).set(own[key])

    def serve(self, config: MetricsConfig, run_folder: Path) -> int:
        """Serves `/metrics` until `close`; returns the port. See `LabelledRegistry.serve`."""
        port = self.registry.serve(config, run_folder, "trainer")
        log.info("metrics at http://%s/metrics", authority(config.host, port))
        return port

    def close(self) -> None:
        """Stops serving, if `serve` was called."""
        self.registry.close()


def _set_labelled(gauge: Any, values: Mapping[str, float]) -> None:
    """Sets the series of a gauge with one label to `values` and removes all others."""
    for family in gauge.collect():
        for gone in {label for sample in family.samples for label in sample.labels.values()} - values.keys():
            gauge.remove(gone)
    for label, value in values.items():
        gauge.labels(label).set(value)
