"""Writes a weight log as a trainer does: whole policies, deltas and anchors with bits that a test chooses."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from penstock.schemas.keys import Field, Keys
from penstock.schemas.policy import Chunk, TensorSpec, WeightManifest
from penstock.schemas.weights.codec import Slice, encode_chunk
from penstock.schemas.weights.layout import element_bytes
from penstock.schemas.weights.stores import REDIS, ChunkStore, RedisChunks, open_store

Bits = Mapping[str, np.ndarray]
"""A policy: tensors as unsigned integers of their element's size, by name."""


class WeightWriter:
    """Writes policies of float32 tensors to the log of run `run`.

    policies: the bits of every version written so far. manifests: those announced.
    """

    def __init__(
        self,
        client: Any,
        run: str = "test",
        *,
        store: ChunkStore | None = None,
        anchors: ChunkStore | None = None,
        piece: int = 1 << 20,
    ) -> None:
        self.client, self.keys = client, Keys(run)
        self.store: ChunkStore = store or RedisChunks(lambda command: command(self.client), self.keys)
        self.anchors = anchors or self.store
        """Where whole policies go."""
        self.policies: dict[int, dict[str, np.ndarray]] = {}
        self.manifests: dict[int, WeightManifest] = {}
        self._tensors: tuple[TensorSpec, ...] | None = None
        self._piece = piece

    def whole(self, version: int, bits: Bits, *, parent: int | None = None, **changes: Any) -> WeightManifest:
        """Announces a policy with all of its bits; `changes` replace fields of its manifest."""
        return self._announce(self._manifest(version, bits, None, parent, "whole"), changes)

    def delta(self, version: int, bits: Bits, of: int, **changes: Any) -> WeightManifest:
        """Announces a policy as a delta of policy `of`."""
        return self._announce(self._manifest(version, bits, of, of, "delta"), changes)

    def anchor(self, version: int) -> WeightManifest:
        """Adds an anchor for a policy that is announced already."""
        manifest = self._manifest(version, self.policies[version], None, None, "anchor")
        self.client.hset(self.keys.anchors, version, msgspec.json.encode(manifest))
        return manifest

    def trim(self, floor: int) -> None:
        """Removes what is older than `floor`, an anchor or a whole policy: announcements and anchors, then chunks."""
        for version in self.client.hkeys(self.keys.anchors):
            if int(version) < floor:
                self.client.hdel(self.keys.anchors, version)
        self.client.xtrim(self.keys.policy, minid=f"{floor}-0", approximate=False)
        kept = self.store.keys()
        self.store.delete([key for key in kept if int(key.partition("-")[0]) < floor])

    def _manifest(self, version: int, bits: Bits, of: int | None, parent: int | None, kind: str) -> WeightManifest:
        tensors = self._tensors or tuple(
            TensorSpec(name=name, dtype="float32", shape=array.shape) for name, array in bits.items()
        )
        chunks: list[Chunk] = []
        store = self.anchors if of is None else self.store
        for number, tensor in enumerate(tensors):
            new = np.ascontiguousarray(bits[tensor.name]).reshape(-1)
            assert new.dtype == f"u{element_bytes(tensor)}"
            old = None if of is None else self.policies[of][tensor.name].reshape(-1)
            for start in range(0, len(new), self._piece):
                end = start + self._piece
                slices = [Slice(number, start, None if old is None else old[start:end], new[start:end])]
                chunk, data = encode_chunk(f"{version}-{kind}-0-{len(chunks)}", slices, whole=old is None)
                store.put(chunk.key, data)
                chunks.append(chunk)
        self.policies[version] = {name: array.copy() for name, array in bits.items()}
        return WeightManifest(
            version=version,
            parent_version=version - 1 if parent is None else parent,
            total_bytes=sum(array.nbytes for array in bits.values()),
            tensors=tensors,
            delta_of=of,
            chunks=tuple(chunks),
            store=store.place,
        )

    def _announce(self, manifest: WeightManifest, changes: Mapping[str, Any]) -> WeightManifest:
        manifest = msgspec.structs.replace(manifest, **changes)
        self.manifests[manifest.version] = manifest
        data = msgspec.json.encode(manifest)
        self.client.xadd(self.keys.policy, {Field.MANIFEST: data}, id=f"{manifest.version}-1")
        if manifest.delta_of is None:
            self.client.hset(self.keys.anchors, manifest.version, data)
        return manifest


class WrittenLog(WeightWriter):
    """A weight log of torch's tensors. deltas, anchors: the places of their chunks, as in the run file."""

    def __init__(self, client: Any, keys: Keys, *, deltas: str = REDIS, anchors: str = REDIS) -> None:
        stores = [open_store(place, keys, lambda command: command(client)) for place in (deltas, anchors)]
        super().__init__(client, store=stores[0], anchors=stores[1])
        self.keys = keys

    def announce(self, version: int, policy: Mapping[str, torch.Tensor]) -> WeightManifest:
        """Announces a policy: the first as an anchor, others as a delta of the one before."""
        self._tensors = tuple(
            TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in policy.items()
        )
        bits = {
            name: tensor.contiguous().flatten().view(torch.uint8).numpy().view(f"u{tensor.element_size()}")
            for name, tensor in policy.items()
        }
        before = max(self.policies, default=None)
        return self.whole(version, bits) if before is None else self.delta(version, bits, of=before)

    def drop(self, *versions: int) -> None:
        """Removes versions as a trainer does: entries and anchors first, then their chunks."""
        for version in versions:
            self.client.xdel(self.keys.policy, f"{version}-1")
            self.client.hdel(self.keys.anchors, str(version))
        for store in (self.store, self.anchors):
            keys = store.keys()
            store.delete([key for key in keys if int(key.partition("-")[0]) in versions])
