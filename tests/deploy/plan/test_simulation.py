"""A run in simulated time: what it keeps, its limits, and that its rules are those of the run itself."""

from typing import Any

import msgspec
import pytest

from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.release import Releaser
from penstock.deploy.plan import simulation as simulated
from penstock.deploy.plan.producer import STEADY, Clock, EngineJob, EngineSpeed, RunPace, SimulatedEngine, SpeedCourse
from penstock.deploy.plan.simulation import Simulation
from penstock.deploy.plan.workload import lengths_of
from penstock.producers.stream.in_flight import Claim
from penstock.schemas.config import RunConfig, config_of

SPEED = EngineSpeed(0.01, 0.001)
LONG_TAIL = "log-normal:60:1.0"


def config(**changed: Any) -> RunConfig:
    document = {
        "name": "planned",
        "group_size": 4,
        "groups_per_batch": 8,
        "model": {"path": "none"},
        "environment": {"path": "nobody:Needed"},
        "sampling": {"max_tokens": 400},
        "producers": {"groups_in_flight": 16},
        "evaluation": {"num_prompts": 0},
    }
    return config_of(document, simulated.__file__, changed)


def simulation(
    run: RunConfig, *, producers: int = 2, lengths: str = LONG_TAIL, updates: int = 30, **pace: Any
) -> Simulation:
    own = RunPace(**{"speed": SPEED, "token_s": 1 / 5000, "load_s": 0.2, "pause_s": 0.05, **pace})
    return Simulation(run, producers, own, lengths_of(lengths), updates)


def mean_lag(course: simulated.Course) -> float:
    return sum(lag * num for lag, num in course.lags.items()) / sum(course.lags.values())


@pytest.mark.parametrize(
    "changed",
    [
        {"max_lag": 1},
        {"max_lag": 3, "batch.fill": "with_variance"},
        {"mode": "synchronous"},
        {"engine.update": "drained"},
        {"producers.generation_deadline_s": 3.0, "trainer.max_dead_in_a_row": 1000},
        {"curriculum.path": "penstock.consumers.stream.curricula:drop_flat", "environment.num_tasks": 100},
        {"trainer.num_minibatches": 2, "max_lag": 4, "evaluation.num_prompts": 20, "evaluation.every": 3},
    ],
    ids=str,
)
def test_every_released_index_is_in_exactly_one_place(changed):
    run = simulation(config(**changed), producers=6, flat=0.4, reward_s=(0.0, 0.5), load_s=2.0)
    course = run.run()
    ledger, streams = run.ledger, run._streams
    settled = set(ledger.settled)
    assert len(settled) == course.num_trained + course.num_skipped + course.num_dead
    places = [claim.index for claim in streams.prompts]
    places += [claim.index for each in run.producers for claim in each.table if claim.evaluation_id is None]
    places += [group.index for group in streams.groups]
    places += [*run.intake.reader.ready, *run.intake.reader.refused_indexes, *ledger.postponed]
    assert sorted(places) == sorted(set(range(1, ledger.num_released + 1)) - settled)
    assert course.num_updates == 30 and not course.failure
    assert course.num_trained and sum(course.lags.values())
    if "producers.generation_deadline_s" in changed:
        assert course.num_dead
    if changed == {"max_lag": 1}:
        assert course.num_stale


def test_a_synchronous_run_takes_the_sum_of_its_stages():
    run = config(mode="synchronous")
    course = simulation(run, producers=1, lengths="constant:100", announce_s=0.3).run()
    sampled_s = 100 * (SPEED.base_s + 32 * SPEED.sequence_s)
    assert course.seconds / 29 == pytest.approx(3200 / 5000 + 0.3 + 0.2 + sampled_s)
    assert course.lags == {0: 30 * 3200}


def test_with_many_producers_the_trainer_is_the_limit():
    course = simulation(config(max_lag=8), producers=50, lengths="constant:20").run()
    assert course.num_tokens / course.seconds == pytest.approx(5000)
    assert course.waits == 0


def test_with_one_slow_producer_its_engine_is_the_limit():
    course = simulation(
        config(max_lag=6),
        producers=1,
        lengths="constant:50",
        updates=100,
        token_s=1e-6,
        load_s=0.0,
        pause_s=0.0,
    ).run()
    assert course.num_tokens / course.seconds == pytest.approx(64 * SPEED.tokens_per_s(64), rel=0.02)
    assert course.waits > 0.9 and course.seats_taken == pytest.approx(1, abs=0.02)


