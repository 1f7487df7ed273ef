"""Exports a checkpoint's model as a Hugging Face folder, or its adapter as peft's."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

from penstock.consumers.learning.model.learner_state import MASTERS, check_masters
from penstock.consumers.learning.model.loading import DTYPES, auto_class, kept_in_float32, read_model, tensors_of
from penstock.consumers.learning.model.lora import FACTORS, published_name
from penstock.consumers.learning.model.tensor_files import read_tensors, specs_in
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.adapter import AdapterIdentity, parse_name
from penstock.schemas.config import ConfigError
from penstock.schemas.model_digest import model_digest

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_model(
    tensors: Path, config: Path, folder: Path, dtype: str, progress: Callable[[str], None] = lambda line: None
) -> None:
    """Writes the masters among the files of `tensors`, whole and in `dtype`, into `folder`, as `save_pretrained` does,
    but without generation_config.json.

    Runs in one process, whose memory holds the model in float32.

    config: a folder with the model's config.json.

    Raises:
        OSError, SafetensorError: a file cannot be read or written.
        ConfigError: the tensors are not those of a model of this configuration.
    """
    transformers_logging.disable_progress_bar()
    settings = AutoConfig.from_pretrained(config)
    with torch.device("meta"):
        module = auto_class(settings).from_config(settings, dtype=DTYPES[dtype])
    specs = specs_in(tensors)
    check_masters(tensors_of(module), specs, tensors)
    masters = _read_masters(tensors, progress)
    module.load_state_dict(masters, strict=False, assign=True)
    del masters  # so that no more than one tensor is in memory twice
    module.tie_weights()
    _round(module, dtype)
    _save(module, folder, dtype, progress)


def export_kept(
    kept: Path, config: Path, folder: Path, dtype: str, progress: Callable[[str], None] = lambda line: None
) -> None:
    """Writes the whole model in the folder `kept` into `folder`, in `dtype`.

    Raises:
        OSError: a file cannot be read or written.
    """
    transformers_logging.disable_progress_bar()
    progress(f"reading {kept}")
    module = read_model(kept, torch.float32)
    _round(module, dtype)
    _save(module, folder, dtype, progress)


def export_adapter(
    adapter: AdapterIdentity,
    tensors: Path,
    config: Path,
    folder: Path,
    dtype: str,
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Writes the adapter among the files of `tensors`, in `dtype`, into `folder` as peft does.

    Raises:
        OSError, SafetensorError: a file cannot be read or written.
    """
    weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in _read_adapter(tensors, progress).items()}
    progress(f"writing {folder} in {dtype}")
    folder.mkdir(parents=True)
    save_file(weights, describe_weights(config, folder, dtype, adapter), metadata={"format": "pt"})
    _share_files(folder, folder / ADAPTER_CONFIG)


def describe_weights(base: Path, folder: Path, dtype: str, adapter: AdapterIdentity | None) -> Path:
    """Writes the description of the weights into `folder`: config.json of the model in `base` with their type, or
    peft's file for an adapter. Returns the path for the weights."""
    if adapter is None:
        described = json.loads((base / "config.json").read_text("utf-8"))
        described.pop("torch_dtype", None)
        (folder / "config.json").write_text(json.dumps(described | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
        return folder / "model.safetensors"
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return folder / ADAPTER_WEIGHTS


def export_merged(
    adapter: AdapterIdentity,
    base: Path,
    tensors: Path,
    config: Path,
    folder: Path,
    dtype: str,
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Writes the model in `base`, with the adapter among the files of `tensors` added to its weights in float32, into
    `folder`, in `dtype`, as `save_pretrained` does.

    Raises:
        OSError, SafetensorError: a file cannot be read or written.
        ConfigError: the adapter belongs to another base.
    """
    if not (base / "config.json").is_file() or (found := model_digest(base)) != adapter.base_digest:
        what = f"digest {found[:12]}" if (base / "config.json").is_file() else "no model there"
        raise ConfigError(
            f"{base}: {what}; expected the base of the adapter, the model that was {adapter.base!r}, digest "
            f"{adapter.base_digest[:12]} (--base names its place)"
        )
    transformers_logging.disable_progress_bar()
    weights = _read_adapter(tensors, progress)
    module = read_model(base, torch.float32)
    _merge(module, weights, adapter.alpha / adapter.rank)
    _round(module, dtype)
    _save(module, folder, dtype, progress)


@torch.no_grad()
def _merge(module: torch.nn.Module, weights: Mapping[str, Tensor], scaling: float) -> None:
    by_module: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        found = parse_name(name)
        assert found is not None
        by_module.setdefault(found[0], {})[found[1]] = tensor
    for name, factors in by_module.items():
        first, second = (factors[each] for each in FACTORS)
        weight: Any = module.get_submodule(name).weight
        weight += scaling * (second @ first)


def _read_adapter(tensors: Path, progress: Callable[[str], None]) -> dict[str, Tensor]:
    """Reads an adapter's tensors by peft's names, from a checkpoint's `tensors` or a folder of peft's."""
    if (tensors / ADAPTER_WEIGHTS).is_file():
        return load_file(tensors / ADAPTER_WEIGHTS)
    return {published_name(name): master for name, master in _read_masters(tensors, progress).items()}


def _read_masters(tensors: Path, progress: Callable[[str], None]) -> dict[str, Tensor]:
    """Reads the whole masters from the files of `tensors`, by parameter name."""
    specs = specs_in(tensors)
    masters = {name: torch.empty(shape, dtype=of) for name, (shape, of) in specs.items() if name.startswith(MASTERS)}
    progress(f"reading {sum(master.nbytes for master in masters.values()) / 1e9:.2f} GB from {tensors}")
    read_tensors(masters, tensors, Ranks())
    return {name.removeprefix(MASTERS): master for name, master in masters.items()}


def _round(module: torch.nn.Module, dtype: str) -> None:
    """Rounds the weights to `dtype`, tensor by tensor, except those that are published in float32."""
    kept = kept_in_float32(module)
    for name, tensor in tensors_of(module).items():
        if tensor.is_floating_point() and name not in kept:
            tensor.data = tensor.data.to(DTYPES[dtype])


def _save(module: Any, folder: Path, dtype: str, progress: Callable[[str], None]) -> None:
    progress(f"writing {folder} in {dtype}")
    # transformers refuses to write some settings that it reads. The base model's file is copied.
    module.generation_config = GenerationConfig()
    module.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    _share_files(folder, folder / "config.json")


def _share_files(folder: Path, like: Path) -> None:
    for file in folder.glob("*.safetensors"):  # safetensors makes them private to their owner, whatever the umask
        file.chmod(like.stat().st_mode & 0o777)
