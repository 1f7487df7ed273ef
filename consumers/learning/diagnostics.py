"""How far the sampling policies were from the trainer's: sums over tokens and rows that add up over micro-batches.

Notation: l = train - rollout logprob of a token (proximal - behavior), c = l clamped to +-20, rho = e^c, w = the weight
the correction applied, tau = the threshold, <.> = mean over the tokens of the loss mask, [.] = mean over rows, a row
without such a token included with l = 0 (as ms-swift and verl count it), d = a row's mean of -l.

Sources: ms-swift's rollout-correction metrics, verl's rollout_corr_helper, PipelineRL's rl_step.
`docs/metrics.md` says what each name warns of.
"""

from dataclasses import dataclass, replace

import torch
from penstock.consumers.learning.mismatch_terms import (
    MAXIMA,
    ROW_TERMS,
    TOKEN_TERMS,
    Level,
    Tokens,
    maxima_of,
    row_terms,
    sums_by_bucket,
    token_terms,
)
from penstock.schemas.metrics import LAG_LABELS, lag_key
from torch import Tensor

SEEDS = "rollout_correction/"
"""Prefix of the names that ms-swift and verl gave."""
_ESS_EPSILON = 1e-8


def mismatch_metrics(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    weights: Tensor | None = None,
    lag: Tensor | None = None,
    threshold: float | None = None,
    advantages: Tensor | None = None,
    level: Level = "token",
) -> dict[str, float]:
    """Every diagnostic of one padded batch, by name; see `MismatchSums.of_packed` and `MismatchSums.metrics`.

    Args:
        train_logprobs, rollout_logprobs: [B, T], natural logarithms.
        loss_mask: [B, T] bool. What the other tensors hold where it is False is never read, NaN or garbage.
        weights, lag: [B, T]. advantages: [B, T], or [B] or [B, 1] for one per row.

    Raises:
        ValueError: shapes that do not fit, a threshold below 1, a lag below 0 where the mask is True.
    """
    if train_logprobs.dim() != 2:
        raise ValueError(f"train_logprobs has shape {tuple(train_logprobs.shape)}, expected [B, T]")
    num_rows, length = train_logprobs.shape
    if advantages is not None and advantages.shape in ((num_rows,), (num_rows, 1)):
        advantages = advantages.reshape(num_rows, 1).expand(num_rows, length)
    given = {"rollout_logprobs": rollout_logprobs, "loss_mask": loss_mask, "weights": weights, "lag": lag}
    for name, tensor in (given | {"advantages": advantages}).items():
        if tensor is not None and tensor.shape != train_logprobs.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(train_logprobs.shape)}")
    if loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask has dtype {loss_mask.dtype}, expected torch.bool")
    if lag is not None and lag.is_floating_point():
        raise ValueError(f"lag has dtype {lag.dtype}, expected an integer type")
    # Packed, every token is a sampled one and its lag counts for its row; here it may be padding.
    lag = None if lag is None else torch.where(loss_mask, lag, torch.zeros_like(lag))
    return MismatchSums.of_packed(
        train_logprobs.flatten(),
        rollout_logprobs.flatten(),
        loss_mask.flatten(),
        torch.arange(num_rows, device=train_logprobs.device).repeat_interleave(length),
        weights=None if weights is None else weights.flatten(),
        lag=None if lag is None else lag.flatten(),
        threshold=threshold,
        advantages=None if advantages is None else advantages.flatten(),
        level=level,
    ).metrics()


