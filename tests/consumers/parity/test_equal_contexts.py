"""Signs of a bfloat16 head that need no gap, and the engine held against itself."""

import pytest
import torch

from parity_bench import COLD, ParityBench, groups_of, prompts, with_logprobs
from penstock.consumers.parity.inference import EqualContexts, engine_head_sign, equal_contexts, rounding_slope
from penstock.consumers.parity.report import Gap
from penstock.consumers.parity.sample import Sample, read_sample
from penstock.schemas.rollout import SamplingSettings
from transformers_engine import TransformersEngine


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return ParityBench.make(tmp_path_factory.mktemp("bench"), dtype="bfloat16")


def sample_of(engine: TransformersEngine, sampling: SamplingSettings = COLD, count: int = 24) -> Sample:
    return read_sample(
        groups_of(engine.generate(prompts(count, 6), 8, 8, sampling=sampling), sampling), 48, lambda v: True
    )


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.7])
def test_first_logprobs_of_siblings_lie_on_the_grid_of_bfloat16_logits(bench, temperature) -> None:
    sampling = SamplingSettings(temperature=temperature, max_tokens=8)
    found = equal_contexts(sample_of(bench.engine(head="bfloat16"), sampling))
    assert found.num_pairs > 20
    assert found.num_on_grid > 0.8 * found.num_pairs
    assert found.has_bfloat16_logits


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.7])
def test_those_of_a_float32_head_do_not(bench, temperature) -> None:
    sampling = SamplingSettings(temperature=temperature, max_tokens=8)
    found = equal_contexts(sample_of(bench.engine(), sampling, count=96))
    assert found.num_pairs > 100
    assert found.num_on_grid <= max(5, 4 * found.expected)
    assert not found.has_bfloat16_logits


def test_contexts_are_equal_token_by_token_until_siblings_part() -> None:
    from training_groups import group_of, segment

    ids = ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9, 4])
    logprobs = ([-1.0, -2.0], [-1.5, -3.0], [-4.0, -5.0])
    segments = [[segment(list(i), [(2, 4)], [7, 7], list(b))] for i, b in zip(ids, logprobs, strict=True)]
    found = equal_contexts(read_sample([group_of(1, segments, [0.0] * 3)], 23, lambda v: True))
    # After (1, 2): 3 and 9 differ, 3 was sampled twice. After (1, 2, 3): 4 and 5 differ. After (1, 2, 9): one only.
    assert (found.num_pairs, found.spread.num_tokens, found.spread.mean) == (2, 1, 0.5)
    # Every one of these logprobs is a multiple of 2^-10, and two pairs prove nothing.
    assert (found.num_on_grid, found.has_bfloat16_logits) == (2, False)


def test_chance_hits_are_no_sign() -> None:
    assert not EqualContexts(num_pairs=1000, num_on_grid=14, expected=10.0).has_bfloat16_logits
    assert not EqualContexts(num_pairs=6, num_on_grid=4, expected=0.06).has_bfloat16_logits
    assert EqualContexts(num_pairs=6, num_on_grid=6, expected=0.06).has_bfloat16_logits


def test_the_slope_tells_rounding_from_noise() -> None:
    random = torch.Generator().manual_seed(0)
    processed = -3 * torch.rand(4000, generator=random, dtype=torch.float64)
    rounded = processed + 1e-2 * torch.randn(4000, generator=random, dtype=torch.float64)
    noise = 2e-2 * torch.randn(4000, generator=random, dtype=torch.float64)
    beta, z = rounding_slope(rounded + noise, processed, rounded)
    assert beta == pytest.approx(1, abs=0.15)
    assert "slope 1.0" in engine_head_sign(EqualContexts(), (beta, z)) or "slope 0.9" in engine_head_sign(
        EqualContexts(), (beta, z)
    )
    beta, z = rounding_slope(processed + noise, processed, rounded)
    assert abs(z) < 4
    assert engine_head_sign(EqualContexts(), (beta, z)) == ""


def test_an_engine_that_disagrees_with_itself_is_named(tmp_path) -> None:
    bench = ParityBench.make(tmp_path)
    random = torch.Generator().manual_seed(0)
    noisy = with_logprobs(
        groups_of(bench.engine().generate(prompts(24, 6), 8, 8, sampling=COLD)),
        lambda siblings: [[b + 3e-3 * float(torch.randn((), generator=random)) for b in own] for own in siblings],
    )
    report = bench.check(noisy)
    assert (report.verdict.status, report.verdict.cause) == ("mismatch", "engine-spread")
    spread: Gap = next(each.gap for each in report.hypotheses if each.name == "engine-spread")
    assert spread.mean == pytest.approx(2**0.5 * report.hypotheses[0].gap.mean, rel=0.3)
