"""Advantages: pure functions of a batch's rewards, named by a run file's `[advantage]`, and the KL in the reward.

With r the rewards of a group's siblings, mean and std (n - 1) over them unless another set is named::

    group_relative        (r - mean) / (std + 1e-4)                                GRPO; without std Dr. GRPO
    leave_one_out         r - mean of the other siblings                           RLOO
    batch_normalized      (r - mean) / (std over the batch's rewards + 1e-4)       Lite PPO
    reinforce_plus_plus   (r - M) / sqrt(V + 1e-8), M and V mean and variance      REINFORCE++; with group_baseline
                          over the batch's sampled tokens                          r - mean takes the place of r
    per_component         sum over the parts c of w_c * group_relative(r_c)        GDPO
    length_weighted       r - (sum of n * r) / (sum of n), n the sampled tokens    OPO
    minimum_variance      r - (sum of n * r) / (sum of n), n = |g|^2               VCPO
    maximum_likelihood    (r - mean) / mean, 0 where the mean is 0                 MaxRL

`minimum_variance` measures g, the gradient of a rollout's part of the loss at an advantage of 1, before the first step
on a batch: one more forward and backward pass for each rollout, alone. The update is the sum of (r - b) * g, whose
second moment over independent siblings is least at this b. g holds the importance weights: under `correction.mode =
"sequence_truncate"` with `sequence_ratio = "product"` |g|^2 is the paper's w^2 |grad log p|^2. Exact for losses that
are linear in the advantage, as all are where no clip acts.

Sources: GRPO DeepSeekMath (arXiv 2402.03300, section 4.1.2), Dr. GRPO arXiv 2503.20783, RLOO Ahmadian et al. (arXiv
2402.14740), Lite PPO arXiv 2508.08221, REINFORCE++ and its baseline variant arXiv 2501.03262, GDPO arXiv 2601.05242,
OPO arXiv 2505.23585 (read in verl's `opo`), VCPO arXiv 2602.17616 (read in the authors' repository, mit-han-lab/vcpo,
which gets |g| and the update from one backward pass per rollout, with two buffers of gradients), MaxRL arXiv 2602.02710
(read on the authors' page, zanette-labs.github.io/MaxRL: theorem 2 and its estimator).

Peers: TRL's `scale_rewards` "group", "none" and "batch" are the first, the first without std, and the third, with its
1e-4; verl takes 1e-6 there. `reinforce_plus_plus` is verl's, of gamma = 1: a rollout of n tokens counts n times.

Departures: GDPO's paper divides the sum by its standard deviation over the batch once more. REINFORCE++ subtracts from
a token's return the KL of the tokens that follow it alone; here, as for every other function, it is the rollout's.
MaxRL's code and TRL's add 1e-6 to the mean; here the mean is exact. Its rewards are 0 and 1, and the estimator that of
the gradient of the truncated log pass rate; for other rewards the formula is a weight of 1 / mean on the group.

A group has no variance if its rewards are equal up to rounding: they differ by 2^-21 (4.8e-7, four units in the last
place of a float32) of the largest in magnitude or less, which counts as 1e-4 at least, so that sums that cancel to 0
are equal too. All functions get such rewards as equal ones (`BatchRewards`); filling of batches, skipping and the
history of tasks go by the functions' results (`has_variance`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from penstock.schemas.config import AdvantageConfig, ConfigError, RunConfig
from penstock.schemas.process.plugins import resolve
from penstock.schemas.rollout import Rollout, RolloutGroup

STD_EPSILON = 1e-4
VARIANCE_EPSILON = 1e-8
ROUNDING = 2.0**-21
"""The largest difference of equal rewards, relative to the largest in magnitude or `STD_EPSILON`."""


@dataclass(frozen=True, kw_only=True)
class BatchRewards:
    """The rewards of a batch's R rollouts; siblings lie next to each other. Those of a group that are equal up to
    rounding are made equal."""

    values: np.ndarray
    """[R] float64, that of truncated rollouts replaced if the run file says so, less the KL penalty if there is one."""
    indexes: np.ndarray
    """[R] int64, the task index of each rollout's group."""
    num_tokens: np.ndarray
    """[R] int64, sampled tokens."""
    parts: Mapping[str, np.ndarray]
    """[R] float64 by the name of a reward's part; 0 for a rollout without it."""
    squared_norms: np.ndarray | None = None
    """[R] float64, the squared norm of each rollout's gradient at an advantage of 1, 0 if not trained on; None until
    it is measured, for a function with an attribute `needs_squared_norms`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", self.of_groups(_without_rounding, self.values))
        if type(self.parts) is dict:
            parts = {name: self.of_groups(_without_rounding, part) for name, part in self.parts.items()}
            object.__setattr__(self, "parts", parts)

    def by_group(self, values: np.ndarray) -> list[np.ndarray]:
        """Splits [R] values into one array per group."""
        return np.split(values, np.flatnonzero(np.diff(self.indexes)) + 1)

    def of_groups(self, function: Callable[[np.ndarray], np.ndarray], values: np.ndarray) -> np.ndarray:
        """Returns [R], the function applied to each group's values."""
        return np.concatenate([function(each) for each in self.by_group(values)])