@dataclass(frozen=True)
class MismatchSums:
    """Sums, counts and extremes over some rows; those of more rows come from `merge`, in any order and grouping.

    Nothing here waits for a device: the tensors stay where the tokens were until `metrics` fetches them at once.
    Across ranks `tokens` and `rows` add and of `maxima` the larger counts: one all_reduce each.
    """

    tokens: Tensor
    """[5, len(TOKEN_TERMS)] float64: sums over the loss mask's tokens by lag bucket; without lags all in the first."""
    rows: Tensor
    """[len(ROW_TERMS)] float64: sums over the rows."""
    maxima: Tensor
    """[len(MAXIMA)] float64, -inf over nothing."""
    threshold: float | None
    level: Level
    known: frozenset[str]
    """Which of the optional inputs were there: what rests on another is left out of the metrics."""

    @classmethod
    @torch.no_grad()
    def of_packed(
        cls,
        train_logprobs: Tensor,
        rollout_logprobs: Tensor,
        loss_mask: Tensor,
        row_ids: Tensor,
        *,
        weights: Tensor | None = None,
        lag: Tensor | None = None,
        threshold: float | None = None,
        advantages: Tensor | None = None,
        keep_mask: Tensor | None = None,
        corrected_mask: Tensor | None = None,
        current_logprobs: Tensor | None = None,
        level: Level = "token",
    ) -> "MismatchSums":
        """The sums of M sampled tokens, whole rows packed one behind the other.

        Args:
            train_logprobs: [M] natural logarithms, the proximal policy's.
            rollout_logprobs: [M], the behavior policies'.
            loss_mask: [M] bool, before the correction's own mask. Where it is False only `lag` is read.
            row_ids: [M] int64 ascending. A row without an unmasked token counts as an empty row.
            weights: [M] as `correct` returned them, 0 where rejected.
            lag: [M] int64 of every sampled token, masked ones included.
            threshold: the importance threshold (of lag 0), at least 1.
            advantages: [M].
            keep_mask: [M] bool, False where the correction rejects; left out, a weight of 0 says so.
            corrected_mask: [M] bool, True where it rejects or bounds the weight, by the threshold of the token's lag.
            current_logprobs: [M], the policy under update where it has left the proximal one; for kl_new_old alone.
            level: what `clipped_frac` holds against the threshold: each token's rho, or each row's geometric mean
                or product of them.

        Raises:
            ValueError: shapes that differ, a mask that is not bool, a threshold below 1, an unknown level.
        """
        optional = {"weights": weights, "lag": lag, "advantages": advantages, "keep_mask": keep_mask}
        optional["corrected_mask"] = corrected_mask
        tensors = {"rollout_logprobs": rollout_logprobs, "loss_mask": loss_mask, "row_ids": row_ids, **optional}
        for name, tensor in (tensors | {"current_logprobs": current_logprobs}).items():
            if tensor is not None and (tensor.dim() != 1 or tensor.shape != train_logprobs.shape):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, expected that of train_logprobs, [M]; "
                    f"got {tuple(train_logprobs.shape)} there"
                )
        if loss_mask.dtype != torch.bool:
            raise ValueError(f"loss_mask has dtype {loss_mask.dtype}, expected torch.bool")
        if threshold is not None and not threshold >= 1:
            raise ValueError(f"threshold = {threshold}: expected at least 1")
        if level not in ("token", "geometric", "product"):
            raise ValueError(f"level = {level!r}: expected 'token', 'geometric' or 'product'")
        tokens = Tokens.of(train_logprobs, rollout_logprobs, loss_mask, row_ids, current_logprobs, threshold)
        rows = row_terms(tokens, level)
        known = {name for name, tensor in optional.items() if tensor is not None}
        return cls(
            tokens=sums_by_bucket(token_terms(tokens, weights, lag, advantages, keep_mask, corrected_mask), lag),
            rows=torch.stack([rows[name].sum() for name in ROW_TERMS]),
            maxima=maxima_of(tokens, rows["diff"]),
            threshold=threshold,
            level=level,
            known=frozenset(known | ({"threshold"} if threshold is not None else set())),
        )

    def merge(self, other: "MismatchSums") -> "MismatchSums":
        """The sums over the rows of both. A record without rows changes nothing.

        Raises:
            ValueError: the two were made with different inputs, thresholds or levels.
        """
        for name in ("known", "threshold", "level"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"merge: {name} is {mine!r} here and {theirs!r} there, expected the same")
        return replace(
            self,
            tokens=self.tokens + other.tokens,
            rows=self.rows + other.rows,
            maxima=torch.maximum(self.maxima, other.maxima),
        )

    def metrics(self) -> dict[str, float]:
        """All names with their values, the sums fetched in one transfer.

        What rests on an input that was not given is left out, as is a lag bucket without tokens and the masked share
        of a sign of the advantage that no token has. Without a single token in the mask the rest has the values of
        identical policies: 0 for divergences and shares, 1 for perplexities, ratios, weights and effective sizes.

        Raises:
            ValueError: tokens of a lag below 0.
        """
        values = torch.cat([self.tokens.flatten(), self.rows, self.maxima]).tolist()
        width = len(TOKEN_TERMS)
        buckets = [
            dict(zip(TOKEN_TERMS, values[i * width : (i + 1) * width], strict=True)) for i in range(len(LAG_LABELS))
        ]
        rest = values[len(LAG_LABELS) * width :]
        rows = dict(zip(ROW_TERMS, rest, strict=False))
        extremes = dict(zip(MAXIMA, rest[len(ROW_TERMS) :], strict=True))
        total = {name: sum(bucket[name] for bucket in buckets) for name in TOKEN_TERMS}
        if total["num_lags_below_0"]:
            raise ValueError(f"lag: {total['num_lags_below_0']:.0f} tokens have a lag below 0, expected 0 or more")
        found = self._seeds(total, rows, extremes) | self._ours(total, rows, extremes)
        if "lag" in self.known:
            if total["num_fresh"]:
                found["mismatch_lag0"] = total["fresh_gap"] / total["num_fresh"]
            for label, bucket in zip(LAG_LABELS, buckets, strict=True):
                if bucket["num_tokens"]:
                    found |= {lag_key(name, label): value for name, value in self._of_bucket(bucket).items()}
        return found

    def _seeds(self, total: dict[str, float], rows: dict[str, float], extremes: dict[str, float]) -> dict[str, float]:
        """Under the seeds' names and by their formulas, epsilons and empty rows included."""
        has_rows, num_filled = rows["num_rows"] > 0, max(rows["num_filled"], 1.0)
        found = {
            "kl": _mean(total, "minus_l"),
            "k3_kl": _mean(total, "k3"),
            "chi2_token": _mean(total, "rho_squared", 1.0) - 1,
            **{name: rows[name] / rows["num_rows"] if has_rows else empty for name, empty in _ROW_MEANS.items()},
            "log_ppl_diff_max": extremes["diff"] if has_rows else 0.0,
            "log_ppl_diff_min": -extremes["minus_diff"] if has_rows else 0.0,
        }
        found["chi2_seq"] -= 1
        if "threshold" in self.known:
            by_token = self.level == "token"
            found["clipped_frac"] = (
                _mean(total, "above") if by_token else rows["above"] / rows["num_rows"] if has_rows else 0.0
            )
        if "weights" in self.known:
            found["is_weight_mean"] = _mean(total, "weight", 1.0)
        if {"weights", "threshold"} <= self.known:
            mean, square = _mean(total, "bounded", 1.0), _mean(total, "bounded_squared", 1.0)
            found["ess"] = (mean + _ESS_EPSILON) ** 2 / square if total["num_tokens"] else 1.0
        pipeline = {"kl_new_old": rows["kl_new_old"] / num_filled}
        if "threshold" in self.known:
            pipeline["clamp_log_ratio_new_old_indicator"] = rows["above_in_row"] / num_filled
        return {SEEDS + name: value for name, value in found.items()} | pipeline

    def _ours(self, total: dict[str, float], rows: dict[str, float], extremes: dict[str, float]) -> dict[str, float]:
        found = {name: value for name, value in self._of_bucket(total).items() if name not in _ONLY_BY_LAG}
        has_tokens = total["num_tokens"] > 0
        return found | {
            "ratio_mean": _mean(total, "rho", 1.0),
            "ratio_max": extremes["rho"] if has_tokens else 1.0,
            "ratio_min": -extremes["minus_rho"] if has_tokens else 1.0,
            "k3_kl_unclamped": _mean(total, "k3_unclamped"),
            "chi2_seq_product": rows["chi2_product"] / rows["num_rows"] - 1 if rows["num_rows"] else 0.0,
        }

    def _of_bucket(self, sums: dict[str, float]) -> dict[str, float]:
        """What there is of every lag bucket and, but for `_ONLY_BY_LAG`, of the whole."""
        found = {
            "num_tokens": sums["num_tokens"],
            "kl": _mean(sums, "minus_l"),
            "k3_kl": _mean(sums, "k3"),
            "chi2": _mean(sums, "rho_squared", 1.0) - 1,
            "ess_fraction": _ess_fraction(sums, "rho"),
        }
        if "weights" in self.known:
            found["applied_ess_fraction"] = _ess_fraction(sums, "weight")
            found["weight_mean"] = _mean(sums, "weight", 1.0)
        if "corrected_mask" in self.known:
            found["corrected_frac"] = _mean(sums, "corrected")
        if self.known & {"weights", "keep_mask"}:
            found["masked_frac"] = _mean(sums, "masked")
            if "advantages" in self.known:
                for sign in ("positive", "negative"):
                    if sums[f"num_{sign}"]:
                        found[f"masked_frac_{sign}"] = sums[f"masked_{sign}"] / sums[f"num_{sign}"]
        return found


_ROW_MEANS = {
    "training_ppl": 1.0,
    "training_log_ppl": 0.0,
    "rollout_ppl": 1.0,
    "rollout_log_ppl": 0.0,
    "log_ppl_diff": 0.0,
    "log_ppl_abs_diff": 0.0,
    "ppl_ratio": 1.0,
    "chi2_seq": 1.0,
}
"""The seeds' means over rows, with their value where there is no row; of chi2_seq before 1 is taken off."""
_ONLY_BY_LAG = frozenset(("num_tokens", "kl", "k3_kl"))
"""Of the whole batch these have the seeds' names, and the trainer's own count of tokens."""


def _mean(sums: dict[str, float], name: str, of_none: float = 0.0) -> float:
    return sums[name] / sums["num_tokens"] if sums["num_tokens"] else of_none


def _ess_fraction(sums: dict[str, float], name: str) -> float:
    """(sum v)^2 / (N sum v^2), N the tokens of the loss mask; 0 where every weight is 0, 1 without a token."""
    if not sums["num_tokens"]:
        return 1.0
    squared = sums["num_tokens"] * sums[f"{name}_squared"]
    return sums[name] ** 2 / squared if squared else 0.0
