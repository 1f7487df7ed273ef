"""avg@k, pass@k and their standard errors, against references that enumerate, resample or write the sum out."""

import itertools
import math
import random

import pytest

from penstock.consumers.learning.held_out import HeldOutAnswers, held_out_figures, pass_at, standard_error
from penstock.schemas.config import HeldOut, SolvedConfig


def how(num_samples: int, *pass_at: int, figure: str = "reward", value: float = 1.0) -> HeldOut:
    solved = SolvedConfig(figure=figure, value=value)
    return HeldOut(num_samples=num_samples, pass_at=pass_at, solved=solved)


def answers(*rewards: float, environment: str = "main", **parts: float) -> HeldOutAnswers:
    return HeldOutAnswers(environment, [{"reward": reward, **parts} for reward in rewards])


def test_pass_at_k_is_the_share_of_all_subsets_with_a_solved_answer():
    for n in (1, 2, 5, 8):
        for num_solved, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * num_solved + [False] * (n - num_solved), k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at(n, num_solved, k) == pytest.approx(expected, abs=1e-12), (n, num_solved, k)


def test_avg_at_k_is_the_mean_over_prompts_and_its_error_the_one_clustered_by_prompt():
    rng = random.Random(7)
    chances = [rng.random() for _ in range(40)]
    rewards = [[float(rng.random() < chance) for _ in range(4)] for chance in chances]
    found = held_out_figures([answers(*each) for each in rewards], {"main": how(4, 1, 2)})
    everything = [reward for each in rewards for reward in each]
    mean = sum(everything) / len(everything)
    assert found["reward"] == found["pass@1"] == pytest.approx(mean)
    # Miller 2024, section 2.2: the covariances of all pairs of answers to one prompt, over the square of their number.
    pairs = sum((one - mean) * (other - mean) for each in rewards for one in each for other in each)
    clustered = math.sqrt(pairs) / len(everything)
    assert found["reward_se"] == pytest.approx(clustered * math.sqrt(40 / 39))
    as_if_independent = math.sqrt(mean * (1 - mean) / len(everything))
    assert found["reward_se"] > 1.2 * as_if_independent, "siblings share the difficulty of their prompt"


def test_standard_errors_are_those_of_resampled_prompts_and_need_two():
    rng = random.Random(3)
    solved = [rng.choice((0, 0, 1, 3, 8)) for _ in range(60)]
    values = [pass_at(8, count, 4) for count in solved]
    found = held_out_figures([answers(*[1.0] * c, *[0.0] * (8 - c)) for c in solved], {"main": how(8, 4)})
    means = [sum(rng.choices(values, k=60)) / 60 for _ in range(4000)]
    spread = math.sqrt(sum((mean - sum(means) / 4000) ** 2 for mean in means) / 3999)
    assert found["pass@4_se"] == pytest.approx(spread, rel=0.06)
    assert standard_error([0.5]) is None and standard_error([]) is None
    assert "reward_se" not in held_out_figures([answers(1.0)], {"main": how(1)})


def test_answers_that_failed_count_as_0_and_lengths_are_of_an_answer():
    whole, short, none = answers(1.0, 1.0), answers(1.0), HeldOutAnswers("main")
    found = held_out_figures([whole, short, none], {"main": how(2, 1, 2)})
    assert found["reward"] == found["pass@1"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert (found["pass@2"], found["num_samples"]) == (pytest.approx(2 / 3), 6)
    cut_off = [HeldOutAnswers("main", [{"reward": 0.0}] * 2, tokens, n) for tokens, n in ((30, 1), (10, 0))]
    found = held_out_figures(cut_off, {"main": how(2)})
    assert (found["completion_tokens"], found["truncated_frac"]) == (10.0, 0.25)


def test_what_is_solved_goes_by_the_figure_and_the_value_and_a_figure_that_no_answer_has_makes_no_pass_at_k():
    prompts = [HeldOutAnswers("main", [{"reward": 0.2, "reward/right": 1.0}, {"reward": 0.9}])]
    for k, expected, asked in ((1, 0.0, {}), (1, 0.5, {"value": 0.9}), (2, 1.0, {"figure": "reward/right"})):
        assert held_out_figures(prompts, {"main": how(2, k, **asked)})[f"pass@{k}"] == expected, asked
    # A misspelt name would read as a policy that solves nothing.
    sets = {"main": how(2, 2, figure="reward/exat"), "other": how(2, 2)}
    right, other = answers(1.0, 1.0, **{"reward/exact": 1.0}), answers(1.0, 1.0, environment="other")
    found = held_out_figures([right, other], sets)
    assert found["reward"] == 1.0 and not [key for key in found if key.startswith("pass@")]
    assert held_out_figures([HeldOutAnswers("main")], sets)["pass@2"] == 0.0, "without an answer nothing is solved"
    partly = answers(1.0, 0.0)._replace(rewards=[{"reward": 1.0, "reward/exat": 1.0}, {"reward": 0.0}])
    assert held_out_figures([partly], sets)["pass@2"] == 1.0


def test_figures_of_several_environments_have_what_all_are_asked_for():
    prompts = [answers(1.0, 0.0, environment="a"), answers(1.0, 1.0, 1.0, 0.0, environment="b")]
    sets = {"a": how(2, 1, 2), "b": how(4, 1, 4)}
    found = held_out_figures(prompts, sets)
    assert {key for key in found if key.startswith("pass@")} == {"pass@1", "pass@1_se"}
    assert found["pass@1"] == pytest.approx((0.5 + 0.75) / 2)
    assert held_out_figures(prompts[1:], sets)["pass@4"] == 1.0
