"""The parity check of a policy that is an adapter: nothing is found where nothing is wrong, and each fault is named."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parity_bench import COLD, ParityBench, groups_of, prompts
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.check import check_parity
from penstock.consumers.parity.gate import Gate, ParityRefusedError
from penstock.consumers.parity.report import ParityReport
from penstock.schemas.adapter import adapter_shapes, parse_name, tensor_name
from penstock.schemas.config import LoraConfig, ModelConfig
from training_groups import configuration
from transformers_engine import TransformersEngine

LORA = LoraConfig(rank=4, alpha=12.0)
"""Its scale is 3."""


class AdapterBench:
    """A base and three adapters to it, each with its file as it is published."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.bench = ParityBench.make(folder, dtype=dtype)
        self.folder, self.dtype = folder, dtype
        self.base = load_file(self.bench.folder / "model.safetensors")
        shapes = adapter_shapes(LORA, {name: tuple(each.shape) for name, each in self.base.items()}, "base")
        self.files: dict[int, Path] = {}
        for version in (1, 2, 3):
            random = torch.Generator().manual_seed(version)
            adapter = {
                name: (torch.randn(shape, generator=random) * (0.3 if parse_name(name)[1] == "A" else 0.05))
                for name, shape in shapes.items()
            }
            self.files[version] = folder / f"adapter-{version}.safetensors"
            save_file({name: each.to(getattr(torch, dtype)) for name, each in adapter.items()}, self.files[version])

    def engine(self, serves: Callable[[int], tuple[int, float]]) -> TransformersEngine:
        """It serves base and adapter merged. serves: of a version, whose adapter and at which scale."""
        merged: dict[int, Path] = {}
        for version in self.files:
            taken, scale = serves(version)
            adapter = {name: each.float() for name, each in load_file(self.files[taken]).items()}
            weights = dict(self.base)
            for name, first in adapter.items():
                module, factor = parse_name(name)
                if factor == "A":
                    weights[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (
                        adapter[tensor_name(module, "B")] @ first
                    )
            merged[version] = self.folder / f"merged-{version}.safetensors"
            save_file({name: each.contiguous() for name, each in weights.items()}, merged[version])
        return TransformersEngine(self.bench.folder, merged)

    def check(self, engine: TransformersEngine, **changes: Any) -> ParityReport:
        answers = [
            *engine.generate(prompts(3, 6), 4, 12, version=2, sampling=COLD, seed=1),
            *engine.generate(prompts(3, 9, seed=1), 4, 14, version=2, updates={7: 3}, sampling=COLD, seed=2),
        ]
        model = ModelConfig(path=str(self.bench.folder), dtype=self.dtype)
        config = configuration(self.bench.folder, model=model, lora=LORA, **changes)
        files: Mapping[int, Path] = {0: self.bench.folder, **self.files}
        return check_parity(groups_of(answers), config=config, weights=files.get)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> AdapterBench:
    return AdapterBench(tmp_path_factory.mktemp("adapters"), "float32")


def named(report: ParityReport, cause: str) -> str:
    assert (report.verdict.status, report.verdict.cause) == ("mismatch", cause), report
    return report.verdict.sentence


def test_nothing_is_found_where_the_adapter_is_applied_as_it_should_be(adapters: AdapterBench) -> None:
    report = adapters.check(adapters.engine(lambda version: (version, 3.0)))
    assert report.verdict.status == "parity", report
    assert next(each.gap.max for each in report.hypotheses if each.name == "processed") <= 1e-5


def test_an_adapter_that_is_not_applied_is_named(adapters: AdapterBench) -> None:
    sentence = named(adapters.check(adapters.engine(lambda version: (version, 0.0))), "adapter-off")
    assert "the policy's adapter is not applied" in sentence and "lora.targets" in sentence


@pytest.mark.parametrize("scale", [1.0, 12.0, 6.0, 9.0, 2.4])
def test_an_adapter_at_another_scale_is_named_with_both_scales(adapters: AdapterBench, scale: float) -> None:
    """No scale at all; alpha; alpha / sqrt(rank); the scale twice; that of another alpha."""
    sentence = named(adapters.check(adapters.engine(lambda version: (version, scale))), "adapter-scale")
    assert f"({scale:g} where lora.alpha / lora.rank is 3)" in sentence


def test_a_stale_adapter_is_named_by_its_distance(adapters: AdapterBench) -> None:
    named(adapters.check(adapters.engine(lambda version: (max(1, version - 1), 3.0))), "weights-1")


def test_the_gate_looks_again_once_the_adapter_is_something(adapters: AdapterBench, tmp_path: Path) -> None:
    model_config = ModelConfig(path=str(adapters.bench.folder))
    config = configuration(adapters.bench.folder, model=model_config, lora=LORA)
    model = PackedModel(str(adapters.bench.folder), "float32", torch.device("cpu"), lora=LORA)
    gate = Gate(config, tmp_path)

    def sampled(files: Mapping[int, Path], version: int) -> list:
        engine = TransformersEngine(adapters.bench.folder, files)
        return groups_of(engine.generate(prompts(3, 6), 4, 12, version=version, sampling=COLD, seed=1))

    gate.check(sampled({}, 0), model, 0, LagTable(0, {}, {}))
    assert gate.is_pending, "whatever an engine does with it, the base is the base"
    model.load_adapter(load_file(adapters.files[1]))
    with pytest.raises(ParityRefusedError, match="the policy's adapter is not applied"):
        gate.check(sampled({}, 1), model, 1, LagTable(1, {}, {}))
    gate = Gate(config, tmp_path)
    engine = adapters.engine(lambda version: (version, 3.0))
    right = groups_of(engine.generate(prompts(3, 6), 4, 12, version=1, sampling=COLD, seed=1))
    gate.check(right, model, 1, LagTable(1, {}, {}))
    assert not gate.is_pending
