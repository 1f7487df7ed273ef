"""Figures of held-out prompts: avg@k and pass@k, each with its standard error.

avg@k   the mean reward of k answers to a prompt, mean over the prompts.
pass@k  the chance that at least one of k answers solves the prompt. Of n answers of which c solve it, an unbiased
        estimate is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1); mean over the prompts.

Answers to one prompt are not independent, so a standard error is computed from one value per prompt: the values'
standard deviation (P - 1) over the square root of their number P. With equally many answers each it is the error
clustered by prompt (Miller 2024, arXiv 2411.00640, section 2.2) but for the factor P / (P - 1).
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.consumers.learning.outcome import mean_rewards, reward_table
from penstock.schemas.config import HeldOut
from penstock.schemas.metrics import REWARD, error_key, pass_key
from penstock.schemas.rollout import RolloutGroup


class HeldOutAnswers(NamedTuple):
    """The answers to one held-out prompt, without failed ones.

    rewards: each answer's `reward` and `reward/<part>`. num_tokens: sampled, over all answers. num_truncated: answers
    that ended at the token limit.
    """

    environment: str
    rewards: Sequence[Mapping[str, float]] = ()
    num_tokens: int = 0
    num_truncated: int = 0

    @classmethod
    def of(cls, group: RolloutGroup) -> "HeldOutAnswers":
        return cls(
            group.environment,
            [reward_table(rollout.reward) for rollout in group.rollouts],
            sum(rollout.num_sampled_tokens for rollout in group.rollouts),
            sum(rollout.is_truncated for rollout in group.rollouts),
        )


def pass_at(num_samples: int, num_solved: int, k: int) -> float:
    """Estimates pass@k for a prompt with `num_samples` answers, k or more, of which `num_solved` solve it."""
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def standard_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of the mean of independent values; None for fewer than two."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None


def held_out_figures(prompts: Sequence[HeldOutAnswers], sets: Mapping[str, HeldOut]) -> dict[str, float]:
    """Returns the figures of prompts of one or several environments.

    A failed answer counts as 0 and as not solved.

    sets: how the prompts of each environment were evaluated.

    Returns:
        reward, reward/<part>: avg@k, as of `mean_rewards`.
        pass@<k>: for each k requested of all these prompts, unless no answer has the figure that decides it.
        reward_se, pass@<k>_se: standard errors, for two prompts or more.
        completion_tokens: mean sampled tokens of an answer; truncated_frac: share that ended at the token limit.
        num_samples: answers requested.
    """
    each_k = [_measurable(prompts, name, sets[name]) for name in {each.environment for each in prompts}]
    asked = [max(sets[each.environment].num_samples, len(each.rewards)) for each in prompts]
    tables = [
        mean_rewards(each.rewards, number - len(each.rewards)) for each, number in zip(prompts, asked, strict=True)
    ]
    answered = [table for table in tables if table]
    found = {REWARD: 0.0, **mean_rewards(answered, len(tables) - len(answered))}
    values = {REWARD: [table.get(REWARD, 0.0) for table in tables]}
    for k in sorted(set.intersection(*each_k)) if each_k else ():
        values[pass_key(k)] = [
            pass_at(number, _num_solved(each, sets[each.environment]), k)
            for each, number in zip(prompts, asked, strict=True)
        ]
        found[pass_key(k)] = float(np.mean(values[pass_key(k)]))
    for name, of_prompts in values.items():
        if (error := standard_error(of_prompts)) is not None:
            found[error_key(name)] = error
    if num_answers := sum(len(each.rewards) for each in prompts):
        found["completion_tokens"] = sum(each.num_tokens for each in prompts) / num_answers
        found["truncated_frac"] = sum(each.num_truncated for each in prompts) / num_answers
    return found | {"num_samples": sum(asked)}


def _measurable(prompts: Sequence[HeldOutAnswers], environment: str, how: HeldOut) -> set[int]:
    """Returns the k of an environment's pass@k; none if its answers lack the figure that says what is solved."""
    answers = [rewards for each in prompts if each.environment == environment for rewards in each.rewards]
    is_there = not answers or any(how.solved.figure in rewards for rewards in answers)
    return set(how.pass_at) if is_there else set()


def _num_solved(answers: HeldOutAnswers, how: HeldOut) -> int:
    return sum(rewards.get(how.solved.figure, -math.inf) >= how.solved.value for rewards in answers.rewards)
