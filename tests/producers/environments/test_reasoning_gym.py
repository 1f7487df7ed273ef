"""Tasks of reasoning-gym: what is held out stays so, the library's own scorers decide, and settings are checked."""

from pathlib import Path
from typing import Any

import pytest

from penstock.producers.environments.reasoning_gym import ReasoningGym, last_number, tagged

DIGITS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
TWO = {"chain_sum": {}, "leg_counting": {}}


def opened(**settings: Any) -> ReasoningGym:
    return ReasoningGym(**{"seed": 1, "tasks": DIGITS, "size": 500, **settings})


def questions(environment: ReasoningGym) -> tuple[list[str], list[str]]:
    """Returns the questions of all training tasks and of all held-out ones."""
    training = [environment.prompt(n) for n in range(1, environment.num_tasks + 1)]
    held_out = [environment.evaluation_prompt(n) for n in range(1, environment.num_evaluation_prompts + 1)]
    return tuple([(prompt.messages or ())[-1].content for prompt in each] for each in (training, held_out))  # type: ignore[return-value]


def test_no_held_out_question_is_trained_on_in_a_task_of_200_questions():
    training, held_out = questions(opened())
    assert len(set(held_out)) == len(held_out) == 64
    assert set(training) & set(held_out) == set() and len(set(training)) > 100


def test_seeds_draw_other_training_items_and_the_same_held_out_ones():
    (one, held_out), (two, same) = (questions(opened(seed=seed, tasks={"chain_sum": {}})) for seed in (1, 2))
    assert held_out == same
    assert len(set(one) & set(two)) < 25, "items of neighbouring seeds are drawn apart"


def test_an_index_names_one_task_and_tasks_take_turns_until_all_repeat():
    environment = opened(tasks=TWO, size=10, num_evaluation_prompts=5)
    again = opened(tasks=TWO, size=10, num_evaluation_prompts=5)
    prompts = [environment.prompt(n) for n in range(1, 41)]
    assert [again.prompt(n) for n in range(40, 0, -1)] == prompts[::-1]
    assert prompts[:20] == prompts[20:] and environment.num_tasks == 20
    assert [each.metadata["task"] for each in prompts[:4]] == ["chain_sum", "leg_counting"] * 2
    assert [environment.evaluation_prompt(n).metadata["task"] for n in (1, 2, 5)] == [*TWO, "chain_sum"]


def test_the_librarys_own_scorer_is_asked_and_an_answer_that_it_cannot_read_is_worth_nothing():
    numbers, primes = opened(answer="last_number"), opened(tasks={"prime_factorization": {}}, answer="whole")
    for environment, completion, expected in (
        (numbers, "4 + 5 is {answer}", 1.0),
        (numbers, "4 + 5 is {answer}.00", 1.0),  # its scorer compares decimals
        (numbers, "none", 0.0),
        (numbers, "{answer} or 99", 0.0),
        (primes, "{answer}", 1.0),
        (primes, "two times three", 0.0),  # its scorer raises
    ):
        for prompt in (environment.prompt(3), environment.evaluation_prompt(2)):
            reward = environment.reward(prompt, completion.format(answer=prompt.answer))
            assert (reward.value, reward.parts) == (expected, {"solved": expected}), (prompt, completion)


def test_an_answer_that_is_evaluated_neither_holds_up_the_producer_nor_starts_a_program(tmp_path: Path):
    environment = opened(tasks={"countdown": {}}, answer="whole", num_evaluation_prompts=2, scoring_timeout_s=60.0)
    prompt, made = environment.prompt(1), tmp_path / "made"
    for answer in (f"__import__('os').system('touch {made}')", "__import__('os')._exit(1)", "[].fork"):
        assert environment.reward(prompt, answer).value < 0.1 and not made.exists()
    assert environment.reward(prompt, prompt.answer).value == 1.0
    environment._scorer._timeout_s = 0.5
    assert environment.reward(prompt, "9**9**9").value == 0.0


def test_answers_are_found_where_the_setting_says():
    assert tagged("so <answer>1</answer>, no <answer> 12 </answer>.") == "12" and tagged("12") == ""
    for completion, number in (("-7.", "-7"), ("1,234.5 m", "1,234.5"), ("it is 3 - 4 = -1", "-1"), ("none", "")):
        assert last_number(completion) == number, completion
    (asked, question) = opened().prompt(1).messages or ()
    assert asked.role == "system" and "<answer>" in asked.content and question.role == "user"
    assert [each.role for each in opened(answer="whole").prompt(1).messages or ()] == ["user"]


def test_settings_that_cannot_work_are_named():
    for settings, message in (
        ({"tasks": {"chain_sums": {}}}, "tasks has 'chain_sums', expected one of the library's, as chain_sum"),
        ({"tasks": {"chain_sum": {"terms": 2}}}, "tasks.chain_sum = {'terms': 2}: the library refuses it: .*'terms'"),
        ({"tasks": {"chain_sum": {"min_terms": 0}}}, "the library refuses it: min_terms must be positive"),
        ({"tasks": {"chain_sum": {"seed": 3}}}, "expected its settings without seed and size"),
        ({"tasks": {"chain_sum": 2}}, "tasks.chain_sum = 2, expected its settings"),
        ({"tasks": {}}, "tasks is empty"),
        ({"num_evaluation_prompts": 300}, "than the 200 different ones"),
        ({"num_evaluation_prompts": -1}, "num_evaluation_prompts is -1, expected 0 to"),
        ({"size": 0}, "size is 0, expected 1 to"),
        ({"answer": "box"}, "answer is 'box', expected one of tag, last_number, whole"),
    ):
        with pytest.raises(ValueError, match=message):
            opened(**settings)
    with pytest.raises(ValueError, match="256 training items of chain_sum in turn are held out"):
        opened(num_evaluation_prompts=200).prompt(1)
