"""The distance between the sampling policies and the trainer's: sums over tokens and rows that add up over
micro-batches.

Notation: l = train - rollout logprob of a token (proximal - behavior), c = l clamped to +-20, rho = e^c, w = the weight
the correction applied, tau = the threshold, <.> = mean over the tokens of the loss mask, [.] = mean over rows, a row
without such a token included with l = 0 (as ms-swift and verl count it), d = a row's mean of -l.

Sources: ms-swift's rollout-correction metrics, verl's rollout_corr_helper, PipelineRL's rl_step.
`docs/metrics.md` says what each name warns of.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from penstock.consumers.learning.rows import clamped, row_numbers
from penstock.schemas.metrics import LAG_LABELS, LAG_STARTS, lag_key

PEER_PREFIX = "rollout_correction/"
"""Prefix of the metrics named by ms-swift and verl."""
K3_BOUND = 10.0
"""Bound of a token's k3 estimate, as in ms-swift; verl has none."""
EXP_BOUND = 100.0
"""Bound of exponents that the peers leave unbounded: e^100 keeps any sum finite, and no run that learns comes near."""

Level = Literal["token", "geometric", "product"]

TOKEN_TERMS = (
    *("num_tokens", "minus_l", "abs_l", "k3", "k3_unclamped", "rho", "rho_squared", "above"),
    *("weight", "weight_squared", "bounded", "bounded_squared"),
    *("corrected", "masked", "num_positive", "masked_positive", "num_negative", "masked_negative"),
)
ROW_TERMS = (
    *("num_rows", "num_filled", "training_log_ppl", "training_ppl", "rollout_log_ppl", "rollout_ppl"),
    *("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "chi2_seq", "chi2_product", "above"),
    *("kl_new_old", "above_in_row"),
)
MAXIMA = ("diff", "minus_diff", "rho", "minus_rho")
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
"""The peers' means over rows, with their value without rows; chi2_seq before 1 is subtracted."""
_ONLY_BY_LAG = frozenset(("num_tokens", "kl", "k3_kl"))
"""For the whole batch these are reported under the peers' names, or as the trainer's own token count."""
_ESS_EPSILON = 1e-8


@dataclass(frozen=True)
class MismatchSums:
    """Sums, counts and extremes over some rows; those of more rows come from `merge`, in any order and grouping.

    Nothing here waits for a device: the tensors stay on the tokens' device until `metrics` fetches them together.
    """

    tokens: Tensor
    """[E, 6, len(TOKEN_TERMS)] float64: sums over the loss mask's tokens by environment and lag bucket; without
    environments one, without lags all in the first bucket."""
    rows: Tensor
    """[len(ROW_TERMS)] float64: sums over the rows."""
    maxima: Tensor
    """[len(MAXIMA)] float64, -inf over nothing."""
    threshold: float | None
    level: Level
    known: frozenset[str]
    """The optional inputs that were given; metrics that need another one are left out."""

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
        environments: Tensor | None = None,
        num_environments: int = 1,
    ) -> "MismatchSums":
        """Returns the sums of M sampled tokens, whole rows packed one after another.

        Args:
            train_logprobs: [M] natural logarithms, the proximal policy's.
            rollout_logprobs: [M], the behavior policies'.
            loss_mask: [M] bool, before the correction's own mask. If it is False only `lag` is read.
            row_ids: [M] int64 ascending. A row without an unmasked token counts as an empty row.
            weights: [M] as `correct_packed` returns them, 0 where rejected.
            lag: [M] int64 of every sampled token, masked ones included.
            threshold: the importance threshold (of lag 0), at least 1.
            advantages: [M].
            keep_mask: [M] bool, False where the correction rejects; left out, a weight of 0 says so.
            corrected_mask: [M] bool, True where it rejects or bounds the weight, by the threshold of the token's lag.
            current_logprobs: [M], the policy under update if it has left the proximal one; for kl_new_old alone.
            level: what `clipped_frac` compares with the threshold: each token's rho, or each row's geometric mean or
                product of them.
            environments: [M] int64, the number of each token's environment, below `num_environments`.
        """
        given = {"weights": weights, "lag": lag, "threshold": threshold, "advantages": advantages}
        given |= {"keep_mask": keep_mask, "corrected_mask": corrected_mask}
        tokens = Tokens.of(train_logprobs, rollout_logprobs, loss_mask, row_ids, current_logprobs, threshold)
        rows = row_terms(tokens, level)
        terms = token_terms(tokens, weights, advantages, keep_mask, corrected_mask)
        buckets = lag_buckets(lag, tokens.row)
        if environments is not None:
            buckets = buckets + len(LAG_LABELS) * environments
        return cls(
            tokens=sums_by_bucket(terms, buckets, num_environments),
            rows=torch.stack([rows[name].sum() for name in ROW_TERMS]),
            maxima=maxima_of(tokens, rows["diff"]),
            threshold=threshold,
            level=level,
            known=frozenset(name for name, value in given.items() if value is not None),
        )

    def merge(self, other: "MismatchSums") -> "MismatchSums":
        """Returns the sums over the rows of both, which were made with the same inputs, threshold and level."""
        return replace(
            self,
            tokens=self.tokens + other.tokens,
            rows=self.rows + other.rows,
            maxima=torch.maximum(self.maxima, other.maxima),
        )

    def scaled(self, factor: float) -> "MismatchSums":
        """Returns the sums of `factor` times as many rows like these."""
        return replace(self, tokens=self.tokens * factor, rows=self.rows * factor)

    def cpu(self) -> "MismatchSums":
        return replace(self, tokens=self.tokens.cpu(), rows=self.rows.cpu(), maxima=self.maxima.cpu())

    def metrics(self) -> dict[str, float]:
        """Returns all metrics by name; the sums are fetched in one transfer.

        Left out are metrics that need an input that was not given, lag buckets without tokens, and the masked share of
        a sign of the advantage that no token has. Without a token in the mask the rest have the values of identical
        policies: 0 for divergences and shares, 1 for perplexities, ratios, weights and effective sizes.
        """
        values = iter(torch.cat([self.tokens.sum(0).flatten(), self.rows, self.maxima]).tolist())
        buckets = [dict(zip(TOKEN_TERMS, values, strict=False)) for _ in LAG_LABELS]
        rows, extremes = (dict(zip(names, values, strict=False)) for names in (ROW_TERMS, MAXIMA))
        total = {name: sum(bucket[name] for bucket in buckets) for name in TOKEN_TERMS}
        found = self._peer_metrics(total, rows, extremes) | self._own_metrics(total, rows, extremes)
        if "lag" in self.known:
            if buckets[0]["num_tokens"]:
                found["mismatch_lag0"] = _mean(buckets[0], "abs_l")
            for label, bucket in zip(LAG_LABELS, buckets, strict=True):
                if bucket["num_tokens"]:
                    found |= {lag_key(name, label): value for name, value in self._bucket_metrics(bucket).items()}
        return found

    def by_environment(self) -> list[dict[str, float]]:
        """Returns a lag bucket's metrics for each environment's tokens; empty without tokens in the loss mask."""
        sums = [dict(zip(TOKEN_TERMS, own, strict=True)) for own in self.tokens.sum(1).tolist()]
        return [self._bucket_metrics(own) if own["num_tokens"] else {} for own in sums]

    def _peer_metrics(
        self, total: dict[str, float], rows: dict[str, float], extremes: dict[str, float]
    ) -> dict[str, float]:
        """Returns the peers' metrics under their names and by their formulas, including epsilons and empty rows."""
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
        return {PEER_PREFIX + name: value for name, value in found.items()} | pipeline

    def _own_metrics(
        self, total: dict[str, float], rows: dict[str, float], extremes: dict[str, float]
    ) -> dict[str, float]:
        found = {name: value for name, value in self._bucket_metrics(total).items() if name not in _ONLY_BY_LAG}
        has_tokens = total["num_tokens"] > 0
        return found | {
            "ratio_mean": _mean(total, "rho", 1.0),
            "ratio_max": extremes["rho"] if has_tokens else 1.0,
            "ratio_min": -extremes["minus_rho"] if has_tokens else 1.0,
            "k3_kl_unclamped": _mean(total, "k3_unclamped"),
            "chi2_seq_product": rows["chi2_product"] / rows["num_rows"] - 1 if rows["num_rows"] else 0.0,
        }

    def _bucket_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of a lag bucket or an environment, and, except `_ONLY_BY_LAG`, of the whole batch."""
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


def _mean(sums: dict[str, float], name: str, of_none: float = 0.0) -> float:
    return sums[name] / sums["num_tokens"] if sums["num_tokens"] else of_none


def _ess_fraction(sums: dict[str, float], name: str) -> float:
    """Returns (sum v)^2 / (N sum v^2), N the tokens of the loss mask; 0 if every weight is 0, 1 without tokens."""
    if not sums["num_tokens"]:
        return 1.0
    squared = sums["num_tokens"] * sums[f"{name}_squared"]
    return sums[name] ** 2 / squared if squared else 0.0


@dataclass(frozen=True)
class Tokens:
    """Values of M tokens, [M] float64, 0 under the mask; row: [M] int64, each token's row counted from 0."""

    mask: Tensor
    row: Tensor
    train: Tensor
    rollout: Tensor
    clamped: Tensor
    rho: Tensor
    above: Tensor
    new_old: Tensor
    threshold: float | None

    @classmethod
    def of(
        cls,
        train_logprobs: Tensor,
        rollout_logprobs: Tensor,
        loss_mask: Tensor,
        row_ids: Tensor,
        current_logprobs: Tensor | None,
        threshold: float | None,
    ) -> "Tokens":
        train, rollout = _where(loss_mask, train_logprobs), _where(loss_mask, rollout_logprobs)
        log_ratios = clamped(train - rollout)
        rho = _where(loss_mask, log_ratios.exp())
        current = train if current_logprobs is None else _where(loss_mask, current_logprobs)
        return cls(
            mask=loss_mask,
            row=row_numbers(row_ids),
            train=train,
            rollout=rollout,
            clamped=log_ratios,
            rho=rho,
            above=torch.zeros_like(rho) if threshold is None else (rho > threshold).double(),
            new_old=clamped(current - rollout),
            threshold=threshold,
        )


