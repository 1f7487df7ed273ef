"""What the objective meets: the trainer at its newest version against the engine, by lag."""

from collections.abc import Callable

import numpy as np
import torch
from penstock.consumers.learning.diagnostics import LAG_STARTS, MismatchSums
from penstock.consumers.learning.rows import LOG_RATIO_BOUND
from penstock.consumers.parity.gaps import quantile
from penstock.consumers.parity.replay import Replay, ReplayPlan
from penstock.consumers.parity.report import LagRow
from penstock.consumers.parity.sample import Sample
from penstock.schemas.metrics import LAG_LABELS, lag_key
from penstock.schemas.policy import FutureVersionError, UnknownVersionError, split_version
from torch import Tensor


def lags_of(sample: Sample, lag_of: Callable[[int], int] | None) -> np.ndarray:
    """[M] int64 lag of each token, -1 where it is unknown; without `lag_of` counted from the newest version here."""
    newest = int(sample.versions.max())
    known: dict[int, int] = {}
    for version in np.unique(sample.versions).tolist():
        try:
            if lag_of is not None:
                known[version] = lag_of(version)
            else:
                same_line = split_version(version)[0] == split_version(newest)[0]
                known[version] = newest - version if same_line else -1
        except (UnknownVersionError, FutureVersionError):
            known[version] = -1
    return np.array([known[version] for version in sample.versions.tolist()])


def newest_version(sample: Sample, lags: np.ndarray) -> int:
    """The version of the smallest lag."""
    known = lags >= 0
    return int(sample.versions[known][lags[known].argmin()]) if known.any() else int(sample.versions.max())


def at_newest(sample: Sample, replay: Replay, null: Tensor, newest: int) -> Tensor:
    """[M] float64: logprobs of the trainer that holds `newest`, rows recomputed whole as it does.

    null: [M] as labelled; equal for rows that `newest` sampled alone.
    """
    others = [row for row in sample.rows if row.is_mixed or row.versions[0] != newest]
    recomputed = replay.logprobs(ReplayPlan(row, ((newest, 0, int(row.sampled[-1])),)) for row in others)
    return torch.where(recomputed.isnan(), null, recomputed)


def lag_rows(sample: Sample, trainer: Tensor, lags: np.ndarray) -> tuple[LagRow, ...]:
    """By lag bucket, of the tokens with known lag. trainer: [M] float64, `at_newest`."""
    known = torch.from_numpy(lags >= 0)
    if not known.any():
        return ()
    engine, trainer, lag = sample.engine[known], trainer[known], torch.from_numpy(lags)[known]
    metrics = MismatchSums.of_packed(
        trainer,
        engine,
        torch.ones_like(lag, dtype=torch.bool),
        torch.from_numpy(sample.rows_of)[known],
        lag=lag,
    ).metrics()
    buckets = torch.bucketize(lag, torch.tensor(LAG_STARTS), right=True)
    return tuple(
        _row(label, engine[buckets == n], trainer[buckets == n], metrics)
        for n, label in enumerate(LAG_LABELS)
        if (buckets == n).any()
    )


def _row(label: str, engine: Tensor, trainer: Tensor, metrics: dict[str, float]) -> LagRow:
    size = (trainer - engine).abs()
    ratio = (trainer - engine).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return LagRow(
        label=label,
        num_tokens=len(size),
        mean=float(size.mean()),
        p99=quantile(size, 0.99),
        kl=metrics[lag_key("kl", label)],
        k3_kl=metrics[lag_key("k3_kl", label)],
        chi2=metrics[lag_key("chi2", label)],
        ess_fraction=metrics[lag_key("ess_fraction", label)],
        ratio_deviation=float((ratio - 1).abs().mean()) * 1e4,
    )
