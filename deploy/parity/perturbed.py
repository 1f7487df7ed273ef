"""Policies for a probe: the base model's weights, each time moved a little at random."""

from collections.abc import Iterator
from pathlib import Path

import torch
from penstock.producers.engines.weight_files import BaseModel
from penstock.producers.rollout.probe import WeightUpdate
from penstock.schemas.config import RunConfig
from penstock.schemas.policy import TensorSpec, WeightManifest
from safetensors.torch import load_file, save_file
from torch import Tensor

CHANGE = {"float32": 1e-2, "bfloat16": 3e-2}
"""Relative change of every tensor from one policy to the next, by the type of the published weights: more than its
noise, and too little for the model to talk nonsense."""


def make_policies(config: RunConfig, folder: Path, num_updates: int) -> list[WeightUpdate]:
    """Writes `v1.safetensors` and so on into `folder`. The same configuration makes the same policies.

    Raises:
        EngineError: model.path holds no model with safetensors weights.
        OSError: `folder` cannot be written.
    """
    weights: dict[str, Tensor] = {}
    for file in BaseModel(config.model.path).files:
        weights |= load_file(file)
    generator = torch.Generator().manual_seed(config.seed)
    return [
        _write(version, moved, folder, config.model.dtype)
        for version, moved in enumerate(_walk(weights, CHANGE[config.model.dtype], generator, num_updates), start=1)
    ]


def _walk(
    weights: dict[str, Tensor], change: float, generator: torch.Generator, num_steps: int
) -> Iterator[dict[str, Tensor]]:
    for _ in range(num_steps):
        for name, tensor in weights.items():
            if tensor.is_floating_point():
                values = tensor.float()
                noise = torch.randn(values.shape, generator=generator)
                weights[name] = values + change * values.square().mean().sqrt() * noise
        yield weights


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
        file=path.name,
        total_bytes=path.stat().st_size,
        checksum="",  # for readers elsewhere; the engine checks names, shapes and types
        tensors=tuple(
            TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in published.items()
        ),
    )
    return WeightUpdate(manifest, str(path))