class AdvantageFunction(Protocol):
    """A pure function that returns [R] float64, each rollout's advantage. A group whose advantages are all 0 is
    skipped."""

    def __call__(self, rewards: BatchRewards) -> np.ndarray: ...


def group_relative(rewards: BatchRewards, *, normalize_std: bool = True) -> np.ndarray:
    """Subtracts each group's mean and divides by its standard deviation unless `normalize_std` is False."""
    _check_flag("normalize_std", normalize_std)
    return rewards.of_groups(partial(_normalized, by_std=normalize_std), rewards.values)


def leave_one_out(rewards: BatchRewards, *, normalize_std: bool = False) -> np.ndarray:
    """Subtracts the mean of the siblings' rewards; divides by the group's standard deviation with `normalize_std`."""
    _check_flag("normalize_std", normalize_std)

    def baselined(values: np.ndarray) -> np.ndarray:
        # r_i - mean of the others = (r_i - mean) * n / (n - 1)
        return _normalized(values, by_std=normalize_std) * (len(values) / max(1, len(values) - 1))

    return rewards.of_groups(baselined, rewards.values)


def batch_normalized(rewards: BatchRewards) -> np.ndarray:
    """Subtracts each group's mean and divides by the standard deviation of the batch's rewards."""
    scale = _scale(rewards.values)
    values = rewards.values / scale
    centered = rewards.of_groups(partial(_normalized, by_std=False), values)
    return centered / (values.std(ddof=1) + STD_EPSILON / scale) if centered.any() else centered


def reinforce_plus_plus(rewards: BatchRewards, *, group_baseline: bool = False) -> np.ndarray:
    """Normalizes rewards, or with `group_baseline` their distance from the group's mean, to mean 0 and variance 1 over
    the batch's tokens. Groups without reward variance are trained on too."""
    _check_flag("group_baseline", group_baseline)
    values = group_relative(rewards, normalize_std=False) if group_baseline else rewards.values
    values, total = _without_rounding(values), rewards.num_tokens.sum()
    if total < 2 or (values == values[0]).all():
        return np.zeros(len(values))
    scale = _scale(values)
    values = values / scale
    centered = values - (rewards.num_tokens * values).sum() / total
    variance = (rewards.num_tokens * centered**2).sum() / (total - 1)
    return np.asarray(centered / np.sqrt(variance + VARIANCE_EPSILON / scale / scale))


