"""The importance weight of each token: the trust in its behavior logprob.

Per token, l = proximal - behavior, c(l) = l clamped to +-20, rho = exp(c(l)). Everything is detached, and computed in
float64 whatever the input. tau is the configuration's threshold, lower its lower bound (0 without one):

    none                1
    token_truncate      min(max(rho, lower), tau)
    token_mask          rho where lower <= rho <= tau, else masked
    sequence_truncate   min(max(R, lower), tau) on every token of the row
    sequence_mask       where lower <= R <= tau, else the whole row masked: rho if R is geometric, else R

    R                   geometric: exp of the mean of c(l) over the row's unmasked tokens; product: exp of c(sum of l)

Sources: the modes are ms-swift's rollout_importance_sampling_mode; truncation goes back to Ionides (2008) and Yao et
al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), masks on both sides to IcePop
(Ling-team, 2025), product ratios to verl and TRL.

Other masks than the mode's, of what is too far off-policy to be trained on: verl's rejections (`rejected`) and
off-policy sequence masking (`off_policy_rows_kept`). Each keeps a NaN: a value that cannot be judged reaches the loss,
and the step is skipped and counted. The loss mask that comes in is that of packing, without tokens that are
too old; statistics of rows read every token of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.consumers.learning.loss.rows import Rows, clamped, log_ratio
from penstock.schemas.config import CorrectionConfig, Rejection


@dataclass(frozen=True)
class Correction:
    """weights: like the inputs, detached; float64 if an input is, else float32; 0 where `keep_mask` is False.

    keep_mask: bool, the loss mask without tokens that the correction masks. Denominators are counted before it.
    corrected_mask: bool, tokens of the loss mask that are not kept, or kept with a weight that the mode bounded.
    """

    weights: Tensor
    keep_mask: Tensor
    corrected_mask: Tensor


def correct_packed(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    loss_mask: Tensor,
    lag: Tensor,
    row_ids: Tensor,
    config: CorrectionConfig,
    *,
    advantages: Tensor | None = None,
    current_logprobs: Tensor | None = None,
) -> Correction:
    """Truncates or masks exp(proximal - behavior); the module's docstring has the formulas.

    A configuration with `is_token_level` takes any tokens, any other one whole rows. Never waits for the device.

    Args:
        proximal_logprobs, behavior_logprobs: [M] float, natural logarithms. Values under the mask are never read; a
            NaN that is not masked is never masked away either: its weight is NaN.
        loss_mask: [M] bool.
        lag: [M] integer, optimizer steps, 0 or more.
        row_ids: [M] int64, ascending.
        advantages, current_logprobs: [M] float; needed by `off_policy_delta`.
    """
    loss_mask = loss_mask.detach()
    given = log_ratio(proximal_logprobs, behavior_logprobs, loss_mask)
    log_ratios = given.double()
    lag = torch.where(loss_mask, lag, 0)
    rows = Rows(row_ids, loss_mask)

    weights, by_mode, bounded = _weigh(log_ratios, rows, config)
    keep = loss_mask & ~by_mode
    for rejection in config.rejection:
        keep = keep & ~rejected(log_ratios, lag, rows, rejection)
    if config.off_policy_delta is not None:
        assert advantages is not None and current_logprobs is not None
        keep = keep & off_policy_rows_kept(
            behavior_logprobs, current_logprobs, loss_mask, advantages, row_ids, config.off_policy_delta
        )

    return Correction(
        weights=torch.where(keep, weights, 0.0).to(given.dtype),
        keep_mask=keep,
        corrected_mask=loss_mask & (bounded | ~keep),
    )


def _weigh(log_ratios: Tensor, rows: Rows, config: CorrectionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the mode's weights, the tokens it masks, and the tokens whose weights it bounds; [M] each."""
    ratio = torch.exp(clamped(log_ratios))
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    if config.mode == "none":
        return torch.ones_like(ratio), nothing, nothing
    assert config.mode is not None  # `settled_correction`
    level, _, action = config.mode.partition("_")
    judged = ratio
    if level == "sequence" and config.sequence_ratio == "geometric":
        judged = torch.exp(rows.mean(clamped(log_ratios)))
    elif level == "sequence":
        judged = torch.exp(clamped(rows.sum(log_ratios)))
    lower, upper = config.lower or 0.0, config.threshold
    outside = (judged < lower) | (judged > upper)
    if action == "truncate":
        return judged.clamp(lower, upper), nothing, outside
    return (judged if level == "sequence" and config.sequence_ratio == "product" else ratio), outside, nothing


def rejected(log_ratios: Tensor, lag: Tensor, rows: Rows, rejection: Rejection) -> Tensor:
    """Returns [M] bool: True where the rejection masks a token.

    verl's rollout rejection (rollout_rs), with l = proximal - behavior, c its clamped value, and Schulman's estimators
    of a KL divergence ("Approximating KL Divergence", 2020) k1 = -c, k2 = c^2 / 2, k3 = e^c - c - 1. A token is judged
    by its own value, or by its row's sum, mean or maximum. `upper` bounds k2 and k3 themselves; for k1 the exponential
    has to lie in [lower, upper], where `lower` None means 1 / upper, or no bound for seq_max_k1. `token_lag`, ours,
    judges a token by its lag.

    Args:
        log_ratios: [M] float64, unclamped, 0 where masked.
        lag: [M] integer, optimizer steps.

    Returns:
        [M] bool; False in a row without an unmasked token, unless its every token is masked anyway.
    """
    scope, _, estimator = rejection.mode.rpartition("_")
    if estimator == "k1":
        # A sum of clamped terms would hide a far token behind many near ones of the other sign: the sum is clamped.
        values = torch.exp(clamped(_over(scope, -log_ratios, rows)))
        if rejection.lower is not None:
            lower = rejection.lower
        else:
            lower = 0.0 if rejection.mode == "seq_max_k1" else 1.0 / rejection.upper
        return (values > rejection.upper) | (values < lower)
    if estimator == "lag":
        return lag > rejection.upper
    bounded = clamped(log_ratios)
    values = bounded.square() / 2 if estimator == "k2" else torch.expm1(bounded) - bounded
    return _over(scope, values, rows) > rejection.upper


def off_policy_rows_kept(
    behavior_logprobs: Tensor,
    current_logprobs: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    row_ids: Tensor,
    delta: float,
) -> Tensor:
    """Off-policy sequence masking: False for rows that drifted and whose probability would be lowered further.

    With D the mean of behavior - current over the row's unmasked tokens, a row is dropped if D > delta and the
    advantage is negative, both strictly. Source: DeepSeek-V3.2 (arXiv 2512.02556, "Off-Policy Sequence Masking");
    ms-swift, TRL and slime agree.

    Args:
        behavior_logprobs, current_logprobs, advantages: [M] float; values under the mask are never read.
        loss_mask: [M] bool.
        row_ids: [M] int64, ascending.

    Returns:
        [M] bool, detached; False under the mask.
    """
    drift = Rows(row_ids, loss_mask).mean(behavior_logprobs.detach().double() - current_logprobs.detach().double())
    return loss_mask & ~((drift > delta) & (advantages.detach() < 0))


def _over(scope: str, values: Tensor, rows: Rows) -> Tensor:
    if scope == "token":
        return values
    return {"seq_sum": rows.sum, "seq_mean": rows.mean, "seq_max": rows.max}[scope](values)
