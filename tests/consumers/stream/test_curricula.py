"""Which tasks come next: pure functions of a history that is part of the ledger, checked before a release."""

import re
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from mini_producer import group_fields, make_group
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.stream.curricula import by_solve_rate, drop_flat
from penstock.consumers.stream.history import TaskHistory
from penstock.consumers.stream.ledger import Ledger, RunFailedError
from penstock.consumers.stream.reader import ReadyGroup
from penstock.consumers.stream.tasks import TaskPlan
from penstock.schemas.config import ConfigError, CurriculumPlug, EnvironmentConfig, ModelConfig, RunConfig
from penstock.schemas.prompt import Reward
from trainer_bench import assert_settled_once

CURRICULA = "penstock.consumers.stream.curricula"


def tried(history: TaskHistory, number: int, *rewards: float) -> None:
    history.release(number)
    history.settle(number, rewards, flat=len(set(rewards)) == 1)


def config(path: str, *sizes: int | None, **kwargs) -> RunConfig:
    return RunConfig(
        name="r",
        model=ModelConfig(path="m"),
        curriculum=CurriculumPlug(path=path, kwargs=kwargs),
        environments=tuple(EnvironmentConfig(path="a:B", name=f"e{n}", num_tasks=size) for n, size in enumerate(sizes)),
    )


def test_a_history_has_rates_flat_groups_and_what_is_open():
    history = TaskHistory(4)
    tried(history, 1, 1.0, 0.0)
    tried(history, 1, 1.0, 1.0)
    tried(history, 1, 2.0, 2.0)
    tried(history, 2, -3.0, -3.0)
    history.release(3)
    tried(history, 4)
    assert history.solve_rate.tolist()[:2] == [0.875, 0.0] and np.isnan(history.solve_rate[2:]).all()
    assert history.flat.tolist() == [2, 1, 0, 0]
    assert history.num_open.tolist() == [0, 0, 1, 0] and history.num_released == 6
    tried(history, 1, 0.5, 0.0)
    assert history.flat[0] == 0, "in a row"
    history.reopen(4)
    assert history.num_open.tolist() == [0, 0, 1, 1]
    again = TaskHistory.from_state(history.to_state())
    for name in ("released", "settled", "flat", "last_pass", "solve_rate"):
        np.testing.assert_array_equal(getattr(again, name), getattr(history, name))
    again.resize(6)
    assert (again.num_tasks, again.num_released, again.released[0]) == (6, 7, 4)
    assert again.last_pass.tolist() == [4, 3, 3, 3, 0, 0]
    again.release(6)
    again.resize(2)
    again.settle(6, (1.0,), flat=True)
    assert again.released.tolist() == [4, 1]


def test_a_pass_has_every_task_once_in_an_order_of_its_own():
    history = TaskHistory(9)
    passes = []
    for _ in range(3):
        passes.append([])
        for budget in (4, 5):
            for number in drop_flat(history, budget, 7):
                tried(history, number, 0.0, 1.0)
                passes[-1].append(number)
    assert [sorted(each) for each in passes] == [list(range(1, 10))] * 3
    assert len({tuple(each) for each in passes}) == 3


def waits_of(flat_until: int, *, after: int, count: int = 8) -> list[tuple[int, int]]:
    """Between two groups of a task, the fewest and the most of the three others, which are solved at times. The task
    has no variance in its first `flat_until` groups."""
    history, others, found = TaskHistory(4), Counter[int](), []
    while len(found) < count:
        (chosen,) = drop_flat(history, 1, 7, after=after)
        tried(history, chosen, 0.0, float(chosen != 2 or history.released[1] >= flat_until))
        if chosen == 2:
            found.append((min(others[n] for n in (1, 3, 4)), max(others.values(), default=0)))
            others.clear()
        else:
            others[chosen] += 1
    return found[1:]


def test_what_is_always_or_never_solved_sits_out_one_two_four_passes_and_comes_in_every_one_once_it_is_solved():
    for after in (1, 2):
        expected = [0] * (after - 1) + [2**n for n in range(8 - after)]
        for (fewest, most), wait in zip(waits_of(99, after=after), expected, strict=True):
            assert wait <= fewest <= most <= wait + 2, "what is left of the pass before and the begin of the next"
    waits = waits_of(4, after=2, count=24)
    assert waits[3][0] >= 4
    since = [most for _, most in waits[4:]]
    assert max(since) <= 2 and sum(since) >= len(since), "once in each shuffled pass, without catching up"


def test_where_all_tasks_are_flat_those_of_the_fewest_groups_come_and_open_ones_last():
    history = TaskHistory(4)
    for number in (1, 2, 3, 4, 1, 2, 3, 4, 4):
        tried(history, number, 1.0, 1.0)
    history.release(2)
    assert set(drop_flat(history, 2, 0)) == {1, 3}
    assert set(drop_flat(history, 3, 0)) == {1, 3, 4}
    assert set(drop_flat(history, 4, 0)) == {1, 2, 3, 4}


def test_tasks_are_drawn_by_their_solve_rate():
    history = TaskHistory(6)
    for number, rewards in enumerate([(1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.9, 0.9), (1.0, 0.0)], start=1):
        tried(history, number, *rewards)
    history.release(5)
    drawn: Counter[int] = Counter()
    for n in range(4000):
        history.num_released = n  # another draw
        drawn.update(by_solve_rate(history, 1, 3))
    assert drawn[5] == 0, "it is open"
    weights = {1: 0.05, 2: 0.05, 3: 1.05, 4: 0.41, 6: 1.05}
    for number, weight in weights.items():
        assert drawn[number] / 4000 == pytest.approx(weight / sum(weights.values()), abs=0.03), number
    assert sorted(by_solve_rate(history, 6, 3)) == [1, 2, 3, 4, 5, 6], "without replacement"


