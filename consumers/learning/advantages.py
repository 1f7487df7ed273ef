"""Advantages of siblings: each reward against those of its group."""

import numpy as np

from penstock.schemas.config import AdvantageConfig
from penstock.schemas.rollout import RolloutGroup

STD_EPSILON = 1e-4


def has_variance(group: RolloutGroup) -> bool:
    """Whether the siblings' rewards differ; without that every advantage is 0 and the group teaches nothing."""
    first = group.rollouts[0].reward.value
    return any(rollout.reward.value != first for rollout in group.rollouts)


def group_advantages(rewards: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    """Advantages of one group's rewards [G], float64.

    The baseline is the group's mean, or with `leave_one_out` the mean of the other siblings (RLOO). With
    `normalize_std` the result is divided by the group's standard deviation plus 1e-4: Bessel's correction (n - 1) and
    epsilon as in TRL's GRPOTrainer. verl takes the same deviation with 1e-6; the GRPO paper names neither.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    size = len(rewards)
    if size < 2 or (rewards == rewards[0]).all():  # not left to the rounding of their mean
        return np.zeros(size)
    advantages = rewards - rewards.mean()
    if config.leave_one_out:
        # r_i - mean of the others = (r_i - mean) * n / (n - 1)
        advantages = advantages * (size / (size - 1))
    if config.normalize_std:
        advantages = advantages / (rewards.std(ddof=1) + STD_EPSILON)
    return advantages
