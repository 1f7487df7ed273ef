"""Metrics of rollouts' rewards and lengths."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.schemas.metrics import MAX_PART_CHARACTERS, MAX_PARTS, REWARD, part_key
from penstock.schemas.prompt import Reward
from penstock.schemas.rollout import RolloutGroup


def outcome(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Returns metrics over every rollout of every group; empty without groups.

    reward, and `reward/<part>` of each part: means, as of `mean_rewards`.
    reward_std: standard deviation (n - 1) of a group's rewards, mean over the groups.
    completion_tokens: mean sampled tokens of a rollout.
    truncated_frac, truncated_rollouts: share and number of the rollouts whose last segment ended at the token limit.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    truncated = [rollout.is_truncated for rollout in rollouts]
    rewards = [[rollout.reward.value for rollout in group.rollouts] for group in groups]
    return {
        **mean_rewards([reward_table(rollout.reward) for rollout in rollouts]),
        "reward_std": float(np.mean([np.std(values, ddof=1) if len(values) > 1 else 0.0 for values in rewards])),
        "completion_tokens": float(np.mean([rollout.num_sampled_tokens for rollout in rollouts])),
        "truncated_frac": float(np.mean(truncated)),
        "truncated_rollouts": float(sum(truncated)),
    }


def reward_table(reward: Reward) -> dict[str, float]:
    """Returns `reward`, and `reward/<part>` for each part."""
    return {REWARD: reward.value, **{part_key(name): value for name, value in reward.parts.items()}}


def mean_rewards(tables: Sequence[Mapping[str, float]], num_failed: int = 0) -> dict[str, float]:
    """Returns means by name over the tables that have it; each of `num_failed` more counts as 0 for every name.

    Agents name parts freely: names longer than `MAX_PART_CHARACTERS`, and all but the `MAX_PARTS` most frequent ones,
    are left out, as is a mean beyond the range of a float.
    """
    counts = Counter(name for table in tables for name in table)
    names = [name for name in counts if len(name) <= len(part_key("")) + MAX_PART_CHARACTERS]
    kept = sorted(names, key=lambda name: (-counts[name], name))[: 1 + MAX_PARTS]
    means = {name: sum(table[name] for table in tables if name in table) / (counts[name] + num_failed) for name in kept}
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}
