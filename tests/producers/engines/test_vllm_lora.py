"""Adapters in the running engine, of one rank and of two: logprobs, labels, prefixes, failed loads, named faults."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from labelled_weights import assert_exact_labels, label_of
from parity_faults import LabelsOnly
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.check import check_parity
from penstock.consumers.parity.inference import compare_layers
from penstock.consumers.parity.report import ParityReport
from penstock.producers.interfaces import WeightLoadError
from penstock.producers.rollout.probe import PosedPrompt, WeightUpdate, probe
from penstock.schemas.adapter import adapter_shapes, parse_name, tensor_name
from penstock.schemas.config import LoraConfig, RunConfig
from penstock.schemas.policy import TensorSpec, WeightManifest
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import RolloutGroup, SamplingSettings
from shared_engine import assert_serves, qwen3, run_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]

LORA = LoraConfig(rank=3, alpha=6.0)
LONG = [(7 * n) % 60 + 3 for n in range(300)]
"""More than two blocks of the KV cache."""


def told_by(base: Any) -> None:
    """Has a model's first channel be positive everywhere and its last MLP pass that on, for an adapter to build on."""
    with torch.no_grad():
        base.model.embed_tokens.weight[:, 0] = 4.0
        base.lm_head.weight.mul_(0.2).add_(2 * torch.eye(64))
        for layer in base.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        for projection in (base.model.layers[1].mlp.gate_proj, base.model.layers[1].mlp.up_proj):
            projection.weight[0] = torch.eye(64)[0]


