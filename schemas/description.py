"""The description of a run in Redis, for a producer on a host that shares nothing else with it."""

import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.model_digest import model_digest

LARGEST_FILES_BYTES = 64_000_000
"""Largest total size of a model's files other than weights: the largest tokenizers have half of it."""
_WEIGHTS = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".gguf", ".h5",
    ".msgpack", ".onnx",
)  # fmt: skip

_files_decoder = msgspec.msgpack.Decoder(dict[str, bytes])


class DescriptionError(ValueError):
    """The hash in Redis does not describe a run."""


class RunDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a run for its producers. It contains no secrets.

    run_file: the whole configuration, as JSON.
    model_digest: `penstock.schemas.model_digest.model_digest` of the base model.
    model_files: the files of the model's folder other than weights, by name: configuration, tokenizer, chat template.
    """

    run_file: bytes
    model_digest: str
    model_files: dict[str, bytes]


def describe(config: RunConfig) -> RunDescription:
    """Describes a run; reads the model's folder except its weights.

    Raises:
        ConfigError: the files other than weights are too large for Redis.
    """
    folder = Path(config.model.path)
    files = {
        file.name: file for file in sorted(folder.glob("[!.]*")) if file.is_file() and not file.name.endswith(_WEIGHTS)
    }
    sizes = {name: file.stat().st_size for name, file in files.items()}
    if sum(sizes.values()) > LARGEST_FILES_BYTES:
        name = max(sizes, key=sizes.__getitem__)
        raise ConfigError(
            f"model.path = {config.model.path!r}: {sum(sizes.values()):,} bytes beside the weights, the largest of "
            f"them {name} with {sizes[name]:,}; expected at most {LARGEST_FILES_BYTES:,}: producers get them by Redis"
        )
    return RunDescription(
        run_file=msgspec.json.encode(config),
        model_digest=model_digest(folder),
        model_files={name: file.read_bytes() for name, file in files.items()},
    )


def encode_description(description: RunDescription) -> dict[str, bytes]:
    """Returns the fields of the hash `Keys.description`, to which a trainer adds the settings of its image processor
    (`image_processor`: `penstock.schemas.images.processor_settings` as JSON, empty for a model of text)."""
    return {
        "run_file": description.run_file,
        "model_digest": description.model_digest.encode(),
        "model_files": zlib.compress(msgspec.msgpack.encode(description.model_files)),
    }


def decode_description(fields: Mapping[bytes, bytes]) -> RunDescription:
    """Decodes the fields of the hash. Raises DescriptionError if they are invalid."""
    try:
        files = _files_decoder.decode(zlib.decompress(fields[b"model_files"]))
        run_file, digest = fields[b"run_file"], fields[b"model_digest"].decode()
    except (KeyError, UnicodeDecodeError, zlib.error, msgspec.DecodeError) as error:
        raise DescriptionError(f"{type(error).__name__}: {error}") from None
    for name in files:
        if Path(name).name != name or name in ("", ".."):
            raise DescriptionError(f"a model's file is named {name!r}, expected a name without a folder")
    return RunDescription(run_file=run_file, model_digest=digest, model_files=files)
