"""Stands in for the trainer of a measured producer: releases prompts, announces a file of weights, trims.

A process of its own, as the trainer is, that computes nothing: `python -m bench.feeder RUN.toml ...`.
"""

import argparse
import hashlib
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.scripts import Scripts
from penstock.producers.engines.weight_files import read_header
from penstock.schemas.config import RunConfig, load_config
from penstock.schemas.keys import Keys
from penstock.schemas.policy import WeightManifest
from penstock.schemas.process.redis_url import redis_url

_TICK_S = 0.02
_TRIM_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Feeds until it is terminated."""
    parser = argparse.ArgumentParser(prog="python -m bench.feeder", description="Feed one measured producer.")
    parser.add_argument("run_file", type=Path, metavar="RUN.toml")
    parser.add_argument("--manifest", type=Path, required=True, metavar="FILE", help="what to announce, as JSON")
    parser.add_argument("--updates-per-s", type=float, required=True, metavar="RATE")
    arguments = parser.parse_args(argv)
    manifest = msgspec.json.decode(arguments.manifest.read_bytes(), type=WeightManifest)
    feed(load_config(arguments.run_file), manifest, arguments.updates_per_s)
    return 0


def feed(config: RunConfig, manifest: WeightManifest, updates_per_s: float) -> None:
    """Keeps as many prompts open as the credit allows and announces the same bytes as ever newer policies, every 20 ms
    what is due. Never returns."""
    connection, keys = TrainerConnection(redis_url(config, Path()), outage_s=10.0), Keys(config.name)
    scripts = Scripts(connection.client, keys)
    scripts.open_epoch(0, uuid.uuid4().hex)
    version = released = 0
    next_update = next_trim = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= next_update:
            announced = msgspec.structs.replace(manifest, version=version, parent_version=version - 1)
            scripts.announce(0, version, msgspec.json.encode(announced), config.weights.keep_versions, None)
            version += 1
            next_update += 1 / updates_per_s
        num_open = connection.client.xlen(keys.prompts)
        if num_open < config.credit:
            released = scripts.release(0, released + config.credit - num_open, released, version - 1)
        if now >= next_trim:
            connection.client.xtrim(keys.rollouts, maxlen=0, approximate=False)
            next_trim += _TRIM_S
        time.sleep(_TICK_S)


def make_manifest(file: Path) -> WeightManifest:
    """The announcement of a safetensors file, as version 0."""
    with file.open("rb") as stream:
        checksum = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return WeightManifest(
        version=0,
        parent_version=-1,
        file=file.name,
        total_bytes=file.stat().st_size,
        checksum=checksum,
        tensors=tuple(read_header(file).values()),
    )


if __name__ == "__main__":
    sys.exit(main())
