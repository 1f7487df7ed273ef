"""Low-rank adapters: the names of their tensors, which are peft's, and the identity of their base model."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.schemas.config import ConfigError, LoraConfig, RunConfig
from penstock.schemas.model_digest import model_digest

ADAPTER = "adapter"
"""The field of a learner's state in a checkpoint that holds the `AdapterIdentity`."""
_PREFIX = "base_model.model."
_NAME = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight")
_IN_A_BLOCK = re.compile(r"\.\d+\.")
_OF_IMAGES = re.compile(r"\.(visual|vision_tower|vision_model|multi_modal_projector|connector)\.")
"""Adapters are of the language model alone."""
_WEIGHT = ".weight"


def tensor_name(module: str, factor: str) -> str:
    """Returns the name of factor "A" [rank, in] or "B" [out, rank] of a linear layer's adapter."""
    return f"{_PREFIX}{module}.lora_{factor}{_WEIGHT}"


def parse_name(name: str) -> tuple[str, str] | None:
    """Returns module and factor: the inverse of `tensor_name`; None for a tensor that is not an adapter's."""
    found = _NAME.fullmatch(name)
    return None if found is None else (found[1], found[2])


def find_targets(lora: LoraConfig, linear: Iterable[str], path: str) -> list[str]:
    """Returns the modules to adapt among `linear`, the names of all linear layers: the targets within blocks.

    Raises:
        ConfigError: the model of `path` lacks a target.
    """
    # Experts are one tensor for all of them in the trainer.
    within = [
        name
        for name in linear
        if _IN_A_BLOCK.search(f".{name}.") and ".experts." not in name and not _OF_IMAGES.search(f".{name}.")
    ]
    known = {name.rpartition(".")[2] for name in within}
    if missing := [target for target in lora.targets if target not in known]:
        raise ConfigError(
            f"lora.targets = {list(lora.targets)!r}: the blocks of model.path = {path!r} have no linear layer "
            f"{', '.join(missing)}; expected some of {', '.join(sorted(known)) or 'none: nothing can be adapted'}"
        )
    return [name for name in within if name.rpartition(".")[2] in lora.targets]


def adapter_shapes(lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]], path: str) -> dict[str, tuple[int, int]]:
    """Returns the shapes of the adapter's tensors, by name, for a checkpoint with tensors of these `shapes`.

    Raises:
        ConfigError: see `find_targets`.
    """
    linear = {
        name.removesuffix(_WEIGHT): shape
        for name, shape in shapes.items()
        if name.endswith(_WEIGHT) and len(shape) == 2
    }
    found: dict[str, tuple[int, int]] = {}
    for module in find_targets(lora, linear, path):
        num_out, num_in = linear[module]
        found[tensor_name(module, "A")] = (lora.rank, num_in)
        found[tensor_name(module, "B")] = (num_out, lora.rank)
    return found


class AdapterIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The context that an adapter's tensors require. base: path of the base model; base_digest: see `model_digest`."""

    base: str
    base_digest: str
    rank: int
    alpha: float
    targets: tuple[str, ...]


def identity_of(config: RunConfig) -> AdapterIdentity | None:
    """Returns the identity of the run's adapter; None if the run trains all weights."""
    if config.lora is None:
        return None
    lora, path = config.lora, config.model.path
    return AdapterIdentity(
        base=str(Path(path).absolute()),
        base_digest=model_digest(Path(path)),
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets,
    )


def saved_identity(learner_state: Mapping[str, Any]) -> AdapterIdentity | None:
    """Returns the identity in a checkpoint's learner state; None if it holds all weights."""
    return msgspec.convert(learner_state.get(ADAPTER), AdapterIdentity | None)


def check_identity(saved: AdapterIdentity | None, own: AdapterIdentity | None, checkpoint: str) -> None:
    """Raises ConfigError if the content of `checkpoint`, an adapter (`saved`) or all weights (None), does not match the
    run's own."""
    if saved is None or own is None:
        if saved is not own:
            found, expected = ("an adapter", "[lora] as it was") if own is None else ("all weights", "no [lora]")
            raise ConfigError(f"lora: {checkpoint} holds {found}; expected {expected}")
        return
    if saved.base_digest != own.base_digest:
        raise ConfigError(
            f"model.path = {own.base!r}: {checkpoint} holds an adapter of another base: digest {own.base_digest[:12]}, "
            f"the adapter's {saved.base_digest[:12]}; expected the model that was {saved.base!r}"
        )
    for field in ("rank", "alpha", "targets"):
        was, now = getattr(saved, field), getattr(own, field)
        if set(was) != set(now) if field == "targets" else was != now:
            raise ConfigError(f"lora.{field} = {now!r}: the adapter in {checkpoint} has {was!r}; expected that")
