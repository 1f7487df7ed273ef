"""Other conventions, units and places of the numbers: each is named, with the residual as processed and under it."""

import math
import re

import pytest
from torch import Tensor

from parity_bench import COLD, ParityBench, groups_of, prompts, with_logprobs, with_sampling
from penstock.consumers.parity.report import EXIT_STATUS, ParityReport
from penstock.schemas.rollout import RolloutGroup, SamplingSettings


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return ParityBench.make(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def groups(bench: ParityBench) -> list[RolloutGroup]:
    engine = bench.engine()
    answers = engine.generate(prompts(12, 6), 4, 16, sampling=COLD)
    return groups_of(answers + engine.generate(prompts(6, 4, 1), 4, 16, version=1, updates={5: 2}, sampling=COLD))


def residuals(report: ParityReport) -> list[float]:
    return [float(number) for number in re.findall(r"\d\.\de[+-]\d\d", report.verdict.sentence)]


def assert_named(report: ParityReport, cause: str, setting: str) -> None:
    assert report.verdict.cause == cause, [report.verdict, *report.hypotheses]
    assert report.verdict.status == "mismatch"
    assert setting in report.verdict.advice
    before, after = residuals(report)[:2]
    assert before > 1e-3
    assert after < 1e-5


def test_with_nothing_wrong_it_is_parity(bench, groups) -> None:
    report = bench.check(groups)
    assert report.verdict.status == "parity", report.verdict
    assert report.hypotheses[0].gap.mean < 2e-6
    assert EXIT_STATUS[report.verdict.status] == 0
    assert report.versions == (0, 1, 2)
    assert report.num_tokens == 18 * 4 * 16


def raw(logits: Tensor, sampling: SamplingSettings, drawn: Tensor) -> Tensor:
    return logits.log_softmax(-1)


def test_raw_logprobs_are_named(bench) -> None:
    engine = bench.engine()
    engine.convention = raw
    groups = groups_of(engine.generate(prompts(40, 6), 8, 16, sampling=COLD))
    assert_named(bench.check(groups), "raw", 'engine.logprobs_mode = "processed_logprobs"')


def test_a_temperature_recorded_wrong_is_told_from_raw_logprobs_by_what_was_sampled(bench) -> None:
    hot = SamplingSettings(temperature=1.0, max_tokens=16)
    groups = groups_of(bench.engine().generate(prompts(40, 6), 8, 16, sampling=hot), hot)
    report = bench.check(with_sampling(groups, temperature=0.7))
    assert_named(report, "temperature", "sampling.temperature")
    assert "1 where 0.7 is recorded, and the tokens were drawn there" in report.verdict.sentence


def test_another_temperature_is_fitted(bench) -> None:
    cool = SamplingSettings(temperature=0.85, max_tokens=16)
    groups = groups_of(bench.engine().generate(prompts(40, 6), 8, 16, sampling=cool), cool)
    report = bench.check(with_sampling(groups, temperature=1.2))
    assert_named(report, "temperature", "sampling.temperature")
    assert "0.85 where 1.2 is recorded" in report.verdict.sentence


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("log2", lambda b: b / math.log(2)),
        ("log10", lambda b: b / math.log(10)),
        ("probability", math.exp),
    ],
)
def test_another_unit_is_named(bench, groups, cause, change) -> None:
    changed = with_logprobs(groups, lambda siblings: [[change(b) for b in own] for own in siblings])
    assert_named(bench.check(changed), cause, "natural logarithms")


@pytest.mark.parametrize(
    ("cause", "change"),
    [("shifted+1", lambda own: [-1.0, *own[:-1]]), ("shifted-1", lambda own: [*own[1:], -1.0])],
)
def test_entries_that_stand_one_token_off_are_named(bench, groups, cause, change) -> None:
    changed = with_logprobs(groups, lambda siblings: [change(own) for own in siblings])
    assert_named(bench.check(changed), cause, "align behavior_logprobs")


@pytest.mark.parametrize("every", [1, 18])
def test_swapped_siblings_are_named_be_it_in_one_group(bench, groups, every) -> None:
    changed = with_logprobs(groups[::every], lambda own: [own[1], own[0], *own[2:]]) + groups
    assert_named(bench.check(changed), "siblings", "by its index")


TRUNCATED = SamplingSettings(temperature=0.9, top_p=0.8, top_k=20, max_tokens=16)


def test_logprobs_over_what_top_p_kept_need_the_mask(bench) -> None:
    groups = groups_of(bench.engine().generate(prompts(12, 6), 4, 16, sampling=TRUNCATED), TRUNCATED)
    assert_named(bench.check(groups), "kept-support", "sampling_mask")


def test_with_the_mask_they_are_at_parity(bench) -> None:
    answers = bench.engine().generate(prompts(12, 6), 4, 16, updates={7: 1}, sampling=TRUNCATED)
    report = bench.check(groups_of(answers, TRUNCATED, with_masks=True))
    assert report.verdict.status == "parity", report.verdict


def whole_vocabulary(logits: Tensor, sampling: SamplingSettings, drawn: Tensor) -> Tensor:
    return (logits / sampling.temperature).log_softmax(-1)


@pytest.mark.parametrize("with_masks", [True, False])
def test_logprobs_over_the_whole_vocabulary_are_not_those_of_top_p(bench, with_masks) -> None:
    engine = bench.engine()
    engine.convention = whole_vocabulary
    answers = engine.generate(prompts(12, 6), 4, 16, sampling=TRUNCATED)
    report = bench.check(groups_of(answers, TRUNCATED, with_masks=with_masks))
    assert (report.verdict.status, report.verdict.cause) == ("mismatch", "whole-vocabulary")


PENALISED = SamplingSettings(
    temperature=0.9, max_tokens=16, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3
)


def test_penalties_are_named(bench) -> None:
    groups = groups_of(bench.engine().generate(prompts(12, 6), 4, 16, sampling=PENALISED), PENALISED)
    assert_named(bench.check(groups), "penalties", "repetition_penalty = 1")


def test_logprobs_without_the_penalties_that_were_sampled_with_are_named(bench) -> None:
    engine = bench.engine()
    engine.convention = whole_vocabulary
    groups = groups_of(engine.generate(prompts(12, 6), 4, 16, sampling=PENALISED), PENALISED)
    report = bench.check(groups)
    assert (report.verdict.status, report.verdict.cause) == ("mismatch", "without-penalties")


def test_rounded_logprobs_are_named(bench, groups) -> None:
    import torch

    changed = with_logprobs(
        groups, lambda siblings: [torch.tensor(own).bfloat16().float().tolist() for own in siblings]
    )
    report = bench.check(changed)
    assert report.verdict.cause == "rounded", report.verdict


def test_tokens_drawn_from_another_distribution_than_their_logprobs_are_named(bench) -> None:
    engine = bench.engine()
    engine.convention = raw
    sharp = SamplingSettings(temperature=1.0, top_p=0.6, max_tokens=16)
    groups = groups_of(engine.generate(prompts(40, 6), 8, 16, sampling=sharp), sharp)
    report = bench.check(with_sampling(groups, top_p=1.0))
    assert (report.verdict.status, report.verdict.cause) == ("mismatch", "sampling"), report.verdict
