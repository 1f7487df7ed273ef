"""What a run's ledger says became of its rollouts: each is counted once, and losses of long ones raise the alarm."""

import logging
from collections import Counter

import msgspec
import pytest

from attrition_totals import totals
from mini_producer import dead_fields
from penstock.consumers.checkpoints.state import LedgerState
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.reader import Reader
from penstock.deploy.report.attrition import windows_of
from penstock.deploy.report.telemetry import read_telemetry
from penstock.schemas.attrition import BEYOND, UNKNOWN, WINDOW, Rollouts
from penstock.schemas.keys import Field, Kind
from penstock.schemas.rollout import encode_group
from scripted_learner import KilledError
from trainer_bench import assert_settled_once
from wire_examples import AT_TEMPERATURE_1, group_of_lengths

pytestmark = pytest.mark.redis


def fields_of(index: int, version: int, *lengths: int, tries_lost: int = 0) -> dict:
    group = group_of_lengths(*lengths, index=index, version=version, tries_lost=tries_lost)
    first, second = group.rollouts
    rollouts = first, msgspec.structs.replace(second, reward=msgspec.structs.replace(second.reward, value=1.0))
    group = msgspec.structs.replace(group, rollouts=rollouts, sampling=AT_TEMPERATURE_1)
    return {Field.INDEX: str(index), Field.KIND: Kind.GROUP, Field.PAYLOAD: encode_group(group)}


def counts(ledger: dict) -> Counter[str]:
    """Rollouts by outcome."""
    found: Counter[str] = Counter()
    for outcomes in ledger["attrition"]["rollouts"].values():
        for outcome, by_length in outcomes.items():
            found[outcome] += sum(one["num"] for one in by_length.values())
    return found


def test_every_rollout_is_counted_once_through_a_kill_and_a_resume(bench, redis_client):
    stale_once: set[int] = set()

    def answer(index: int, version: int) -> dict:
        if index == 7:
            return dead_fields(7, "deadline: not finished after 1 s")
        if index in (25, 33) and index not in stale_once:
            stale_once.add(index)
            return fields_of(index, 0, 40, 3)  # as old as policy 0: sampled again
        return fields_of(index, version, 40, 3, tries_lost=int(index == 5))

    producer = bench.producer(answer)
    first = bench.trainer()
    first.learner.fail_at[9] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    assert bench.trainer(resume=True).run()
    assert_settled_once(bench, redis_client, dead={7})
    ledger = bench.ledger()
    num_stale = sum(producer.answers.values()) - 48 - 1
    assert num_stale >= 2, "those of the lost policies too"
    assert counts(ledger) == {"trained": 2 * 48, "dead": 2, "stale": 2 * num_stale}
    by_outcome = ledger["attrition"]["rollouts"]["main"]
    assert by_outcome["dead"][UNKNOWN]["num"] == 2
    assert by_outcome["trained"]["64"] | {"reward_sum": 0.0} == {
        "num": 48,
        "num_tokens": 48 * 40,
        "num_tokens_masked": 0,
        "num_scored": 48,
        "reward_sum": 0.0,
        "finish_reasons": {"stop": 48},
    }
    assert ledger["attrition"]["num_tries_lost"] == 1
    updates = read_telemetry(bench.folder).updates
    trained = sum((window.rollouts["main"]["trained"] for window in windows_of(updates)), Rollouts())
    told = by_outcome["trained"]["64"]["reward_sum"] + by_outcome["trained"]["4"]["reward_sum"]
    assert trained == Rollouts(2 * 48, 43 * 48, 0, 2 * 48, told, {"stop": 2 * 48}), "of the final policy's updates"


def resume(bench, intake) -> None:
    """Replaces ledger and reader by those of a trainer that continues from a checkpoint made now."""
    intake.ledger = Ledger.from_state(
        msgspec.json.decode(msgspec.json.encode(intake.ledger.to_state()), type=LedgerState)
    )
    intake.reader = Reader(bench.connections[-1], bench.keys, intake.ledger, bench.config.group_size)


