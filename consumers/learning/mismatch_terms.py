"""What `diagnostics` sums: the terms of each token and each row. Notation as there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from penstock.consumers.learning.importance import LOG_RATIO_BOUND
from penstock.schemas.metrics import LAG_LABELS
from torch import Tensor

K3_BOUND = 10.0
"""Bound of a token's k3 estimate, as in ms-swift; verl has none."""
EXP_BOUND = 100.0
"""Bound of the exponents that the seeds leave open: e^100 keeps any sum finite, and no run that learns comes near."""
LAG_STARTS = (1, 2, 4, 8)
"""First lag of every bucket after lag 0; the labels are `penstock.schemas.metrics.LAG_LABELS`."""

Level = Literal["token", "geometric", "product"]

TOKEN_TERMS = (
    *("num_tokens", "minus_l", "k3", "k3_unclamped", "rho", "rho_squared", "above"),
    *("weight", "weight_squared", "bounded", "bounded_squared"),
    *("corrected", "masked", "num_positive", "masked_positive", "num_negative", "masked_negative"),
    *("num_fresh", "fresh_gap", "num_lags_below_0"),
)
ROW_TERMS = (
    *("num_rows", "num_filled", "training_log_ppl", "training_ppl", "rollout_log_ppl", "rollout_ppl"),
    *("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "chi2_seq", "chi2_product", "above"),
    *("kl_new_old", "above_in_row"),
)
MAXIMA = ("diff", "minus_diff", "rho", "minus_rho")


@dataclass(frozen=True)
class Tokens:
    """Some tokens as float64 [M], 0 under the mask, and the index of each one's row, [M] int64 counted from 0."""

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
        clamped = (train - rollout).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        rho = _where(loss_mask, clamped.exp())
        starts = torch.ones_like(row_ids)
        starts[1:] = row_ids[1:] != row_ids[:-1]
        current = train if current_logprobs is None else _where(loss_mask, current_logprobs)
        return cls(
            mask=loss_mask,
            row=starts.cumsum(0) - 1,
            train=train,
            rollout=rollout,
            clamped=clamped,
            rho=rho,
            above=torch.zeros_like(rho) if threshold is None else (rho > threshold).double(),
            new_old=(current - rollout).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND),
            threshold=threshold,
        )


def token_terms(
    tokens: Tokens,
    weights: Tensor | None,
    lag: Tensor | None,
    advantages: Tensor | None,
    keep_mask: Tensor | None,
    corrected_mask: Tensor | None,
) -> dict[str, Tensor]:
    """[M] of each of TOKEN_TERMS that the inputs allow, 0 under the mask."""
    mask, rho, clamped = tokens.mask, tokens.rho, tokens.clamped
    log_ratios = tokens.train - tokens.rollout
    terms = {
        "num_tokens": mask,
        "minus_l": -log_ratios,
        # Masked tokens have l = 0, and k3 of that is 0.
        "k3": (clamped.exp() - clamped - 1).clamp(max=K3_BOUND),
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
    if lag is not None:
        # In a row that began under older weights even a fresh token saw keys and values of theirs.
        oldest = torch.zeros_like(lag).scatter_reduce(0, tokens.row, lag, "amax")
        fresh = mask & (oldest[tokens.row] == 0)
        terms |= {
            "num_fresh": fresh,
            "fresh_gap": _where(fresh, log_ratios.abs()),
            "num_lags_below_0": mask & (lag < 0),
        }
    return terms


def sums_by_bucket(terms: Mapping[str, Tensor], lag: Tensor | None) -> Tensor:
    """[5, len(TOKEN_TERMS)] float64: `token_terms` summed by lag bucket; without lags all in the first."""
    some = terms["num_tokens"]
    zero = torch.zeros(len(some), dtype=torch.float64, device=some.device)
    columns = torch.stack([terms[name].double() if name in terms else zero for name in TOKEN_TERMS], dim=1)
    sums = torch.zeros(len(LAG_LABELS), len(TOKEN_TERMS), dtype=torch.float64, device=some.device)
    if lag is None:
        sums[0] = columns.sum(0)
        return sums
    starts = torch.tensor(LAG_STARTS, device=lag.device)
    return sums.index_add_(0, torch.bucketize(lag, starts, right=True), columns)


def row_terms(tokens: Tokens, level: Level) -> dict[str, Tensor]:
    """[M] of each of ROW_TERMS, the first as many as there are rows in use, 0 in the others; and `diff`, -inf there.

    M is the most rows there can be: how many there are is not asked, for which a device would have to be waited for.
    """
    x, mask = tokens.new_old, tokens.mask
    columns = torch.stack(
        [mask.double(), tokens.train, tokens.rollout, tokens.clamped, x.exp() - x - 1, tokens.above], dim=1
    )
    count, train, rollout, clamped, kl_new_old, above = (
        torch.zeros_like(columns).index_add_(0, tokens.row, columns).unbind(1)
    )
    exists = torch.zeros_like(mask).index_fill_(0, tokens.row, True)
    filled = count.clamp(min=1)
    log_ratio = train - rollout
    mean = log_ratio / filled
    geometric, product = (clamped / filled).exp(), log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
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
        "chi2_seq": mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).mul(2).exp(),
        "chi2_product": product.square(),
        "above": above_row > (tokens.threshold or torch.inf),
        "kl_new_old": kl_new_old / filled,
        "above_in_row": above / filled,
    }
    found = {name: _where(exists, term) for name, term in terms.items()}
    return found | {"diff": torch.where(exists, -mean, -torch.inf)}


def maxima_of(tokens: Tokens, diff: Tensor) -> Tensor:
    """[len(MAXIMA)] float64: the largest of each over rows or tokens, -inf over none."""
    nothing = torch.full_like(diff, -torch.inf)
    minus_diff = torch.where(diff > -torch.inf, -diff, nothing)
    rho = torch.where(tokens.mask, tokens.rho, nothing)
    columns = torch.stack([diff, minus_diff, rho, torch.where(tokens.mask, -rho, nothing)], dim=1)
    return torch.cat([columns, nothing.new_full((1, len(MAXIMA)), -torch.inf)]).amax(0)


def _where(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values.detach().double(), 0.0)


def _exp(exponents: Tensor) -> Tensor:
    return exponents.clamp(max=EXP_BOUND).exp()
