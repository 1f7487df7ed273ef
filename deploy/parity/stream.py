"""Rollouts of a run, read from its stream by XREAD: nothing is acknowledged, trimmed or held back."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import redis
from penstock.consumers.parity.errors import ParityError
from penstock.consumers.stream.scripts import announced_of, forks_of
from penstock.deploy.operate.run_access import OpenRun
from penstock.deploy.parity.material import Material, versions_of
from penstock.deploy.parity.weights import WeightVersions, with_neighbours
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Commit, Field, Keys, Kind
from penstock.schemas.rollout import RecordError, RolloutGroup, decode_group

_ENTRIES = 16
_BLOCK_MS = 500


class StreamReader:
    """The newest groups of a rollout stream, at most `num_groups` of them.

    num_seen: groups read so far. num_refused: of these, such that break the contract; `refusal` says what the last one
    broke.
    """

    def __init__(self, client: redis.Redis, keys: Keys, num_groups: int) -> None:
        self._client, self._keys = client, keys
        self._cursor = "0-0"
        self._groups: deque[RolloutGroup] = deque(maxlen=num_groups)
        self.num_seen = self.num_refused = 0
        self.refusal = ""

    @property
    def groups(self) -> list[RolloutGroup]:
        """In order of arrival."""
        return list(self._groups)

    @property
    def is_full(self) -> bool:
        return len(self._groups) == self._groups.maxlen

    def read(self, *, block: bool) -> None:
        """Reads to the stream's end. With `block` it waits a moment there for one more entry."""
        while entries := self._read(None):
            self._take(entries)
        if block:
            self._take(self._read(_BLOCK_MS))

    def _read(self, block_ms: int | None) -> list[tuple[bytes, dict[bytes, bytes]]]:
        found: Any = self._client.xread({self._keys.rollouts: self._cursor}, count=_ENTRIES, block=block_ms)
        return found[0][1] if found else []

    def _take(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        for entry_id, fields in entries:
            self._cursor = entry_id.decode()
            if fields.get(Field.KIND) != Kind.GROUP:
                continue
            self.num_seen += 1
            try:
                self._groups.append(decode_group(fields.get(Field.PAYLOAD, b"")))
            except RecordError as error:
                self.num_refused += 1
                self.refusal = str(error)


def read_run(
    run: OpenRun,
    config: RunConfig,
    weights: WeightVersions,
    *,
    num_groups: int,
    wait_s: float,
    say: Callable[[str], None],
) -> Material:
    """The newest groups of a run, and its weights held.

    Waits, while the run has producers and fewer than `num_groups` groups are on its stream: more groups unblock it, or
    the end of `wait_s`.

    Raises:
        ParityError: there are no rollouts.
        ServerError: Redis cannot be reached.
    """
    client, keys = run.redis, run.keys
    reader = StreamReader(client, keys, num_groups)
    deadline = time.monotonic() + wait_s
    while True:
        weights.hold()
        reader.read(block=False)
        # Once more: what was sampled by a version announced meanwhile is in hand too.
        weights.hold()
        newest = weights.versions[-config.weights.keep_versions :]
        weights.keep_only(with_neighbours(versions_of(reader.groups)).union(newest))
        if reader.is_full or time.monotonic() >= deadline or not _is_alive(client, keys):
            break
        say(f"waiting for rollouts: {len(reader.groups)} of {num_groups}")
        reader.read(block=True)
    if not reader.groups:
        raise ParityError(_why_empty(run, client, reader))
    weights.keep_only(with_neighbours(versions_of(reader.groups)))
    commit: Any = client.hgetall(keys.commit)  # last: it is to know every version that a token may name
    notes = [f"the newest {len(reader.groups)} of {reader.num_seen} groups on the stream"]
    if reader.num_refused:
        notes.append(f"{reader.num_refused} groups break the contract, the last one so: {reader.refusal}")
    return Material(
        title=f"run {run.name}",
        config=config,
        groups=reader.groups,
        weights=weights,
        policy_version=int(commit.get(Commit.VERSION, -1)),
        forks=forks_of(commit),
        announced=announced_of(commit),
        notes=tuple(notes),
    )


def _is_alive(client: redis.Redis, keys: Keys) -> bool:
    """Whether some producer's heartbeat is there and the run is not finished."""
    if client.hget(keys.commit, Commit.FINISHED) == b"1":
        return False
    return next(client.scan_iter(match=keys.producer_pattern, count=1000), None) is not None


def _why_empty(run: OpenRun, client: redis.Redis, reader: StreamReader) -> str:
    if reader.num_refused:
        return f"run {run.name}: none of the {reader.num_seen} groups on its stream can be read: {reader.refusal}"
    where = f"run {run.name}: no rollouts on its stream"
    if not client.exists(run.keys.commit):
        return f"{where}: Redis knows nothing of this run"
    finished = client.hget(run.keys.commit, Commit.FINISHED) == b"1"
    state = "the run is finished" if finished else "no producer is at work"
    return (
        f"{where}: {state}, and the trainer trims what a checkpoint has settled. Check a run while it goes (`penstock "
        f"parity {run.name}`, with --save FILE to keep the rollouts), or its engine by a probe of its own: `penstock "
        f"parity {run.folder}/run.toml`"
    )
