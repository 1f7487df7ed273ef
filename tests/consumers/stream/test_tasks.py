"""Which task an index stands for: by environment and weight, and kept through crashes and changed weights."""

from collections import Counter

import msgspec
import pytest

from penstock.consumers.checkpoints.state import ReleasedTask
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.tasks import TaskPlan, environment_of
from penstock.schemas.config import CurriculumPlug, EnvironmentConfig, ModelConfig, RunConfig
from scripted_learner import KilledError
from trainer_bench import assert_settled_once, tasks_taken


def config(**weights: float) -> RunConfig:
    environments = tuple(EnvironmentConfig(path="a:B", name=name, weight=weight) for name, weight in weights.items())
    return RunConfig(name="r", seed=3, model=ModelConfig(path="m"), environments=environments)


def released(ledger: Ledger, config: RunConfig, count: int) -> list[ReleasedTask]:
    tasks = TaskPlan(config, ledger).next(count)
    for task in tasks:
        ledger.release(task)
    return tasks


def test_every_stretch_of_indexes_has_each_environment_by_its_weight_and_the_same_on_every_machine():
    weights = {"a": 3.0, "b": 1.0, "c": 0.5}
    for seed in (0, 1, 7):
        names = [environment_of(index, seed, weights) for index in range(1, 4001)]
        for length in (16, 100, 1000):
            for start in range(0, 3000, 97):
                counts = Counter(names[start : start + length])
                for name, weight in weights.items():
                    assert abs(counts[name] - length * weight / 4.5) < 4, (seed, name, start, length)
    weights = {"a": 1.0, "b": 1.0}
    assert "".join(environment_of(index, 0, weights) for index in range(1, 25)) == "aababaababbabaababbababb"
    assert environment_of(10**15, 0, weights) in weights
    assert any(environment_of(i, 0, weights) != environment_of(i, 1, weights) for i in range(1, 25))


def test_an_environment_of_weight_0_needs_no_number_of_tasks_and_keeps_its_history():
    first = msgspec.structs.replace(
        config(a=1, b=0), curriculum=CurriculumPlug(path="penstock.consumers.stream.curricula:drop_flat")
    )
    a, b = first.environments
    sized = msgspec.structs.replace(a, num_tasks=3)
    ledger = Ledger()
    tasks = released(ledger, msgspec.structs.replace(first, environments=(sized, b)), 3)
    assert sorted(tasks) == [ReleasedTask("a", number) for number in (1, 2, 3)]
    rested = msgspec.structs.replace(sized, weight=0.0)
    second = msgspec.structs.replace(first, environments=(rested, EnvironmentConfig(path="a:B", name="c", num_tasks=9)))
    assert {task.environment for task in released(ledger, second, 4)} == {"c"}
    assert ledger.histories["a"].released.tolist() == [1, 1, 1], "its weight may rise again"


def test_released_indexes_keep_their_tasks_when_weights_change_on_resume():
    ledger = Ledger()
    before = released(ledger, config(a=1, b=1), 12)
    ledger.settle(2, "trained")
    ledger.settle(3, "dead", "reward: boom")
    again = Ledger.from_state(ledger.to_state())
    assert again.tasks == {i: task for i, task in enumerate(before, 1) if i != 2}, "a dead one may be requeued"
    later = released(again, config(a=1, b=9), 10)
    assert Counter(task.environment for task in later)["b"] >= 8
    counted = [task.number for task in (*before, *later) if task.environment == "a"]
    assert counted == list(range(1, len(counted) + 1))


def test_what_was_released_since_the_checkpoint_keeps_the_task_that_redis_has():
    ledger = Ledger()
    released(ledger, config(a=1, b=1), 4)
    state, later = ledger.to_state(), released(ledger, config(a=1, b=1), 6)
    in_redis = {b"%d" % i: f"{task.number} {task.environment}".encode() for i, task in enumerate(later, 5)}
    again = Ledger.from_state(state)
    TaskPlan(config(b=1), again).catch_up(10, in_redis)
    assert again.tasks == ledger.tasks
    lost = Ledger.from_state(state)
    TaskPlan(config(a=1, b=1), lost).catch_up(10, {index: in_redis[index] for index in (b"6", b"9")})
    assert lost.tasks == ledger.tasks, "what Redis has lost is decided on as before"
    assert released(again, config(a=1, b=1), 5) == released(ledger, config(a=1, b=1), 5)


@pytest.mark.redis
def test_a_killed_run_continued_with_other_weights_keeps_every_task_that_was_released(bench, redis_client):
    environments = "".join(f"[[environments]]\nname = '{name}'\npath = 'none:None'\n" for name in "ab")
    bench.file.write_text(bench.file.read_text().replace('[environment]\npath = "none:None"\n', environments))
    bench.producer()
    first = bench.trainer(fail_at={7: KilledError()})
    before = tasks_taken(first)
    with pytest.raises(KilledError):
        first.run()
    released = redis_client.hgetall(bench.keys.tasks)
    assert len(released) > 20
    bench.file.write_text(bench.file.read_text().replace("name = 'b'", "name = 'b'\nweight = 50"))
    second = bench.trainer(resume=True)
    after = tasks_taken(second)
    assert second.run()
    assert_settled_once(bench, redis_client)
    assert len(before.keys() & after.keys()) >= 8, "taken after the checkpoint, and again after the resume"
    assert {index: after[index] for index in before.keys() & after.keys()}.items() <= before.items()
    all_taken = before | after
    for index, task in released.items():
        number, name = task.decode().split()
        assert all_taken[int(index)] == ReleasedTask(name, int(number))
    assert len(set(all_taken.values())) == len(all_taken), "no task twice while others wait"
    late = Counter(task.environment for index, task in after.items() if index > len(released))
    assert late["b"] >= 5 * late["a"], "new indexes go by the new weights"