def token_terms(
    tokens: Tokens,
    weights: Tensor | None,
    advantages: Tensor | None,
    keep_mask: Tensor | None,
    corrected_mask: Tensor | None,
) -> dict[str, Tensor]:
    """Returns [M] for each of TOKEN_TERMS that the inputs allow, 0 under the mask."""
    mask, rho = tokens.mask, tokens.rho
    log_ratios = tokens.train - tokens.rollout
    terms = {
        "num_tokens": mask,
        "minus_l": -log_ratios,
        "abs_l": log_ratios.abs(),
        # Masked tokens have l = 0, and k3 of that is 0.
        "k3": bounded_k3(log_ratios),
        "k3_unclamped": log_ratios.clamp(max=EXP_BOUND).exp() - log_ratios - 1,
        "rho": rho,
        "rho_squared": rho.square(),
        "above": tokens.above,
    }
    if weights is not None:
        applied = _where(mask, weights)
        terms |= {"weight": applied, "weight_squared": applied.square()}
        if tokens.threshold is not None:
            bounded = _where(mask, applied.clamp(1 / tokens.threshold, tokens.threshold))
            terms |= {"bounded": bounded, "bounded_squared": bounded.square()}
    if corrected_mask is not None:
        terms["corrected"] = mask & corrected_mask
    if keep_mask is not None or weights is not None:
        rejected = ~keep_mask if keep_mask is not None else weights == 0
        terms["masked"] = masked = mask & rejected
        if advantages is not None:
            positive, negative = mask & (advantages > 0), mask & (advantages < 0)
            terms |= {"num_positive": positive, "masked_positive": positive & masked}
            terms |= {"num_negative": negative, "masked_negative": negative & masked}
    return terms


