"""Producers of one host whose engines compare each policy that they load, bit for bit, with what was published."""

import asyncio
import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load

from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.weights.follower import WeightFollower
from penstock.producers.weights.host_copy import HostCopy
from penstock.schemas.keys import Keys
from penstock.schemas.policy import WeightManifest
from penstock.schemas.weights.reading import WeightReader
from scripted_engine import ScriptedEngine

Weights = Mapping[str, torch.Tensor]


def read(path: Path | str) -> Weights:
    """Reads a file of weights into memory, as an engine does."""
    return load(Path(path).read_bytes())


def are_bits(found: Weights, expected: Weights) -> bool:
    """Returns whether two policies are equal bit for bit."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype
        and found[name].shape == expected[name].shape
        and found[name].reshape(-1).view(torch.uint8).equal(expected[name].reshape(-1).view(torch.uint8))
        for name in expected
    )


class VerifyingEngine(ScriptedEngine):
    """An engine that compares each policy that it loads. expected: the published weights by version. wrong: versions
    that differed."""

    def __init__(self, expected: Mapping[int, Weights], **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self._expected = expected
        self.wrong: list[int] = []

    async def load_weights(self, manifest: WeightManifest, path: str, restore: object = None) -> float:
        if not are_bits(await asyncio.to_thread(read, path), self._expected[manifest.version]):
            self.wrong.append(manifest.version)
        return await super().load_weights(manifest, path)


class HostProducer:
    """The part of a producer that follows the policy, on a host with its copies in `folder`."""

    def __init__(
        self, url: str, folder: Path, keys: Keys, expected: Mapping[int, Weights], outage_s: float = 20
    ) -> None:
        self.metrics = ProducerMetrics()
        self.engine = VerifyingEngine(expected)
        self.connection = ProducerConnection.open(url, outage_s=outage_s, metrics=self.metrics)
        reader = WeightReader(self.connection.call, keys)
        self.copy = HostCopy(str(folder), keys.run, "redis", reader, self.metrics)
        self.weights = WeightFollower(self.connection, keys, self.engine, self.copy, self.metrics)
        self.tasks = [asyncio.create_task(part()) for part in (self.weights.follow, self.weights.keep_current)]

    def serves(self, version: int) -> bool:
        """Returns whether the engine holds this version; raises the error of a failed part."""
        for task in self.tasks:
            if task.done():
                task.result()
        return self.weights.loaded and self.engine.policy_version == version

    def rebuilt(self, reason: str) -> float:
        """Returns how many copies were rebuilt for this reason."""
        name = "penstock_weight_copies_rebuilt_total"
        return self.metrics.registry.get_sample_value(name, {"reason": reason}) or 0.0

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.connection.close()


def corrupt_copy(folder: Path, how: str) -> None:
    """Corrupts a host's copy while no producer loads from it.

    how: `torn`: half of its bytes are wrong and its state is missing, as after a kill during a patch. `overwritten`:
    half of its bytes are wrong, and its state is clean. `stateless`: its state is missing. `cut short`: half of the
    file is missing. `removed`: the whole folder is.
    """
    descriptor = os.open(folder / "read", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        (file,) = folder.glob("weights-*")
        if how in ("torn", "stateless"):
            (folder / "state").unlink(missing_ok=True)
        if how in ("torn", "overwritten"):
            size = file.stat().st_size
            with file.open("r+b") as stream:
                stream.seek(size // 2)
                stream.write(bytes(255 - byte for byte in file.read_bytes()[size // 2 :]))
        if how == "cut short":
            os.truncate(file, file.stat().st_size // 2)
        if how == "removed":
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)