def test_the_same_history_gives_the_same_tasks_on_every_machine():
    history = TaskHistory(1000)
    for number in range(1, 500):
        tried(history, number, float(number % 2), float(number % 3 == 0))
    assert drop_flat(history, 5, 1) == [506, 943, 851, 967, 766]
    assert by_solve_rate(history, 5, 1) == [149, 961, 144, 808, 978]
    assert drop_flat(history, 5, 2) != drop_flat(history, 5, 1)


def test_a_choice_that_cannot_be_released_is_refused():
    for path, kwargs, message in (
        (f"{CURRICULA}:drop_flat", {"after": 0}, "ValueError: after is 0, expected 1 or more"),
        (f"{CURRICULA}:by_solve_rate", {"floor": 0.0}, "ValueError: floor is 0.0, expected above 0"),
        (f"{__name__}:twice", {}, "asked for 3 tasks of environment 'e0': returned task 1 twice; expected each once"),
        (f"{__name__}:too_few", {}, "returned 2"),
        (f"{__name__}:beyond", {}, "returned task 6, expected 1 to 5"),
        (f"{__name__}:text", {}, "TypeError: 'str' object cannot be interpreted as an integer"),
    ):
        with pytest.raises(RunFailedError, match=re.escape(message)):
            TaskPlan(config(path, 5, **kwargs), Ledger()).next(3)


def twice(history, budget, seed):
    return [1] * budget


def too_few(history, budget, seed):
    return range(1, budget)


def beyond(history, budget, seed):
    return range(history.num_tasks - budget + 2, history.num_tasks + 2)


def text(history, budget, seed):
    return "abc"


def test_a_curriculum_that_does_not_fit_is_an_error_of_the_run_file():
    takes = "got an unexpected keyword argument 'often'; expected a function (history"
    for name, kwargs, message in (
        ("harder", {}, "has no 'harder'; it defines"),
        ("drop_flat", {"often": 3}, takes),
        ("drop_flat", {}, "environments[1].num_tasks is not set: curriculum.path = "),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            TaskPlan(config(f"{CURRICULA}:{name}", 5, None, **kwargs), Ledger())


def test_no_environment_is_asked_for_more_tasks_than_it_has():
    plan = TaskPlan(config(f"{CURRICULA}:drop_flat", 3, 50), ledger := Ledger())
    rounds = []
    while ledger.num_released < 40:
        rounds.append(plan.next(40 - ledger.num_released))
        for task in rounds[-1]:
            ledger.release(task)
    assert len(rounds) > 1
    for tasks in rounds:
        assert len(set(tasks)) == len(tasks)
    first = Counter(task.number for tasks in rounds for task in tasks if task.environment == "e0")
    assert set(first) == {1, 2, 3} and max(first.values()) - min(first.values()) <= 1


@pytest.mark.redis
@pytest.mark.parametrize(
    ("teaching", "flat"),
    [
        ([], [1, 1, 1]),
        (["teacher.model=none"], [0, 0, 0]),
        (
            ["advantage={path='penstock.consumers.learning.advantages:per_component', kwargs={weights={right=1}}}"],
            [0] * 3,
        ),
    ],
)
def test_groups_of_equal_rewards_that_teach_all_the_same_are_not_flat(bench, redis_client, teaching, flat):
    bench.overrides = [f"curriculum.path={CURRICULA}:drop_flat", "environment.num_tasks=60", *teaching]
    intake = bench.trainer().intake
    intake.release()
    group = make_group(1, 0, rewards=(1.0, 1.0))
    parts = ({"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0})
    rollouts = zip(group.rollouts, parts, strict=True)
    group = replace(group, rollouts=tuple(replace(each, reward=Reward(value=1.0, parts=own)) for each, own in rollouts))
    advantages = dict.fromkeys((1, 2, 3), (0.0, 0.0))
    report = StepReport(
        metrics={}, lag_histogram={}, num_tokens_trained=1, num_tokens_masked_lag=0, advantages=advantages
    )
    groups = [replace(group, index=index) for index in advantages]
    intake.reader.ready |= {each.index: ReadyGroup(b"1-0", each) for each in groups}
    intake.settle(groups, report)
    tasks = intake.ledger.histories["main"]
    assert tasks.flat[tasks.settled > 0].tolist() == flat


@pytest.mark.redis
def test_a_group_that_came_before_its_lost_index_was_released_again_keeps_its_task(bench, redis_client):
    bench.overrides = [f"curriculum.path={CURRICULA}:by_solve_rate", "environment.num_tasks=30"]
    first = bench.trainer()
    first.intake.reconcile()
    redis_client.flushall()
    redis_client.xadd(bench.keys.rollouts, group_fields(5, 0))
    first.intake.reconcile()
    assert redis_client.xlen(bench.keys.prompts) == 11
    assert bench.trainer(resume=True).intake.ledger.tasks == first.intake.ledger.tasks


@pytest.mark.redis
def test_a_run_whose_curriculum_fails_ends_with_its_work_saved_and_goes_on_with_another(bench, redis_client):
    bench.overrides = [f"curriculum.path={__name__}:failing", "environment.num_tasks=30"]
    bench.producer()
    with pytest.raises(RunFailedError, match="returned task 7 twice; expected each once"):
        bench.trainer().run()
    assert bench.ledger()["num_groups_trained"] > 0
    bench.overrides = [f"curriculum.path={CURRICULA}:by_solve_rate", "environment.num_tasks=30"]
    trainer = bench.trainer(resume=True)
    assert trainer.run()
    assert_settled_once(bench, redis_client)


def failing(history, budget, seed):
    return range(1, budget + 1) if history.num_released < 20 else [7] * budget
