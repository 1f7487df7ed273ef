"""The result of a cell, read from its run folder."""

import platform
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar

import numpy as np

from bench.ablation.objective import CLIP_RATE
from bench.ablation.plan import AblationCell
from bench.experiments.experiment import CellResult
from penstock.deploy.report.telemetry import RunTelemetry, Update, WeightsLoaded
from penstock.schemas.policy import split_version

LAST_UPDATES = 20
"""Updates over which the values at the end are averaged."""
CURVES = {
    "clamp_log_ratio_new_old_indicator": CLIP_RATE,
    "kl_new_old": "kl_new_old",
    "entropy": "entropy",
    "reward": "reward",
    "policy_clipped_frac": "policy_clipped_frac",
    "ratio_mean": "ratio_mean",
    "mismatch_lag0": "mismatch_lag0",
    "ess_fraction": "ess_fraction",
    "grad_norm": "grad_norm",
    "training_log_ppl": "rollout_correction/training_log_ppl",
    "rollout_log_ppl": "rollout_correction/rollout_log_ppl",
}
"""A curve's name to its key in updates.jsonl."""
SOMETIMES = ("mismatch_lag0",)
"""Curves that a complete run may lack: of rows sampled by the newest version alone, which need not occur."""


class AblationResult(CellResult, kw_only=True):
    """One finished cell.

    curves: of `CURVES`, and `token_lag`, the tokens' mean lag.
    engine_lag: by producer, at each update the trainer's version, just announced, minus the version the engine held,
        in optimizer steps; None before its first load.
    tokens_by_lag: sampled tokens of the whole run by their lag.
    """

    num_last_evaluations: ClassVar[int] = 3

    cell: AblationCell
    processor: str
    engine_lag: dict[str, list[int | None]]
    tokens_by_lag: dict[int, int]
    num_steps_skipped: int

    @classmethod
    def of_run(cls, cell: AblationCell, settings: dict[str, Any], run: RunTelemetry) -> "AblationResult":
        lags: Counter[int] = Counter()
        for line in run.updates:
            lags.update(line.lag_histogram)
        curves = {name: [line.metrics.get(key) for line in run.updates] for name, key in CURVES.items()}
        return cls(
            cell=cell,
            processor=platform.machine(),
            settings=settings,
            curves={**curves, "token_lag": [_mean_lag(line) for line in run.updates]},
            engine_lag=engine_lag(run),
            accuracy=[(point.update, point.metrics.get("reward/exact", point.reward)) for point in run.evaluations],
            tokens_by_lag=dict(sorted(lags.items())),
            num_steps_skipped=sum(sum(line.steps_skipped.values()) for line in run.updates),
        )

    @property
    def current_logprobs(self) -> np.ndarray:
        """[updates]: the trainer's logprob of a sampled token, mean over a row's tokens, then over rows."""
        return -self.curve("training_log_ppl")

    @property
    def ratio_deviation(self) -> np.ndarray:
        """[updates]: (mean over tokens of current / behavior - 1) * 10^4. One step a batch: current is proximal."""
        return (self.curve("ratio_mean") - 1) * 1e4

    def at_the_end(self, name: str) -> float:
        return float(np.nanmean(self.curve(name)[-LAST_UPDATES:]))

    def num_with(self, name: str) -> int:
        """Counts the updates that have it."""
        return int((~np.isnan(self.curve(name))).sum())

    @property
    def mean_engine_lag(self) -> float:
        return fmean(lag for lags in self.engine_lag.values() for lag in lags if lag is not None)

    @property
    def summary(self) -> str:
        return f"reward {self.at_the_end('reward'):.3f}, kl_new_old {self.overall('kl_new_old'):.2e}"


def engine_lag(run: RunTelemetry) -> dict[str, list[int | None]]:
    """See `AblationResult.engine_lag`."""
    found: dict[str, list[int | None]] = {}
    for producer, events in run.producers.items():
        loads = [event for event in events if isinstance(event, WeightsLoaded)]
        times = np.array([event.time_s for event in loads])
        lags: list[int | None] = []
        for line in run.updates:
            num_loaded = int(np.searchsorted(times, line.time_s, side="right"))
            held = loads[num_loaded - 1].policy_version if num_loaded else None
            lags.append(None if held is None else _steps(line.policy_version) - _steps(held))
        found[producer] = lags
    return found


def of_arm(results: Sequence[AblationResult], arm: str) -> list[AblationResult]:
    """Returns the results of an arm, ascending by seed."""
    return sorted((result for result in results if result.cell.arm == arm), key=lambda result: result.cell.seed)


def _steps(policy_version: int) -> int:
    return split_version(policy_version)[1]


def _mean_lag(line: Update) -> float | None:
    total = sum(line.lag_histogram.values())
    return sum(lag * count for lag, count in line.lag_histogram.items()) / total if total else None
