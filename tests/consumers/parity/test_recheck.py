"""Groups without a row of lag 0, recomputed while the trainer waits and between updates: a late label is found, nothing
is harmed."""

import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import fakeredis
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from parity_bench import COLD, ParityBench, groups_of, prompts
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.learner.fresh_rows import RowGap
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.parity.recheck import BUSY_SHARE, MAX_WAITING, Recheck, _nearest
from penstock.consumers.parity.replay import PolicyStore, Replay, as_labelled
from penstock.consumers.parity.sample import read_sample
from penstock.consumers.parity.watch import ProducerWatch
from penstock.schemas.config import ModelConfig, ParityConfig, RunConfig, TrainerConfig
from penstock.schemas.keys import Keys
from penstock.schemas.rollout import RolloutGroup
from penstock.schemas.weights.reading import WeightReader
from training_groups import configuration
from written_log import WrittenLog

LENGTH, SIBLINGS = 10, 3
AT_3 = LagTable(3, {}, {})
TRAINED = SimpleNamespace(counts_as_update=True, fresh={}, failed={}, spared=frozenset())


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> ParityBench:
    return ParityBench.make(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def learner(bench) -> Learner:
    return Learner(config_of(bench))


@pytest.fixture(scope="module")
def answers(bench) -> list[RolloutGroup]:
    """Answers of an engine that took policy 2 in place of policy 1 before the sixth token of each of four groups."""
    return groups_of(
        bench.engine().generate(prompts(4, 20), SIBLINGS, LENGTH, version=1, updates={5: 2}, sampling=COLD)
    )


@pytest.fixture
def log(bench) -> WrittenLog:
    """Versions 0 to 3, of which 0 is whole."""
    log = WrittenLog(fakeredis.FakeRedis(), Keys("run"))
    for version, file in bench.files.items():
        log.announce(version, load_file(file))
    return log


class Rechecked:
    """A recheck of every group, and what it has counted. tokens: recomputed. now_s: of its clock, which stands."""

    def __init__(self, bench: ParityBench, log: WrittenLog, share: float = 1.0) -> None:
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0
        self.now_s = 0.0
        reader = WeightReader(lambda command: command(log.client), log.keys)
        self.own = Recheck(config_of(bench, share), reader, self._count, lambda: self.now_s)

    def takes(self, seconds: Callable[[RolloutGroup], float]) -> list[tuple[str, float]]:
        """Has each recheck take so long and compute nothing, but for the first; whose group, and when it began."""
        begun: list[tuple[str, float]] = []
        gap = self.own._gap

        def instead(group: RolloutGroup) -> RowGap | None:
            if not begun:
                gap(group)  # the second model is made
            begun.append((group.samplers[0], self.now_s))
            self.now_s += seconds(group)
            return RowGap(SIBLINGS, SIBLINGS * LENGTH, 0.0, 0.0)

        self.own._gap = instead
        return begun

    def _count(self, outcome: str, num_tokens: int) -> None:
        self.outcomes[outcome] += 1
        self.tokens += num_tokens


@pytest.fixture
def rechecked(bench, log):
    made = Rechecked(bench, log)
    yield made
    made.own.close()


def config_of(bench: ParityBench, share: float = 1.0) -> RunConfig:
    return configuration(
        bench.folder,
        model=ModelConfig(path=str(bench.folder)),
        trainer=TrainerConfig(device="cpu", learning_rate=1e-12),
        parity=ParityConfig(recheck=share),
    )


def sampled_by(groups: list[RolloutGroup], *instances: str) -> list[RolloutGroup]:
    return [msgspec.structs.replace(group, producer_id=instances[-1], sampled_by=instances) for group in groups]


def late(group: RolloutGroup, tokens: int = 2) -> RolloutGroup:
    """The label changes so many tokens after the weights."""

    def moved(segment):
        first, second = segment.version_spans
        spans = (
            msgspec.structs.replace(first, end=first.end + tokens),
            msgspec.structs.replace(second, start=second.start + tokens),
        )
        return msgspec.structs.replace(segment, version_spans=spans)

    rollouts = tuple(
        msgspec.structs.replace(rollout, segments=tuple(map(moved, rollout.segments))) for rollout in group.rollouts
    )
    return msgspec.structs.replace(group, rollouts=rollouts)


def indexed(group: RolloutGroup, index: int) -> RolloutGroup:
    return msgspec.structs.replace(group, index=index)


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_a_producer_that_labels_late_is_found_by_rechecks_alone(bench, learner, log, answers, share):
    watch, rechecked = ProducerWatch(config_of(bench, share)), Rechecked(bench, log, share)
    sound = [indexed(group, 10 + group.index) for group in sampled_by(answers, "sound")]
    found = {}
    for good, bad in zip(sound, sampled_by(list(map(late, answers)), "late"), strict=True):
        batch = [bad, good]
        report = learner.step(learner.pack(batch, AT_3))
        assert not report.fresh and not watch.observe_groups(batch, report.fresh)
        rechecked.own.add(batch, report)
        for _ in batch:
            found |= watch.observe_groups(*rechecked.own.one())
    rechecked.own.close()
    if share == 0:
        assert not found and not rechecked.outcomes and not watch.table()
        return
    assert set(found) == {"late"} and found["late"].num_rows == 4 * SIBLINGS
    assert watch.table()["sound"].gap < 1e-5 < found["late"].gap
    assert rechecked.outcomes == {"rechecked": 8} and rechecked.tokens == 8 * SIBLINGS * LENGTH


UPDATES = {3: 1, 6: 2}


def under(bench, log, groups) -> list[RowGap]:
    """What a recheck finds of each."""
    rechecked = Rechecked(bench, log)
    rechecked.own.add(groups, TRAINED)
    found = [rechecked.own.one()[1] for _ in groups]
    rechecked.own.close()
    assert rechecked.outcomes == {"rechecked": len(groups)}
    return [gap for each in found for gap in each.values()]


@pytest.mark.parametrize("preempted", [(4,), (3,), (7,), (4, 8), (6, 9), (5, 7, 8)])
def test_rows_of_an_engine_that_was_preempted_are_within_the_band_wherever_it_was(bench, log, preempted):
    """Its keys and values are computed again, by the policy that it has by then."""
    answers = bench.engine().generate(
        prompts(2, 20), SIBLINGS, LENGTH, updates=UPDATES, preempted=preempted, sampling=COLD
    )
    watch = ProducerWatch(config_of(bench))
    gaps = under(bench, log, groups_of(answers))
    assert len(gaps) == 2 and all(gap.mean < 1e-6 for gap in gaps)
    assert not any(watch.observe("sound", "p1", gap) for gap in gaps * 20)
    as_kept = PolicyStore(config_of(bench), bench.files.get, torch.device("cpu"))
    sample = read_sample(groups_of(answers), as_kept.vocabulary, as_kept.has)
    kept = RowGap.of(Replay(sample, as_kept, 4096).logprobs(map(as_labelled, sample.rows)), sample.engine, 6)
    assert kept.mean > 1e-5, "which they were not under the keys and values that were lost"


def test_a_late_label_is_as_far_off_in_rows_that_were_preempted(bench, log):
    def gaps(preempted, **label) -> list[RowGap]:
        groups = groups_of(
            bench.engine().generate(
                prompts(2, 20), SIBLINGS, LENGTH, updates={5: 2}, preempted=preempted, sampling=COLD
            )
        )
        return under(bench, log, [late(group, **label) for group in groups] if label else groups)

    assert all(gap.mean < 1e-6 for gap in gaps((7,)))
    off = gaps((7,), tokens=2)
    assert all(gap.mean > 1e-4 for gap in off)
    watch = ProducerWatch(config_of(bench))
    assert [watch.observe("late", "p1", gap) for gap in off * 2] == [False, False, False, True]


@pytest.mark.parametrize("seed", range(20))
def test_the_places_are_those_of_the_least_sum(seed):
    rng = np.random.default_rng(seed)
    num_policies, num_tokens = int(rng.integers(1, 4)), int(rng.integers(4, 8))
    starts = [0, *sorted(rng.choice(np.arange(1, num_tokens), num_policies - 1, replace=False).tolist())]
    now = [sum(start <= token for start in starts) - 1 for token in range(num_tokens)]
    costs = rng.random((num_policies, num_tokens))

    def is_possible(course) -> bool:
        return all(new in (old, held) for old, new, held in zip((0, *course), course, now, strict=False))

    def cost(course) -> float:
        return sum(costs[policy, token] for token, policy in enumerate(course))

    chosen = _nearest(costs, np.array(now)).tolist()
    every = itertools.product(range(num_policies), repeat=num_tokens)
    assert is_possible(chosen) and cost(chosen) == pytest.approx(min(map(cost, filter(is_possible, every))))


def test_the_trainers_weights_and_random_numbers_stay_as_they_are(learner, rechecked, answers):
    before = {name: tensor.clone() for name, tensor in learner.model.state().items()}
    torch.manual_seed(7)
    random = torch.get_rng_state()
    rechecked.own.add(answers[:1], TRAINED)
    assert rechecked.own.one_if_due()[1][1].num_tokens == SIBLINGS * LENGTH
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.model.state().items())


