"""Stands in for the trainer of a measured producer: releases prompts, announces weights, trims.

A process of its own, as the trainer is, that computes nothing: `python -m bench.feeder RUN.toml ...`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from safetensors import deserialize

from penstock.consumers.checkpoints.state import ReleasedTask
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.scripts import Scripts
from penstock.producers.engines.weight_files import DTYPES
from penstock.schemas.config import RunConfig, load_config
from penstock.schemas.keys import Keys
from penstock.schemas.policy import Chunk, TensorSpec, WeightManifest
from penstock.schemas.process.redis_url import redis_url
from penstock.schemas.weights.codec import Slice, encode_chunk
from penstock.schemas.weights.layout import element_bytes
from penstock.schemas.weights.stores import ChunkStore, RedisChunks

_TICK_S = 0.02
_TRIM_S = 1.0
_PIECE = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Feeds until it is terminated."""
    parser = argparse.ArgumentParser(prog="python -m bench.feeder", description="Feed one measured producer.")
    parser.add_argument("run_file", type=Path, metavar="RUN.toml")
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="what to announce: safetensors")
    parser.add_argument("--updates-per-s", type=float, required=True, metavar="RATE")
    arguments = parser.parse_args(argv)
    feed(load_config(arguments.run_file), arguments.weights, arguments.updates_per_s)
    return 0


def feed(config: RunConfig, weights: Path, updates_per_s: float) -> None:
    """Keeps as many prompts open as the credit allows and announces the same weights as ever newer policies, checking
    every 20 ms what is due. Never returns."""
    connection, keys = TrainerConnection(redis_url(config, Path()), outage_s=10.0), Keys(config.name)
    scripts = Scripts(connection, keys)
    scripts.open_epoch(0)
    manifest = make_manifest(weights, RedisChunks(connection.call, keys))
    version = released = 0
    (name,) = config.every_environment
    next_update = next_trim = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= next_update:
            announced = msgspec.structs.replace(manifest, version=version, parent_version=version - 1)
            scripts.announce(version, msgspec.json.encode(announced), b"", version)
            version += 1
            next_update += 1 / updates_per_s
        num_open = connection.client.xlen(keys.prompts)
        if num_open < config.credit:
            tasks = [ReleasedTask(name, released + n) for n in range(1, config.credit - num_open + 1)]
            released = scripts.release(released, tasks, version - 1)
        if now >= next_trim:
            connection.client.xtrim(keys.rollouts, maxlen=0, approximate=False)
            next_trim += _TRIM_S
        time.sleep(_TICK_S)


def make_manifest(file: Path, store: ChunkStore) -> WeightManifest:
    """Puts a safetensors file into a chunk store as one whole policy; returns its announcement as version 0."""
    tensors, total_bytes = [], 0
    chunks: list[Chunk] = []
    for number, (name, found) in enumerate(deserialize(file.read_bytes())):
        tensor = TensorSpec(name=name, dtype=DTYPES[found["dtype"]], shape=tuple(found["shape"]))
        tensors.append(tensor)
        total_bytes += len(found["data"])
        elements = np.frombuffer(found["data"], f"u{element_bytes(tensor)}")
        for start in range(0, len(elements), _PIECE):
            piece = elements[start : start + _PIECE]
            chunk, data = encode_chunk(f"0-whole-0-{len(chunks)}", [Slice(number, start, None, piece)], whole=True)
            chunks.append(chunk)
            store.put(chunk.key, data)
    return WeightManifest(
        version=0,
        parent_version=-1,
        total_bytes=total_bytes,
        tensors=tuple(tensors),
        chunks=tuple(chunks),
        store=store.place,
    )


if __name__ == "__main__":
    sys.exit(main())
