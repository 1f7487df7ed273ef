"""Groups without a row of lag 0, recomputed while the trainer waits: a late label is found, nothing is harmed."""

from collections import Counter
from types import SimpleNamespace

import fakeredis
import msgspec
import pytest
import torch
from safetensors.torch import load_file

from parity_bench import COLD, ParityBench, groups_of, prompts
from penstock.consumers.learning.lag import LagTable
from penstock.consumers.learning.learner import Learner
from penstock.consumers.parity.recheck import MAX_WAITING, Recheck
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
    """Of an engine that took policy 2 in place of policy 1 before the sixth token of each of four groups."""
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
    """A recheck of every group, and what it has counted. tokens: recomputed."""

    def __init__(self, bench: ParityBench, log: WrittenLog, share: float = 1.0) -> None:
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0
        reader = WeightReader(lambda command: command(log.client), log.keys)
        self.own = Recheck(config_of(bench, share), reader, self._count)

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


def test_the_trainers_weights_and_random_numbers_stay_as_they_are(learner, rechecked, answers):
    before = {name: tensor.clone() for name, tensor in learner.model.state().items()}
    torch.manual_seed(7)
    random = torch.get_rng_state()
    rechecked.own.add(answers, TRAINED)
    assert rechecked.own.one()[1][1].num_tokens == SIBLINGS * LENGTH
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
    assert left == list(range(3, MAX_WAITING + 3))
    assert rechecked.outcomes == {"displaced": 2, "rechecked": MAX_WAITING}


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
    rechecked.own.add([answers[0], indexed(newer, 9), answers[1]], TRAINED)
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
    assert "group 1 is not rechecked: " in caplog.text
    for key, data in lost.items():
        store.put(key, data)
    assert rechecked.own.one()[1].keys() == {2}
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
