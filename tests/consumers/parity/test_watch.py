"""The watch over each producer: who is found, after how many groups, and who never is."""

import random

import numpy as np
import pytest
import torch

from padded_batches import mismatch_sums
from penstock.consumers.learning.learner.fresh_rows import RowGap, fresh_sums, gaps_of
from penstock.consumers.learning.loss.diagnostics import K3_BOUND
from penstock.consumers.parity.report import TOLERANCES
from penstock.consumers.parity.watch import LIMIT, OUT, WITHIN, ProducerWatch, is_within
from penstock.schemas.config import ModelConfig, ParityConfig
from training_groups import configuration

GROUP = 256  # tokens


def watch(tmp_path, dtype="float32", gate="refuse") -> ProducerWatch:
    return ProducerWatch(
        configuration(tmp_path, model=ModelConfig(path=".", dtype=dtype), parity=ParityConfig(gate=gate))
    )


def gap(mean: float, num_tokens: int = GROUP, k3: float = 0.0) -> RowGap:
    return RowGap(4, num_tokens, mean * num_tokens, k3 * num_tokens)


def found_after(own: ProducerWatch, *gaps: RowGap) -> int | None:
    """By which of the groups the instance is found."""
    return next((n for n, each in enumerate(gaps, 1) if own.observe("i1", "p1", each)), None)


BEYOND = {"float32": 3e-5, "bfloat16": 0.1}
SOUND = {"float32": 3e-7, "bfloat16": 8e-3}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_producer_whose_rows_leave_the_band_is_found_by_the_fourth_group_and_once(tmp_path, dtype):
    own = watch(tmp_path, dtype)
    assert found_after(own, *[gap(SOUND[dtype])] * 50, *[gap(BEYOND[dtype])] * 4) == 54
    assert found_after(own, *[gap(BEYOND[dtype])] * 9) is None
    found = own.found("i1")
    assert (found.producer_id, found.cause, found.num_rows) == ("p1", "unexplained", 63 * 4)
    assert found.quarantined_s and f"{TOLERANCES[dtype].mean:.0e} is allowed" in found.says


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bad_row_or_a_bad_group_now_and_then_finds_nobody(tmp_path, dtype):
    """Ten nats in every twentieth group."""
    bad, good = gap(10.0), gap(SOUND[dtype])
    assert found_after(watch(tmp_path, dtype), *([bad] + [good] * 19) * 50) is None
    assert found_after(watch(tmp_path, dtype), *([bad] * 3 + [good] * 19) * 50) is None


def test_a_few_tokens_that_are_far_off_count_in_bfloat16_where_the_mean_hides_them(tmp_path):
    """One token in a hundred from another text: 5 nats each."""
    assert found_after(watch(tmp_path, "bfloat16"), *[gap(0.049, 300, k3=4 / 100)] * 4) == 4


def test_the_bound_on_k3_is_that_of_chi_square_for_small_ratios():
    rng = torch.Generator().manual_seed(0)
    ratios = 0.1 * torch.randn(100_000, generator=rng, dtype=torch.float64)
    ratios -= (ratios.exp().mean()).log()  # ratios of distributions have mean 1
    both = mismatch_sums(ratios, torch.zeros_like(ratios), torch.ones(100_000).bool(), torch.arange(100_000))
    of = RowGap.of(ratios, torch.zeros_like(ratios), 1)
    assert 2 * of.k3 == pytest.approx(both.metrics()["chi2"], rel=0.05)
    assert not is_within(of, TOLERANCES["bfloat16"])


def test_groups_of_a_few_tokens_are_taken_together(tmp_path):
    assert found_after(watch(tmp_path), *[gap(1e-3, 5)] * 20) == 16
    assert found_after(watch(tmp_path, "bfloat16"), *[gap(1.0, 100)] * 20) == 12


def test_one_token_that_is_far_off_is_no_evidence_in_bfloat16(tmp_path):
    """Half a nat in one token of every fourth group of 40, the others at the noise of a body."""
    quiet, loud = gap(1e-2, 40, k3=1e-4), gap(2e-2, 40, k3=0.15 / 40)
    assert not is_within(loud, TOLERANCES["bfloat16"])
    assert found_after(watch(tmp_path, "bfloat16"), *[loud, quiet, quiet, quiet] * 200) is None


def test_every_instance_is_judged_by_its_own_rows(tmp_path):
    own = watch(tmp_path)
    for _ in range(3):
        assert not own.observe("i1", "p1", gap(1.0))
    assert not own.observe("i2", "p1", gap(1.0)), "the producer started again is another instance"
    assert own.observe("i1", "p1", gap(1.0))
    assert {name: each.num_rows for name, each in own.table().items()} == {"i1": 16, "i2": 4}


def test_logprobs_of_the_trainer_that_are_no_numbers_are_no_evidence(tmp_path):
    assert found_after(watch(tmp_path), *[gap(float("nan"))] * 9) is None


