import math

import pytest

from penstock.producers.environments.arithmetic import Arithmetic
from penstock.schemas.prompt import Prompt

TASK = Prompt(text="12+34=", answer="046")


def operands(prompt: Prompt) -> frozenset[int]:
    return frozenset(int(number) for number in prompt.text.removesuffix("=").split("+"))


def test_the_answer_is_the_sum_in_one_digit_more_than_the_operands():
    for width in (1, 2, 3, 18):
        environment = Arithmetic(seed=3, width=width, num_evaluation_prompts=4)
        for prompt in [environment.prompt(index) for index in range(1, 50)] + [environment.evaluation_prompt(1)]:
            a, b = prompt.text.removesuffix("=").split("+")
            assert len(a) == len(b) == width == len(prompt.answer) - 1
            assert int(prompt.answer) == int(a) + int(b)


def test_held_out_problems_are_distinct_and_never_trained_on_whatever_the_seed():
    environment = Arithmetic(seed=3, width=2, num_evaluation_prompts=512)
    held_out = {operands(environment.evaluation_prompt(n)) for n in range(1, 513)}
    assert len({environment.evaluation_prompt(n).text for n in range(1, 513)}) == 512
    for seed in (0, 1, 2):
        training = Arithmetic(seed=seed, width=2)
        assert held_out.isdisjoint(operands(training.prompt(index)) for index in range(1, 10_001))
    small = Arithmetic(seed=0, width=1, num_evaluation_prompts=0)
    assert 80 <= len({small.prompt(index).text for index in range(1, 3_001)}) < 100, "all others are"


def test_the_seed_and_the_index_alone_name_a_task_and_the_held_out_ones_not_even_the_seed():
    first, same, other = Arithmetic(seed=7), Arithmetic(seed=7), Arithmetic(seed=8)
    indices = (1, 2, 17, 10**9)
    assert [first.prompt(index) for index in indices] == [same.prompt(index) for index in reversed(indices)][::-1]
    assert first.prompt(1).text == "35+70=", "in every release"
    assert [first.prompt(i) for i in range(1, 20)] != [other.prompt(i) for i in range(1, 20)]
    assert [first.evaluation_prompt(n) for n in range(1, 257)] == [other.evaluation_prompt(n) for n in range(1, 257)]


def test_the_exact_sum_earns_one_and_partial_credit_counts_digits_from_the_right():
    for completion, exact, digits in [
        ("046", 1.0, 1.0), (" 046\n", 1.0, 1.0), ("036", 0.0, 2 / 3), ("46", 0.0, 2 / 3), ("0046", 0.0, 3 / 4),
        ("146", 0.0, 2 / 3), ("460", 0.0, 0.0), ("", 0.0, 0.0), ("046 046", 0.0, 3 / 7),
    ]:  # fmt: skip
        reward = Arithmetic(seed=0, partial_credit=0.5).reward(TASK, completion)
        assert reward.parts == {"exact": exact, "digits": pytest.approx(digits)}, completion
        assert math.isclose(reward.value, exact or 0.5 * digits), completion
        assert Arithmetic(seed=0).reward(TASK, completion).value == exact, completion


def test_an_impossible_argument_is_named():
    for arguments, message in [
        ({"width": 0}, "width is 0, expected 1 to 18"),
        ({"width": 19}, "width is 19"),
        ({"partial_credit": 1.0}, "partial_credit is 1.0"),
        ({"partial_credit": float("nan")}, "partial_credit is nan"),
        ({"width": 1}, "num_evaluation_prompts is 256, expected at most"),
        ({"num_evaluation_prompts": -1}, "num_evaluation_prompts is -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            Arithmetic(seed=0, **arguments)
    with pytest.raises(ValueError, match="held-out problem 5 asked for, expected 1 to 4"):
        Arithmetic(seed=0, num_evaluation_prompts=4).evaluation_prompt(5)