def bounded_k3(log_ratios: Tensor) -> Tensor:
    """Returns k3 = e^c - c - 1 of each token, at most `K3_BOUND`."""
    bounded = clamped(log_ratios)
    return (bounded.exp() - bounded - 1).clamp(max=K3_BOUND)


def lag_buckets(lag: Tensor | None, row: Tensor) -> Tensor:
    """Returns [M] int64, each token's place in LAG_LABELS; 0 without lags. row: [M] int64, counted from 0.

    A token of lag 0 in a row with older tokens attended to keys and values of older weights: it has its own bucket.
    """
    if lag is None:
        return torch.zeros_like(row)
    oldest = torch.zeros_like(lag).scatter_reduce(0, row, lag, "amax")
    bucket = (oldest[row] > 0).long()
    for start in LAG_STARTS:
        bucket += lag >= start
    return bucket


def sums_by_bucket(terms: Mapping[str, Tensor], buckets: Tensor, num_environments: int) -> Tensor:
    """Sums `token_terms` by environment and lag bucket: [num_environments, 6, len(TOKEN_TERMS)] float64.

    buckets: [M] int64, the environment's number times 6, and the place in LAG_LABELS.
    """
    some = terms["num_tokens"]
    zero = torch.zeros(len(some), dtype=torch.float64, device=some.device)
    columns = torch.stack([terms[name].double() if name in terms else zero for name in TOKEN_TERMS], dim=1)
    sums = torch.zeros(num_environments * len(LAG_LABELS), len(TOKEN_TERMS), dtype=torch.float64, device=some.device)
    return sums.index_add_(0, buckets, columns).view(num_environments, len(LAG_LABELS), len(TOKEN_TERMS))


