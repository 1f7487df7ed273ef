"""KL in the reward: a rollout's distance from the reference model, subtracted from its reward.

Formula, of a rollout with reward r and sampled tokens t, beta = `advantage.kl_coefficient`::

    r' = r - beta * sum_t (proximal_t - reference_t)

The sum is k1 of terms.py over the whole rollout, an estimate of KL(proximal || reference) without bias if the proximal
policy sampled it. As a reward it has a gradient of the right expectation, which k1 as a loss term lacks. The advantages
are those of r'.

Source: Stiennon et al. (arXiv 2009.01325, section 3.4). Peers: TRL's RLOOTrainer (`beta`) and verl's
`use_kl_in_reward` with `kl_penalty = "kl"`, both of the proximal policy's logprobs.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.learning.advantages import make_advantage
from penstock.consumers.learning.batch.batch import Batch
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.config import AdvantageConfig


def penalized(batch: Batch, divergences: Sequence[Tensor], config: AdvantageConfig, ranks: Ranks) -> Batch:
    """Returns the batch with the advantages of its penalized rewards, NaN for a group with a divergence that is not
    finite; the same on every rank, as sums are over all.

    divergences: proximal - reference logprobs of each of the batch's micro-batches, [M] float64 on CPU.
    """
    total = torch.zeros(len(batch.rewards.values), dtype=torch.float64)
    for microbatch, own in zip(batch.microbatches, divergences, strict=True):
        total.index_add_(0, microbatch.rollouts[microbatch.row_ids], own)
    penalties = config.kl_coefficient * ranks.add(total).numpy()
    is_known = np.isfinite(penalties)
    rewards = replace(batch.rewards, values=batch.rewards.values - np.where(is_known, penalties, 0.0))
    # A group without a known penalty fails alone, whatever its advantages are made of.
    of_known = rewards.of_groups(lambda each: np.full(len(each), each.all()), is_known)
    return batch.with_advantages(np.where(of_known, make_advantage(config)(rewards), np.nan))
