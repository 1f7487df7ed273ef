"""Computes the trainer's losses in the slow and obvious way: float64, row by row, plain loops. Shares no code with
consumers."""

import cmath
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.schemas.rollout import RolloutGroup, Segment, unpack_floats, unpack_ids


def logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns the targets' logprobs and the entropies, both [n], from logits [n, V] float64 and targets [n]."""
    log_p = torch.log_softmax(logits / (1.0 if temperature < 1e-5 else temperature), dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def sampled_logprobs(model: torch.nn.Module, segment: Segment, temperature: float = 1.0) -> Tensor:
    """Returns the logprobs of a segment's sampled tokens under gradient. The model is a transformers one, unpacked."""
    ids = torch.tensor(list(unpack_ids(segment.token_ids)))
    at = torch.tensor([place for start, end in segment.loss_mask for place in range(start, end)])
    return logprobs_and_entropy(model(input_ids=ids[None]).logits[0][at - 1], ids[at], temperature)[0]


def grpo_loss(
    model: torch.nn.Module,
    groups: list[RolloutGroup],
    lag_of: Callable[[int], int],
    *,
    lag_bound: int,
    threshold: float,
    clip: float = 0.2,
) -> Tensor:
    """Returns the token-mean GRPO loss over every group with token-truncated weights. The model is float64, on CPU,
    unpacked.

    Groups without variance take part, with their advantage of 0.
    """
    total, denominator = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        rewards = [rollout.reward.value for rollout in group.rollouts]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            advantage = (reward - mean) / (std + 1e-4)
            for segment in rollout.segments:
                current = sampled_logprobs(model, segment, group.sampling.temperature)
                versions = [span.version for span in segment.version_spans for _ in range(span.start, span.end)]
                denominator += len(current)
                for c, b, v in zip(current, unpack_floats(segment.behavior_logprobs), versions, strict=True):
                    if lag_of(v) > lag_bound:
                        continue
                    weight = min(math.exp(max(-20.0, min(20.0, c.item() - b))), threshold)
                    ratio = torch.exp(c - c.detach())
                    clipped = ratio.clamp(1 - clip, 1 + clip)
                    total = total - weight * torch.minimum(ratio * advantage, clipped * advantage)
    return total / denominator


class OracleToken(NamedTuple):
    """One sampled token, as the objectives see it; masked ones are ignored."""

    current: float
    proximal: float
    behavior: float
    weight: float
    advantage: float
    kept: bool
    entropy: float
    row: int
    rollout_tokens: float
    reference: float
    lag: int


def objective_loss(
    kind: str, settings: dict[str, Any], tokens: list[OracleToken], *, denominator: float, num_rollouts: int
) -> tuple[float, list[float]]:
    """Returns the loss and its gradient with respect to each token's current logprob.

    Log-ratios are assumed to be within +-20. The derivative is taken by a complex step, exact to rounding, without a
    difference. Quantities that a definition detaches keep the values of `tokens`.
    """
    step = 1e-30

    def loss(moved: int | None) -> complex:
        current = [complex(token.current, step * (at == moved)) for at, token in enumerate(tokens)]
        return _loss(kind, settings, tokens, current, denominator, num_rollouts)

    return loss(None).real, [loss(at).imag / step for at in range(len(tokens))]


def _loss(
    kind: str,
    settings: dict[str, Any],
    tokens: list[OracleToken],
    current: list[complex],
    denominator: float,
    num_rollouts: int,
) -> complex:
    total = 0j
    for at, token in enumerate(tokens):
        if not token.kept:
            continue
        x = token.reference - current[at]
        divergence = {"k1": -x, "k2": x * x / 2, "k3": cmath.exp(x) - x - 1}[settings["kl_estimator"]]
        value = -token.weight * _gain(kind, settings, tokens, current, at)
        value += settings["kl_coefficient"] * divergence - settings["entropy_coefficient"] * token.entropy
        value += settings["behavior_kl_coefficient"] * (current[at] - token.behavior) ** 2
        total += {
            "token": lambda value, _: value / denominator,
            "sequence": lambda value, token: value / token.rollout_tokens / num_rollouts,
            "constant": lambda value, _: value / (num_rollouts * settings["constant_denominator"]),
        }[settings["aggregation"]](value, token)
    return total


def _gain(kind: str, settings: dict[str, Any], tokens: list[OracleToken], current: list[complex], at: int) -> complex:
    token, log_p = tokens[at], current[at]
    ratio = cmath.exp(log_p - token.proximal)
    stopped = math.exp(token.current - token.proximal)
    if kind in ("Grpo", "Dapo"):
        return _clipped(ratio, token.advantage, settings)
    if kind == "Gspo":
        row = [(c, t) for c, t in zip(current, tokens, strict=True) if t.kept and t.row == token.row]
        mean = sum(c - t.proximal for c, t in row) / len(row)
        if settings["gradient"] == "token":
            mean = mean.real + log_p - token.current
        return _clipped(cmath.exp(mean), token.advantage, settings)
    if kind == "Cispo":
        weight = min(max(stopped, 1 - settings["clip_low"]), 1 + settings["clip_high"])
        return weight * token.advantage * log_p
    if kind == "Reinforce":
        return min(stopped, settings["ratio_cap"]) * token.advantage * log_p
    if kind == "Sapo":
        tau = settings["temperature_positive" if token.advantage > 0 else "temperature_negative"]
        return 4 / tau / (1 + cmath.exp(-tau * (ratio - 1))) * token.advantage
    if kind == "DecoupledPpo":
        return _decoupled(token, log_p, settings)
    if kind in ("DppoTv", "DppoKl"):
        return _trusted(token, log_p, _bernoulli_divergence(kind, token), settings["bound_low"], settings["bound_high"])
    if kind == "Tvpo":
        row = [abs(math.exp(t.current - t.behavior) - 1) for t in tokens if t.kept and t.row == token.row]
        return _trusted(token, log_p, sum(row) / len(row), settings["bound"], settings["bound"])
    raise NotImplementedError(kind)


def _clipped(ratio: complex, advantage: float, settings: dict[str, Any]) -> complex:
    low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
    bounded = complex(low) if ratio.real < low else complex(high) if ratio.real > high else ratio
    gain = min(ratio * advantage, bounded * advantage, key=lambda z: z.real)
    if settings["dual_clip"] is not None and advantage < 0:
        gain = max(gain, complex(settings["dual_clip"] * advantage), key=lambda z: z.real)
    return gain


def _decoupled(token: OracleToken, log_p: complex, settings: dict[str, Any]) -> complex:
    if settings["proximal"] == "recomputed":
        return _clipped(cmath.exp(log_p - token.proximal), token.advantage, settings)
    share = (token.lag - 1) / token.lag if token.lag > 0 else 0.0
    behavior, current = math.exp(token.behavior), math.exp(token.current)
    if settings["proximal"] == "loglinear":
        proximal = behavior ** (1 - share) * current**share
    else:
        proximal = (1 - share) * behavior + share * current
    weight = proximal / behavior * min(1.0, settings["total_weight_cap"] / (current / behavior))
    return weight * _clipped(cmath.exp(log_p) / proximal, token.advantage, settings)


def _bernoulli_divergence(kind: str, token: OracleToken) -> float:
    p, q = math.exp(token.current), math.exp(token.behavior)
    if kind == "DppoTv":
        return abs(p - q)
    rest_p, rest_q = max(1 - p, 1e-8), max(1 - q, 1e-8)
    return q * math.log(q / p) + rest_q * math.log(rest_q / rest_p)


def _trusted(token: OracleToken, log_p: complex, divergence: float, low: float, high: float) -> complex:
    """The ratio's gain; nothing where the advantage would move a token that is too far away further."""
    if token.advantage > 0 and token.current > token.behavior and divergence > high:
        return 0j
    if token.advantage < 0 and token.current < token.behavior and divergence > low:
        return 0j
    return cmath.exp(log_p - token.behavior) * token.advantage
