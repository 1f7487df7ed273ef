"""The distance between the sampling policies and the trainer's: sums over tokens and rows that add up over
micro-batches.

Notation: l = train - rollout logprob of a token (proximal - behavior), c = l clamped to +-20, rho = e^c, w = the weight
the correction applied, tau = the threshold, <.> = mean over the tokens of the loss mask, [.] = mean over rows, a row
without such a token included with l = 0 (as ms-swift and verl count it), d = a row's mean of -l.

Sources: ms-swift's rollout-correction metrics, verl's rollout_corr_helper, PipelineRL's rl_step.
`docs/metrics.md` says what each name warns of.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.consumers.learning.loss.importance import Correction
from penstock.consumers.learning.loss.rows import clamped, row_numbers
from penstock.schemas.metrics import LAG_LABELS, LAG_STARTS, lag_key

PEER_PREFIX = "rollout_correction/"
"""Prefix of the metrics named by ms-swift and verl."""
K3_BOUND = 10.0
"""Bound of a token's k3 estimate, as in ms-swift; verl has none."""
EXP_BOUND = 100.0
"""Bound of exponents that the peers leave unbounded: e^100 keeps any sum finite, and no run that learns comes near."""
_ESS_EPSILON = 1e-8

Level = Literal["token", "geometric", "product"]

