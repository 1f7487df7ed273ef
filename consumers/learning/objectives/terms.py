"""Common parts of the objectives: aggregation, the KL to a reference and to the sampler, the entropy bonus, the mask.

Formula, over the sampled tokens t, with the gain g_t of the objective's own file and the importance weight w_t::

    loss = aggregate(-w_t * g_t)  +  kl_coefficient * aggregate(kl_t)  -  entropy_coefficient * aggregate(H_t)
           + behavior_kl_coefficient * aggregate((current_t - behavior_t)^2)

The last three need no advantage: with any of them enabled, t includes the groups without reward variance.

Your own objective needs none of this: it may be any callable LossInputs -> LossOutputs
(`penstock.consumers.learning.interfaces`).

Aggregation. All three denominators are counted before anything is masked, so that masking never inflates the rest;
verl, ms-swift and TRL divide by the unmasked count, which is the same if nothing is masked.

    token     sum_t / tokens of the optimizer step: every token alike (DAPO, verl's token-mean)
    sequence  sum_t (. / tokens of t's rollout) / rollouts: every rollout alike (GRPO's paper, seq-mean-token-mean)
    constant  sum_t / (rollouts * constant_denominator): no length in it (Dr. GRPO, arXiv 2503.20783; TRL's dr_grpo with
              constant_denominator = max_completion_length, verl's seq-mean-token-sum-norm)

KL to the reference, with x = reference - current of the sampled token (Schulman, "Approximating KL divergence", 2020).
As a value each estimates KL(current || reference); as a loss term each gives a gradient of its own::

    k1 = -x            gradient  grad log p            zero in expectation: noise, offered as the peers offer it
    k2 = x^2 / 2       gradient  -x * grad log p       in expectation that of KL(current || reference)
    k3 = e^x - x - 1   gradient  (1 - e^x) grad log p  in expectation that of KL(reference || current); GRPO's (eq. 4)

These expectations are over the current policy, though behavior policies sampled the tokens; verl, ms-swift and, by
default, TRL and slime leave it at that. `kl_importance_weighted` multiplies kl_t by an estimate of current / behavior::

    w_t * current / proximal   the importance weight, detached, times the policy ratio, under gradient
    current / behavior         for an objective that forms this ratio itself, with weights of 1 (`reads_behavior`)

With a gradient through the ratio, k1 and k3 then both have that of KL(current || reference) in expectation over the
sampling policy, as far as w_t is proximal / behavior; k2 stays biased. Source: DeepSeek-V3.2 (arXiv 2512.02556).
TRL (`use_bias_correction_kl`) and slime (`use_unbiased_kl`) multiply by current / proximal alone, which is this with
`correction.mode = "none"`. x is clamped to +-20, beyond which its gradient is 0. The entropy bonus is exact at each
token, and unweighted.

The KL to the sampler, twice Schulman's k2 of behavior and current, holds the policy near what sampled each token, on
either side and whatever its advantage; also tokens that an objective's own clip or mask leaves without a gain. It is no
importance weight, so it goes with any correction. Source: Kimi K2.5 (arXiv 2602.02276, eq. 1, whose tau it is; read as
prime-rl quotes it in its pull request 1697). Peers: prime-rl's `kl_tau`, 1e-3 by default.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs, LossOutputs
from penstock.consumers.learning.loss.rows import clamped

AGGREGATIONS = ("token", "sequence", "constant")
KL_ESTIMATORS = ("k1", "k2", "k3")
_MASKED = (
    *("current_logprobs", "proximal_logprobs", "behavior_logprobs", "importance_weights", "advantages", "entropy"),
    *("reference_logprobs", "lag", "top_current_logprobs", "top_behavior_logprobs"),
)
"""The inputs that are set to 0 under the mask before any arithmetic."""


def _setting(default: Any, expected: str, accepts: Callable[[Any], bool]) -> Any:
    return field(default=default, metadata={"expected": expected, "accepts": accepts})


def number(
    default: float | None,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    or_none: bool = False,
) -> Any:
    """Declares an argument that must be a finite number within the bounds given, or None if that is the default or
    `or_none`."""
    bounds = {f"more than {above}": above, f"at least {at_least}": at_least, f"at most {at_most}": at_most}
    stated = [text for text, bound in bounds.items() if math.isfinite(bound)]

    def accepts(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return (is_number and value > above and at_least <= value <= at_most) or (or_none and value is None)

    return _setting(default, " and ".join(["a finite number", *stated]), accepts)


def choice(default: str, choices: tuple[str, ...]) -> Any:
    """Declares an argument that must be one of the choices."""
    return _setting(default, " or ".join(map(repr, choices)), choices.__contains__)


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(ABC):
    """An objective that is a gain per token, which the subclass defines. `number` and `choice` declare arguments.

    Raises:
        ValueError: on construction, an argument out of range; when called, a KL term without reference logprobs.
    """

    token_level: ClassVar[bool] = True

    aggregation: str = choice("token", AGGREGATIONS)
    """"token", "sequence" or "constant"."""
    constant_denominator: float | None = number(None, above=0)
    """The number of tokens that every rollout counts as, for aggregation "constant"; e.g. sampling.max_tokens."""
    kl_coefficient: float = number(0.0, at_least=0)
    """Weight of the KL to the reference model; 0 needs none."""
    kl_estimator: str = choice("k3", KL_ESTIMATORS)
    """"k1", "k2" or "k3"."""
    kl_importance_weighted: bool = _setting(False, "true or false", lambda value: isinstance(value, bool))
    """Multiplies the KL by importance weight and policy ratio: see the module's docstring."""
    entropy_coefficient: float = number(0.0, at_least=0)
    """Share of the token entropy that is subtracted from the loss."""
    behavior_kl_coefficient: float = number(0.0, at_least=0)
    """Weight of the squared log-ratio to the policy that sampled the token."""
    full_rate_ess: float | None = number(None, above=0, at_most=1)
    """Steps of a lower effective sample size have a lower learning rate (`penstock.consumers.learning.loss.ess`)."""

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def trains_every_row(self) -> bool:
        return max(self.kl_coefficient, self.entropy_coefficient, self.behavior_kl_coefficient) > 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            is_left_out = value is None and each.default is None
            if "accepts" in each.metadata and not is_left_out and not each.metadata["accepts"](value):
                raise self.refusal(each.name)
        if self.aggregation == "constant" and self.constant_denominator is None:
            raise self.refusal("constant_denominator")
        if self.aggregation != "constant" and self.constant_denominator is not None:
            raise self.refusal("constant_denominator", f"None with aggregation {self.aggregation!r}")

    @abstractmethod
    def gain(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the gain of each token, which the update raises, before the importance weight.

        Args:
            inputs: every tensor but `row_ids` and `rollout_tokens` is 0 where masked.

        Returns:
            [M] under gradient; and metrics, detached sums over the unmasked tokens.
        """

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        inputs = _zero_under_mask(inputs)
        gain, metrics = self.gain(inputs)
        loss = -self.aggregate(inputs.importance_weights * gain, inputs)
        if inputs.reference_logprobs is not None:
            divergence = reference_kl(inputs.current_logprobs, inputs.reference_logprobs, self.kl_estimator)
            if self.kl_importance_weighted:
                sampled_by = "behavior_logprobs" if getattr(self, "reads_behavior", False) else "proximal_logprobs"
                ratio = bounded_exp(inputs.current_logprobs - getattr(inputs, sampled_by))
                divergence = inputs.importance_weights * ratio * divergence
            metrics["reference_kl"] = divergence.detach().sum()
            if self.kl_coefficient:
                loss = loss + self.kl_coefficient * self.aggregate(divergence, inputs)
        elif self.kl_coefficient:
            raise ValueError(
                f"{type(self).__name__}: reference_logprobs is None with kl_coefficient = {self.kl_coefficient}, "
                "expected the reference model's logprobs"
            )
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * self.aggregate(inputs.entropy, inputs)
        if self.behavior_kl_coefficient:
            squared = clamped(inputs.current_logprobs - inputs.behavior_logprobs).square()
            loss = loss + self.behavior_kl_coefficient * self.aggregate(squared, inputs)
        return LossOutputs(loss=loss, metrics=metrics)

    def aggregate(self, values: Tensor, inputs: LossInputs) -> Tensor:
        """Returns this micro-batch's share of the optimizer step, a scalar. values: [M], 0 where masked."""
        if self.aggregation == "token":
            return values.sum() / inputs.denominator
        if self.aggregation == "sequence":
            return (values / inputs.rollout_tokens).sum() / inputs.num_rollouts
        assert self.constant_denominator is not None
        return values.sum() / (inputs.num_rollouts * self.constant_denominator)

    def refusal(self, name: str, expected: str | None = None) -> ValueError:
        """Returns the error for an argument. expected: by default what the argument's field accepts."""
        expected = expected or {each.name: each for each in fields(self)}[name].metadata["expected"]
        return ValueError(f"{type(self).__name__}: {name} is {getattr(self, name)!r}, expected {expected}")


def policy_ratio(inputs: LossInputs) -> Tensor:
    """Returns exp(current - proximal), [M] under gradient, of the clamped logarithm."""
    return bounded_exp(inputs.current_logprobs - inputs.proximal_logprobs)


def bounded_exp(logarithm: Tensor) -> Tensor:
    """Returns exp of the logarithm clamped to +-20: always finite, and without gradient beyond the bound."""
    return clamped(logarithm).exp()


def reference_kl(current_logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates each token's KL(current || reference) (see the module's docstring); same shape, under gradient."""
    x = clamped(reference_logprobs - current_logprobs)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    return torch.expm1(x) - x


def _zero_under_mask(inputs: LossInputs) -> LossInputs:
    """Sets masked inputs to 0, so that they reach neither the loss nor a gradient."""
    masked: dict[str, Any] = {}
    for name in _MASKED:
        values = getattr(inputs, name)
        if values is not None:
            mask = inputs.loss_mask if values.ndim == 1 else inputs.loss_mask[:, None]
            masked[name] = torch.where(mask, values, values.new_zeros(()))
    return replace(inputs, **masked)
