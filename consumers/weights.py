"""Publishes a policy: bytes into the shared folder, then the manifest onto the policy stream."""

import hashlib
import os
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from consumers.connection import Connection
from consumers.scripts import Scripts
from schemas.policy import TensorSpec, WeightManifest

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Publisher:
    """Writes `v<version>.safetensors` and announces it; deletes versions older than the last `keep`."""

    def __init__(self, connection: Connection, scripts: Scripts, folder: Path, keep: int, epoch: int) -> None:
        self._connection = connection
        self._scripts = scripts
        self._folder = folder
        self._keep = keep
        self._epoch = epoch
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob("v*.partial-*"):
            unfinished.unlink(missing_ok=True)  # of a trainer that was killed
        self._published = sorted(folder.glob("v*.safetensors"), key=lambda file: int(file.stem[1:]))

    def publish(
        self, weights: dict[str, torch.Tensor], version: int, parent_version: int, *, fork: bool = False
    ) -> WeightManifest:
        """Announces `weights` as policy `version`.

        A producer sees the manifest only when the whole file is there under its final name. `fork` books
        `parent_version` as the version that this epoch's first policy equals.

        Raises:
            OSError: the folder cannot be written.
            FencedError: a newer trainer owns the run.
        """
        file = self._folder / f"v{version}.safetensors"
        partial = file.with_suffix(f".partial-{os.getpid()}")
        save_file(weights, partial)
        with partial.open("rb") as stream:
            checksum = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        manifest = WeightManifest(
            version=version,
            parent_version=parent_version,
            file=file.name,
            total_bytes=partial.stat().st_size,
            checksum=checksum,
            tensors=tuple(
                TensorSpec(name=name, dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape))
                for name, tensor in weights.items()
            ),
        )
        partial.replace(file)
        encoded = msgspec.json.encode(manifest)
        parent = parent_version if fork else None
        self._connection.call(lambda _: self._scripts.announce(self._epoch, version, encoded, self._keep, parent))
        self._published.append(file)
        while len(self._published) > self._keep:
            self._published.pop(0).unlink(missing_ok=True)
        return manifest
