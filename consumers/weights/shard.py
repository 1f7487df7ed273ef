"""The part of a policy that one rank publishes: its changes, encoded and put into a chunk store."""

import functools
import logging
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model.published import PublishedPart
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.weights.snapshots import Snapshots
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Keys
from penstock.schemas.policy import Chunk, TensorSpec
from penstock.schemas.weights.codec import ChunkError, Slice, encode_chunk
from penstock.schemas.weights.layout import Array
from penstock.schemas.weights.log import VersionGoneError
from penstock.schemas.weights.reading import WeightReader
from penstock.schemas.weights.stores import Call, open_store

log = logging.getLogger(__name__)

MAX_PIECE_BYTES = 16 << 20
MAX_CHUNK_BYTES = 32 << 20
"""Bytes of tensors in one chunk: bounds what encoding holds in memory and what a reader fetches at once."""


class NoRoomError(Exception):
    """The chunks of a policy do not fit into the room for them in Redis."""


class DenseError(Exception):
    """The chunks of a delta take half the bytes of a whole policy or more."""


class Task(NamedTuple):
    """What each rank has to write of a policy.

    version: the newest or the one before. before: the base of a delta. place: of the store. room: the most bytes that a
        rank may put there. attempt: a task that differs from the last one in its room alone continues that one.
    """

    version: int
    before: int | None
    whole: bool
    place: str
    room: float
    attempt: int


class Written(NamedTuple):
    """One rank's answer to a `Task`. tensors: all of the policy, whole. chunks: put into the store so far."""

    tensors: tuple[TensorSpec, ...]
    chunks: list[Chunk]
    failure: Exception | None = None


class _Extent(NamedTuple):
    """Elements [begin, end) of the buffer of tensor number `tensor`."""

    tensor: int
    begin: int
    end: int


class PolicyShard:
    """One rank's shards of the policy.

    call: of a Redis client of this rank. collect, num_kept: see `Snapshots`.
    """

    def __init__(
        self,
        ranks: Ranks,
        keys: Keys,
        call: Call[Any],
        collect: Callable[[], Callable[[], list[PublishedPart]]],
        num_kept: int = 2,
    ) -> None:
        self._rank = ranks.rank
        self.store = functools.cache(lambda place: open_store(place, keys, call))
        """Returns the store at a place. Raises ConfigError: see `open_store`."""
        self.snapshots = Snapshots(collect, num_kept)
        self._reader = WeightReader(call, keys)
        self._asked: set[int] = set()
        """The versions that the weight log was asked for."""
        self._whole_bytes = 0
        """Bytes of this rank's chunks when the policy was last written whole."""
        self._last: Task | None = None
        self._chunks: list[Chunk] = []
        self._num_groups = 0

    @property
    def progress(self) -> str:
        """How much of the task is done, for a log line."""
        if self._last is None:
            return "the snapshot is not taken"
        written, place = list(self._chunks), self._last.place
        num_bytes = sum(chunk.num_bytes for chunk in written)
        return (
            f"of policy {self._last.version} {len(written)} of {self._num_groups} chunks ({num_bytes:,} bytes) are in "
            f"{place}"
        )

    def policy(self, version: int) -> list[Tensor] | None:
        """Returns this rank's elements of each tensor of a published policy, [count]: those in memory, or, as after a
        resume, those of the weight log; None if it is gone from there too."""
        values = self.snapshots.values(version)
        if values is not None or version in self._asked:
            return values
        self._asked.add(version)
        self.snapshots.wait()  # it knows the tensors
        try:
            with tempfile.TemporaryDirectory(prefix="penstock-policy-") as folder:
                file = Path(folder) / "model.safetensors"
                self._reader.write(self._reader.log().chain(version), file)
                return self.snapshots.add(version, load_file(file))
        except (VersionGoneError, ChunkError, OSError) as error:
            log.warning("policy %d cannot be read from the weight log: %s", version, error)
            return None

    def write(self, task: Task) -> Written:
        """Writes this rank's chunks; the answer holds an error that prevented it. Waits for the snapshot."""
        if self._last is None or self._last != task._replace(room=self._last.room):
            self._chunks = []
        self._last = task
        failure = None
        try:
            self._write(task)
        except Exception as error:
            failure = error
        return Written(self.snapshots.tensors, list(self._chunks), failure)

    def _write(self, task: Task) -> None:
        new = self.snapshots.bits(task.version)
        old = None if task.before is None else self.snapshots.bits(task.before)
        num_bytes = sum(chunk.num_bytes for chunk in self._chunks)
        groups = _groups(new)
        self._num_groups = len(groups)
        for extents in groups[len(self._chunks) :]:
            kind = "whole" if task.whole else "delta"
            chunk, data = encode_chunk(
                f"{task.version}-{kind}-{self._rank}-{len(self._chunks)}",
                [self._slice(extent, old, new) for extent in extents],
                whole=task.whole,
            )
            num_bytes += len(data)
            if not task.whole and 2 * num_bytes >= self._whole_bytes:
                raise DenseError
            if num_bytes > task.room:
                raise NoRoomError
            self.store(task.place).put(chunk.key, data)
            self._chunks.append(chunk)
        if task.whole:
            self._whole_bytes = num_bytes

    def _slice(self, extent: _Extent, old: list[Array] | None, new: list[Array]) -> Slice:
        tensor, begin, end = extent
        before = None if old is None else old[tensor][begin:end]
        return Slice(tensor, self.snapshots.starts[tensor] + begin, before, new[tensor][begin:end])


