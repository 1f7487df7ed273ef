"""Computes the mismatch diagnostics in the slow and obvious way: plain Python floats, written from the definitions.

Shares no code with consumers. A batch is a list of rows, a row a list of `MismatchToken`s.
"""

import math
from statistics import fmean
from typing import NamedTuple

BUCKETS = {"0": (0, 0), "0-mixed": (0, 0), "1": (1, 1), "2-3": (2, 3), "4-7": (4, 7), "8+": (8, math.inf)}


class MismatchToken(NamedTuple):
    train: float
    rollout: float
    mask: bool
    weight: float
    lag: int
    advantage: float
    moved: float = 0.0
    """current - train."""

    @property
    def l(self) -> float:  # noqa: E743  the definitions' letter
        return self.train - self.rollout

    @property
    def rho(self) -> float:
        return math.exp(_clamp(self.l, 20))

    @property
    def policy_ratio(self) -> float:
        return math.exp(_clamp(self.moved, 20))

    @property
    def new_old(self) -> float:
        x = _clamp(self.l + self.moved, 20)
        return math.exp(x) - x - 1

    @property
    def corrected(self) -> bool:
        return self.weight in (0.0, 2.0)


def oracle(rows: list[list[MismatchToken]], threshold: float, level: str = "token") -> dict[str, float]:
    """Returns every metric of a batch with at least one valid token."""
    valid = [[token for token in row if token.mask] for row in rows]
    tokens = [token for row in valid for token in row]
    found = _rollout_correction(valid, tokens, threshold, level) | of_tokens(tokens)
    for name in ("kl", "k3_kl", "num_tokens"):
        del found[name]
    found["ratio_mean"] = fmean(t.rho for t in tokens)
    found["ratio_max"] = max(t.rho for t in tokens)
    found["ratio_min"] = min(t.rho for t in tokens)
    found["k3_kl_unclamped"] = fmean(math.exp(min(t.l, 100)) - t.l - 1 for t in tokens)
    found["chi2_seq_product"] = fmean(math.exp(2 * _clamp(sum(t.l for t in row), 20)) for row in valid) - 1
    filled = [row for row in valid if row]
    found["kl_new_old"] = fmean(fmean(t.new_old for t in row) for row in filled)
    found["clamp_log_ratio_new_old_indicator"] = fmean(fmean(t.rho > threshold for t in row) for row in filled)
    pure = [t for row in rows if max((t.lag for t in row), default=0) == 0 for t in row if t.mask]
    mixed = [t for row in rows if max((t.lag for t in row), default=0) > 0 for t in row if t.mask and t.lag == 0]
    if pure:
        found["mismatch_lag0"] = fmean(abs(t.l) for t in pure)
    of_lag_0 = {"0": pure, "0-mixed": mixed}
    for label, (low, high) in BUCKETS.items():
        inside = of_lag_0.get(label, [t for t in tokens if low <= t.lag <= high])
        if inside:
            found |= {f"{name}/lag_{label}": value for name, value in of_tokens(inside).items()}
    return found


def _rollout_correction(
    valid: list[list[MismatchToken]], tokens: list[MismatchToken], threshold: float, level: str
) -> dict[str, float]:
    train = [-fmean([t.train for t in row] or [0.0]) for row in valid]
    rollout = [-fmean([t.rollout for t in row] or [0.0]) for row in valid]
    diffs = [a - b for a, b in zip(train, rollout, strict=True)]
    bounded = [min(max(t.weight, 1 / threshold), threshold) for t in tokens]
    mean = fmean(bounded) + 1e-8
    if level == "token":
        clipped = fmean(t.rho > threshold for t in tokens)
    elif level == "geometric":
        clipped = fmean(math.exp(fmean([_clamp(t.l, 20) for t in row] or [0.0])) > threshold for row in valid)
    else:
        clipped = fmean(math.exp(_clamp(sum(t.l for t in row), 20)) > threshold for row in valid)
    found = {
        "kl": fmean(-t.l for t in tokens),
        "k3_kl": fmean(min(math.exp(_clamp(t.l, 20)) - _clamp(t.l, 20) - 1, 10) for t in tokens),
        "chi2_token": fmean(math.exp(2 * _clamp(t.l, 20)) for t in tokens) - 1,
        "chi2_seq": fmean(math.exp(2 * _clamp(-d, 20)) for d in diffs) - 1,
        "training_log_ppl": fmean(train),
        "training_ppl": fmean(math.exp(x) for x in train),
        "rollout_log_ppl": fmean(rollout),
        "rollout_ppl": fmean(math.exp(x) for x in rollout),
        "log_ppl_diff": fmean(diffs),
        "log_ppl_abs_diff": fmean(abs(d) for d in diffs),
        "log_ppl_diff_max": max(diffs),
        "log_ppl_diff_min": min(diffs),
        "ppl_ratio": fmean(math.exp(d) for d in diffs),
        "is_weight_mean": fmean(t.weight for t in tokens),
        "ess": 1 / fmean((u / mean) ** 2 for u in bounded),
        "clipped_frac": clipped,
    }
    return {f"rollout_correction/{name}": value for name, value in found.items()}


def of_tokens(tokens: list[MismatchToken]) -> dict[str, float]:
    """Returns the metrics of any set of tokens, such as a lag bucket or an environment."""
    found = {
        "num_tokens": float(len(tokens)),
        "kl": fmean(-t.l for t in tokens),
        "k3_kl": fmean(min(t.rho - _clamp(t.l, 20) - 1, 10) for t in tokens),
        "chi2": fmean(t.rho**2 for t in tokens) - 1,
        "ess_fraction": _ess([t.rho for t in tokens]),
        "applied_ess_fraction": _ess([t.weight for t in tokens]),
        "policy_chi2": fmean(t.policy_ratio**2 for t in tokens) - 1,
        "policy_ess_fraction": _ess([t.policy_ratio for t in tokens]),
        "weight_mean": fmean(t.weight for t in tokens),
        "corrected_frac": fmean(t.corrected for t in tokens),
        "masked_frac": fmean(t.weight == 0 for t in tokens),
    }
    for name, sign in (("positive", 1), ("negative", -1)):
        signed = [t for t in tokens if t.advantage * sign > 0]
        if signed:
            found[f"rejected_frac_{name}"] = fmean(t.weight == 0 for t in signed)
    return found


def _ess(weights: list[float]) -> float:
    squares = sum(w * w for w in weights)
    return sum(weights) ** 2 / (len(weights) * squares) if squares else 0.0


def _clamp(value: float, bound: float) -> float:
    return max(-bound, min(bound, value))