def per_component(rewards: BatchRewards, *, weights: Mapping[str, float]) -> np.ndarray:
    """Returns the weighted sum of `group_relative` of each part of the reward. The reward itself is not read."""
    if not isinstance(weights, Mapping) or not weights:
        raise ValueError(f"weights is {weights!r}, expected a weight for each of one or more parts of the reward")
    total = np.zeros(len(rewards.values))
    for name, weight in weights.items():
        if not (isinstance(weight, int | float) and np.isfinite(weight)):
            raise ValueError(f"weights.{name} is {weight!r}, expected a finite number")
        try:
            part = rewards.parts[name]
        except KeyError:
            known = ", ".join(map(repr, sorted(rewards.parts))) or "none"
            raise ValueError(f"weights has {name!r}, expected parts that the batch's rewards have: {known}") from None
        total += weight * rewards.of_groups(partial(_normalized, by_std=True), part)
    return total


def length_weighted(rewards: BatchRewards) -> np.ndarray:
    """Subtracts the mean of each group's rewards over its tokens: the baseline of least variance if the squared norms
    of the rollouts' gradients are as their lengths, and one policy sampled them."""
    scale = _scale(rewards.values)
    each = rewards.by_group(rewards.values / scale), rewards.by_group(rewards.num_tokens)
    return np.concatenate([_above(values, num_tokens) * scale for values, num_tokens in zip(*each, strict=True)])


def minimum_variance(rewards: BatchRewards) -> np.ndarray:
    """Subtracts the mean of each group's rewards by the squared norms of its rollouts' gradients."""
    norms = np.ones(len(rewards.values)) if rewards.squared_norms is None else rewards.squared_norms
    return length_weighted(replace(rewards, num_tokens=norms))


minimum_variance.needs_squared_norms = True  # type: ignore[attr-defined]


def _above(values: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    if (values == values[:1]).all() or not num_tokens.any():
        return np.zeros(len(values))
    return values - (num_tokens * values).sum() / num_tokens.sum()


def maximum_likelihood(rewards: BatchRewards) -> np.ndarray:
    """Subtracts each group's mean and divides by it: the rarer success is in a group, the more each one counts."""
    if (rewards.values < 0).any():
        raise ValueError(f"a reward is {rewards.values.min()}, expected 0 or more, as of a mean that is a pass rate")

    def by_mean(values: np.ndarray) -> np.ndarray:
        if not values.any():
            return np.zeros(len(values))
        shares = values / values.max()
        return _normalized(shares, by_std=False) / shares.mean()

    return rewards.of_groups(by_mean, rewards.values)


def make_advantage(config: AdvantageConfig) -> AdvantageFunction:
    """Returns the function that a run file names, with its arguments; each call is checked.

    Raises:
        ConfigError: no such function; when called, refused arguments, or a result other than [R] numbers.
    """
    function = resolve(config, "advantage")

    def checked(rewards: BatchRewards) -> np.ndarray:
        try:
            found = np.asarray(function(rewards, **config.kwargs), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"advantage.path = {config.path!r} with kwargs = {config.kwargs!r}: {error}") from error
        if found.shape != rewards.values.shape:
            raise ConfigError(
                f"advantage.path = {config.path!r}: returns an array of {list(found.shape)}, expected "
                f"{list(rewards.values.shape)}, a number for each rollout"
            )
        return found

    return checked


def check_advantage(config: AdvantageConfig) -> None:
    """Tries the function on pairs of groups. Raises ConfigError if it does not fit, or does not read the rewards that
    the run file changes."""
    function = make_advantage(config)
    parts = _EveryPart(np.array([0.0, 1.0, 1.0, 0.0]))
    values = np.array([[0.0, 1.0, 1.0, 3.0], [0.0, 1.0, 1.0, 2.0], [0.0, 1.0, 1.0, 3.0]])
    # The last as the run file's changes may make them.
    values[2] -= 4.0 * (config.kl_coefficient > 0)
    values[2, 0] = values[2, 0] if config.truncated_reward is None else config.truncated_reward
    found = [
        function(BatchRewards(values=each, indexes=np.array([1, 1, 2, 2]), num_tokens=np.full(4, 3), parts=parts))
        for each in values
    ]
    if not np.isfinite(found).all():
        raise ConfigError(f"advantage.path = {config.path!r}: returns {found[0].tolist()}, expected finite numbers")
    changes = {"kl_coefficient": (config.kl_coefficient, 0), "truncated_reward": (config.truncated_reward, None)}
    for name, (value, none) in changes.items():
        if value != none and np.array_equal(found[0], found[1]):
            raise ConfigError(
                f"advantage.{name} = {value} with advantage.path = {config.path!r}: this function does not read the "
                "rewards that it changes; expected it to be left out"
            )


def check_siblings(config: RunConfig) -> None:
    """Raises ConfigError if groups have one rollout each, and the advantage function gives all of them 0."""
    if config.group_size > 1 or (config.teacher is not None and config.teacher.alone):
        return
    values = np.arange(min(config.groups_per_batch, 2), dtype=np.float64)
    rewards = BatchRewards(
        values=values, indexes=np.arange(len(values)), num_tokens=np.full(len(values), 3), parts=_EveryPart(values)
    )
    if not make_advantage(config.advantage)(rewards).any():
        raise ConfigError(
            f"group_size = 1 with advantage.path = {config.advantage.path!r}, kwargs = {config.advantage.kwargs!r} and "
            f"groups_per_batch = {config.groups_per_batch}: every advantage is 0; expected 2 or more siblings, whose "
            "rewards are compared, a function that compares those of different groups, or a [teacher] alone"
        )


def batch_rewards(groups: Sequence[RolloutGroup], config: AdvantageConfig) -> BatchRewards:
    """Returns the groups' rewards. config: sets the reward of a truncated rollout."""
    instead = config.truncated_reward

    def value(rollout: Rollout) -> float:
        return instead if instead is not None and rollout.is_truncated else rollout.reward.value

    rollouts = [rollout for group in groups for rollout in group.rollouts]
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.reward.parts)
    return BatchRewards(
        values=np.array([value(rollout) for rollout in rollouts], dtype=np.float64),
        indexes=np.array([group.index for group in groups for _ in group.rollouts], dtype=np.int64),
        num_tokens=np.array([rollout.num_sampled_tokens for rollout in rollouts], dtype=np.int64),
        parts={name: np.array([rollout.reward.parts.get(name, 0.0) for rollout in rollouts]) for name in names},
    )