def row_terms(tokens: Tokens, level: Level) -> dict[str, Tensor]:
    """Returns [M] for each of ROW_TERMS, one element per row, then 0; and `diff`, then -inf.

    M is the largest possible number of rows. To ask for their number would wait for the device.
    """
    x, mask = tokens.new_old, tokens.mask
    columns = torch.stack(
        [mask.double(), tokens.train, tokens.rollout, tokens.clamped, x.exp() - x - 1, tokens.above], dim=1
    )
    count, train, rollout, bounded, kl_new_old, above = (
        torch.zeros_like(columns).index_add_(0, tokens.row, columns).unbind(1)
    )
    exists = torch.zeros_like(mask).index_fill_(0, tokens.row, True)
    filled = count.clamp(min=1)
    log_ratio = train - rollout
    mean = log_ratio / filled
    geometric, product = (bounded / filled).exp(), clamped(log_ratio).exp()
    above_row = geometric if level == "geometric" else product
    terms = {
        "num_rows": exists,
        "num_filled": count > 0,
        "training_log_ppl": -train / filled,
        "training_ppl": _exp(-train / filled),
        "rollout_log_ppl": -rollout / filled,
        "rollout_ppl": _exp(-rollout / filled),
        "log_ppl_diff": -mean,
        "log_ppl_abs_diff": mean.abs(),
        "ppl_ratio": _exp(-mean),
        "chi2_seq": clamped(mean).mul(2).exp(),
        "chi2_product": product.square(),
        "above": above_row > (tokens.threshold or torch.inf),
        "kl_new_old": kl_new_old / filled,
        "above_in_row": above / filled,
    }
    found = {name: _where(exists, term) for name, term in terms.items()}
    return found | {"diff": torch.where(exists, -mean, -torch.inf)}


def maxima_of(tokens: Tokens, diff: Tensor) -> Tensor:
    """Returns [len(MAXIMA)] float64: the maximum of each over rows or tokens, -inf over none."""
    nothing = torch.full_like(diff, -torch.inf)
    minus_diff = torch.where(diff > -torch.inf, -diff, nothing)
    rho = torch.where(tokens.mask, tokens.rho, nothing)
    columns = torch.stack([diff, minus_diff, rho, torch.where(tokens.mask, -rho, nothing)], dim=1)
    return torch.cat([columns, nothing.new_full((1, len(MAXIMA)), -torch.inf)]).amax(0)


def _where(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values.detach().double(), 0.0)


def _exp(exponents: Tensor) -> Tensor:
    return exponents.clamp(max=EXP_BOUND).exp()
