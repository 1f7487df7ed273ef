"""Policies compared bit for bit, and a host's copy of one corrupted."""

import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load

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