def has_variance(group: RolloutGroup, config: AdvantageConfig) -> bool:
    """Returns whether the rewards differ among siblings: the group's advantages, taken alone, are not all 0.

    Raises:
        ConfigError: see `make_advantage`.
    """
    rewards = batch_rewards([group], config)
    parts = _EveryPart(np.zeros(len(rewards.values)))  # other groups of a batch may have parts that this one lacks
    parts.update(rewards.parts)
    return bool(make_advantage(config)(replace(rewards, parts=parts)).any())


class _EveryPart(dict[str, Any]):
    """Reward parts; a missing name has `values`."""

    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self._values = values

    def __missing__(self, name: str) -> np.ndarray:
        return self._values


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected true or false")


def _without_rounding(values: np.ndarray) -> np.ndarray:
    """Returns the values; all as the first one if they are equal up to rounding."""
    if not len(values):
        return values
    half_spread = values.max() / 2 - values.min() / 2  # of half the values: a part may be any finite number
    is_equal = half_spread <= ROUNDING / 2 * max(np.abs(values).max(), STD_EPSILON)
    return np.full_like(values, values[0]) if is_equal else values


def _scale(values: np.ndarray) -> float:
    """Returns what values are divided by before they are squared or added: the square of one beyond 1e154 would be
    infinite."""
    return max(1.0, float(np.abs(values).max()))


def _normalized(values: np.ndarray, *, by_std: bool) -> np.ndarray:
    if len(values) < 2 or (values == values[0]).all():  # exact, whatever the rounding of the mean
        return np.zeros(len(values))
    scale = _scale(values)
    values = values / scale
    centered = values - values.mean()  # of the scaled ones: a sum of large rewards would be infinite
    return centered / (values.std(ddof=1) + STD_EPSILON / scale) if by_std else centered * scale