def open_shard(config: RunConfig, ranks: Ranks, call: Call[Any], learner: Learner) -> PolicyShard:
    """Returns the shard that this rank publishes, from which the learner also reads older policies, if it does."""
    num_kept = max(2, config.num_trained_versions) if config.correction.proximal == "sampled_version" else 2
    shard = PolicyShard(ranks, Keys(config.name), call, learner.published_parts, num_kept)
    learner.follow_versions(shard.policy)
    return shard


class ShardPublisher:
    """Writes the shards of a rank other than the lead in a thread, by order of the lead's `Publisher`.

    ranks: all of them.
    """

    def __init__(self, shard: PolicyShard, ranks: Ranks) -> None:
        self._shard = shard
        self._ranks = ranks.for_thread("publisher")
        self._thread = threading.Thread(target=self._serve, name="publisher", daemon=True)
        self._failure: Exception | None = None

    def begin(self, version: int) -> None:
        """Begins the snapshot of policy `version`. Called in the main thread, by order of the lead.

        Raises the error that has ended the thread: communication with the lead failed.
        """
        if self._failure is not None:
            raise self._failure
        self._shard.snapshots.begin(version)
        if self._thread.ident is None:
            self._thread.start()

    def _serve(self) -> None:
        try:
            while True:
                task = self._ranks.hand_out(_lead_decides)
                self._ranks.phase = "publish"
                self._ranks.gather(self._shard.write(task))
                self._ranks.phase = ""
        except Exception as error:
            self._failure = error


def _lead_decides(rank: int) -> Task:
    raise NotImplementedError("the lead alone knows what to write")


def _groups(buffers: list[Array]) -> list[list[_Extent]]:
    """Returns the extents of each chunk, which are the same for every version."""
    groups: list[list[_Extent]] = []
    room = 0
    for tensor, buffer in enumerate(buffers):
        step = MAX_PIECE_BYTES // buffer.itemsize
        for begin in range(0, len(buffer), step):
            end = min(begin + step, len(buffer))
            num_bytes = (end - begin) * buffer.itemsize
            if num_bytes > room:
                groups.append([])
                room = MAX_CHUNK_BYTES
            groups[-1].append(_Extent(tensor, begin, end))
            room -= num_bytes
    return groups