def test_the_share_is_drawn_by_index_and_spread_evenly(bench, log, answers, monkeypatch):
    monkeypatch.setattr("penstock.consumers.parity.recheck.MAX_WAITING", 1000)
    groups = [indexed(answers[0], index) for index in range(1, 1001)]

    def drawn(share: float) -> list[int]:
        own = Rechecked(bench, log, share).own
        own.add(groups, TRAINED)
        return list(own._waiting)

    quarter = drawn(0.25)
    assert quarter == drawn(0.25) and set(quarter) <= set(drawn(0.5))
    assert all(24 <= sum(n * 100 < index <= (n + 1) * 100 for index in quarter) <= 26 for n in range(10))
    assert drawn(0.0) == [] and len(drawn(1.0)) == 1000


def test_few_groups_wait_and_the_newest_are_kept(rechecked, answers):
    rechecked.own.add([indexed(answers[0], index) for index in range(1, MAX_WAITING + 3)], TRAINED)
    left = [index for _ in range(MAX_WAITING + 2) for index in rechecked.own.one()[1]]
    assert left == list(range(MAX_WAITING + 2, 2, -1))
    assert rechecked.outcomes == {"displaced": 2, "rechecked": MAX_WAITING}


def test_a_trainer_that_never_waits_rechecks_all_the_same_in_a_bounded_share_of_its_time(rechecked, answers):
    """An update takes a second, a recheck between 0.02 and 0.5 s and, once, 5 s."""
    began = rechecked.takes(lambda group: 5.0 if group.index == 400 else (0.02, 0.1, 0.5)[group.index % 3])
    spent_s = []
    for update in range(1, 2001):
        rechecked.now_s += 1.0
        rechecked.own.add([indexed(answers[0], update)], TRAINED)
        before_s = rechecked.now_s
        rechecked.own.one_if_due()
        spent_s.append(rechecked.now_s - before_s)
    assert 0.5 * BUSY_SHARE < sum(spent_s[1:]) / rechecked.now_s <= BUSY_SHARE
    begun_s = [at for _, at in began]
    for took_s, (at, following) in zip(filter(None, spent_s[1:]), itertools.pairwise(begun_s[1:]), strict=False):
        assert took_s / BUSY_SHARE <= following - at <= took_s / BUSY_SHARE + 2.0, (
            "an update after it is due at the latest"
        )
    assert begun_s[:2] == [1.0, 2.0 + spent_s[0]], "at once, and the making of the second model is not counted"


