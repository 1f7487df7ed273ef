"""Dead groups end a run only if they come in a row, with no good one in between."""

import logging
import re

import pytest

import penstock.consumers.trainer
from mini_producer import dead_fields, group_fields
from penstock.consumers.stream.ledger import Ledger, RunFailedError
from penstock.consumers.stream.reader import Refused
from penstock.consumers.stream.settlement import Settlement
from scripted_learner import KilledError
from trainer_bench import TrainerBench, assert_settled_once
from waiting import wait_for

pytestmark = pytest.mark.redis


def leave_a_full_stream(bench: TrainerBench, redis_client, is_dead) -> None:
    """A trainer that is killed before its first update, and a stream that holds all it had released."""
    bench.overrides = ["max_lag=20", "trainer.max_dead_in_a_row=10"]
    bench.producer(
        lambda index, version: dead_fields(index, "prompt: bad") if is_dead(index) else group_fields(index, version)
    )
    first = bench.trainer()
    first.learner.fail_at[0] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    wait_for(lambda: redis_client.xlen(bench.keys.rollouts), lambda num_answered: num_answered >= 48)


def test_dead_groups_among_good_ones_do_not_end_a_run_that_reads_them_all_at_once(bench, redis_client):
    leave_a_full_stream(bench, redis_client, lambda index: index % 3 == 0)
    second = bench.trainer(resume=True)
    assert second.run()
    ledger = bench.ledger()
    assert ledger["num_groups_dead"] > 10
    dead = {index for index in range(1, ledger["num_groups_released"] + 1) if index % 3 == 0}
    assert_settled_once(bench, redis_client, dead=dead)


def test_groups_that_agents_abandoned_neither_count_as_dead_in_a_row_nor_end_such_a_row():
    settlement = Settlement(ledger := Ledger(), 3, lambda refused: None)
    reasons = ["reward: boom", *["abandoned: nothing was heard"] * 9, "reward: boom", "abandoned: nothing was heard"]
    settlement.settle_refused([Refused(n, reason, b"") for n, reason in enumerate(reasons, start=1)])
    assert settlement.num_abandoned == 10 and ledger.dead_reasons == {"reward": 2, "abandoned": 10}
    with pytest.raises(RunFailedError, match="max_dead_in_a_row = 3 groups have died in a row"):
        settlement.settle_refused([Refused(13, "abandonedly: boom", b"")])
    settlement.settle_refused([Refused(14, "reward: boom", b"", num_received=1)])
    assert settlement.num_abandoned == 0


def test_an_outage_of_agents_is_waited_for_and_told(bench, caplog, monkeypatch):
    monkeypatch.setattr(penstock.consumers.trainer, "WAITING_LOG_S", 0.0)
    bench.overrides = ["trainer.max_dead_in_a_row=10"]
    bench.producer(
        lambda index, version: (
            dead_fields(index, "abandoned: nothing was heard of the agents: 4 idle")
            if index <= 40
            else group_fields(index, version)
        )
    )
    with caplog.at_level(logging.INFO):
        assert bench.trainer().run()
    assert bench.ledger()["dead_reasons"] == {"abandoned": 40}
    told = re.findall(r"waiting for agents: they abandoned the last (\d+) groups", caplog.text)
    assert told and max(map(int, told)) > 10


def test_a_row_of_dead_groups_ends_a_run_that_reads_them_all_at_once(bench, redis_client):
    leave_a_full_stream(bench, redis_client, lambda index: index > 20)
    with pytest.raises(RunFailedError, match="max_dead_in_a_row = 10 groups have died in a row"):
        bench.trainer(resume=True).run()
