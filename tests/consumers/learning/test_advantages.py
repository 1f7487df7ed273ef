"""Advantages of siblings."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.consumers.learning.advantages import group_advantages, has_variance
from penstock.schemas.config import AdvantageConfig
from training_groups import random_group

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16).map(np.array)


@given(rewards=rewards)
@settings(deadline=None, derandomize=True)
def test_the_default_is_trls_formula(rewards) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    expected = (values - values.mean()) / (values.std() + 1e-4)
    np.testing.assert_allclose(group_advantages(rewards, AdvantageConfig()), expected, rtol=1e-9, atol=1e-9)


@given(rewards=rewards)
@settings(deadline=None, derandomize=True)
def test_leave_one_out_subtracts_the_mean_of_the_others(rewards) -> None:
    got = group_advantages(rewards, AdvantageConfig(leave_one_out=True, normalize_std=False))
    expected = [r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@given(rewards=rewards, shift=st.floats(-5, 5), normalize=st.booleans(), leave_one_out=st.booleans())
@settings(deadline=None, derandomize=True)
def test_advantages_sum_to_0_and_ignore_a_shift(rewards, shift, normalize, leave_one_out) -> None:
    config = AdvantageConfig(normalize_std=normalize, leave_one_out=leave_one_out)
    got = group_advantages(rewards, config)
    assert got.sum() == pytest.approx(0, abs=1e-9)
    np.testing.assert_allclose(group_advantages(rewards + shift, config), got, rtol=1e-6, atol=1e-9)


def test_equal_rewards_give_0() -> None:
    for config in (AdvantageConfig(), AdvantageConfig(leave_one_out=True, normalize_std=False)):
        assert not group_advantages(np.full(8, 0.5), config).any()


def test_a_lone_sibling_gives_0() -> None:
    assert group_advantages(np.array([3.0]), AdvantageConfig()).tolist() == [0.0]


def test_variance_means_that_rewards_differ() -> None:
    assert has_variance(random_group(1, 0, rewards=[0.0, 0.0, 0.0, 1.0]))
    assert not has_variance(random_group(1, 0, rewards=[0.25] * 4))
