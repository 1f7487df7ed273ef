"""Identifies the model in a folder."""

import hashlib
from pathlib import Path

_SAMPLED_BYTES = 1 << 20


def model_digest(folder: Path) -> str:
    """Returns BLAKE2b-128 of configuration, tokenizer, and each weights file's name, size, first and last MiB: other
    weights give another digest, without reading gigabytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLED_BYTES))
            stream.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(stream.read(_SAMPLED_BYTES))
    return digest.hexdigest()
