"""Makes the input of a check with an engine of its own: samples prompts while weights change in flight."""

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.consumers.parity.logged_versions import WeightVersions
from penstock.deploy.launch.engine_output import Say, output_in
from penstock.deploy.parity.inputs import ParityInput
from penstock.producers.engines.weight_files import BaseModel
from penstock.producers.interfaces import CaptureError, EngineError
from penstock.producers.rollout.episode import load_tokenizer
from penstock.producers.rollout.probe import PosedPrompt, WeightUpdate, batch_dependence, pose, probe
from penstock.producers.rollout.run_environments import open_environments
from penstock.schemas.adapter import adapter_shapes, parse_name
from penstock.schemas.config import ConfigError, LoraConfig, RunConfig
from penstock.schemas.policy import TensorSpec, WeightManifest
from penstock.schemas.rollout import RolloutGroup, SamplingSettings, unpack_ids

NUM_UPDATES = 3
MOST_TOKENS = 96
"""Tokens of a completion: enough for an update to come while it is in flight."""
CHANGE = {"float32": 1e-2, "bfloat16": 3e-2, "float16": 1e-2}
"""Relative change of every tensor from one policy to the next, by the type of the published weights: more than the
type's noise, and too little for the model to become incoherent."""
_CAPTURE = "hidden_states.safetensors"


class Probed(NamedTuple):
    """capture: file with the hidden states of one sequence; None if they could not be recorded, and a note says why."""

    input: ParityInput
    capture: Path | None


def run_probe(config: RunConfig, folder: Path, *, num_prompts: int, log: Path, say: Say) -> Probed:
    """Boots one engine as `config` says and probes it. Weights and hidden states go to `folder`, its output to `log`.

    Raises:
        ConfigError: a prompt that the model has no room for, or an environment or a model that cannot be used.
        EngineError, WeightLoadError: the engine does not start or serve.
    """
    opened = open_environments(config)
    environments = [opened.named(each.name).environment for each in config.every_environment.values() if each.weight]
    prompts = pose(environments, load_tokenizer(config), num_prompts)
    with output_in(log):
        groups, notes = asyncio.run(_sample(config, prompts, folder, say))
    found = ParityInput(
        title=f"a probe of {config.name}'s engine",
        config=config,
        groups=groups,
        weights=WeightVersions(Path(config.model.path), folder),
        policy_version=NUM_UPDATES,
        forks={},
        announced={},
        notes=notes,
    )
    capture = folder / _CAPTURE
    return Probed(found, capture if capture.exists() else None)


async def _sample(
    config: RunConfig, prompts: list[PosedPrompt], folder: Path, say: Say
) -> tuple[list[RolloutGroup], tuple[str, ...]]:
    say("booting vLLM")
    engine = await _engine_type().start(config)
    try:
        sampling = _sampling(config, prompts, engine.max_model_len)
        say(f"making {NUM_UPDATES} policies")
        updates = make_policies(config, folder, NUM_UPDATES)
        say(f"sampling {len(prompts)} prompts {NUM_UPDATES + 1} times, with {NUM_UPDATES} updates in flight")
        groups = await probe(engine, prompts, sampling, group_size=config.group_size, updates=updates)
        notes = [
            f"a probe: {len(prompts)} prompts, up to {sampling.max_tokens} tokens a completion, {NUM_UPDATES} updates "
            "of random noise in flight",
            str(await batch_dependence(engine, prompts, sampling.max_tokens)),
        ]
        say("recording hidden states")
        segments = (rollout.segments[0] for group in groups for rollout in group.rollouts)
        longest = max(segments, key=lambda segment: segment.num_tokens)
        try:
            await engine.capture(unpack_ids(longest.token_ids).tolist(), str((folder / _CAPTURE).absolute()))
        except CaptureError as error:
            notes.append(f"layers were not compared: {error}")
        return groups, tuple(notes)
    finally:
        await engine.close()


def _engine_type() -> Any:
    try:
        from penstock.producers.engines.vllm import VllmEngine
    except ImportError as error:
        raise EngineError(f"vLLM cannot be imported ({error}); install the extra [cpu] or [gpu]") from error
    return VllmEngine


def _sampling(config: RunConfig, prompts: list[PosedPrompt], max_model_len: int) -> SamplingSettings:
    """Returns the run's own sampling settings, with completions of a probe's length."""
    room = max_model_len - max(len(posed.token_ids) for posed in prompts)
    if room < 1:
        raise ConfigError(
            f"engine.max_model_len = {max_model_len}: the longest of {len(prompts)} prompts leaves no room to answer"
        )
    own = config.sampling
    return SamplingSettings(
        temperature=own.temperature,
        top_k=own.top_k,
        top_p=own.top_p,
        max_tokens=min(room, own.max_tokens, MOST_TOKENS),
        stop_token_ids=own.stop_token_ids,
    )


def make_policies(config: RunConfig, folder: Path, num_updates: int) -> list[WeightUpdate]:
    """Writes `v1.safetensors` and so on into `folder`: the base model's weights, changed a little more at random each
    time, or small random adapters. Equal configurations make equal policies.

    Raises:
        EngineError: model.path holds no model with safetensors weights.
        OSError: `folder` cannot be written.
    """
    weights: dict[str, Tensor] = {}
    base = BaseModel(config.model.path)
    for file in base.files:
        weights |= load_file(file)
    generator, dtype = torch.Generator().manual_seed(config.seed), config.model.dtype
    updates = []
    for version in range(1, num_updates + 1):
        if config.lora is None:
            published = weights = {name: _changed(tensor, dtype, generator) for name, tensor in weights.items()}
        else:
            published = _random_adapter(config.lora, base, weights, dtype, generator)
        updates.append(_write(version, published, folder, dtype))
    return updates


def _changed(tensor: Tensor, dtype: str, generator: torch.Generator) -> Tensor:
    """Adds noise to a tensor of weights; returns any other as it is."""
    if not tensor.is_floating_point():
        return tensor
    values = tensor.float()
    noise = torch.randn(values.shape, generator=generator)
    return values + CHANGE[dtype] * values.square().mean().sqrt() * noise


def _random_adapter(
    lora: LoraConfig, base: BaseModel, weights: Mapping[str, Tensor], dtype: str, generator: torch.Generator
) -> dict[str, Tensor]:
    """Makes an adapter whose product changes each weight by about the share that `_changed` does."""
    found: dict[str, Tensor] = {}
    for name, shape in adapter_shapes(lora, base.shapes, base.folder).items():
        module, factor = parse_name(name) or ("", "")
        size = 1 / math.sqrt(lora.rank)
        if factor == "B":
            size = CHANGE[dtype] * weights[f"{module}.weight"].float().square().mean().sqrt().item() / lora.scaling
        found[name] = size * torch.randn(shape, generator=generator)
    return found


def _write(version: int, weights: dict[str, Tensor], folder: Path, dtype: str) -> WeightUpdate:
    published = {
        name: tensor.to(getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in weights.items()
    }
    path = folder / f"v{version}.safetensors"
    save_file(published, path)
    manifest = WeightManifest(
        version=version,
        parent_version=version - 1,
        total_bytes=sum(tensor.nbytes for tensor in published.values()),
        tensors=tuple(
            TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in published.items()
        ),
    )
    return WeightUpdate(manifest, str(path))