class AdaptedEngine:
    """A running engine, its base, and the adapters that it was given, by version."""

    def __init__(self, engine: Any, config: RunConfig, base: Any, folder: Path) -> None:
        self.engine, self.config, self.base, self.folder = engine, config, base, folder
        self.shapes = adapter_shapes(LORA, {n: tuple(p.shape) for n, p in base.named_parameters()}, "base")
        self.files: dict[int, Path] = {0: Path(config.model.path)}

    def adapter(self, size: float = 0.1) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(len(self.files))
        sizes = {"A": 0.2, "B": size}
        return {
            name: torch.randn(shape, generator=random) * sizes[parse_name(name)[1]]
            for name, shape in self.shapes.items()
        }

    def weights_of_token(self, token: int) -> dict[str, Tensor]:
        """An adapter whose greedy token is `token` after any context."""
        adapter = {name: torch.zeros(shape) for name, shape in self.shapes.items()}
        adapter[tensor_name("model.layers.1.mlp.down_proj", "A")][0, 0] = 1.0
        adapter[tensor_name("model.layers.1.mlp.down_proj", "B")][token, 0] = 300.0
        return adapter

    def update(self, adapter: Mapping[str, Tensor]) -> WeightUpdate:
        """The next policy."""
        version = len(self.files)
        path = self.files[version] = self.folder / f"v{version}.safetensors"
        save_file(dict(adapter), path)
        tensors = tuple(TensorSpec(name=n, dtype="float32", shape=tuple(t.shape)) for n, t in adapter.items())
        manifest = WeightManifest(version=version, parent_version=version - 1, total_bytes=1, tensors=tensors)
        return WeightUpdate(manifest, str(path))

    async def load(self, adapter: Mapping[str, Tensor]) -> int:
        update = self.update(adapter)
        await self.engine.load_weights(update.manifest, update.path)
        return update.manifest.version

    def merged(self, adapter: Mapping[str, Tensor]) -> Any:
        model = qwen3(tied=False, seed=0)
        model.load_state_dict(self.base.state_dict())
        with torch.no_grad():
            for name, first in adapter.items():
                module, factor = parse_name(name)
                if factor == "A":
                    model.get_submodule(module).weight += 2.0 * adapter[tensor_name(module, "B")] @ first
        return model

    async def sample(self, updates: list[WeightUpdate] | None = None, engine: Any = None) -> list[RolloutGroup]:
        posed = [PosedPrompt(Prompt(text="?"), ids) for ids in ([3, 17, 5, 40], LONG)]
        settings = SamplingSettings(max_tokens=64)
        return await probe(engine or self.engine, posed, settings, group_size=8, updates=updates or [])

    def check(self, groups: list[RolloutGroup]) -> ParityReport:
        return check_parity(groups, config=self.config, weights=self.files.get)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[1, pytest.param(2, marks=pytest.mark.exhaustive)],
    ids=["one rank", "two ranks"],
)
async def adapted(request, vllm_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    base = qwen3(tied=False, seed=0)
    told_by(base)
    base.save_pretrained(folder / "model")
    settings: dict[str, Any] = {"prefix_caching": True, "tensor_parallel_size": request.param}
    if request.param > 1:
        settings["args"] = {"enforce_eager": True}
    config = msgspec.structs.replace(run_config(folder / "model", engine=settings), lora=LORA)
    found = AdaptedEngine(await vllm_engine.start(config), config, base, folder)
    await serves(found, {}, found.engine.policy_version)
    yield found
    await found.engine.close()


async def serves(adapted: AdaptedEngine, adapter: Mapping[str, Tensor], version: int) -> None:
    """The engine samples from the base with `adapter`, and labels its tokens `version`."""
    for prompt in ([3, 17, 5, 40], LONG):
        await assert_serves(adapted.engine, adapted.merged(adapter), version, prompt)


async def test_each_policy_serves_the_base_with_its_adapter_and_no_older_prefix(adapted: AdaptedEngine):
    for size in (0.1, 0.2, 0.05):
        adapter = adapted.adapter(size)
        # The second time the prompt's prefix is cached, and the third under another adapter.
        version = await adapted.load(adapter)
        for _ in range(2):
            await serves(adapted, adapter, version)
    assert msgspec.json.decode(adapted.engine.fingerprint.other["lora"])["rank"] == 3


async def test_no_token_is_mislabelled_while_adapters_come_in_flight(adapted: AdaptedEngine):
    await assert_exact_labels(
        adapted.engine, lambda: adapted.load(adapted.weights_of_token(label_of(len(adapted.files)))), 12
    )


async def test_an_adapter_that_does_not_fit_leaves_the_one_before_in_place(adapted: AdaptedEngine):
    adapter = adapted.adapter()
    version = await adapted.load(adapter)
    strange = {name.replace("layers.1.", "layers.7."): tensor for name, tensor in adapter.items()}
    wide = {name: torch.zeros(4, 64) if parse_name(name)[1] == "A" else tensor for name, tensor in adapter.items()}
    for wrong, message in (
        (strange, r"no LoRA layer for \['model.layers.7.mlp.down_proj'"),
        (wide, r"lora_A.weight: shape \(4, 64\), the model's is \(3, \d+\)"),
        (adapted.base.state_dict(), r"tensors missing: \[\], not in the model: \['lm_head.weight'"),
    ):
        update = adapted.update({name: tensor.clone() for name, tensor in wrong.items()})
        with pytest.raises(WeightLoadError, match=message):
            await adapted.engine.load_weights(update.manifest, update.path)
        await serves(adapted, adapter, version)


async def test_the_parity_check_finds_nothing_and_layers_agree(adapted: AdaptedEngine, tmp_path):
    await adapted.load(adapted.adapter(0.05))
    groups = await adapted.sample([adapted.update(adapted.adapter(0.05)) for _ in range(2)])
    report = adapted.check(groups)
    assert report.verdict.status == "parity", report.verdict
    await adapted.engine.capture([n % 64 for n in range(3, 100)], str(tmp_path / "states.safetensors"))
    trainer = PackedModel(adapted.config.model.path, "float32", torch.device("cpu"), lora=LORA)
    trainer.load_adapter(load_file(adapted.files[adapted.engine.policy_version]))
    assert not [layer for layer in compare_layers(trainer, tmp_path / "states.safetensors") if layer.is_off]


@pytest.mark.parametrize("adapted", [1], ids=["one rank"], indirect=True)
@pytest.mark.parametrize("fault", ["adapter-off", "adapter-scale", "weights-1"])
async def test_a_fault_of_the_adapter_is_named(adapted: AdaptedEngine, fault: str):
    rpc = adapted.engine._llm.collective_rpc
    # Two, so that the one before the last is not the base either.
    await adapted.load(adapted.adapter(0.05))
    update = adapted.update(adapted.adapter(0.05))
    try:
        if fault == "weights-1":
            groups = await adapted.sample([update], LabelsOnly(adapted.engine))
        else:
            if fault == "adapter-scale":
                await rpc("penstock_adapt", args=(1.0,))
            await adapted.engine.load_weights(update.manifest, update.path)
            if fault == "adapter-off":
                await rpc("penstock_load", args=([],))
            groups = await adapted.sample()
    finally:
        await rpc("penstock_adapt", args=(LORA.scaling,))
        await adapted.load(adapted.adapter())
    verdict = adapted.check(groups).verdict
    assert (verdict.status, verdict.cause) == ("mismatch", fault), verdict
    if fault == "adapter-scale":
        assert "(1 where lora.alpha / lora.rank is 2)" in verdict.sentence
