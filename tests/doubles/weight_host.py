"""A host of producers whose engines keep what they load: no policy may be served by other bits than were published."""

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
    """What an engine gets from a file, in memory of its own."""
    return load(Path(path).read_bytes())


def are_bits(found: Weights, expected: Weights) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype
        and found[name].shape == expected[name].shape
        and found[name].reshape(-1).view(torch.uint8).equal(expected[name].reshape(-1).view(torch.uint8))
        for name in expected
    )


class VerifyingEngine(ScriptedEngine):
    """Keeps the tensors that it has loaded last, and of each load whether they were those published as that version.

    expected: by version, what was published.
    """

    def __init__(self, expected: Mapping[int, Weights], **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self._expected = expected
        self.wrong: list[int] = []

    async def load_weights(self, manifest: WeightManifest, path: str, restore: object = None) -> float:
        if not are_bits(await asyncio.to_thread(read, path), self._expected[manifest.version]):
            self.wrong.append(manifest.version)
        return await super().load_weights(manifest, path)


class HostProducer:
    """The part of a producer that follows the policy, on a host whose copies are in `folder`."""

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
        for task in self.tasks:
            if task.done():
                task.result()
        return self.weights.loaded and self.engine.policy_version == version

    def rebuilt(self, reason: str) -> float:
        name = "penstock_weight_copies_rebuilt_total"
        return self.metrics.registry.get_sample_value(name, {"reason": reason}) or 0.0

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.connection.close()


def corrupt_copy(folder: Path, harm: str, *, wait: bool = True) -> None:
    """Harms a host's copy while nobody loads from it; raises BlockingIOError if somebody does, unless it may wait.

    `torn`: half of its bytes are others, and it is dirty, as a kill in the middle of a patch leaves it. `overwritten`:
    the same, and it looks clean. `stateless`, `cut short`, `removed`: what the names say; the folder is removed.
    """
    descriptor = os.open(folder / "read", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        (file,) = folder.glob("weights-*")
        if harm in ("torn", "stateless"):
            (folder / "state").unlink(missing_ok=True)
        if harm in ("torn", "overwritten"):
            size = file.stat().st_size
            with file.open("r+b") as stream:
                stream.seek(size // 2)
                stream.write(bytes(255 - byte for byte in file.read_bytes()[size // 2 :]))
        if harm == "cut short":
            os.truncate(file, file.stat().st_size // 2)
        if harm == "removed":
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)
