"""Compares what the trainer published under a version with what each engine read and labelled with it.

The trainer's side writes `published <version> <digest>` before anything of a policy is written, from the masters
themselves; a producer's engine writes `held <version> <digest>`, from the file that it loads, before it samples under
the version. The digest is BLAKE2b over names, types, shapes and bytes: the code under test uses another one.

A trainer of several ranks writes nothing: no rank has the whole tensors.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.consumers.weights.publisher import Publisher


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns the digest of a policy."""
    hashed = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def note(file: Path, what: str, version: int, found: str) -> None:
    """Appends one line in a single write, whoever else writes."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{what} {version} {found}\n".encode())
    finally:
        os.close(descriptor)


def watch_publications(file: Path) -> None:
    """Records each policy of this process before it is published."""
    publish = Publisher.publish

    def noted(self: Any, version: int, *rest: Any, **how: Any) -> None:
        if self._ranks.size == 1:
            parts = self._shard.snapshots._collect()()
            found = {part.name: part.values.to(part.dtype).reshape(part.shape) for part in parts}
            note(file, "published", version, digest(found))
        publish(self, version, *rest, **how)

    Publisher.publish = noted  # type: ignore[method-assign]


def judge_labels(file: Path) -> tuple[int, list[str]]:
    """Returns how often a policy was loaded, and what is wrong about it."""
    lines = [line.split(" ") for line in file.read_text().splitlines()] if file.exists() else []
    published = {(version, found) for what, version, found in lines if what == "published"}
    held = [(version, found) for what, version, found in lines if what == "held"]
    problems = []
    by_version = dict(published)
    if len(by_version) != len(published):
        problems.append("a version was published with two contents")
    if published:
        wrong = sorted({version for version, found in held if (version, found) not in published})
        if wrong:
            problems.append(f"{len(wrong)} versions held with other bits than were published: {', '.join(wrong[:8])}")
    return len(held), problems
