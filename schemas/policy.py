"""Policies by number: the weight manifest, version arithmetic, and lag along the line of policies."""

import math
from collections.abc import Mapping

import msgspec

VERSIONS_PER_EPOCH = 10**9
"""A trainer's epoch (the number of earlier trainers) is the version's leading part: no version is ever reused."""
UNKNOWN_VERSION = -1


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Elements of one tensor, and their digest after the update.

    tensor: its index in the manifest's `tensors`. start, count: in elements, of the tensor in row-major order.
    digest: XXH3-128 of their bytes, hexadecimal.
    """

    tensor: int
    start: int
    count: int
    digest: str


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Some pieces of a policy, as one object of a chunk store; `penstock.schemas.weights.codec` defines its content.

    digest: XXH3-128 of the object, hexadecimal. num_changed: elements of the pieces that the update changed.
    """

    key: str
    num_bytes: int
    digest: str
    num_changed: int
    pieces: tuple[Piece, ...]


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Announces one policy: its tensors, and the chunks with the changed elements.

    parent_version: the policy that this one was trained from (for a re-announcement after a resume: the checkpoint's),
        -1 for the base model.
    total_bytes: of all tensors.
    delta_of: the version that the chunks change into this one; None if they hold the whole policy.
    chunks: their pieces are all elements of all tensors, each once, including unchanged ones.
    store: where the chunks are: "redis", a folder, or an fsspec URL.
    created_s: when it was announced, in seconds since 1970; 0 if unknown.
    base_digest: of the base model if the tensors are an adapter, see `penstock.schemas.model_digest`; unset if they are
        a whole model.
    run_id: of the run, see `penstock.schemas.keys.Commit`. Empty in earlier releases.
    """

    version: int
    parent_version: int
    total_bytes: int
    tensors: tuple[TensorSpec, ...]
    delta_of: int | None = None
    chunks: tuple[Chunk, ...] = ()
    store: str = "redis"
    created_s: float = 0.0
    base_digest: str | msgspec.UnsetType = msgspec.UNSET
    run_id: str = ""

    @property
    def chunk_bytes(self) -> int:
        """The bytes that a reader has to fetch."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def num_changed(self) -> int:
        return sum(chunk.num_changed for chunk in self.chunks)

    @property
    def num_elements(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


class UnknownVersionError(ValueError):
    """A version that was never announced."""


class FutureVersionError(ValueError):
    """A version that the trainer has not reached yet."""


def make_version(epoch: int, steps: int) -> int:
    """Returns the policy version after `steps` optimizer steps of trainer `epoch`."""
    return epoch * VERSIONS_PER_EPOCH + steps


def split_version(version: int) -> tuple[int, int]:
    """Returns (epoch, steps): the inverse of `make_version`."""
    return divmod(version, VERSIONS_PER_EPOCH)


def lag(version: int, current: int, forks: Mapping[int, int], announced: Mapping[int, int] | None = None) -> int:
    """Returns the number of optimizer steps on the path between two policies.

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


def steps_behind(held: int, wanted: int) -> float:
    """Returns `lag` of policy `held` when the trainer is at `wanted`, for a process without the fork table.

    Zero or less if `held` is as new. Infinite if `wanted` is of a later epoch: that epoch's first weights are fetched
    before anything that it released is sampled.
    """
    held_epoch, held_steps = split_version(held)
    wanted_epoch, wanted_steps = split_version(wanted)
    if held_epoch != wanted_epoch:
        return math.inf if held_epoch < wanted_epoch else 0
    return wanted_steps - held_steps


def _ancestry(version: int, forks: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Returns, for each epoch on the line to `version`, its last step on that line and the optimizer steps after it."""
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
