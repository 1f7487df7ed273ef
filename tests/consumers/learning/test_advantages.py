"""Advantages from the rewards of a batch, against torch's arithmetic in float64."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from penstock.consumers.learning.advantages import (
    BatchRewards,
    batch_normalized,
    batch_rewards,
    check_advantage,
    check_siblings,
    group_relative,
    has_variance,
    leave_one_out,
    length_weighted,
    make_advantage,
    maximum_likelihood,
    per_component,
    reinforce_plus_plus,
)
from penstock.consumers.learning.batch.packing import pack
from penstock.schemas.config import AdvantageConfig, ConfigError
from penstock.schemas.prompt import Reward
from training_groups import configuration, lag_from, random_group

HERE = "penstock.consumers.learning.advantages"
EVERY = {
    "group_relative": {},
    "leave_one_out": {},
    "batch_normalized": {},
    "reinforce_plus_plus": {},
    "per_component": {"weights": {"exact": 1.0, "brief": 0.5}},
    "length_weighted": {},
    "maximum_likelihood": {},
}
KL = {"kl_coefficient": 0.1}
TRUNCATED = {"truncated": "penalize", "truncated_reward": -1.0}

values = st.integers(-10_000, 10_000).map(lambda n: n / 1000)  # none are equal up to rounding
batches = st.lists(
    st.lists(st.tuples(values, st.integers(1, 9), values, values), min_size=1, max_size=6), min_size=1, max_size=5
)


def _rewards(groups: list[list[tuple[float, int, float, float]]]) -> BatchRewards:
    rows = [row for group in groups for row in group]
    reward, tokens, exact, brief = (np.array(column) for column in zip(*rows, strict=True))
    indexes = np.array([7 + n for n, group in enumerate(groups) for _ in group])
    return BatchRewards(values=reward, indexes=indexes, num_tokens=tokens, parts={"exact": exact, "brief": brief})


def _by_group(rewards: BatchRewards, column: np.ndarray) -> list[Tensor]:
    return [torch.from_numpy(column[rewards.indexes == index]) for index in np.unique(rewards.indexes)]


def _std(values: Tensor) -> Tensor:
    return values.std() if len(values) > 1 else torch.zeros(())


def _assert_close(got: np.ndarray, expected: list[Tensor] | Tensor) -> None:
    np.testing.assert_allclose(got, torch.cat(list(expected)), rtol=1e-6, atol=1e-9)


@given(groups=batches, group_baseline=st.booleans())
@settings(deadline=None, derandomize=True)
def test_each_function_is_the_formula_of_its_source(groups, group_baseline) -> None:
    rewards = _rewards(groups)
    own = _by_group(rewards, rewards.values)
    centered_values = [r - r.mean() for r in own]
    _assert_close(group_relative(rewards), [(r - r.mean()) / (_std(r) + 1e-4) for r in own])  # TRL's default
    _assert_close(group_relative(rewards, normalize_std=False), centered_values)
    left_out = [
        r[i] - np.delete(r, i).mean() if len(r) > 1 else 0.0 for r in map(np.asarray, own) for i in range(len(r))
    ]
    np.testing.assert_allclose(leave_one_out(rewards), left_out, rtol=1e-9, atol=1e-9)
    scale = _std(torch.from_numpy(rewards.values)) + 1e-4  # TRL's scale by the batch
    _assert_close(batch_normalized(rewards), [r / scale for r in centered_values])
    expected: Any = 0
    for name, weight in (("exact", 1.0), ("brief", -0.5)):
        parts = _by_group(rewards, rewards.parts[name])
        expected = expected + weight * torch.cat([(r - r.mean()) / (_std(r) + 1e-4) for r in parts])
    _assert_close(per_component(rewards, weights={"exact": 1.0, "brief": -0.5}), expected[None])
    lengths = _by_group(rewards, rewards.num_tokens)
    _assert_close(length_weighted(rewards), [r - (r * n).sum() / n.sum() for r, n in zip(own, lengths, strict=True)])
    success = BatchRewards(**vars(rewards) | {"values": np.abs(rewards.values)})  # MaxRL divides by the pass rate
    rates = [(r, r.mean()) for r in _by_group(success, success.values)]
    _assert_close(maximum_likelihood(success), [(r - mean) / (mean if mean > 0 else 1.0) for r, mean in rates])
    # verl whitens over the tokens.
    by_rollout = torch.cat(centered_values if group_baseline else own)
    by_token = by_rollout.repeat_interleave(torch.from_numpy(rewards.num_tokens))
    got = reinforce_plus_plus(rewards, group_baseline=group_baseline)
    if _std(by_token) > 1e-6:  # below it rounding is all there is
        _assert_close(got, ((by_rollout - by_token.mean()) * torch.rsqrt(_std(by_token) ** 2 + 1e-8))[None])
        of_tokens = got.repeat(rewards.num_tokens)
        assert of_tokens.mean() == pytest.approx(0, abs=1e-6)
        assert of_tokens.std(ddof=1) <= 1 + 1e-9


def test_components_that_cancel_in_the_sum_still_teach() -> None:
    rewards = _rewards([[(1.0, 3, 1.0, 0.0), (1.0, 3, 0.0, 1.0), (1.0, 3, 1.0, 0.0)]])
    assert not group_relative(rewards).any()
    assert per_component(rewards, weights={"exact": 1.0, "brief": 0.5}).all()


@pytest.mark.parametrize("name", EVERY)
def test_a_shift_of_every_reward_changes_nothing_and_equal_rewards_give_exactly_0(name) -> None:
    function = make_advantage(AdvantageConfig(path=f"{HERE}:{name}", kwargs=EVERY[name]))
    rewards = _rewards([[(0.1, 2, 1.0, 0.0), (0.7, 5, 0.0, 0.3)], [(0.3, 1, 1.0, 0.0), (0.3, 3, 0.0, 0.1)]])
    shifted = BatchRewards(
        values=rewards.values + 3,
        indexes=rewards.indexes,
        num_tokens=rewards.num_tokens,
        parts={part: column - 2 for part, column in rewards.parts.items()},
    )
    if name != "maximum_likelihood":
        np.testing.assert_allclose(function(shifted), function(rewards), rtol=1e-9)
    alike = _rewards([[(0.1, n, 0.1, 0.7) for n in range(1, 8)]] * 3)
    assert not function(alike).any()
    assert function(_rewards([[(3.0, 2, 1.0, 1.0)]])).tolist() == [0.0]


def test_successes_average_their_scores_whatever_their_number_and_the_rewards_scale() -> None:
    for k in range(5):
        for one in (1e-3, 1.0, 1.7e308):
            group = _rewards([[(one * (n < k), 2, 0.0, 0.0) for n in range(4)]])
            got = maximum_likelihood(group) / 4  # sum of score / k over successes, less the mean score: theorem 2
            expected = [(n < k) / k - 1 / 4 if 0 < k < 4 else 0.0 for n in range(4)]
            np.testing.assert_allclose(got, expected, rtol=1e-12, err_msg=f"{k} of {one}")


def centered(rewards: BatchRewards) -> np.ndarray:
    return rewards.values - rewards.by_group(rewards.values)[0][0]


def test_rewards_that_are_equal_up_to_rounding_have_no_variance_under_any_function(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "test_advantages", sys.modules[__name__])
    sums = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6, float(np.float32(0.1) + np.float32(0.2) + np.float32(0.3))]
    assert len(set(sums)) > 2
    functions = {f"{HERE}:{name}": kwargs for name, kwargs in EVERY.items()} | {"test_advantages:centered": {}}
    equal = {"sums": sums, "cancelled": [(0.1 + 0.2) - 0.3, 0.0, 0.0, -0.0], "large": [1e9 / 3 * 3, 1e9, 1e9, 1e9 - 1]}
    for path, kwargs in functions.items():
        config = AdvantageConfig(path=path, kwargs=kwargs)
        for case, values in equal.items():
            group = random_group(1, 0, rewards=values)
            rollouts = tuple(
                replace(one, reward=Reward(value=value, parts={"exact": value, "brief": -value}))
                for one, value in zip(group.rollouts, values, strict=True)
            )
            group = replace(group, rollouts=rollouts)
            assert not has_variance(group, config), (path, case)
            assert not make_advantage(config)(batch_rewards([group], config)).any(), (path, case)
    for values in ([1.0, 1.000001, 1.0, 1.0], [0.0, 0.0, 1e-9, 0.0], [-1e-3, 1e-3, 0.0, 0.0]):
        assert has_variance(random_group(1, 0, rewards=values), AdvantageConfig()), values
    two = _rewards([[(sums[0], 3, 0, 0), (sums[1], 4, 0, 0)], [(sums[2], 3, 0, 0), (sums[3], 4, 0, 0)]])
    assert not reinforce_plus_plus(two).any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1e9, 1e154, 1e200, 1e308, 1.7e308])
def test_a_reward_or_part_of_any_finite_size_has_its_exact_advantage(size) -> None:
    whole = _rewards([[(size, 3, 0.0, 0.0), (-size, 3, 0.0, 0.0), (0.0, 3, 0.0, 0.0)]])
    np.testing.assert_allclose(batch_normalized(whole), [1.0, -1.0, 0.0], rtol=1e-12)
    for group_baseline in (False, True):  # the variance over 9 tokens is 6 / 8 of size**2
        got = reinforce_plus_plus(whole, group_baseline=group_baseline)
        np.testing.assert_allclose(got, np.array([1.0, -1.0, 0.0]) / np.sqrt(0.75), rtol=1e-12)
    same_sign = _rewards([[(size / 2, 3, 0.0, 0.0), (size, 3, 0.0, 0.0), (size, 3, 0.0, 0.0), (size, 3, 0.0, 0.0)]])
    apart = np.array([-3.0, 1.0, 1.0, 1.0])
    np.testing.assert_allclose(group_relative(same_sign, normalize_std=False), apart / 8 * size, rtol=1e-12)
    np.testing.assert_allclose(leave_one_out(same_sign), apart / 6 * size, rtol=1e-12)
    np.testing.assert_allclose(length_weighted(same_sign), apart / 8 * size, rtol=1e-12)
    np.testing.assert_allclose(reinforce_plus_plus(same_sign, group_baseline=True), apart / np.sqrt(36 / 11), rtol=1e-9)
    parts = [(0.0, 3, size, 0.0), (0.0, 3, -size, 0.0), (0.0, 3, 0.0, 1.0)]
    got = per_component(_rewards([parts]), weights={"exact": 1.0, "brief": 0.0})
    np.testing.assert_allclose(got, [1.0, -1.0, 0.0], rtol=1e-12)  # mean 0, std = size


@pytest.mark.parametrize(
    ("name", "kwargs", "groups", "fits"),
    [
        ("reinforce_plus_plus", {}, 8, True),
        ("reinforce_plus_plus", {}, 1, False),
        ("reinforce_plus_plus", {"group_baseline": True}, 8, False),
        *((name, EVERY[name], 8, False) for name in EVERY if name != "reinforce_plus_plus"),
    ],
)
def test_groups_of_one_need_a_function_that_compares_different_groups(name, kwargs, groups, fits) -> None:
    advantage = AdvantageConfig(path=f"{HERE}:{name}", kwargs=kwargs)
    config = configuration("none", advantage=advantage, group_size=1, groups_per_batch=groups)
    if fits:
        return check_siblings(config)
    with pytest.raises(ConfigError, match=rf"group_size = 1 with .*{name}.* = {groups}: every advantage is 0"):
        check_siblings(config)


def test_rewards_are_in_the_order_of_the_groups_with_0_for_a_part_that_is_not_there() -> None:
    first, second = random_group(4, 0, siblings=2, rewards=[0.25, 1.0]), random_group(9, 0, siblings=3)
    with_part = replace(first.rollouts[1], reward=Reward(value=1.0, parts={"exact": 0.5}))
    first = replace(first, rollouts=(first.rollouts[0], with_part))
    found = batch_rewards([first, second], AdvantageConfig())
    assert found.indexes.tolist() == [4, 4, 9, 9, 9]
    assert found.values[:2].tolist() == [0.25, 1.0]
    assert found.num_tokens.tolist() == [each.num_sampled_tokens for g in (first, second) for each in g.rollouts]
    assert {name: column.tolist() for name, column in found.parts.items()} == {"exact": [0.0, 0.5, 0.0, 0.0, 0.0]}


def by_length(rewards: BatchRewards, *, sign: int) -> np.ndarray:
    return sign * rewards.num_tokens


def test_a_function_of_ones_own_is_named_by_its_path(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "test_advantages", sys.modules[__name__])
    config = configuration("none", advantage=AdvantageConfig(path="test_advantages:by_length", kwargs={"sign": -1}))
    flat = random_group(1, 0, rewards=[0.5] * 4)
    batch = pack([flat], lag_from(7), config)
    lengths = tuple(-float(rollout.num_sampled_tokens) for rollout in flat.rollouts)
    assert batch.group_advantages == {1: lengths}
    (microbatch,) = batch.microbatches  # though the rewards are equal: the advantages are not 0
    by_row = {int(row): microbatch.advantages[microbatch.row_ids == row].unique().tolist() for row in range(4)}
    assert sorted(by_row.values()) == sorted([each] for each in lengths)
    assert [lengths[place] for place in microbatch.rollouts] == [each for (each,) in by_row.values()]


def of_the_wrong_size(rewards: BatchRewards) -> np.ndarray:
    return rewards.values[:2]


def not_finite(rewards: BatchRewards) -> np.ndarray:
    return rewards.values / 0.0


REFUSED = (
    (f"{HERE}:grpo", {}, {}, f"advantage.path = '{HERE}:grpo': module '{HERE}' has no 'grpo'"),
    (f"{HERE}:group_relative", {"std": 1}, {}, "with kwargs = {'std': 1}: group_relative() got an unexpected"),
    (f"{HERE}:group_relative", {"normalize_std": "no"}, {}, "normalize_std is 'no', expected true or false"),
    (f"{HERE}:leave_one_out", {"normalize_std": 1}, {}, "normalize_std is 1, expected true or false"),
    (f"{HERE}:reinforce_plus_plus", {"group_baseline": 1}, {}, "group_baseline is 1, expected true or false"),
    (f"{HERE}:per_component", {}, {}, "missing 1 required keyword-only argument: 'weights'"),
    (f"{HERE}:per_component", {"weights": {}}, {}, "weights is {}, expected a weight for each of one or more"),
    (f"{HERE}:per_component", {"weights": {"a": "x"}}, {}, "weights.a is 'x', expected a finite number"),
    (f"{HERE}:per_component", {"weights": {"a": 1.0}}, KL, "advantage.kl_coefficient = 0.1 with advantage.path"),
    (f"{HERE}:per_component", {"weights": {"a": 1.0}}, TRUNCATED, "advantage.truncated_reward = -1.0 with advantage"),
    ("test_advantages:of_the_wrong_size", {}, {}, "returns an array of [2], expected [4], a number for each"),
    (f"{HERE}:maximum_likelihood", {}, KL, "a reward is -4.0, expected 0 or more"),
    (f"{HERE}:maximum_likelihood", {}, TRUNCATED, "a reward is -1.0, expected 0 or more"),
    ("test_advantages:not_finite", {}, {}, "returns [nan, inf, inf, inf], expected finite numbers"),
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_function_that_does_not_fit_is_refused_before_the_start(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "test_advantages", sys.modules[__name__])
    for path, kwargs, fields, message in REFUSED:
        with pytest.raises(ConfigError) as refused:
            check_advantage(AdvantageConfig(path=path, kwargs=kwargs, **fields))
        assert message in str(refused.value), path
    for name, kwargs in EVERY.items():
        for fields in ({}, *([KL, TRUNCATED] if name not in ("per_component", "maximum_likelihood") else [])):
            check_advantage(AdvantageConfig(path=f"{HERE}:{name}", kwargs=kwargs, **fields))


def test_a_component_that_no_reward_of_a_batch_has_is_named_with_those_it_has() -> None:
    function = make_advantage(AdvantageConfig(path=f"{HERE}:per_component", kwargs={"weights": {"exat": 1.0}}))
    with pytest.raises(ConfigError, match=r"weights has 'exat', expected parts that .* have: 'brief', 'exact'"):
        function(_rewards([[(1.0, 1, 0.0, 0.0), (0.0, 1, 1.0, 1.0)]]))
