"""Reads the weight log: fetches and checks chunks, writes a policy to a file and compares its digests."""

import functools
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.schemas.keys import Keys
from penstock.schemas.policy import Chunk, WeightManifest
from penstock.schemas.weights.codec import ChunkError, Part, apply, digest, unpack
from penstock.schemas.weights.layout import Layout, LayoutError
from penstock.schemas.weights.log import WeightLog, read_log
from penstock.schemas.weights.stores import Call, open_store


class WeightReader:
    """Reads one run's log. num_bytes: the bytes fetched so far.

    call: of a synchronous Redis client.
    """

    def __init__(self, call: Call[Any], keys: Keys) -> None:
        self._call, self._keys = call, keys
        self._store = functools.cache(lambda place: open_store(place, keys, call))
        self.num_bytes = 0

    def log(self) -> WeightLog:
        """Reads the whole log. Raises redis.RedisError."""
        log: WeightLog = self._call(lambda client: read_log(client, self._keys))
        return log

    def parts(self, manifest: WeightManifest, chunk: Chunk) -> list[Part]:
        """Fetches a chunk.

        Raises:
            ChunkStoreError, ConfigError: see `penstock.schemas.weights.stores`.
            ChunkError: it differs from the announced one.
        """
        data = self._store(manifest.store).get(chunk.key)
        self.num_bytes += len(data)
        where = f"policy {manifest.version}: chunk {chunk.key} in {manifest.store}"
        if len(data) != chunk.num_bytes:
            raise ChunkError(f"{where}: {len(data):,} bytes, expected {chunk.num_bytes:,}")
        if (found := digest(data)) != chunk.digest:
            raise ChunkError(f"{where}: XXH3 digest {found}, expected {chunk.digest}")
        return unpack(data)

    def write(self, chain: Iterable[WeightManifest], path: Path) -> WeightManifest:
        """Writes the policy at the end of `chain`, which begins with a whole policy, as a safetensors file; returns its
        manifest.

        Raises:
            OSError: no space at `path`, or a store failed.
            ConfigError, ChunkError: see `parts` and `verify`.
        """
        file: mmap.mmap | None = None
        for manifest in chain:
            layout = layout_of(manifest)
            if file is None:
                file = create(path, layout)
            for chunk in manifest.chunks:
                apply(self.parts(manifest, chunk), layout, file)
        assert file is not None
        verify(manifest, layout, file)
        file.flush()
        return manifest


def layout_of(manifest: WeightManifest) -> Layout:
    """Returns a manifest's layout. Raises ChunkError if its tensors or pieces do not form a policy."""
    where = f"policy {manifest.version}"
    try:
        layout = Layout(manifest.tensors)
    except LayoutError as error:
        raise ChunkError(f"{where}: {error}") from None
    if not layout.is_tiled_by([piece for chunk in manifest.chunks for piece in chunk.pieces]):
        raise ChunkError(f"{where}: the pieces of its chunks are not all elements of its tensors, each once")
    return layout


def create(path: Path, layout: Layout) -> mmap.mmap:
    """Creates and maps a file for policies of this layout, with only its header. Its space is reserved: later writes
    cannot run out of it.

    Raises:
        OSError: no space; the message says where, and how much was needed.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        try:
            os.posix_fallocate(descriptor, 0, layout.num_bytes)
        except OSError as error:
            path.unlink()
            raise OSError(error.errno, f"{error.strerror}: {layout.num_bytes:,} bytes are needed", str(path)) from None
        file = mmap.mmap(descriptor, layout.num_bytes)
    finally:
        os.close(descriptor)
    file[: len(layout.header)] = layout.header
    return file


def verify(manifest: WeightManifest, layout: Layout, file: Any) -> None:
    """Compares the digests of all pieces.

    Raises:
        ChunkError: names the first tensor whose bits differ from those published.
    """
    for chunk in manifest.chunks:
        for piece in chunk.pieces:
            if digest(layout.piece(file, piece)) != piece.digest:
                name = manifest.tensors[piece.tensor].name
                raise ChunkError(
                    f"policy {manifest.version}: {name}, elements {piece.start} to {piece.start + piece.count}: other "
                    "bits than were published"
                )
