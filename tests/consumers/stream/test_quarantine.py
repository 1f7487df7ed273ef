"""A quarantined producer trains nobody: its groups are sampled again, each index is settled once, the others go on."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import msgspec
import pytest

import penstock.consumers.__main__ as entry
from mini_producer import make_group
from penstock.consumers.learning.learner.fresh_rows import RowGap
from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.consumers.parity.watch import LIMIT, OUT
from penstock.consumers.stream import quarantine
from penstock.consumers.stream.connection import TrainerConnection
from penstock.schemas.config import ConfigError
from penstock.schemas.keys import Field, Kind
from penstock.schemas.producer_parity import ProducerParity, decode_parity
from penstock.schemas.rollout import (
    RolloutGroup,
    SamplingSettings,
    VersionSpan,
    decode_group,
    encode_group,
    pack_floats,
    pack_ids,
)
from scripted_learner import KilledError, ScriptedLearner
from trainer_bench import assert_balanced, assert_settled_once

pytestmark = pytest.mark.redis

GAPS = {"good": 1e-7, "fine": 1e-7, "bad": 1.0}
"""By producer, of its rows of lag 0."""


class ProducerInstances:
    """Instances of the three producers in turn, whatever the trainer says of them; groups packed, by producer."""

    def __init__(self, *instances: str) -> None:
        self.instances = instances
        self.num_answered = 0
        self.batches: list[list[str]] = []
        self.found_in: int | None = None
        """The number of batches trained when somebody was quarantined."""

    def answer(self, index: int, version: int) -> dict:
        instance = self.instances[self.num_answered % len(self.instances)]
        self.num_answered += 1
        group = make_group(index, version)
        group = msgspec.structs.replace(group, producer_id=instance.partition("-")[0], sampled_by=(instance,))
        return {Field.INDEX: str(index), Field.KIND: Kind.GROUP, Field.PAYLOAD: encode_group(group)}

    def watched(self, trainer):
        """The trainer, with a learner that measures each producer's gap."""
        trainer.gate.is_pending = False
        trainer.watch.examine = lambda *_: None  # without a model there is nothing to examine
        pack, step, add = trainer.learner.pack, trainer.learner.step, trainer.intake.quarantine.add
        taken: list = []

        def note_and_pack(groups, lag_of):
            self.batches.append([group.sampled_by[0] for group in groups])
            taken[:] = groups
            return pack(groups, lag_of)

        def measure_and_step(batch):
            fresh = {group.index: RowGap(2, 40, 40 * GAPS[group.producer_id], 0.0) for group in taken}
            return replace(step(batch), fresh=fresh)

        def note_and_add(instance, found):
            self.found_in = len(self.batches)
            add(instance, found)

        trainer.learner.pack, trainer.learner.step = note_and_pack, measure_and_step
        trainer.intake.quarantine.add = note_and_add
        return trainer


class CountingClient:
    """Notes the names of the commands that fetch keys."""

    def __init__(self, client, fetched: list[str]) -> None:
        self._client, self._fetched = client, fetched

    def __getattr__(self, name: str):
        if name in ("mget", "scan_iter"):
            self._fetched.append(name)
        return getattr(self._client, name)


def num_of_bad(batches: list[list[str]]) -> int:
    return sum(name.startswith("bad") for batch in batches for name in batch)


@pytest.fixture
def gated(bench):
    bench.overrides = ["parity.gate=refuse"]
    return bench