def test_what_engines_are_paused_for_is_not_sampled():
    still = simulation(config(), producers=1, pause_s=0.0).run()
    paused = simulation(config(), producers=1, load_s=1.0, pause_s=1.0).run()
    assert still.paused == 0 and paused.paused > 0.15
    assert paused.num_tokens / paused.seconds < 0.85 * still.num_tokens / still.seconds


def test_a_wider_bound_lets_lag_grow_and_less_be_masked():
    courses = [simulation(config(max_lag=bound), updates=60).run() for bound in (1, 3, 6)]
    assert mean_lag(courses[0]) < mean_lag(courses[1]) < mean_lag(courses[2])
    masked = [course.num_masked / sum(course.lags.values()) for course in courses]
    assert masked[2] < min(masked[:2])


def test_the_same_plan_comes_to_the_same():
    assert simulation(config()).run() == simulation(config()).run()


def test_a_drained_engine_samples_each_completion_with_one_version(monkeypatch):
    groups, settle = [], Intake.settle
    monkeypatch.setattr(Intake, "settle", lambda intake, *given: (groups.extend(given[0]), settle(intake, *given))[1])
    for update, is_one in (("in_flight", False), ("drained", True)):
        groups.clear()
        own = RunPace(speed=SPEED, token_s=1 / 5000, load_s=0.2)
        Simulation(config(**{"engine.update": update}), 2, own, lengths_of(LONG_TAIL), 20).run()
        spans = [rollout.segments[0].version_spans for group in groups for rollout in group.rollouts]
        assert all(len(found) == 1 for found in spans) == is_one


def test_groups_past_the_deadline_end_the_run_as_they_would():
    run = config(**{"producers.generation_deadline_s": 1.0, "trainer.max_dead_in_a_row": 20})
    course = simulation(run, lengths="constant:300").run()
    assert course.num_updates == 0
    assert "trainer.max_dead_in_a_row = 20" in course.failure and "not finished after 1 s" in course.failure


def test_batches_filled_with_variance_skip_flat_groups():
    every = simulation(config(), flat=0.5).run()
    filled = simulation(config(**{"batch.fill": "with_variance"}), flat=0.5).run()
    assert every.num_skipped / (every.num_trained + every.num_skipped) == pytest.approx(0.5, abs=0.1)
    assert filled.num_trained > 0.9 * 8 * 30
    assert filled.credit > every.credit == 24


def test_a_curriculum_that_drops_flat_tasks_sees_fewer_of_them():
    run = {"environment.num_tasks": 40, "curriculum.path": "penstock.consumers.stream.curricula:drop_flat"}
    dropped, all_ = simulation(config(**run), flat=0.5, updates=60).run(), simulation(config(), flat=0.5).run()
    share = [each.num_skipped / (each.num_skipped + each.num_trained) for each in (dropped, all_)]
    assert share[0] < 0.7 * share[1]


@pytest.mark.parametrize(
    ("changed", "flat", "steps"),
    [
        ({}, 0.0, 30),
        ({}, 1.0, 0),
        ({"objective.kwargs.kl_coefficient": 0.001}, 1.0, 30),
        ({"trainer.num_minibatches": 4, "max_lag": 8, "trainer.num_epochs": 2}, 0.0, 8 * 30),
    ],
    ids=str,
)
def test_mini_batches_that_teach_nothing_make_no_policy(changed, flat, steps):
    run = simulation(config(**changed), flat=flat)
    assert run.run().num_updates == 30
    assert run.intake.lag_of.current == steps


def test_of_mini_batches_those_make_a_policy_that_have_a_group_with_variance():
    small_batches = config(**{"trainer.num_minibatches": 8, "max_lag": 16})
    run = simulation(small_batches, flat=0.75, updates=60)
    run.run()
    assert run.intake.lag_of.current == run.ledger.count("trained"), "one group each"
    assert mean_lag(run.course) < 0.5 * mean_lag(simulation(small_batches, flat=0.0, updates=60).run())


