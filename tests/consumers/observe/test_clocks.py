"""Hosts whose clocks differ by minutes: what the trainer measures of its producers stays right."""

import re
import time

import msgspec
import pytest

from mini_producer import group_fields
from penstock.deploy.report.summary import summarize
from penstock.deploy.report.telemetry import read_telemetry
from penstock.schemas.keys import Field
from penstock.schemas.rollout import Timings, decode_group, encode_group
from trainer_bench import assert_settled_once

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("ahead_s", [600.0, -600.0])
def test_waits_and_the_start_of_a_run_do_not_depend_on_the_producers_clock(bench, redis_client, ahead_s):
    def answer(index: int, version: int) -> dict:
        fields = group_fields(index, version)
        now = time.time() + ahead_s
        timings = Timings(claimed_s=now - 2.0, generated_s=now, appended_s=now)
        group = msgspec.structs.replace(decode_group(fields[Field.PAYLOAD]), timings=timings)
        return fields | {Field.PAYLOAD: encode_group(group)}

    bench.producer(answer)
    began_s = time.time()
    assert bench.trainer().run()
    assert_settled_once(bench, redis_client)
    ledger = bench.ledger()
    assert 0.0 < ledger["last_update_s"] - ledger["first_prompt_s"] - 2.0 < time.time() - began_s
    updates = bench.lines("updates.jsonl")
    assert all(line["wait_s"] > 0.0 for line in updates)
    assert all(abs(line["clock_ahead_s"]) < 3.0 for line in updates)  # Redis is on this host


def test_a_trainer_whose_clock_is_wrong_says_so(bench, monkeypatch, caplog):
    true_time = time.time
    bench.producer()
    monkeypatch.setattr(time, "time", lambda: true_time() - 420.0)
    assert bench.trainer().run()
    assert all(line["clock_ahead_s"] == pytest.approx(-420.0, abs=3.0) for line in bench.lines("updates.jsonl"))
    assert re.search(r"this host's clock is 4[12]\d s behind", caplog.text)


def test_a_clock_that_is_set_back_while_it_trains_makes_no_time_below_zero(bench, monkeypatch):
    true_time, updates = time.time, bench.folder / "updates.jsonl"

    def set_back() -> float:
        is_later = updates.is_file() and len(updates.read_bytes().splitlines()) > 3
        return true_time() - 172_784.0 * is_later

    bench.producer()
    began = time.monotonic()
    monkeypatch.setattr(time, "time", set_back)
    assert bench.trainer().run()
    monkeypatch.undo()
    lines = bench.lines("updates.jsonl")
    assert lines[0]["time_s"] - lines[-1]["time_s"] > 172_000 and len({line["started_s"] for line in lines}) == 1
    summary = summarize(read_telemetry(bench.folder))
    assert summary["num_updates"] == len(lines) and 0.0 < summary["wall_s"] < time.monotonic() - began + 10.0
