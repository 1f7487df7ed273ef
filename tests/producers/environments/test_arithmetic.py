import math

import pytest

from penstock.producers.environments.arithmetic import Arithmetic
from penstock.schemas.prompt import Prompt


def operands(prompt: Prompt) -> frozenset[int]:
    return frozenset(int(number) for number in prompt.text.removesuffix("=").split("+"))


@pytest.mark.parametrize("width", [1, 2, 3, 18])
def test_the_answer_is_the_sum_in_one_digit_more_than_the_operands(width: int):
    environment = Arithmetic(seed=3, width=width, num_evaluation_prompts=4)
    for prompt in [environment.prompt(index) for index in range(1, 50)] + [environment.evaluation_prompt(1)]:
        a, b = prompt.text.removesuffix("=").split("+")
        assert len(a) == len(b) == width
        assert len(prompt.answer) == width + 1
        assert int(prompt.answer) == int(a) + int(b)


def test_held_out_problems_never_appear_in_training():
    environment = Arithmetic(seed=3, width=2, num_evaluation_prompts=512)
    held_out = {operands(environment.evaluation_prompt(n)) for n in range(1, 513)}
    for seed in (0, 1, 2):
        training = Arithmetic(seed=seed, width=2)
        assert held_out.isdisjoint(operands(training.prompt(index)) for index in range(1, 10_001))


def test_training_reaches_every_problem_that_is_not_held_out():
    environment = Arithmetic(seed=0, width=1, num_evaluation_prompts=0)
    seen = {environment.prompt(index).text for index in range(1, 3_001)}
    assert 80 <= len(seen) < 100


def test_the_same_index_names_the_same_task_in_every_process():
    first, second = Arithmetic(seed=7, width=3), Arithmetic(seed=7, width=3)
    indices = (1, 2, 17, 10**9)
    assert [first.prompt(index) for index in indices] == [second.prompt(index) for index in reversed(indices)][::-1]
    assert Arithmetic(seed=7).prompt(1).text == "35+70="


def test_another_seed_poses_other_training_tasks_and_the_same_held_out_ones():
    first, second = Arithmetic(seed=1, width=3), Arithmetic(seed=2, width=3)
    assert [first.prompt(i) for i in range(1, 20)] != [second.prompt(i) for i in range(1, 20)]
    assert [first.evaluation_prompt(n) for n in range(1, 257)] == [second.evaluation_prompt(n) for n in range(1, 257)]


def test_held_out_problems_are_distinct():
    environment = Arithmetic(seed=0, width=2, num_evaluation_prompts=256)
    assert len({environment.evaluation_prompt(n).text for n in range(1, 257)}) == 256


@pytest.mark.parametrize("completion", ["046", " 046\n"])
def test_the_exact_sum_earns_one(completion: str):
    reward = Arithmetic(seed=0, partial_credit=0.5).reward(Prompt(text="12+34=", answer="046"), completion)
    assert reward.value == 1.0
    assert reward.parts == {"exact": 1.0, "digits": 1.0}


@pytest.mark.parametrize("completion", ["", "46", "0460", "045", "forty-six", "046 046"])
def test_anything_but_the_exact_sum_earns_nothing_without_partial_credit(completion: str):
    assert Arithmetic(seed=0).reward(Prompt(text="12+34=", answer="046"), completion).value == 0.0


@pytest.mark.parametrize(
    ("completion", "digits"), [("036", 2 / 3), ("46", 2 / 3), ("0046", 3 / 4), ("146", 2 / 3), ("460", 0.0), ("", 0.0)]
)
def test_partial_credit_counts_digits_from_the_right(completion: str, digits: float):
    reward = Arithmetic(seed=0, partial_credit=0.5).reward(Prompt(text="12+34=", answer="046"), completion)
    assert math.isclose(reward.value, 0.5 * digits)
    assert reward.parts == {"exact": 0.0, "digits": digits}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "width is 0, expected 1 to 18"),
        ({"width": 19}, "width is 19"),
        ({"partial_credit": 1.0}, "partial_credit is 1.0"),
        ({"partial_credit": float("nan")}, "partial_credit is nan"),
        ({"width": 1}, "num_evaluation_prompts is 256, expected at most"),
        ({"num_evaluation_prompts": -1}, "num_evaluation_prompts is -1"),
    ],
)
def test_an_impossible_argument_is_named(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Arithmetic(seed=0, **arguments)


@pytest.mark.parametrize("n", [0, 5, -1])
def test_a_held_out_problem_outside_the_range_is_refused(n: int):
    with pytest.raises(ValueError, match=f"held-out problem {n} asked for, expected 1 to 4"):
        Arithmetic(seed=0, num_evaluation_prompts=4).evaluation_prompt(n)
