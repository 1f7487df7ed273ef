"""Writes a weight log in Redis and in stores of chunks, as a trainer does, from tensors."""

from collections.abc import Mapping
from typing import Any

import msgspec
import redis
import torch

from penstock.schemas.keys import Field, Keys
from penstock.schemas.policy import TensorSpec, WeightManifest
from penstock.schemas.weights.codec import Slice, encode_chunk
from penstock.schemas.weights.layout import as_bits
from penstock.schemas.weights.log import read_log
from penstock.schemas.weights.stores import REDIS, open_store

Policy = Mapping[str, torch.Tensor]


class WrittenLog:
    """A weight log. deltas, anchors: the places of their chunks, as in the run file."""

    def __init__(self, client: redis.Redis, keys: Keys, *, deltas: str = REDIS, anchors: str = REDIS) -> None:
        self.client, self.keys, self._deltas, self._anchors = client, keys, deltas, anchors
        self._policies: dict[int, Policy] = {}

    def store(self, place: str) -> Any:
        return open_store(place, self.keys, lambda command: command(self.client))

    def announce(self, version: int, policy: Policy, *, whole: bool = False) -> WeightManifest:
        """Announces a policy: the first, and each with `whole`, as an anchor, others as a delta of the one before."""
        before = None if whole or not self._policies else max(self._policies)
        self._policies[version] = {name: tensor.clone() for name, tensor in policy.items()}
        manifest = self._manifest(version, before)
        if before is None:
            self.client.hset(self.keys.anchors, str(version), msgspec.json.encode(manifest))
        self.client.xadd(self.keys.policy, {Field.MANIFEST: msgspec.json.encode(manifest)}, id=f"{version}-1")
        return manifest

    def anchor(self, version: int) -> WeightManifest:
        """Adds an anchor for an announced policy, in addition to its delta."""
        manifest = self._manifest(version, None)
        self.client.hset(self.keys.anchors, str(version), msgspec.json.encode(manifest))
        return manifest

    def drop(self, *versions: int) -> None:
        """Removes versions as a trainer does: entries and anchors first, then their chunks."""
        log = read_log(self.client, self.keys)
        for version in versions:
            self.client.xdel(self.keys.policy, f"{version}-1")
            self.client.hdel(self.keys.anchors, str(version))
            for manifest in (log.announced.get(version), log.anchors.get(version)):
                if manifest is not None:
                    self.store(manifest.store).delete(chunk.key for chunk in manifest.chunks)

    def _manifest(self, version: int, before: int | None) -> WeightManifest:
        policy = self._policies[version]
        slices = [
            Slice(number, 0, None if before is None else _bits(self._policies[before][name]), _bits(tensor))
            for number, (name, tensor) in enumerate(policy.items())
        ]
        kind, place = ("whole", self._anchors) if before is None else ("delta", self._deltas)
        chunk, data = encode_chunk(f"{version}-{kind}-0-0", slices, whole=before is None)
        self.store(place).put(chunk.key, data)
        return WeightManifest(
            version=version,
            parent_version=version - 1,
            total_bytes=sum(tensor.nbytes for tensor in policy.values()),
            tensors=tuple(
                TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
                for name, tensor in policy.items()
            ),
            delta_of=before,
            chunks=(chunk,),
            store=place,
        )


def _bits(tensor: torch.Tensor) -> Any:
    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return as_bits(tensor.contiguous().flatten().view(unsigned).numpy())