def test_a_gate_that_is_off_finds_nobody_and_shows_gaps_all_the_same(tmp_path):
    own = watch(tmp_path, gate="off")
    assert found_after(own, *[gap(1.0)] * 9) is None
    assert own.table()["i1"].gap == pytest.approx(1.0)


NOT_FINITE = "poison: group 7: behavior_logprobs holds a value that is not finite"


def test_a_producer_whose_groups_are_refused_is_found_by_the_fourth_and_once(tmp_path):
    own = watch(tmp_path)
    reasons = [NOT_FINITE, "poison: another", "poison: a third", "poison: a fourth", "poison: a fifth"]
    found = [own.observe_refused("i1", "p1", 0, reason) for reason in reasons]
    assert [each is not None for each in found] == [False, False, False, True, False]
    assert (found[3].producer_id, found[3].cause, found[3].num_rows) == ("p1", "refused", 0) and found[3].quarantined_s
    assert found[3].says == f"the trainer refuses its groups, the first one as {NOT_FINITE}"
    assert own.table()["i1"].gap is None
    assert found_after(own, *[gap(1.0)] * 9) is None, "it is quarantined already"


def test_a_refused_group_now_and_then_finds_nobody_though_no_row_has_lag_0(tmp_path):
    own = watch(tmp_path)
    assert not any(own.observe_refused("i1", "p1", 19 * n, NOT_FINITE) for n in range(1000))
    assert not any(own.observe_refused("i2", "p2", 19 * (n // 3), NOT_FINITE) for n in range(1000))


def test_a_producer_half_of_whose_groups_are_refused_is_found_as_one_half_of_whose_groups_are_out(tmp_path):
    refused, out = watch(tmp_path), watch(tmp_path)
    found = [refused.observe_refused("i1", "p1", n, NOT_FINITE) is not None for n in range(5)]
    assert 2 * (found.index(True) + 1) - 1 == found_after(out, *[gap(1.0), gap(1e-7)] * 5)


def test_gates_that_warn_or_are_off_quarantine_nobody_for_what_is_refused(tmp_path, caplog):
    for gate in ("warn", "off"):
        own = watch(tmp_path, gate=gate)
        assert not any(own.observe_refused("i1", "p1", 0, NOT_FINITE) for _ in range(9))
    assert caplog.text.count("p1 is trained all the same") == 1 and NOT_FINITE in caplog.text


def mean_groups(share: float) -> float:
    """The mean number of groups until an instance is found whose groups are out with this probability: the absorption
    time of the score's Markov chain."""
    chain = np.eye(LIMIT)
    for score in range(LIMIT):
        if score + OUT < LIMIT:
            chain[score, score + OUT] -= share
        chain[score, max(0, score - WITHIN)] -= 1 - share
    return float(np.linalg.solve(chain, np.ones(LIMIT))[0])


def test_the_false_alarm_rate_and_the_power_are_those_that_the_page_states():
    stated = {0.001: 2.8e10, 0.01: 2.6e6, 0.05: 3500, 0.2: 37, 0.5: 8.5, 1.0: 4.0}
    assert {share: mean_groups(share) for share in stated} == pytest.approx(stated, rel=0.02)


@pytest.mark.parametrize(("share", "num_trials"), [(0.1, 300), (0.5, 1000)])
def test_simulated_producers_are_found_after_as_many_groups_as_computed(tmp_path, share, num_trials):
    source, lengths = random.Random(share), []
    for _ in range(num_trials):
        own, num = watch(tmp_path), 1
        while not own.observe("i1", "p1", gap(1e-3 if source.random() < share else 1e-7)):
            num += 1
        lengths.append(num)
    error = np.std(lengths) / num_trials**0.5
    assert np.mean(lengths) == pytest.approx(mean_groups(share), abs=4 * error)


def test_only_rows_of_lag_0_throughout_that_are_trained_on_count_for_their_group():
    engine = torch.zeros(8)
    trainer = torch.tensor([0.5, -0.5, 9.0, 9.0, 9.0, 20.0, 0.25, 9.0])
    rows = torch.tensor([0, 0, 1, 1, 2, 3, 4, 5])
    lag = torch.tensor([0, 0, 0, 1, 2, 0, 0, 0])
    mask = torch.tensor([True] * 7 + [False])
    group = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    one, two, three, none = gaps_of(fresh_sums(trainer, engine, mask, rows, lag, group, 4))
    assert one == pytest.approx(RowGap(1, 2, 1.0, float(torch.tensor([0.5, -0.5]).exp().sum()) - 2))
    assert two == pytest.approx(RowGap(1, 1, 20.0, K3_BOUND))
    assert (three.num_rows, three.num_tokens, three.abs_sum) == (1, 1, 0.25)
    assert none == RowGap()
