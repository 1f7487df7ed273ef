"""Dead groups end a run only if they come in a row, with no good one in between."""

import logging
import re

import pytest

import penstock.consumers.trainer
from mini_producer import dead_fields, group_fields
from penstock.consumers.stream.ledger import Ledger, RunFailedError
from penstock.consumers.stream.reader import Refused
from penstock.consumers.stream.settlement import Settlement

pytestmark = pytest.mark.redis


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
