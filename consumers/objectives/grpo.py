"""GRPO with PPO's clipped ratio, on importance-corrected tokens.

Formula, over the sampled tokens t of the batch, with r = exp(current - proximal) and the rollout's advantage A::

    loss = - sum_t  w_t * min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t)  /  denominator

`w = f(exp(proximal - behavior))` is the importance weight; it corrects what the engine and the lag did and carries no
gradient. With `dual_clip = c` a token of negative advantage costs at most c * |A|: min(..) becomes max(min(..), c * A).

Source: DeepSeekMath (arXiv 2402.03300, eq. 3); the clip is PPO's (arXiv 1707.06347, eq. 7), the dual clip Ye et al.'s
(arXiv 1912.09729, eq. 5), the asymmetric clip DAPO's (arXiv 2503.14476).

Departures from the paper: the weight w, which the paper's on-policy setting does not need; the mean over all tokens of
the batch, as in DAPO and verl, where the paper takes the mean of each rollout first (`aggregation = "rollout"` does
that); no KL penalty against a reference model. Masked tokens stay in the denominators, so that masking never inflates
what survives.
"""

import torch
from torch import Tensor

from consumers.importance import LOG_RATIO_BOUND
from consumers.interfaces import LossInputs, LossOutputs


class Grpo:
    """See the module's docstring.

    Args:
        clip_low, clip_high: the policy ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: largest factor a negative advantage is multiplied with; None for no such bound.
        aggregation: "token" weighs every sampled token of the batch alike, "rollout" every rollout.
        entropy_coefficient: subtracts this share of the mean token entropy from the loss.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        aggregation: str = "token",
        entropy_coefficient: float = 0.0,
    ) -> None:
        if not 0 < clip_low <= 1:
            raise ValueError(f"Grpo: clip_low is {clip_low}, expected 0 < clip_low <= 1")
        if not clip_high > 0:
            raise ValueError(f"Grpo: clip_high is {clip_high}, expected more than 0")
        if dual_clip is not None and not dual_clip > 1:
            raise ValueError(f"Grpo: dual_clip is {dual_clip}, expected more than 1, or None")
        if aggregation not in ("token", "rollout"):
            raise ValueError(f"Grpo: aggregation is {aggregation!r}, expected 'token' or 'rollout'")
        if not entropy_coefficient >= 0:
            raise ValueError(f"Grpo: entropy_coefficient is {entropy_coefficient}, expected 0 or more")
        self._clip = (1.0 - clip_low, 1.0 + clip_high)
        self._dual_clip = dual_clip
        self._aggregation = aggregation
        self._entropy_coefficient = entropy_coefficient

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        mask = inputs.loss_mask
        # Selected before any arithmetic: what lies under the mask reaches neither the loss nor a gradient.
        zero = inputs.current_logprobs.new_zeros(())
        log_ratio = torch.where(mask, inputs.current_logprobs - inputs.proximal_logprobs, zero)
        advantages = torch.where(mask, inputs.advantages, zero)
        weights = torch.where(mask, inputs.importance_weights, zero)
        ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        unclipped = ratio * advantages
        gain = torch.minimum(unclipped, ratio.clamp(*self._clip) * advantages)
        clipped = unclipped > gain
        if self._dual_clip is not None:
            gain = torch.where(advantages < 0, torch.maximum(gain, self._dual_clip * advantages), gain)
        loss = -self._reduce(weights * gain, inputs)
        if self._entropy_coefficient:
            loss = loss - self._entropy_coefficient * self._reduce(torch.where(mask, inputs.entropy, zero), inputs)
        return LossOutputs(loss=loss, metrics={"policy_clipped_frac": clipped.sum().detach()})

    def _reduce(self, values: Tensor, inputs: LossInputs) -> Tensor:
        """The mean of values [M], 0 where masked, as this micro-batch's share of the batch."""
        if self._aggregation == "token":
            return values.sum() / inputs.denominator
        return (values / inputs.rollout_tokens).sum() / inputs.num_rollouts
