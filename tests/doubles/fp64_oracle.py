"""The trainer's loss the slow and obvious way: float64, row by row, plain loops. Shares no code with consumers."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from schemas.rollout import RolloutGroup, unpack_floats, unpack_ids


def logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logits [n, V] float64, targets [n] -> both [n]."""
    log_p = torch.log_softmax(logits / (1.0 if temperature < 1e-5 else temperature), dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def grpo_loss(
    model: torch.nn.Module,
    groups: list[RolloutGroup],
    lag_of: Callable[[int], int],
    *,
    lag_bound: int,
    threshold: float,
    clip: float = 0.2,
) -> Tensor:
    """Token-mean GRPO over every group with token-truncated weights; the model is in float64, on CPU, unpacked.

    Groups without variance take part here with their advantage of 0.
    """
    total, denominator = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        rewards = [rollout.reward.value for rollout in group.rollouts]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            advantage = (reward - mean) / (std + 1e-4)
            for segment in rollout.segments:
                ids = torch.tensor(list(unpack_ids(segment.token_ids)))
                at = [p for start, end in segment.loss_mask for p in range(start, end)]
                versions = [span.version for span in segment.version_spans for _ in range(span.start, span.end)]
                denominator += len(at)
                logits = model(input_ids=ids[None]).logits[0][[p - 1 for p in at]]
                current, _ = logprobs_and_entropy(logits, ids[at], group.sampling.temperature)
                for c, b, v in zip(current, unpack_floats(segment.behavior_logprobs), versions, strict=True):
                    if lag_of(v) > lag_bound:
                        continue
                    weight = min(math.exp(max(-20.0, min(20.0, c.item() - b))), threshold)
                    ratio = torch.exp(c - c.detach())
                    clipped = ratio.clamp(1 - clip, 1 + clip)
                    total = total - weight * torch.minimum(ratio * advantage, clipped * advantage)
    return total / denominator