def test_a_recheck_while_rollouts_are_waited_for_saves_the_one_between_updates(rechecked, answers):
    began = rechecked.takes(lambda group: 0.3)
    rechecked.own.add(answers, TRAINED)
    rechecked.own.one_if_due()
    assert rechecked.own.one()[0] and len(began) == 2, "a trainer that waits has the time"
    rechecked.now_s = began[-1][1] + 0.3 / BUSY_SHARE - 0.01
    assert rechecked.own.one_if_due() == ([], {})
    rechecked.now_s += 0.02
    assert rechecked.own.one_if_due()[0]


@pytest.mark.parametrize("waits", [False, True])
def test_every_producer_has_its_turn_however_few_groups_it_delivers(rechecked, answers, waits):
    """Each batch has 6 groups of one producer and one of another, every fifth also one of a third."""
    began = rechecked.takes(lambda group: 0.09)  # every third update or so
    index = itertools.count(1)
    for update in range(300):
        names = ["slow"] * (update % 5 == 0) + ["few"] + ["busy"] * 6
        batch = [indexed(group, next(index)) for name in names for group in sampled_by(answers[:1], name)]
        rechecked.own.add(batch, TRAINED)
        rechecked.now_s += 1.0
        rechecked.own.one() if waits else rechecked.own.one_if_due()
    turns = Counter(name for name, _ in began)
    if waits:
        assert len(began) == 300 and turns["slow"] == 60 and turns["few"] == turns["busy"] == 120
    else:
        assert len(began) > 99 and max(turns.values()) - min(turns.values()) <= 1