def test_release_is_that_of_the_trainer(monkeypatch):
    """The credit of `Releaser` bounds the simulated run too."""
    monkeypatch.setattr(Releaser, "credit", property(lambda self: 9))
    run, most = simulation(config()), []
    settle = Intake.settle
    monkeypatch.setattr(Intake, "settle", lambda *given: (most.append(run.ledger.num_open), settle(*given))[1])
    assert run.run().num_updates == 30
    assert max(most) == 9


def test_staleness_is_that_of_the_trainer(monkeypatch):
    monkeypatch.setattr("penstock.consumers.stream.intake.is_stale", lambda group, lag_of, bound: False)
    course = simulation(config(max_lag=1), producers=6, load_s=2.0).run()
    assert not course.num_stale and course.num_masked


def test_claims_are_those_of_a_producer(monkeypatch):
    """A read claims a quarter of the free room: the first of two idle producers does not get everything."""
    run = simulation(config(max_lag=0), producers=2, updates=0)
    run.run()
    assert sorted(len(each.table) for each in run.producers) == [4, 4]


class SampledJobs:
    """An engine of 4 seats whose step takes a second, and the jobs that it has finished, with their times."""

    def __init__(self, course: SpeedCourse = STEADY) -> None:
        self.clock = Clock()
        self.done: dict[int, tuple[float, EngineJob]] = {}
        self.engine = SimulatedEngine(self.clock, EngineSpeed(1.0, 0.0), 4, self._note, course)

    def _note(self, job: EngineJob) -> None:
        self.done[job.claim.index] = self.clock.now_s, job

    def add(self, index: int, *lengths: int) -> EngineJob:
        job = EngineJob(Claim(stream="prompts", entry_id=b"%d" % index, index=index, version=0), lengths)
        self.engine.add(job)
        return job

    def run(self) -> None:
        while self.clock.step():
            pass


def test_a_sequence_without_a_seat_waits_for_one():
    sampled = SampledJobs()
    sampled.add(1, 10, 10, 10)
    sampled.add(2, 5, 5)
    sampled.run()
    assert {index: at for index, (at, _) in sampled.done.items()} == {1: 10.0, 2: 10.0}


def test_tokens_have_the_version_that_was_there_when_they_were_whole():
    sampled = SampledJobs()
    sampled.add(1, 10, 4)
    sampled.clock.after(3.5, sampled.engine.pause)
    sampled.clock.after(6.5, lambda: sampled.engine.load(7))
    sampled.run()
    at, job = sampled.done[1]
    assert at == 13.0
    assert [tuple(map(tuple, map(msgspec.structs.astuple, job.spans[n]))) for n in (0, 1)] == [
        ((0, 0, 3), (7, 3, 10)),
        ((0, 0, 3), (7, 3, 4)),
    ]
    assert sampled.engine.paused_s == 3.0 and sampled.engine.num_tokens == 14


def test_an_engine_goes_through_the_course_of_its_speed():
    """A second for a token, two, and again: nothing is lost where it changes, nor while it is paused or idle."""
    sampled = SampledJobs(SpeedCourse((1.0, 0.5), 5.0))
    sampled.add(1, 8)
    sampled.clock.after(12.0, sampled.engine.pause)
    sampled.clock.after(14.0, lambda: sampled.engine.load(7))
    sampled.clock.after(27.0, lambda: sampled.add(3, 3))
    sampled.add(2, 12)
    sampled.run()
    assert {index: at for index, (at, _) in sampled.done.items()} == pytest.approx({1: 10.5, 2: 18.0, 3: 31.5})


def test_a_job_that_is_given_up_leaves_its_seats():
    sampled = SampledJobs()
    job = sampled.add(1, 100, 100, 100, 100)
    sampled.add(2, 10)
    sampled.clock.after(5.0, lambda: sampled.engine.drop(job))
    sampled.run()
    assert list(sampled.done) == [2] and sampled.done[2][0] == 15.0


def test_the_speed_is_that_of_one_and_of_all():
    speed = EngineSpeed.of(1000.0, 40.0, 100)
    assert speed.tokens_per_s(1) == pytest.approx(40)
    assert 100 * speed.tokens_per_s(100) == pytest.approx(1000)
    assert EngineSpeed.of(50.0, 50.0, 1).tokens_per_s(1) == 50
