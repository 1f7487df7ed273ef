"""The reader bounds the reasons, indexes and sizes that a hostile or broken producer writes beside the record."""

import logging

import pytest

from mini_producer import dead_fields, group_fields
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.evaluation import Evaluator
from penstock.consumers.stream.ledger import MAX_KIND_CHARACTERS, MAX_KINDS, OTHER_KIND, Ledger
from penstock.consumers.stream.reader import Reader
from penstock.consumers.stream.scripts import Scripts
from penstock.schemas.config import HeldOut
from penstock.schemas.keys import Field, Keys, Kind
from penstock.schemas.rollout import MAX_ENTRY_BYTES, MAX_REASON_CHARACTERS
from trainer_bench import assert_settled_once

pytestmark = pytest.mark.redis

KEYS = Keys("test")
HUGE = "reward: line\n\x1b[31mred\u2028" * 100_000


@pytest.fixture
def connection(redis_url):
    connection = TrainerConnection(redis_url, outage_s=20)
    yield connection
    connection.close()


@pytest.fixture
def reader(connection) -> Reader:
    ledger = Ledger()
    ledger.num_released = 12
    return Reader(connection, KEYS, ledger, group_size=2)


def lag_of(version: int) -> int:
    return 0


def read(reader: Reader) -> list:
    reader.read_to_end(lag_of)
    return reader.take_refused()


def test_a_reason_is_one_short_line_whatever_the_entry_holds(reader, redis_client):
    entries = (
        dead_fields(1, HUGE),
        {**dead_fields(2, ""), Field.REASON: b"\xff\n" * 1_000_000},
        {**group_fields(3, 0), Field.INDEX: b"x\n" * 1_000_000},
        {**group_fields(4, 0), Field.INDEX: b"9" * 4000},
        {**group_fields(5, 0), Field.INDEX: b"9" * 1_000_000},
    )
    for n, fields in enumerate(entries):
        redis_client.xadd(KEYS.rollouts, fields)
        (record,) = read(reader)
        assert record.reason.isprintable() and 20 < len(record.reason) <= MAX_REASON_CHARACTERS, n


def test_a_run_among_hostile_dead_entries_finishes_and_its_letters_and_lines_are_short(bench, redis_client, caplog):
    dead = {3, 9}

    def answer(index: int, version: int) -> dict:
        if index in dead:
            return {**dead_fields(index, HUGE), Field.PAYLOAD: b"x" * (MAX_ENTRY_BYTES + 1)}
        return group_fields(index, version)

    bench.producer(answer)
    assert bench.trainer().run()
    assert_settled_once(bench, redis_client, dead=dead)
    letters = [fields for _, fields in redis_client.xrange(bench.keys.dead)]
    assert {int(fields[Field.INDEX]) for fields in letters} == dead
    assert all(len(fields[Field.REASON]) <= MAX_REASON_CHARACTERS for fields in letters)
    assert all(len(fields[Field.PAYLOAD]) == MAX_ENTRY_BYTES for fields in letters)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 2 and all(line.isprintable() and len(line) < 2 * MAX_REASON_CHARACTERS for line in lines)
    assert bench.ledger()["dead_reasons"] == {"reward": 2}


def test_kinds_of_death_are_bounded_in_number_and_length_and_no_index_is_lost_by_it():
    ledger = Ledger()
    for index in range(1, 1001):
        ledger.settle(index, "dead", f"{index}-{'x' * 400}: boom")
    ledger.settle(1001, "dead", f"1-{'x' * 400}: again")
    reasons = ledger.dead_reasons
    assert len(reasons) == MAX_KINDS
    assert max(map(len, reasons)) <= MAX_KIND_CHARACTERS
    assert reasons[OTHER_KIND] == 1000 - (MAX_KINDS - 1)
    assert sum(reasons.values()) == 1001 == ledger.count("dead")
    assert next(iter(reasons.values())) == 2, "a known kind stays known"
    again = Ledger.from_state(ledger.to_state())
    again.settle(1002, "dead", "new: boom")
    assert again.dead_reasons == {**reasons, OTHER_KIND: reasons[OTHER_KIND] + 1}


def no_index(n: int) -> dict:
    return {Field.INDEX: f"nobody-{n}", Field.KIND: Kind.GROUP, Field.PAYLOAD: b"x"}


def trim(reader: Reader, redis_client) -> None:
    first = reader.first_unsettled()
    redis_client.xtrim(KEYS.rollouts, minid=first)
    reader.forget_trimmed(first)


def test_what_names_no_index_leaves_one_letter_and_is_remembered_only_while_it_is_on_the_stream(reader, redis_client):
    for n in range(200):
        redis_client.xadd(KEYS.rollouts, no_index(n))
        if n % 10 == 9:
            assert len(read(reader)) == 10
            trim(reader, redis_client)
    assert redis_client.xlen(KEYS.rollouts) == len(reader._refused_entries) == 0
    redis_client.xadd(KEYS.rollouts, group_fields(1, 0))  # ready: nothing after it may be trimmed
    for n in range(5):
        redis_client.xadd(KEYS.rollouts, no_index(n))
    assert len(read(reader)) == 5
    for _ in range(3):
        trim(reader, redis_client)
        reader.rewind()
        assert read(reader) == []


def test_a_server_that_was_emptied_and_whose_clock_is_behind_has_its_refused_entries_told(reader, redis_client):
    for n in range(5):
        redis_client.xadd(KEYS.rollouts, no_index(n), id=f"2000000-{n}")
    assert len(read(reader)) == 5
    redis_client.delete(KEYS.rollouts)
    for n in range(3):
        redis_client.xadd(KEYS.rollouts, no_index(n), id=f"1000000-{n}")
    reader.rewind()
    assert len(read(reader)) == 3
    trim(reader, redis_client)
    assert len(reader._refused_entries) == 0, "those of before the loss are forgotten too"


def test_a_result_of_no_evaluation_prompt_is_passed_over(connection, redis_client):
    scripts = Scripts(connection, KEYS)
    scripts.open_epoch(0)
    evaluator = Evaluator(scripts, {"main": HeldOut(num_prompts=3, num_samples=1)})
    evaluator.request(5, update=5)
    failed = {Field.KIND: Kind.DEAD, Field.REASON: "reward: boom"}
    names = ["5-" + "9" * 5000, "9" * 5000 + "-1", "5-0", "5-4", "5", "5-1-1", "x-y", "", "5--1"]
    for answered in (*names, "5-1", "5-2"):
        redis_client.xadd(KEYS.evaluation_results, {Field.EVALUATION: answered, **failed})
    assert evaluator.collect() == []
    redis_client.xadd(KEYS.evaluation_results, {Field.EVALUATION: "5-3", **failed})
    assert [(result.policy_version, result.num_prompts) for result in evaluator.collect()] == [(5, 3)]
