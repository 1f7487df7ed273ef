"""A quarantined producer trains nobody: its groups are sampled again, each index is settled once, the others go on."""

from collections import Counter
from dataclasses import replace
from itertools import cycle

import msgspec
import pytest

from mini_producer import make_group
from penstock.consumers.learning.learner.step_report import RowGap
from penstock.consumers.parity.gate import ParityRefusedError
from penstock.consumers.parity.producers import NUM_JUDGED
from penstock.consumers.stream import quarantine
from penstock.consumers.stream.ledger import RunFailedError
from penstock.schemas.keys import Field, Kind
from penstock.schemas.producer_parity import ProducerParity, decode_parity, quarantine_in
from penstock.schemas.rollout import encode_group, pack_floats
from scripted_learner import KilledError
from trainer_bench import assert_balanced, assert_settled_once

pytestmark = pytest.mark.redis

GAPS = {"good": 1e-7, "fine": 1e-7, "gone": 1e-7, "bad": 1.0}
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
        pack, step, add = trainer.learner.pack, trainer.learner.step, trainer.intake.quarantine.add
        taken: list = []

        def note_and_pack(groups, lag_of):
            self.batches.append([group.sampled_by[0] for group in groups])
            taken[:] = groups
            return pack(groups, lag_of)

        def measure_and_step(batch):
            gaps = {group.index: RowGap(40, 40 * GAPS[group.producer_id]) for group in taken}
            return replace(step(batch), gaps=gaps)

        def note_and_add(instance, finding, *, refuses):
            self.found_in = len(self.batches)
            add(instance, finding, refuses=refuses)

        trainer.learner.pack, trainer.learner.step = note_and_pack, measure_and_step
        trainer.intake.quarantine.add = note_and_add
        return trainer


def num_of_bad(batches: list[list[str]]) -> int:
    return sum(name.startswith("bad") for batch in batches for name in batch)


@pytest.fixture
def gated(bench, beat):
    """A run with three producers that are alive."""
    bench.overrides = ["parity.gate=refuse", "num_updates=16"]
    for instance in ("good-1", "bad-1", "fine-1"):
        beat(bench.keys, instance)
    return bench


def test_of_a_bad_producer_nothing_is_trained_from_its_last_judged_group_on_and_nothing_is_lost(gated, redis_client):
    own = ProducerInstances("good-1", "bad-1", "fine-1")
    gated.producer(own.answer)
    trainer = own.watched(gated.trainer())
    assert trainer.run()
    assert_settled_once(gated, redis_client)
    assert_balanced(gated, trainer)
    found_in = next(n for n in range(1, 17) if num_of_bad(own.batches[:n]) >= NUM_JUDGED)
    assert own.found_in == found_in and num_of_bad(own.batches[found_in:]) == 0 and len(own.batches) == 16
    assert {name for batch in own.batches[found_in:] for name in batch} == {"good-1", "fine-1"}
    again = gated.ledger()["num_groups_released_again"]["quarantined"]
    (outcomes,) = gated.ledger()["attrition"]["rollouts"].values()
    assert sum(each["num"] for each in outcomes["quarantined"].values()) == 2 * again > 0
    told = {name.decode(): decode_parity(value) for name, value in redis_client.hgetall(gated.keys.parity).items()}
    assert told["bad-1"].quarantined_s and told["bad-1"].producer_id == "bad"
    assert "is above 1.0e-05 nats, the most that is allowed: 1.0e+00 over all of them" in told["bad-1"].reason


def test_the_trainer_that_goes_on_keeps_the_quarantine_and_a_restart_of_the_producer_ends_it(gated, redis_client):
    own = ProducerInstances("good-1", "bad-1", "fine-1")
    gated.producer(own.answer)
    first = own.watched(gated.trainer(fail_at={9: KilledError()}))
    with pytest.raises(KilledError):
        first.run()
    assert own.found_in is not None
    own.batches.clear()
    own.instances = "good-1", "bad-1", "bad-2"
    second = own.watched(gated.trainer(resume=True))
    second.producers.observe = lambda groups, gaps: {}
    assert second.run()
    assert_settled_once(gated, redis_client)
    names = Counter(name for batch in own.batches for name in batch)
    assert names["bad-1"] == 0 and names["bad-2"] > 0


def test_what_a_refused_batch_s_producers_sampled_is_sampled_again_once_the_run_is_resumed(gated, redis_client):
    own = ProducerInstances("bad-1")
    gated.producer(own.answer)
    trainer = own.watched(gated.trainer())
    trainer.gate.is_pending = True

    def refuse(*arguments):
        raise ParityRefusedError("raw logprobs")

    trainer.gate.check, trainer.learner.model = refuse, None
    with pytest.raises(ParityRefusedError):
        trainer.run()
    trainer.close()
    own.instances = ("bad-2",)
    second = own.watched(gated.trainer(resume=True))
    second.producers.observe = lambda groups, gaps: {}
    assert second.run()
    assert_settled_once(gated, redis_client)
    assert {name for batch in own.batches for name in batch} == {"bad-2"}
    told = quarantine_in(redis_client.hget(gated.keys.parity, "bad-1"))
    assert told is not None and told.reason == "raw logprobs"


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
    last = max(line["update"] for line in gated.lines("evaluations.jsonl"))
    assert own.found_in is not None and own.found_in < last
    done = {line["update"]: line for line in gated.lines("evaluations.jsonl")}
    assert done[last]["reward"] == 1.0
    assert "held-out prompts are asked again: a quarantined producer answered them" in caplog.text


