"""Computes importance weights from their definitions, token by token in plain Python floats. Shares no code with
consumers."""

import math
from dataclasses import dataclass

from penstock.schemas.config import CorrectionConfig, Rejection


@dataclass(frozen=True)
class CorrectionToken:
    proximal: float
    behavior: float
    current: float
    advantage: float
    lag: int
    valid: bool


Row = list[CorrectionToken]
Judgement = tuple[float, bool]
"""(weight, kept) of a token; the weight is 0 if it is not kept."""


def oracle_correct(rows: list[Row], config: CorrectionConfig) -> list[list[Judgement]]:
    judged = {
        (r, t): _mode(token, row, config) for r, row in enumerate(rows) for t, token in enumerate(row) if token.valid
    }
    weights = {at: weight for at, weight in judged.items() if weight is not None}
    kept = {
        (r, t)
        for r, t in weights
        if not any(_rejects(rejection, rows[r][t], rows[r]) for rejection in config.rejection)
        and not _off_policy(rows[r][t], rows[r], config)
    }
    return [
        [(weights[r, t], True) if (r, t) in kept else (0.0, False) for t in range(len(row))]
        for r, row in enumerate(rows)
    ]


def log_ratio(token: CorrectionToken) -> float:
    return token.proximal - token.behavior


def clip(value: float) -> float:
    return max(-20.0, min(20.0, value))


def _valid(row: Row) -> Row:
    return [token for token in row if token.valid]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _mode(token: CorrectionToken, row: Row, config: CorrectionConfig) -> float | None:
    """Returns the mode's weight; None if it masks the token."""
    rho = math.exp(clip(log_ratio(token)))
    if config.mode == "none":
        return 1.0
    ratio = rho
    if config.mode in ("sequence_truncate", "sequence_mask"):
        if config.sequence_ratio == "geometric":
            ratio = math.exp(_mean([clip(log_ratio(other)) for other in _valid(row)]))
        else:
            ratio = math.exp(clip(sum(log_ratio(other) for other in _valid(row))))
    high, low = config.threshold, config.lower if config.lower is not None else 0.0
    if config.mode in ("token_truncate", "sequence_truncate"):
        return min(max(ratio, low), high)
    if ratio < low or ratio > high:
        return None
    return ratio if config.sequence_ratio == "product" else rho


def _estimate(estimator: str, value: float) -> float:
    if estimator == "k2":
        return clip(value) ** 2 / 2
    return math.exp(clip(value)) - clip(value) - 1


def _rejects(rejection: Rejection, token: CorrectionToken, row: Row) -> bool:
    scope, estimator = rejection.mode[:-3], rejection.mode[-2:]
    tokens = [token] if scope == "token" else _valid(row)
    gather = {"token": sum, "seq_sum": sum, "seq_mean": _mean, "seq_max": max}[scope]
    if estimator != "k1":
        return gather([_estimate(estimator, log_ratio(other)) for other in tokens]) > rejection.upper
    inverse = math.exp(clip(gather([-log_ratio(other) for other in tokens])))
    if inverse > rejection.upper:
        return True
    if scope == "seq_max":
        return False
    return inverse < (rejection.lower if rejection.lower is not None else 1 / rejection.upper)


def _off_policy(token: CorrectionToken, row: Row, config: CorrectionConfig) -> bool:
    if config.off_policy_delta is None:
        return False
    drift = _mean([other.behavior - other.current for other in _valid(row)])
    return drift > config.off_policy_delta and token.advantage < 0