TOKEN_TERMS = (
    *("num_tokens", "minus_l", "abs_l", "k3", "k3_unclamped", "rho", "rho_squared", "above"),
    *("weight", "weight_squared", "bounded", "bounded_squared", "policy_ratio", "policy_ratio_squared"),
    *("corrected", "rejected", "num_positive", "rejected_positive", "num_negative", "rejected_negative"),
)
_BUCKET_TERMS = (*TOKEN_TERMS, "masked_lag")
"""Of a lag bucket or an environment: also its tokens beyond the lag bound, which are not in the loss mask."""
ROW_TERMS = (
    *("num_rows", "num_filled", "training_log_ppl", "training_ppl", "rollout_log_ppl", "rollout_ppl"),
    *("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "chi2_seq", "chi2_product", "row_above"),
    *("kl_new_old", "above_in_row"),
)
MAXIMA = ("diff", "minus_diff", "rho", "minus_rho")


class _Mean(NamedTuple):
    """A metric that is one sum divided by another, less a constant. of_none: the quotient without any token or row."""

    term: str
    over: str = "num_tokens"
    of_none: float = 0.0
    less: float = 0.0

    def of(self, sums: dict[str, float]) -> float:
        return (sums[self.term] / sums[self.over] if sums[self.over] else self.of_none) - self.less


_OF_BUCKETS = {"kl": _Mean("minus_l"), "k3_kl": _Mean("k3")}
"""Of a lag bucket or an environment alone: the whole batch has them under the peers' names."""
_OF_TOKENS = {
    "chi2": _Mean("rho_squared", of_none=1.0, less=1.0),
    "policy_chi2": _Mean("policy_ratio_squared", of_none=1.0, less=1.0),
    "weight_mean": _Mean("weight", of_none=1.0),
    "corrected_frac": _Mean("corrected"),
}
"""Of a lag bucket, an environment or the whole batch."""
_OF_BATCH = {
    PEER_PREFIX + "kl": _Mean("minus_l"),
    PEER_PREFIX + "k3_kl": _Mean("k3"),
    PEER_PREFIX + "chi2_token": _Mean("rho_squared", of_none=1.0, less=1.0),
    PEER_PREFIX + "chi2_seq": _Mean("chi2_seq", "num_rows", of_none=1.0, less=1.0),
    PEER_PREFIX + "training_ppl": _Mean("training_ppl", "num_rows", of_none=1.0),
    PEER_PREFIX + "training_log_ppl": _Mean("training_log_ppl", "num_rows"),
    PEER_PREFIX + "rollout_ppl": _Mean("rollout_ppl", "num_rows", of_none=1.0),
    PEER_PREFIX + "rollout_log_ppl": _Mean("rollout_log_ppl", "num_rows"),
    PEER_PREFIX + "log_ppl_diff": _Mean("log_ppl_diff", "num_rows"),
    PEER_PREFIX + "log_ppl_abs_diff": _Mean("log_ppl_abs_diff", "num_rows"),
    PEER_PREFIX + "ppl_ratio": _Mean("ppl_ratio", "num_rows", of_none=1.0),
    PEER_PREFIX + "is_weight_mean": _Mean("weight", of_none=1.0),
    "kl_new_old": _Mean("kl_new_old", "num_filled"),
    "clamp_log_ratio_new_old_indicator": _Mean("above_in_row", "num_filled"),
    "ratio_mean": _Mean("rho", of_none=1.0),
    "k3_kl_unclamped": _Mean("k3_unclamped"),
    "chi2_seq_product": _Mean("chi2_product", "num_rows", of_none=1.0, less=1.0),
}
"""Of the whole batch; the peers count empty rows too."""


@dataclass(frozen=True)
class MismatchSums:
    """Sums, counts and extremes over some rows; those of more rows come from `merge`, in any order and grouping.

    Nothing here waits for a device: the tensors stay on the tokens' device until `metrics` fetches them together.
    """

    tokens: Tensor
    """[E, 6, len(TOKEN_TERMS)] float64: sums over the loss mask's tokens by environment and lag bucket."""
    rows: Tensor
    """[len(ROW_TERMS)] float64: sums over the rows."""
    maxima: Tensor
    """[len(MAXIMA)] float64, -inf over nothing."""
    level: Level

    @classmethod
    @torch.no_grad()
    def of_packed(
        cls,
        train_logprobs: Tensor,
        rollout_logprobs: Tensor,
        loss_mask: Tensor,
        row_ids: Tensor,
        lag: Tensor,
        correction: Correction,
        *,
        threshold: float,
        advantages: Tensor,
        level: Level = "token",
        current_logprobs: Tensor | None = None,
        environments: Tensor | None = None,
        num_environments: int = 1,
    ) -> "MismatchSums":
        """Returns the sums of M sampled tokens, whole rows packed one after another.

        Args:
            train_logprobs: [M] natural logarithms, the proximal policy's.
            rollout_logprobs: [M], the behavior policies'.
            loss_mask: [M] bool, before the correction's own mask. If it is False only `lag` is read.
            row_ids: [M] int64 ascending. A row without an unmasked token counts as an empty row.
            lag: [M] int64 of every sampled token, masked ones included.
            threshold: the importance threshold, at least 1.
            advantages: [M].
            level: what `clipped_frac` compares with the threshold: each token's rho, or each row's geometric mean or
                product of them.
            current_logprobs: [M], the policy under update if it has left the proximal one; for kl_new_old, policy_chi2
                and policy_ess_fraction.
            environments: [M] int64, the number of each token's environment, below `num_environments`; 0 if left out.
        """
        train, rollout = _where(loss_mask, train_logprobs), _where(loss_mask, rollout_logprobs)
        current = train if current_logprobs is None else _where(loss_mask, current_logprobs)
        row = row_numbers(row_ids)
        terms = token_terms(train - rollout, current - train, loss_mask, correction, advantages, threshold)
        rows = row_terms(loss_mask, row, train, rollout, current, terms["above"], threshold, level)
        buckets = lag_buckets(lag, row)
        if environments is not None:
            buckets = buckets + len(LAG_LABELS) * environments
        columns = torch.stack([terms[name].double() for name in TOKEN_TERMS], dim=1)
        sums = columns.new_zeros(num_environments * len(LAG_LABELS), len(TOKEN_TERMS)).index_add_(0, buckets, columns)
        return cls(
            tokens=sums.view(num_environments, len(LAG_LABELS), len(TOKEN_TERMS)),
            rows=torch.stack([rows[name].sum() for name in ROW_TERMS]),
            maxima=maxima_of(loss_mask, terms["rho"], rows["diff"]),
            level=level,
        )

    def merge(self, other: "MismatchSums") -> "MismatchSums":
        """Returns the sums over the rows of both, which were made with the same threshold and level."""
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

    def metrics(self, masked_by_lag: Tensor | None = None) -> dict[str, float]:
        """Returns all metrics by name; the sums are fetched in one transfer.

        Left out are lag buckets without tokens, and the rejected share of a sign of the advantage that no token has.
        Without a token in the mask the rest have the values of identical policies: 0 for divergences and shares, 1 for
        perplexities, ratios, weights and effective sizes.

        masked_by_lag: [E, 6], tokens beyond the lag bound by environment and lag bucket. They count in `masked_frac`
            alone, and a bucket or an environment that has no others has this metric only.
        """
        tokens = self._with_masked(masked_by_lag).sum(0)
        values = iter(torch.cat([tokens.flatten(), self.rows, self.maxima]).tolist())
        buckets = [dict(zip(_BUCKET_TERMS, values, strict=False)) for _ in LAG_LABELS]
        rows, extremes = (dict(zip(names, values, strict=False)) for names in (ROW_TERMS, MAXIMA))
        sums = {name: sum(bucket[name] for bucket in buckets) for name in _BUCKET_TERMS} | rows
        by_token, has_tokens, has_rows = self.level == "token", sums["num_tokens"] > 0, sums["num_rows"] > 0
        clipped = _Mean("above") if by_token else _Mean("row_above", "num_rows")
        weight, square = (_Mean(name, of_none=1.0).of(sums) for name in ("bounded", "bounded_squared"))
        found = {name: mean.of(sums) for name, mean in _OF_BATCH.items()} | {
            PEER_PREFIX + "log_ppl_diff_max": extremes["diff"] if has_rows else 0.0,
            PEER_PREFIX + "log_ppl_diff_min": -extremes["minus_diff"] if has_rows else 0.0,
            PEER_PREFIX + "clipped_frac": clipped.of(sums),
            PEER_PREFIX + "ess": (weight + _ESS_EPSILON) ** 2 / square if has_tokens else 1.0,
            "ratio_max": extremes["rho"] if has_tokens else 1.0,
            "ratio_min": -extremes["minus_rho"] if has_tokens else 1.0,
            **_token_metrics(sums),
        }
        if buckets[0]["num_tokens"]:
            found["mismatch_lag0"] = _Mean("abs_l").of(buckets[0])
        for label, bucket in zip(LAG_LABELS, buckets, strict=True):
            found |= {lag_key(name, label): value for name, value in _bucket_metrics(bucket).items()}
        return found

    def by_environment(self, masked_by_lag: Tensor | None = None) -> list[dict[str, float]]:
        """Returns a lag bucket's metrics for each environment's tokens; see `metrics`."""
        sums = self._with_masked(masked_by_lag).sum(1).tolist()
        return [_bucket_metrics(dict(zip(_BUCKET_TERMS, values, strict=True))) for values in sums]

    def _with_masked(self, masked_by_lag: Tensor | None) -> Tensor:
        """Returns [E, 6, len(_BUCKET_TERMS)] float64."""
        masked = torch.zeros(self.tokens.shape[:2]) if masked_by_lag is None else masked_by_lag
        return torch.cat([self.tokens, masked.to(self.tokens)[..., None]], dim=-1)


def _bucket_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of a lag bucket or an environment; empty without tokens."""
    if not sums["num_tokens"]:
        return {"masked_frac": 1.0} if sums["masked_lag"] else {}
    means = {name: mean.of(sums) for name, mean in _OF_BUCKETS.items()}
    return {"num_tokens": sums["num_tokens"], **means, **_token_metrics(sums)}


def _token_metrics(sums: dict[str, float]) -> dict[str, float]:
    found = {name: mean.of(sums) for name, mean in _OF_TOKENS.items()}
    found["ess_fraction"] = _ess_fraction(sums, "rho")
    found["applied_ess_fraction"] = _ess_fraction(sums, "weight")
    found["policy_ess_fraction"] = _ess_fraction(sums, "policy_ratio")
    num_sampled = sums["num_tokens"] + sums["masked_lag"]
    found["masked_frac"] = (sums["rejected"] + sums["masked_lag"]) / num_sampled if num_sampled else 0.0
    for sign in ("positive", "negative"):
        if sums[f"num_{sign}"]:
            found[f"rejected_frac_{sign}"] = sums[f"rejected_{sign}"] / sums[f"num_{sign}"]
    return found


def _ess_fraction(sums: dict[str, float], name: str) -> float:
    """Returns (sum v)^2 / (N sum v^2), N the tokens of the loss mask; 0 if every weight is 0, 1 without tokens."""
    if not sums["num_tokens"]:
        return 1.0
    squared = sums["num_tokens"] * sums[f"{name}_squared"]
    return sums[name] ** 2 / squared if squared else 0.0


def token_terms(
    log_ratios: Tensor,
    policy_log_ratios: Tensor,
    mask: Tensor,
    correction: Correction,
    advantages: Tensor,
    threshold: float,
) -> dict[str, Tensor]:
    """Returns [M] for each of TOKEN_TERMS, 0 under the mask.

    Args:
        log_ratios, policy_log_ratios: [M] float64, l and current - proximal, 0 under the mask.
    """
    policy_ratio = _where(mask, clamped(policy_log_ratios).exp())
    rho, weight = _where(mask, clamped(log_ratios).exp()), _where(mask, correction.weights)
    bounded = _where(mask, weight.clamp(1 / threshold, threshold))
    rejected, positive, negative = mask & ~correction.keep_mask, mask & (advantages > 0), mask & (advantages < 0)
    return {
        "num_tokens": mask,
        "minus_l": -log_ratios,
        "abs_l": log_ratios.abs(),
        # Masked tokens have l = 0, and k3 of that is 0.
        "k3": bounded_k3(log_ratios),
        "k3_unclamped": log_ratios.clamp(max=EXP_BOUND).exp() - log_ratios - 1,
        "rho": rho,
        "rho_squared": rho.square(),
        "above": rho > threshold,
        "weight": weight,
        "weight_squared": weight.square(),
        "bounded": bounded,
        "bounded_squared": bounded.square(),
        "policy_ratio": policy_ratio,
        "policy_ratio_squared": policy_ratio.square(),
        "corrected": mask & correction.corrected_mask,
        "rejected": rejected,
        "num_positive": positive,
        "rejected_positive": positive & rejected,
        "num_negative": negative,
        "rejected_negative": negative & rejected,
    }


def bounded_k3(log_ratios: Tensor) -> Tensor:
    """Returns k3 = e^c - c - 1 of each token, at most `K3_BOUND`."""
    bounded = clamped(log_ratios)
    return (bounded.exp() - bounded - 1).clamp(max=K3_BOUND)


def lag_buckets(lag: Tensor, row: Tensor) -> Tensor:
    """Returns [M] int64, each token's place in LAG_LABELS. row: [M] int64, counted from 0.

    A token of lag 0 in a row with older tokens attended to keys and values of older weights: it has its own bucket.
    """
    oldest = torch.zeros_like(lag).scatter_reduce(0, row, lag, "amax")
    bucket = (oldest[row] > 0).long()
    for start in LAG_STARTS:
        bucket += lag >= start
    return bucket


def row_terms(
    mask: Tensor,
    row: Tensor,
    train: Tensor,
    rollout: Tensor,
    current: Tensor,
    above: Tensor,
    threshold: float,
    level: Level,
) -> dict[str, Tensor]:
    """Returns [M] for each of ROW_TERMS, one element per row, then 0; and `diff`, then -inf.

    M is the largest possible number of rows. To ask for their number would wait for the device.

    Args:
        row: [M] int64, counted from 0.
        train, rollout, current: [M] float64, logprobs, 0 under the mask.
        above: [M] bool, True for a token whose rho is above the threshold.
    """
    x = clamped(current - rollout)
    columns = torch.stack(
        [mask.double(), train, rollout, clamped(train - rollout), x.exp() - x - 1, above.double()], dim=1
    )
    sums = torch.zeros_like(columns).index_add_(0, row, columns)
    count, train_sum, rollout_sum, bounded_sum, k3_sum, num_above = sums.unbind(1)
    exists = torch.zeros_like(mask).index_fill_(0, row, True)
    filled = count.clamp(min=1)
    log_ratio = train_sum - rollout_sum
    mean = log_ratio / filled
    geometric, product = (bounded_sum / filled).exp(), clamped(log_ratio).exp()
    terms = {
        "num_rows": exists,
        "num_filled": count > 0,
        "training_log_ppl": -train_sum / filled,
        "training_ppl": _exp(-train_sum / filled),
        "rollout_log_ppl": -rollout_sum / filled,
        "rollout_ppl": _exp(-rollout_sum / filled),
        "log_ppl_diff": -mean,
        "log_ppl_abs_diff": mean.abs(),
        "ppl_ratio": _exp(-mean),
        "chi2_seq": clamped(mean).mul(2).exp(),
        "chi2_product": product.square(),
        "row_above": (geometric if level == "geometric" else product) > threshold,
        "kl_new_old": k3_sum / filled,
        "above_in_row": num_above / filled,
    }
    found = {name: _where(exists, term) for name, term in terms.items()}
    return found | {"diff": torch.where(exists, -mean, -torch.inf)}


def maxima_of(mask: Tensor, rho: Tensor, diff: Tensor) -> Tensor:
    """Returns [len(MAXIMA)] float64: the maximum of each over rows or tokens, -inf over none."""
    nothing = torch.full_like(diff, -torch.inf)
    minus_diff = torch.where(diff > -torch.inf, -diff, nothing)
    columns = torch.stack([diff, minus_diff, torch.where(mask, rho, nothing), torch.where(mask, -rho, nothing)], dim=1)
    return torch.cat([columns, nothing.new_full((1, len(MAXIMA)), -torch.inf)]).amax(0)


def _where(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values.detach().double(), 0.0)


def _exp(exponents: Tensor) -> Tensor:
    return exponents.clamp(max=EXP_BOUND).exp()