def test_the_only_producer_is_trained_from_all_the_same_where_the_gate_warns_and_ends_the_run_where_it_refuses(
    bench, beat, caplog
):
    beat(bench.keys, "bad-1")
    own = ProducerInstances("bad-1")
    bench.producer(own.answer)
    bench.overrides = ["parity.gate=refuse"]
    reason = r"producer bad cannot be trained from .*, and no other is alive: mean \|engine"
    with pytest.raises(RunFailedError, match=reason):
        own.watched(bench.trainer()).run()
    assert len(own.batches) == 2 and 4 < NUM_JUDGED <= 8, "four groups each"
    assert bench.ledger()["num_groups_trained"] == 8, "what was trained is committed"
    bench.overrides = ["parity.gate=warn"]
    trainer = own.watched(bench.trainer(resume=True))
    assert trainer.run()
    assert_balanced(bench, trainer)
    assert len(own.batches) == 12 and trainer.intake.ledger.released_again["quarantined"] == 0
    (warned,) = [line for line in caplog.messages if "trained from all the same" in line]
    assert warned.startswith('bad is trained from all the same (parity.gate = "warn"): mean |eng')


def test_the_last_of_several_bad_producers_is_not_quarantined(gated, caplog):
    gated.overrides = ["parity.gate=warn"]
    add = gated.trainer().intake.quarantine.add
    for instance in ("good-1", "bad-1", "fine-1"):
        add(instance, ProducerParity(producer_id=instance[:-2], quarantined_s=1.0, reason="why"), refuses=False)
    assert [line.split(",")[0] for line in caplog.messages if "quarantined" in line] == [
        "producer good is quarantined",
        "producer bad is quarantined",
    ]
    assert 'fine is trained from all the same (parity.gate = "warn"): why' in caplog.messages


def test_gaps_are_shown_of_producers_that_are_alive_and_a_quarantine_until_the_next_start(
    gated, beat, redis_client, monkeypatch
):
    monkeypatch.setattr(quarantine, "NOTE_S", 0.0)
    own = ProducerInstances("good-1", "bad-1", "gone-1")
    gated.producer(own.answer)
    trainer = own.watched(gated.trainer())
    assert trainer.run()

    def value(metric: str, name: str) -> float | None:
        trainer.run_log.metrics.measure_producers(trainer.intake.quarantine.shown)
        return gated.metrics.registry.get_sample_value(metric, {"producer": name})

    gap, is_quarantined = "penstock_producer_mismatch_lag0_mean_nats", "penstock_producer_quarantined"
    assert [value(gap, name) for name in ("good", "bad", "gone")] == [pytest.approx(1e-7), pytest.approx(1.0), None]
    assert value(is_quarantined, "bad") == 1 and value(is_quarantined, "good") is None
    assert set(redis_client.hkeys(gated.keys.parity)) == {b"bad-1", b"good-1"}
    redis_client.delete(gated.keys.producer("bad"))  # it ends
    trainer.intake.quarantine.note({})
    assert value(is_quarantined, "bad") == 1
    beat(gated.keys, "bad-2")
    trainer.intake.quarantine.note({"bad-2": ProducerParity(producer_id="bad", gap=1e-7)})
    assert value(is_quarantined, "bad") is None and value(gap, "bad") == pytest.approx(1e-7)


def test_groups_that_are_refused_for_their_rows_die_and_those_of_a_quarantined_producer_do_not(gated, redis_client):
    trainer = gated.trainer()
    trainer.intake.release()

    def append(index: int) -> None:
        group = make_group(index, 0)
        segment = msgspec.structs.replace(
            group.rollouts[0].segments[0], behavior_logprobs=pack_floats([-1.0, float("nan"), -1.0])
        )
        rollout = msgspec.structs.replace(group.rollouts[0], segments=(segment,))
        broken = msgspec.structs.replace(
            group, rollouts=(rollout, *group.rollouts[1:]), producer_id="bad", sampled_by=("bad-1",)
        )
        entry = {Field.INDEX: str(index), Field.KIND: Kind.GROUP, Field.PAYLOAD: encode_group(broken)}
        redis_client.xadd(gated.keys.rollouts, entry)

    append(1)
    trainer.intake.reconcile()
    letters = [fields for _, fields in redis_client.xrange(gated.keys.dead)]
    assert [letter[Field.INDEX] for letter in letters] == [b"1"] and letters[0][Field.PRODUCER] == b"bad"
    assert letters[0][Field.REASON].endswith(b"; sampled by bad-1")
    trainer.intake.quarantine.add("bad-1", ProducerParity(producer_id="bad", quarantined_s=1.0), refuses=True)
    append(2)
    trainer.intake.reconcile()
    assert redis_client.xlen(gated.keys.dead) == 1
    assert trainer.intake.ledger.released_again["quarantined"] + len(trainer.intake.ledger.postponed) == 1