def test_a_stale_group_that_is_read_again_is_counted_once(bench, redis_client):
    released = bench.trainer()
    released.intake.reconcile()
    entry_id = redis_client.xadd(bench.keys.rollouts, fields_of(1, 0, 9, 9))
    released.intake.lag_of.advance(5)
    intake = released.intake
    for is_new in (True, False):
        intake.reader.read_to_end(intake.lag_of)
        assert (1 in intake.reader.ready) == is_new, "it is not judged again"
        assert intake.batch(1) is None
        resume(bench, intake)
    assert totals(intake.ledger.attrition) == {"stale": {"16": (2, 18)}}
    assert intake.ledger.stale == {1: entry_id.decode()}
    redis_client.xadd(bench.keys.rollouts, fields_of(1, 5, 9, 9))
    intake.reader.rewind()
    intake.reader.read_to_end(intake.lag_of)
    assert 1 in intake.reader.ready, "the group that was sampled in its place"


def test_groups_of_an_index_that_another_came_first_for_are_counted_once(bench, redis_client):
    trainer = bench.trainer()
    intake = trainer.intake
    intake.reconcile()
    other = msgspec.structs.replace(group_of_lengths(40, 3, index=1), environment="nobody's")
    for fields in (
        fields_of(1, 0, 9, 9),
        fields_of(1, 0, 40, 3, tries_lost=1),
        {Field.INDEX: "1", Field.KIND: Kind.GROUP, Field.PAYLOAD: encode_group(other)},
        dead_fields(1, "deadline: not finished after 1 s"),
    ):
        redis_client.xadd(bench.keys.rollouts, fields)
    for _ in range(2):
        intake.reader.read_to_end(intake.lag_of)
        resume(bench, intake)
    found = intake.ledger.attrition
    assert intake.ledger.num_duplicates_dropped == 3
    assert totals(found) == {"duplicate": {"64": (2, 80), "4": (2, 6), UNKNOWN: (2, 0)}}
    assert "nobody's" not in found.rollouts
    assert found.window == [] and found.num_tries_lost == 0, "the group that came first stands for its index"


def test_groups_that_died_of_their_length_are_long_ones_that_were_lost(bench, redis_client):
    intake = bench.trainer().intake
    intake.reconcile()
    reasons = {
        1: "deadline: not finished after 1 s",
        2: "record: group 2: 5,402,112 bytes encoded, at most 4,194,304 fit one stream entry; lower group_size",
        3: "agents: no rollout of 2 finished: 2 not finished after 900 s (endpoint.group_deadline_s)",
        4: "attempts: handed out 8 times without a result",  # of which nothing is known
    }
    for index, reason in reasons.items():
        redis_client.xadd(bench.keys.rollouts, dead_fields(index, reason))
    known = {**dead_fields(5, reasons[4]), Field.PAYLOAD: encode_group(group_of_lengths(70, 90, index=5))}
    redis_client.xadd(bench.keys.rollouts, known)
    intake.reader.read_to_end(intake.lag_of)
    intake.batch(4)
    assert intake.ledger.attrition.window == [(BEYOND, True)] * 3 + [(90, True)]
    assert totals(intake.ledger.attrition) == {"dead": {UNKNOWN: (8, 0), "128": (2, 160)}}


@pytest.mark.parametrize("by_length", [True, False])
def test_long_rollouts_that_come_too_late_raise_the_alarm_and_losses_at_random_do_not(
    bench, redis_client, caplog, by_length
):
    bench.overrides = [f"num_updates={WINDOW // 4 + 12}", "checkpoint.every=1000", "evaluation.num_prompts=0"]
    stale_once: set[int] = set()

    def answer(index: int, version: int) -> dict:
        length = 40 if index % 4 == 0 else 3
        is_late = index % 8 == (0 if by_length else index // 8 % 8)  # one in eight, of long ones every other
        if is_late and version > 3 and index not in stale_once:
            stale_once.add(index)
            return fields_of(index, 0, length, 3)
        return fields_of(index, version, length, 3)

    bench.producer(answer)
    trainer = bench.trainer()
    with caplog.at_level(logging.WARNING):
        assert trainer.run()
    found = trainer.intake.ledger.attrition.last
    assert found is not None and found.is_alarm == by_length
    assert found.num_long_lost + found.num_other_lost > 20
    assert ("long rollouts are lost: " in caplog.text) == by_length
    value = bench.metrics.registry.get_sample_value
    assert value("penstock_long_rollouts_lost_alert") == by_length
    lost = value("penstock_lost_by_length_frac", {"length": "longest"})
    assert lost == found.num_long_lost / found.num_long
    stale = {"outcome": "stale"}
    assert value("penstock_rollout_tokens_count", stale) == 2 * trainer.intake.ledger.released_again["stale"]
    assert_settled_once(bench, redis_client)
