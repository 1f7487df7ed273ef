"""The parity check of a policy that is an adapter: nothing is found where nothing is wrong, and each fault is named."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parity_bench import COLD, ParityBench, groups_of, prompts
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.check import check_parity
from penstock.consumers.parity.gate import Gate, ParityRefusedError
from penstock.consumers.parity.loaded import LoadedChecks
from penstock.consumers.parity.report import ParityReport
from penstock.schemas.adapter import adapter_shapes, parse_name, tensor_name
from penstock.schemas.config import LoraConfig
from training_groups import configuration
from transformers_engine import TransformersEngine

LORA = LoraConfig(rank=4, alpha=12.0)
"""Its scale is 3."""


class AdapterBench:
    """A base and three adapters to it, each with its file as it is published."""

    def __init__(self, folder: Path) -> None:
        self.bench, self.folder = ParityBench.make(folder), folder
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
            save_file(adapter, self.files[version])

    def engine(self, serves: Callable[[int], tuple[int, float]]) -> TransformersEngine:
        """It serves base and adapter merged. serves: of a version, whose adapter and at which scale."""
        merged: dict[int, Path] = {}
        for version in self.files:
            taken, scale = serves(version)
            adapter = load_file(self.files[taken])
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

    def check(self, serves: Callable[[int], tuple[int, float]]) -> ParityReport:
        engine = self.engine(serves)
        answers = [
            *engine.generate(prompts(3, 6), 4, 12, version=2, sampling=COLD, seed=1),
            *engine.generate(prompts(3, 9, seed=1), 4, 14, version=2, updates={7: 3}, sampling=COLD, seed=2),
        ]
        files: Mapping[int, Path] = {0: self.bench.folder, **self.files}
        return check_parity(groups_of(answers), config=configuration(self.bench.folder, lora=LORA), weights=files.get)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> AdapterBench:
    return AdapterBench(tmp_path_factory.mktemp("adapters"))


def test_a_fault_of_an_adapter_is_named_and_nothing_where_it_is_applied_as_it_should_be(adapters: AdapterBench) -> None:
    assert adapters.check(lambda version: (version, 3.0)).verdict.status == "parity"
    for cause, serves, part in (
        ("adapter-off", lambda version: (version, 0.0), "engine computes with it in all layers of lora.targets"),
        # Without a scale; alpha / sqrt(rank); that of another alpha.
        *(
            ("adapter-scale", lambda version, scale=scale: (version, scale), f"({scale:g} where lora.alpha / lora.rank")
            for scale in (1.0, 6.0, 2.4)
        ),
        ("weights-1", lambda version: (max(1, version - 1), 3.0), "labelled 2, sampled by 1"),
    ):
        verdict = adapters.check(serves).verdict
        assert (verdict.status, verdict.cause) == ("mismatch", cause), verdict
        assert part in verdict.sentence


def test_the_gate_looks_again_once_the_adapter_is_something(adapters: AdapterBench, tmp_path: Path) -> None:
    config = configuration(adapters.bench.folder, lora=LORA)
    model = PackedModel(str(adapters.bench.folder), "float32", torch.device("cpu"), lora=LORA)
    gate = Gate(config, tmp_path, LoadedChecks(config))

    def sampled(engine: TransformersEngine, version: int) -> list:
        return groups_of(engine.generate(prompts(3, 6), 4, 12, version=version, sampling=COLD, seed=1))

    bare = TransformersEngine(adapters.bench.folder, {})
    gate.check(sampled(bare, 0), model, 0, LagTable(0, {}, {}))
    assert gate.is_pending, "whatever an engine does with it, the base is the base"
    model.load_adapter(load_file(adapters.files[1]))
    with pytest.raises(ParityRefusedError):
        gate.check(sampled(bare, 1), model, 1, LagTable(1, {}, {}))
    gate.check(sampled(adapters.engine(lambda version: (version, 3.0)), 1), model, 1, LagTable(1, {}, {}))
    assert not gate.is_pending
