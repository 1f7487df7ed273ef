"""Policies by number: the weight manifest, version arithmetic, and lag along the line of policies."""

from collections.abc import Mapping

import msgspec

VERSIONS_PER_EPOCH = 10**9
"""A trainer's epoch (the number of trainers before it) is the version's leading part: no version is ever reused."""
UNKNOWN_VERSION = -1


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Announces one policy. Its weights are in a safetensors file, relative to the run's weights folder.

    `checksum` is the BLAKE2b-128 of the whole file, hexadecimal; `total_bytes` its size. `parent_version` is the policy
    that this one was trained from (for a re-announcement after a resume: the checkpoint's), -1 for the base model.
    """

    version: int
    parent_version: int
    file: str
    total_bytes: int
    checksum: str
    tensors: tuple[TensorSpec, ...]


class UnknownVersionError(ValueError):
    """A version that was never announced."""


class FutureVersionError(ValueError):
    """A version that the trainer has not reached yet."""


def make_version(epoch: int, steps: int) -> int:
    """The policy version after `steps` optimizer steps of trainer `epoch`."""
    return epoch * VERSIONS_PER_EPOCH + steps


def split_version(version: int) -> tuple[int, int]:
    """The inverse of `make_version`: (epoch, steps)."""
    return divmod(version, VERSIONS_PER_EPOCH)


def lag(version: int, current: int, forks: Mapping[int, int], announced: Mapping[int, int] | None = None) -> int:
    """The optimizer steps on the path between two policies.

    On one line `current - version`; through the fork if a rollback lies between them; 0 between a checkpoint and its
    re-announcement.

    Args:
        version: the version that sampled a token.
        current: the trainer's version.
        forks: for each epoch after the first, the version its first policy equals.
        announced: for each epoch that has ended, the last version announced; None skips that check.

    Raises:
        UnknownVersionError: `version` was never announced.
        FutureVersionError: `version` is ahead of `current` on its line.
    """
    if version < 0:
        raise UnknownVersionError(f"version {version} is unknown")
    epoch, steps = split_version(version)
    current_epoch, current_steps = split_version(current)
    if epoch > current_epoch or (epoch == current_epoch and steps > current_steps):
        raise FutureVersionError(f"version {version} is ahead of the trainer's {current}")
    if epoch and epoch not in forks:
        raise UnknownVersionError(f"version {version} belongs to epoch {epoch}, which the fork table does not hold")
    if announced is not None and epoch < current_epoch and version > announced.get(epoch, -1):
        raise UnknownVersionError(f"version {version} was never announced in epoch {epoch}")
    ancestry = _ancestry(current, forks)
    distance = 0
    while epoch not in ancestry:
        distance += steps
        epoch, steps = split_version(forks[epoch])
    shared_steps, above = ancestry[epoch]
    return distance + above + abs(shared_steps - steps)


def _ancestry(version: int, forks: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """For each epoch on the line to `version`: (its last step on that line, the optimizer steps from there on)."""
    line: dict[int, tuple[int, int]] = {}
    above = 0
    epoch, steps = split_version(version)
    while True:
        line[epoch] = (steps, above)
        if epoch == 0:
            return line
        if epoch not in forks:
            raise UnknownVersionError(f"epoch {epoch} of version {version} is not in the fork table")
        above += steps
        epoch, steps = split_version(forks[epoch])