def test_nothing_of_it_is_trained_from_then_on_and_nothing_is_lost(gated, redis_client):
    own = ProducerInstances("good-1", "bad-1", "fine-1")
    gated.producer(own.answer)
    trainer = own.watched(gated.trainer())
    assert trainer.run()
    assert_settled_once(gated, redis_client)
    assert_balanced(gated, trainer)
    needed = -(-LIMIT // OUT)
    found_in = next(n for n in range(1, 13) if num_of_bad(own.batches[:n]) >= needed)
    assert num_of_bad(own.batches[found_in:]) == 0 and len(own.batches) == 12
    of_others = Counter(name for batch in own.batches[found_in:] for name in batch)
    assert of_others.keys() == {"good-1", "fine-1"}
    again = gated.ledger()["num_groups_released_again"]["quarantined"]
    (outcomes,) = gated.ledger()["attrition"]["rollouts"].values()
    assert sum(each["num"] for each in outcomes["quarantined"].values()) == 2 * again > 0
    told = {name.decode(): decode_parity(value) for name, value in redis_client.hgetall(gated.keys.parity).items()}
    assert told["bad-1"].quarantined_s and told["bad-1"].producer_id == "bad"
    assert "1.0e+00 nats, 1e-05 is allowed" in told["bad-1"].says


def test_the_trainer_that_goes_on_keeps_the_quarantine_and_a_restart_of_the_producer_ends_it(gated, redis_client):
    own = ProducerInstances("good-1", "bad-1", "fine-1")
    gated.producer(own.answer)
    first = own.watched(gated.trainer())
    first.learner.fail_at[6] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    own.batches.clear()
    own.instances = "good-1", "bad-1", "bad-2"
    second = own.watched(gated.trainer(resume=True))
    second.watch.observe_groups = lambda groups, gaps: {}
    assert second.run()
    assert_settled_once(gated, redis_client)
    names = Counter(name for batch in own.batches for name in batch)
    assert names["bad-1"] == 0 and names["bad-2"] > 0


def test_what_another_went_on_with_from_it_is_not_trained_either(gated, redis_client):
    own = ProducerInstances("good-1")
    gated.producer(own.answer)
    trainer = own.watched(gated.trainer())
    trainer.intake.quarantine.add("bad-1", ProducerParity(producer_id="bad", quarantined_s=1.0))
    assert trainer.intake.quarantine.holds(("bad-1", "good-1"))
    assert not trainer.intake.quarantine.holds(("bad-2", "good-1"))
    assert trainer.run()


def test_evaluations_go_by_what_others_answer_once_a_producer_is_quarantined(gated, caplog):
    """Every second held-out prompt is answered by the bad one, whose answers are worth 0."""
    own = ProducerInstances("good-1", "bad-1", "fine-1")
    producer, turns = gated.producer(own.answer), cycle(("bad-1", "good-1"))

    def held_out(version: int) -> float:
        producer.evaluated_by = (next(turns),)
        return float(producer.evaluated_by != ("bad-1",))

    producer.held_out = held_out
    trainer = own.watched(gated.trainer())
    assert trainer.run()
    assert own.found_in is not None and own.found_in < 10, "the evaluation after it is the third of four"
    done = {line["update"]: line for line in gated.lines("evaluations.jsonl")}
    assert [done[update]["reward"] for update in (10, 12)] == [1.0, 1.0]
    assert "held-out prompts are asked again: a quarantined producer answered them" in caplog.text


def test_the_heartbeats_are_fetched_once_for_a_quarantine(gated, beat, monkeypatch):
    trainer = gated.trainer()
    for instance in ("bad-1", "good-1"):
        beat(gated.keys, instance)
    fetched = []
    connection = trainer.leadership.scripts.connection
    call = connection.call
    monkeypatch.setattr(
        connection, "call", lambda command: call(lambda client: command(CountingClient(client, fetched)))
    )
    trainer.intake.quarantine.add("bad-1", ProducerParity(producer_id="bad", quarantined_s=1.0))
    assert fetched == ["scan_iter", "mget"]
    assert trainer.intake.quarantine.alive.keys() == {"bad"}
    assert trainer.intake.quarantine.are_others(["fine-1"]) and not trainer.intake.quarantine.are_others(["good-1"])


def test_a_run_all_of_whose_producers_are_quarantined_says_so_and_goes_on_with_the_next(gated, beat, caplog):
    own = ProducerInstances("bad-1")
    beat(gated.keys, "bad-1")
    trainer = own.watched(gated.trainer())
    add = trainer.intake.quarantine.add

    def add_and_restart(instance, found):
        add(instance, found)
        own.instances = ("good-1",)

    trainer.intake.quarantine.add = add_and_restart
    gated.producer(own.answer)
    assert trainer.run()
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "producer bad is quarantined" in said[0]
    assert "every producer that is alive is quarantined, so that nothing is sampled for this run (bad: " in said[1]
    assert num_of_bad(own.batches) <= 8, "no batch has more than four groups"


def test_gaps_and_quarantines_are_shown_of_producers_that_are_alive(gated, beat, redis_client, monkeypatch):
    monkeypatch.setattr(quarantine, "NOTE_S", 0.0)
    own = ProducerInstances("good-1", "bad-1", "fine-1")
    for instance in ("good-1", "bad-1"):
        beat(gated.keys, instance)
    gated.producer(own.answer)
    trainer = own.watched(gated.trainer())
    assert trainer.run()
    registry = gated.metrics.registry

    def gap_of(name: str) -> float | None:
        return registry.get_sample_value("penstock_producer_mismatch_lag0_mean_nats", {"producer": name})

    assert gap_of("good") == pytest.approx(1e-7) and gap_of("bad") == pytest.approx(1.0) and gap_of("fine") is None
    labels = {"producer": "bad", "cause": "unexplained"}
    assert registry.get_sample_value("penstock_producer_quarantined", labels) == 1
    assert set(redis_client.hkeys(gated.keys.parity)) == {b"bad-1", b"good-1"}
    beat(gated.keys, "bad-2")
    trainer._watch_producers([], {})
    assert registry.get_sample_value("penstock_producer_quarantined", labels) is None and gap_of("bad") is None


def with_first_segment(group: RolloutGroup, **changes) -> RolloutGroup:
    first, *others = group.rollouts
    segment = msgspec.structs.replace(first.segments[0], **changes)
    return msgspec.structs.replace(group, rollouts=(msgspec.structs.replace(first, segments=(segment,)), *others))


def labelled(group: RolloutGroup, version: int) -> RolloutGroup:
    return with_first_segment(group, version_spans=(VersionSpan(version, 3, 6),))


def without_kept_ids(group: RolloutGroup) -> RolloutGroup:
    return msgspec.structs.replace(group, sampling=SamplingSettings(temperature=1.0, top_p=0.5))


UNREADABLE = {
    "not finite": lambda group: with_first_segment(group, behavior_logprobs=pack_floats([-1.0, math.nan, -1.0])),
    "infinite": lambda group: with_first_segment(group, behavior_logprobs=pack_floats([-1.0, -math.inf, -1.0])),
    "above 0": lambda group: with_first_segment(group, behavior_logprobs=pack_floats([-1.0, 0.5, -1.0])),
    "no sampling_mask": without_kept_ids,
    "vocabulary": lambda group: with_first_segment(group, token_ids=pack_ids([11, 12, 13, 21, 100, 2])),
    "future label": lambda group: labelled(group, 999),
}
"""By fault a group that the trainer refuses for its rows; the learner's vocabulary has 100 ids."""


def unreadable_by(own: ProducerInstances, names: tuple[str, ...], fault=UNREADABLE["not finite"], samplers=()):
    """The answers of `own`, those of some producers with a fault, and as if these instances had sampled them."""

    def answer(index: int, version: int) -> dict:
        fields = own.answer(index, version)
        group = decode_group(fields[Field.PAYLOAD])
        if group.producer_id not in names:
            return fields
        wrong = msgspec.structs.replace(fault(group), sampled_by=samplers or group.sampled_by)
        return {**fields, Field.PAYLOAD: encode_group(wrong)}

    return answer


def dead_of(redis_client, keys) -> list[dict]:
    return [fields for _, fields in redis_client.xrange(keys.dead)]


@pytest.mark.parametrize("fault", UNREADABLE)
def test_a_producer_whose_rows_are_refused_costs_three_groups_and_no_more(gated, redis_client, fault):
    own = ProducerInstances("good-1", "bad-1", "fine-1")
    gated.producer(unreadable_by(own, ("bad",), UNREADABLE[fault]))
    trainer = own.watched(gated.trainer())
    assert trainer.run()
    letters = dead_of(redis_client, gated.keys)
    assert len(letters) < -(-LIMIT // OUT)
    assert {letter[Field.PRODUCER] for letter in letters} <= {b"bad"}
    assert all(letter[Field.REASON].endswith(b"; sampled by bad-1") for letter in letters)
    assert_settled_once(gated, redis_client, dead={int(letter[Field.INDEX]) for letter in letters})
    told = {name.decode(): decode_parity(value) for name, value in redis_client.hgetall(gated.keys.parity).items()}
    assert told.keys() == {"bad-1"} and (told["bad-1"].cause, told["bad-1"].gap) == ("refused", None)
    assert "the trainer refuses its groups, the first one as poison: " in told["bad-1"].says
    assert num_of_bad(own.batches) == 0 and len(own.batches) == 12
    again = gated.ledger()["num_groups_released_again"]["quarantined"]
    outcomes = gated.ledger()["attrition"]["rollouts"]
    num = sum(each["num"] for name in outcomes for each in outcomes[name].get("quarantined", {}).values())
    assert num == 2 * again > 0


def appended(redis_client, keys, index: int, group: RolloutGroup) -> None:
    entry = {Field.INDEX: str(index), Field.KIND: Kind.GROUP, Field.PAYLOAD: encode_group(group)}
    redis_client.xadd(keys.rollouts, entry)


def broken(index: int, *samplers: str) -> RolloutGroup:
    group = UNREADABLE["not finite"](make_group(index, 0))
    return msgspec.structs.replace(group, producer_id="bad", sampled_by=samplers)


def test_refused_groups_that_are_read_together_are_all_sampled_again(gated, redis_client):
    trainer = gated.trainer()
    trainer.intake.release()
    for index in range(1, 6):
        appended(redis_client, gated.keys, index, broken(index, "bad-1"))
    trainer.intake.reconcile()
    assert trainer.intake.quarantine.holds(("bad-1",)) and dead_of(redis_client, gated.keys) == []
    assert trainer.intake.ledger.released_again["quarantined"] + len(trainer.intake.ledger.postponed) == 5
    trainer.intake.reader.rewind()
    trainer.intake.reconcile()
    outcomes = trainer.intake.ledger.attrition.by_environment()
    assert [each["quarantined"].num for each in outcomes.values()] == [2 * 5], "what is read again is not counted again"
    assert trainer.intake.ledger.num_duplicates_dropped == 0


def test_what_two_have_sampled_or_garbage_finds_nobody_and_dies(gated, redis_client):
    trainer = gated.trainer()
    trainer.intake.release()
    for index in range(1, 5):
        appended(redis_client, gated.keys, index, broken(index, "bad-1", "good-1"))
    for index in range(5, 9):
        entry = {Field.INDEX: str(index), Field.KIND: Kind.GROUP, Field.PAYLOAD: b"garbage"}
        redis_client.xadd(gated.keys.rollouts, entry)
    trainer.intake.reconcile()
    letters = dead_of(redis_client, gated.keys)
    assert [int(letter[Field.INDEX]) for letter in letters] == list(range(1, 9))
    assert [letter.get(Field.PRODUCER, b"") for letter in letters] == [b"bad"] * 4 + [b""] * 4
    assert letters[0][Field.REASON].endswith(b"; sampled by bad-1, good-1")
    assert redis_client.hgetall(gated.keys.parity) == {}
    trainer.intake.quarantine.add("good-1", ProducerParity(producer_id="good", quarantined_s=1.0))
    appended(redis_client, gated.keys, 9, broken(9, "bad-1", "good-1"))
    trainer.intake.reconcile()
    assert len(dead_of(redis_client, gated.keys)) == 8, "one that a quarantined producer began is sampled again"


def test_a_group_of_another_task_is_no_evidence(gated, redis_client):
    """As after a rollback of trainer and Redis, where indexes in flight stand for other tasks."""
    trainer = gated.trainer()
    trainer.intake.release()
    for index in range(1, 7):
        group = msgspec.structs.replace(make_group(index, 0), producer_id="good", sampled_by=("good-1",), task=99)
        appended(redis_client, gated.keys, index, group)
    trainer.intake.reconcile()
    letters = dead_of(redis_client, gated.keys)
    assert len(letters) == 6 and {letter[Field.PRODUCER] for letter in letters} == {b"good"}
    assert redis_client.hgetall(gated.keys.parity) == {}


@pytest.mark.parametrize("gate", ["warn", "off"])
def test_without_a_gate_that_refuses_unreadable_groups_die_as_they_come(gated, redis_client, gate, caplog):
    gated.overrides = [f"parity.gate={gate}"]
    own = ProducerInstances("good-1", "bad-1", "fine-1")
    gated.producer(unreadable_by(own, ("bad",)))
    assert own.watched(gated.trainer()).run()
    letters = dead_of(redis_client, gated.keys)
    assert len(letters) > 12 and {letter[Field.PRODUCER] for letter in letters} == {b"bad"}
    assert_settled_once(gated, redis_client, dead={int(letter[Field.INDEX]) for letter in letters})
    assert ("bad is trained all the same" in caplog.text) == (gate == "warn")


def test_a_group_that_failed_batches_spare_is_evidence_once(gated):
    """One group of a sound producer is out; five batches in which it stands take no optimizer step."""
    own = ProducerInstances("good-1", "fine-1")
    gated.producer(own.answer)
    trainer = own.watched(gated.trainer())
    step, taken = trainer.learner.step, []

    def fail_and_step(batch):
        taken.append(batch.indexes)
        num_failing = len(taken)
        if num_failing <= 5:
            trainer.learner.fail_at[0] = "loss is not finite"
        report = step(batch)
        fresh = {index: RowGap(2, 40, 40.0 * (index == taken[0][0]), 0.0) for index in batch.indexes}
        failed = {batch.indexes[-1]: "loss is not finite"} if num_failing <= 5 else {}
        return replace(report, fresh=fresh, failed=failed)

    trainer.learner.step = fail_and_step
    assert trainer.run()
    assert all(taken[0][0] in indexes for indexes in taken[:6]), "it was spared, and trained at last"
    assert own.found_in is None
    num_rows = sum(each.num_rows for each in trainer.watch.table().values())
    ledger = gated.ledger()
    assert num_rows == 2 * (ledger["num_groups_trained"] + ledger["num_groups_dead"]), "those that died count too"
    assert ledger["num_groups_dead"] == 5


def test_a_gate_that_warns_names_the_producer_and_trains_it(gated, caplog):
    gated.overrides = ["parity.gate=warn"]
    own = ProducerInstances("good-1", "bad-1", "fine-1")
    gated.producer(own.answer)
    assert own.watched(gated.trainer()).run()
    assert num_of_bad(own.batches) > 12
    assert 'bad is trained all the same (parity.gate = "warn")' in caplog.text


@pytest.mark.parametrize("share", [0, 1])
def test_rechecks_are_made_while_rollouts_are_waited_for_and_quarantine_as_rows_of_lag_0_do(gated, share):
    gated.overrides.append(f"parity.recheck={share}")
    own = ProducerInstances("good-1", "bad-1")
    gated.producer(own.answer)
    trainer = own.watched(gated.trainer())
    read = trainer.intake.read
    trainer.learner.step = partial(ScriptedLearner.step, trainer.learner)  # no row has lag 0
    trainer.recheck._gap = lambda group: RowGap(2, 40, 40 * GAPS[group.producer_id], 0.0)
    trainer.intake.read = lambda: 0 if trainer.recheck._waiting else read()
    assert trainer.run()
    assert_balanced(gated, trainer)
    assert trainer.intake.quarantine.holds(["bad-1"]) == bool(share)
    assert (num_of_bad(own.batches[-3:]) == 0) == bool(share)
    count = partial(gated.metrics.registry.get_sample_value, labels={"outcome": "rechecked"})
    assert bool(count("penstock_parity_rechecks_total")) == bool(share)


def test_ranks_that_share_a_model_recheck_nothing(gated):
    gated.overrides.append("parity.recheck=0.1")
    connection = TrainerConnection(gated.url, outage_s=45)
    gated.connections.append(connection)
    with pytest.raises(ConfigError, match=r"parity\.recheck = 0\.1 with 2 ranks .* expected 0, or"):
        entry.open_trainer(
            gated.config, gated.runs, connection, TrainerMetrics(), resume=False, ranks=SimpleNamespace(size=2)
        )
