"""The rule against a bad producer: who is quarantined, after how many groups, and who never is."""

import random

import msgspec
import numpy as np
import pytest
import torch

from mini_producer import make_group
from penstock.consumers.learning.learner.batch_tally import gap_sums
from penstock.consumers.learning.learner.step_report import RowGap
from penstock.consumers.parity.producers import NUM_JUDGED, WARNED_AT, ProducerGaps
from penstock.schemas.config import ModelConfig, ParityConfig
from penstock.schemas.rollout import RolloutGroup
from training_groups import configuration

NUM_TOKENS = 256
SOUND, BEYOND = {"float32": 3e-7, "bfloat16": 8e-3}, {"float32": 3e-5, "bfloat16": 0.1}


def gaps_by(tmp_path, dtype="float32", gate="refuse") -> ProducerGaps:
    model = ModelConfig(path=".", dtype=dtype)
    return ProducerGaps(configuration(tmp_path, model=model, parity=ParityConfig(gate=gate)))


def group_of(index: int, *samplers: str) -> RolloutGroup:
    return msgspec.structs.replace(make_group(index, 0), producer_id="p1", sampled_by=samplers)


def quarantined_after(own: ProducerGaps, *means: float, num_tokens: int = NUM_TOKENS) -> int | None:
    """Returns by which of the groups of these mean gaps the instance is quarantined."""
    for n, mean in enumerate(means, 1):
        if own.observe([group_of(n, "i1")], {n: RowGap(num_tokens, mean * num_tokens)}):
            return n
    return None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_producer_is_quarantined_once_when_its_last_groups_all_lie_outside_the_band_and_else_never(tmp_path, dtype):
    """Not with a sound group now and then, nor if a group in ten is off by ten nats, drawn at random."""
    own = gaps_by(tmp_path, dtype)
    assert quarantined_after(own, *[SOUND[dtype]] * 20, *[BEYOND[dtype]] * (NUM_JUDGED + 5)) == 20 + NUM_JUDGED
    assert quarantined_after(own, *[BEYOND[dtype]] * 20) is None
    assert own.table()["i1"].gap == pytest.approx(BEYOND[dtype])
    rows = [BEYOND[dtype]] * (NUM_JUDGED - 1) + [SOUND[dtype]]
    drawn = random.Random(0).choices([10.0, SOUND[dtype]], weights=[1, 9], k=5000)
    for means in (rows * 20, drawn):
        assert quarantined_after(gaps_by(tmp_path, dtype), *means) is None


def test_the_reason_names_the_figure_and_the_bound(tmp_path):
    own = gaps_by(tmp_path)
    groups = [group_of(n, "i1") for n in range(NUM_JUDGED)]
    (finding,) = own.observe(groups, {n: RowGap(100, 0.31 * 100) for n in range(NUM_JUDGED)}).values()
    assert finding.producer_id == "p1" and finding.quarantined_s > 0
    assert finding.reason == (
        f"mean |engine - trainer| of each of its last {NUM_JUDGED} groups is above 1.0e-05 nats, the most that is "
        "allowed: 3.1e-01 over all of them; ask `penstock parity`"
    )


def test_groups_of_few_tokens_are_judged_together(tmp_path):
    own = gaps_by(tmp_path, "bfloat16")
    assert quarantined_after(own, *[1.0] * 200, num_tokens=32) == 2 * NUM_JUDGED, "64 tokens make a judgement"


def test_no_evidence_is_no_quarantine(tmp_path):
    """Groups of two instances, without rows of lag 0, or recomputed as no number."""
    own = gaps_by(tmp_path)
    two = [group_of(n, "i1", "i2") for n in range(50)]
    assert own.observe(two, {n: RowGap(100, 1e3) for n in range(50)}) == {}
    one = [group_of(n, "i1") for n in range(50)]
    assert own.observe(one, {}) == own.observe(one, {n: RowGap(100, float("nan")) for n in range(50)}) == {}


@pytest.mark.parametrize(("gate", "number"), [("refuse", 1), ("warn", 1), ("off", 0)])
def test_without_a_gate_gaps_are_measured_and_nobody_is_judged(tmp_path, gate, number):
    own = gaps_by(tmp_path, gate=gate)
    groups = [group_of(n, "i1") for n in range(NUM_JUDGED)]
    assert len(own.observe(groups, {n: RowGap(100, 100.0) for n in range(NUM_JUDGED)})) == number
    assert own.table()["i1"].gap == pytest.approx(1.0)


def test_a_group_s_gap_is_that_of_its_rows_of_lag_0_alone():
    rng = np.random.default_rng(0)
    num_rows, width, num_groups = 12, 9, 3
    trainer, engine = (torch.from_numpy(rng.normal(-2, 1, (num_rows, width))).float() for _ in range(2))
    mask = torch.from_numpy(rng.random((num_rows, width)) < 0.8)
    lag = torch.from_numpy(rng.choice([0, 1], (num_rows, width), p=[0.95, 0.05]))
    group = torch.from_numpy(np.arange(num_rows) % num_groups)
    row_ids = torch.arange(num_rows).repeat_interleave(width)
    flat = [each.flatten() for each in (trainer, engine, mask)]
    sums = gap_sums(*flat, row_ids, lag.flatten(), group.repeat_interleave(width), num_groups)
    fresh = (lag == 0).all(1)
    for n in range(num_groups):
        rows = [row for row in range(num_rows) if row % num_groups == n and fresh[row]]
        difference = torch.cat([(trainer[row].double() - engine[row].double())[mask[row]].abs() for row in rows])
        assert sums[n].tolist() == pytest.approx([len(difference), float(difference.sum())])


def test_a_run_in_which_nobody_can_be_judged_says_so_once(tmp_path, caplog):
    own = gaps_by(tmp_path)
    own.observe([group_of(n, "i1") for n in range(3 * WARNED_AT)], {})
    assert caplog.text.count("no producer is judged by its logprobs") == 1
    caplog.clear()
    own = gaps_by(tmp_path)
    own.observe([group_of(n, "i1") for n in range(3 * WARNED_AT)], {WARNED_AT - 1: RowGap(1, 0.0)})
    assert not caplog.text