def test_more_producers_than_groups_that_wait_have_their_turns_too(rechecked, answers):
    names = [f"p{n}" for n in range(3 * MAX_WAITING)]
    began = rechecked.takes(lambda group: 0.09)
    for update in range(200):
        batch = [
            indexed(group, update * len(names) + n)
            for n, name in enumerate(names)
            for group in sampled_by(answers[:1], name)
        ]
        rechecked.own.add(batch, TRAINED)
        rechecked.now_s += 1.0
        rechecked.own.one_if_due()
    for n in range(0, len(began) - len(names), len(names)):
        assert {name for name, _ in began[n : n + len(names)]} == {*names}


def test_a_producer_whose_groups_cannot_be_recomputed_takes_nobodys_turn(rechecked, answers):
    rechecked.own._gap = lambda group: None if group.samplers[0] == "gone" else RowGap(1, 1, 0.0, 0.0)
    found = []
    for update in range(10):
        names = ["gone"] * 3 + ["sound"]
        batch = [
            indexed(group, 4 * update + n) for n, name in enumerate(names) for group in sampled_by(answers[:1], name)
        ]
        rechecked.own.add(batch, TRAINED)
        found.append(len(rechecked.own.one()[0]))
    assert found == [1, 0] * 5


def test_groups_that_are_judged_otherwise_or_not_trained_are_left_alone(rechecked, answers):
    for changes in (
        {"fresh": {1: None}},
        {"failed": {1: "not finite"}},
        {"spared": frozenset({1})},
        {"counts_as_update": False},
    ):
        rechecked.own.add(answers[:1], SimpleNamespace(**{**vars(TRAINED), **changes}))
    assert rechecked.own.one() == ([], {}) and not rechecked.outcomes
    rechecked.own.add(sampled_by(answers[:1], "lost", "heir"), TRAINED)
    assert rechecked.own.one() == ([], {}) and rechecked.outcomes == {"shared": 1}


def test_a_group_whose_versions_are_kept_no_longer_is_counted_and_not_judged(bench, rechecked, log, answers):
    engine = bench.engine()
    (newer,) = groups_of(engine.generate(prompts(1, 20), SIBLINGS, LENGTH, version=2, updates={5: 3}, sampling=COLD))
    rechecked.own.add([answers[1], indexed(newer, 9), answers[0]], TRAINED)
    assert rechecked.own.one()[1].keys() == {1} and rechecked.own.one()[1].keys() == {9}
    log.drop(0, 1)
    assert rechecked.own.one() == ([], {}), "version 1, which was in memory, is gone from log and folder"
    assert rechecked.outcomes == {"rechecked": 2, "gone": 1}


def test_weights_that_cannot_be_read_are_told_of_and_the_next_group_is_tried(rechecked, log, answers, caplog):
    store = log.store("redis")
    lost = {key: store.get(key) for key in store.keys() if key.startswith("2-")}  # noqa: SIM118
    store.delete(lost)
    rechecked.own.add(answers[:2], TRAINED)
    assert rechecked.own.one() == ([], {})
    assert "group 2 is not rechecked: " in caplog.text
    for key, data in lost.items():
        store.put(key, data)
    assert rechecked.own.one()[1].keys() == {1}
    assert rechecked.outcomes == {"failed": 1, "rechecked": 1}


def test_a_device_without_room_for_a_second_model_ends_the_rechecks(rechecked, answers, caplog, monkeypatch):
    def no_room(*_args, **_kwargs):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr("penstock.consumers.parity.replay.PackedModel", no_room)
    rechecked.own.add(answers[:2], TRAINED)
    assert rechecked.own.one() == ([], {})
    assert "the device has no room for a second model: tried to allocate 2 GiB" in caplog.text
    rechecked.own.add(answers[2:], TRAINED)
    assert rechecked.own.one() == ([], {}) and rechecked.outcomes == {"failed": 1}
