"""Safetensors files: reads them, and checks their headers before the engine loads them."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open

from penstock.producers.interfaces import EngineError, WeightLoadError
from penstock.schemas.adapter import parse_name
from penstock.schemas.config import LoraConfig
from penstock.schemas.model_digest import model_digest
from penstock.schemas.policy import TensorSpec, WeightManifest
from penstock.schemas.weights.layout import SAFETENSORS_NAMES

DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
LARGEST_HEADER_BYTES = 100_000_000
"""The limit of the format."""

Shapes = Mapping[str, tuple[int, ...]]


class HeaderError(ValueError):
    """Not a safetensors file."""


def read_header(path: str | Path) -> dict[str, TensorSpec]:
    """Reads the tensors of a safetensors file by name from its header; checks the file's length against the header.

    Raises:
        OSError: the file cannot be read.
        HeaderError: it is not a safetensors file, or it is truncated.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER_BYTES):
            raise HeaderError(f"{path}: not a safetensors file ({size:,} bytes, header of {length:,})")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {
                name: TensorSpec(name=name, dtype=DTYPES.get(info["dtype"], info["dtype"]), shape=tuple(info["shape"]))
                for name, info in header.items()
            }
            end = max((info["data_offsets"][1] for info in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HeaderError(f"{path}: safetensors header does not parse: {error!r}") from None
    if 8 + length + end != size:
        raise HeaderError(f"{path}: {size:,} bytes, its header describes {8 + length + end:,}")
    return tensors


_HEAD = "lm_head.weight"
"""The files of a tied model may hold a copy of it, and a published policy does not, or the other way round."""


class BaseModel:
    """The model folder that an engine starts from.

    files: its safetensors files; none in a folder that came from Redis, without weights.
    shapes: every parameter's shape by its name in the checkpoint; empty without files.

    Raises:
        EngineError: the folder does not exist or is not a transformers model.
    """

    def __init__(self, folder: str) -> None:
        where = f"model.path = {folder!r}"
        if not os.path.isdir(folder):
            raise EngineError(f"{where}: no such folder; expected one with a transformers model")
        try:
            json.loads(Path(folder, "config.json").read_text("utf-8"))
            self.files = _checkpoint_files(Path(folder))
            tensors = [tensor for file in self.files for tensor in read_header(file).values()]
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise EngineError(f"{where}: not a transformers model with safetensors weights: {error}") from error
        self.folder = folder
        self.shapes: Shapes = {tensor.name: tensor.shape for tensor in tensors}

    @cached_property
    def is_tied(self) -> bool:
        """True if the head is the embedding, which config.json may leave to its class or to its text model."""
        from transformers import AutoConfig  # takes seconds, for a difference that few models have

        config: Any = AutoConfig.from_pretrained(self.folder, local_files_only=True)
        return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))

    @cached_property
    def has_other_parts(self) -> bool:
        """True if the files have more than the text model that is trained: towers for images or sound, or layers that
        predict several tokens."""
        config = json.loads(Path(self.folder, "config.json").read_text("utf-8"))
        return bool(
            "text_config" in config
            or config.get("num_nextn_predict_layers")
            or any(name.startswith("mtp.") for name in self.shapes)
        )

    @cached_property
    def digest(self) -> str:
        return model_digest(Path(self.folder))


def _checkpoint_files(folder: Path) -> list[str]:
    """Returns a sharded checkpoint's files by its index, else the single file, else every safetensors file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted({str(folder / name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
    single = folder / "model.safetensors"
    return [str(single)] if single.exists() else sorted(map(str, folder.glob("*.safetensors")))


def read_tensors(paths: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yields every tensor of the files in file order, memory-mapped."""
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


def check_range(base: BaseModel, dtype: str) -> None:
    """Raises EngineError if `dtype` is float16 and cannot hold a weight of the base model, whose files are read for it:
    vLLM would load infinity."""
    for name, tensor in read_tensors(base.files) if dtype == "float16" else ():
        if tensor.is_floating_point() and not (half := tensor.half().isfinite()).all():
            raise EngineError(
                f"model.dtype = 'float16' with model.path = {base.folder!r}: {name} has a weight of "
                f"{float(tensor[~half][0]):g}, float16 ends at 65504; expected 'bfloat16' or 'float32'"
            )


def check(path: str, manifest: WeightManifest, base: BaseModel, dtype: str, lora: LoraConfig | None = None) -> None:
    """Checks that the file at `path` is the announced one and fits the model in names, shapes and dtype, beside which
    some tensors may be float32; with `lora`, that it fits as an adapter.

    Raises:
        WeightLoadError: names the tensor, what was expected and what was found.
    """
    where = f"policy {manifest.version}"
    try:
        found = read_header(path)
    except (OSError, HeaderError) as error:
        raise WeightLoadError(f"{where}: {error}") from error
    if manifest.base_digest and manifest.base_digest != base.digest:
        raise WeightLoadError(
            f"{where}: an adapter to a base of digest {manifest.base_digest[:12]}, but model.path = {base.folder!r} "
            f"has {base.digest[:12]} here; expected the model that the trainer has"
        )
    announced = {tensor.name: tensor for tensor in manifest.tensors}
    for name in announced.keys() | found.keys():
        if found.get(name) != announced.get(name):
            raise WeightLoadError(f"{where}: {name}: the file holds {found.get(name)}, announced {announced.get(name)}")
    own_shapes = {name: tensor.shape for name, tensor in found.items()}
    shapes = (base.shapes or own_shapes) if lora is None else _of_adapter(own_shapes, base, lora)
    expected = set(shapes)
    trained = {_part(name) for name in found}
    untrained = {name for name in expected if base.has_other_parts and _part(name) not in trained}
    missing, unknown = expected - untrained - set(found), set(found) - expected
    if missing | unknown and not (missing | unknown == {_HEAD} and base.is_tied):
        raise WeightLoadError(
            f"{where}: tensors missing: {sorted(missing)[:5]}, not in the model: {sorted(unknown)[:5]}"
        )
    has_dtype = any(tensor.dtype == dtype for tensor in found.values())
    for name, tensor in found.items():
        if tensor.shape != shapes.get(name, tensor.shape):
            raise WeightLoadError(f"{where}: {name}: shape {tensor.shape}, the model's is {shapes[name]}")
        if tensor.dtype != dtype and not (has_dtype and tensor.dtype == "float32"):
            raise WeightLoadError(f"{where}: {name}: dtype {tensor.dtype}, expected model.dtype = {dtype}")


def _part(name: str) -> str:
    """Returns a tensor's part of the model, such as `model.layers.3`, `model.visual`, or `mtp.layers.0`."""
    match = re.match(r"(?:[a-z_]+\.)*\d+|[^.]+\.[^.]+", name)
    return match[0] if match else name


def _of_adapter(found: Shapes, base: BaseModel, lora: LoraConfig) -> Shapes:
    """Returns the expected shapes of the adapter's tensors among `found`. The engine checks those of layers that have
    another name in the checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in found.items():
        if (parsed := parse_name(name)) is None:
            continue
        module, factor = parsed
        num_out, num_in = base.shapes.get(f"{module}.weight", (shape[0], shape[-1]))
        shapes[name] = (lora.rank, num_in) if factor == "A" else (num_out, lora.rank)
    return shapes
