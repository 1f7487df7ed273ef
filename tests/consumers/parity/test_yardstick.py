"""The model's own yardstick: what it is measured on, and a trainer's pass that is no computation of the model."""

import math

import pytest
import torch

from parity_bench import COLD, ParityBench, groups_of, prompts
from penstock.consumers.learning.model.attention import IMPLEMENTATION
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity import yardstick as module
from penstock.consumers.parity.sample import Sample, read_sample
from penstock.consumers.parity.tolerance import TOLERANCES
from penstock.consumers.parity.yardstick import measure_yardstick


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def bench(request, tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return ParityBench.make(tmp_path_factory.mktemp("bench"), dtype=request.param)


def sampled(bench: ParityBench, num_tokens: int, count: int = 6) -> Sample:
    answers = bench.engine().generate(prompts(count, 6), 4, num_tokens, sampling=COLD)
    return read_sample(groups_of(answers), 48, lambda version: True)


def test_it_is_what_the_three_computations_differ_by(bench, monkeypatch):
    model = PackedModel(str(bench.folder), bench.dtype, torch.device("cpu"))
    found = measure_yardstick(sampled(bench, 16), model, 8192)
    least, most = {"float32": (1e-8, 1e-6), "bfloat16": (1e-3, 5e-2), "float16": (1e-4, 6e-3)}[bench.dtype]
    assert found.num_tokens == 6 * 4 * 16 and found.packed_excess(bench.dtype) is None
    assert least < found.transformers < most and least < found.packed < most
    assert found.tolerance(bench.dtype).mean == TOLERANCES[bench.dtype].mean
    assert model.module.config._attn_implementation == IMPLEMENTATION, "the trainer goes on as before"
    short = measure_yardstick(sampled(bench, 2), model, 8192)
    assert short.num_tokens == 6 * 4 * (6 + 2 - 1), "contexts count where answers are few tokens"
    monkeypatch.setattr(module, "EAGER_TOKENS", 8)
    long = measure_yardstick(sampled(bench, 16), model, 8192)
    assert math.isnan(long.transformers) and long.mean == long.packed < most


def test_a_pass_that_does_not_compute_the_model_is_the_trainers_fault_and_widens_nothing(bench, monkeypatch):
    forward = PackedModel.forward

    def leaking(model, microbatch):
        hidden, head = forward(model, microbatch)
        is_start_check = len(hidden) < 40  # whose rows are short, as those below a rope's original context
        return hidden if is_start_check else hidden + hidden.roll(1, 0), head

    monkeypatch.setattr(PackedModel, "forward", leaking)
    report = bench.check(groups_of(bench.engine().generate(prompts(6, 6), 4, 16, sampling=COLD)))
    assert report.verdict.cause == "trainer-pass", report.verdict
    assert "between it and transformers' own attention on the same rows (mean " in report.verdict.sentence
    assert report.tolerance.mean == TOLERANCES[bench.dtype].mean
