"""The source that reads a live run's rollout stream, whose groups have no findings of the trainer yet."""

from functools import cache
from typing import Any, NamedTuple

import redis

from penstock.deploy.inspector.rows import InspectedRow
from penstock.deploy.inspector.sources import InspectedGroup
from penstock.deploy.operate.producer_list import lag_by_commit
from penstock.schemas.keys import Commit, Field, Keys, Kind, number_in
from penstock.schemas.record import Findings, GroupEntry, SegmentFindings, dead_group, group_entry
from penstock.schemas.rollout import RecordError, RolloutGroup, decode_group, one_line

_ENTRIES_PER_READ = 32
_KEPT_BYTES = 256_000_000
_START = b"0-0"
_PER_MILLISECOND = 1000
"""Row numbers for each millisecond of entry ids."""
_MOST = 2**53 - 10**9
"""Largest row number from an id: a browser's numbers are exact up to 2**53."""


class _Kept(NamedTuple):
    """One group in memory. commit: the commit hash that its lags are counted with."""

    row: InspectedRow
    payload: bytes
    commit: dict[bytes, bytes]


class StreamSource:
    """Reads the stream with XREAD from its first entry, and keeps groups that the trainer trims later.

    Keys are entry ids. It acknowledges and writes nothing. Lags are counted when a group is read. Beyond `kept_bytes`
    it drops the oldest groups.
    """

    kind = "stream"

    def __init__(self, client: redis.Redis, keys: Keys, kept_bytes: int = _KEPT_BYTES) -> None:
        self._client = client
        self._keys = keys
        self._kept_bytes = kept_bytes
        self._cursor = _START
        self.rows: list[InspectedRow] = []
        self.revision = 0
        self.notes: list[str] = []
        self._kept: dict[str, _Kept] = {}
        self._num_bytes = self._num_read = self._num_dropped = 0
        self._num_trimmed: int | None = None
        """None before the first read."""
        self.refresh()

    def refresh(self) -> None:
        info = self._info()
        if self._num_trimmed is None:
            self._num_trimmed = info.get("entries-added", 0) - info.get("length", 0)
        elif _key(info.get("last-generated-id", _START)) < _key(self._cursor):  # the server was emptied
            self._cursor, self._num_read, self._num_trimmed = _START, 0, 0
        while self._read():
            self._drop_oldest()
        self._note(self._info())

    def read(self, key: str) -> InspectedGroup:
        row, payload, commit = self._kept[key]
        version = _current(commit)
        remark = f"lags are counted from policy {version}, the newest when this page read the group"
        if row.outcome == "dead" and not payload:
            return InspectedGroup(row, None, (), None, remark, f"dead: {row.entry.reason}")
        try:
            group = decode_group(payload, dead=row.outcome == "dead")
        except RecordError as error:
            return InspectedGroup(row, None, (), None, remark, str(error))
        return InspectedGroup(row, group, _findings(group, commit), None, remark)

    def _read(self) -> bool:
        reply: Any = self._client.xread({self._keys.rollouts: self._cursor}, count=_ENTRIES_PER_READ)
        entries = reply[0][1] if reply else []
        if not entries:
            return False
        commit: dict[bytes, bytes] = self._client.hgetall(self._keys.commit)  # type: ignore[assignment]
        for entry_id, fields in entries:
            self._take(entry_id.decode(), fields, commit)
            self._cursor = entry_id
        self._num_read += len(entries)
        self.revision += 1
        return True

    def _take(self, key: str, fields: dict[bytes, bytes], commit: dict[bytes, bytes]) -> None:
        payload = fields.get(Field.PAYLOAD, b"")
        index = number_in(fields.get(Field.INDEX)) or 0
        if fields.get(Field.KIND) == Kind.DEAD:
            reason = one_line(fields.get(Field.REASON, b"unknown").decode(errors="replace"))
            producer = one_line(fields.get(Field.PRODUCER, b"").decode(errors="replace"))
            (entry, (payload, _)), outcome = dead_group(index, reason, producer, payload), "dead"
        else:
            try:
                group = decode_group(payload)
                # "skipped" stands in for an outcome that is not known yet; the row says so.
                entry, outcome = group_entry(group, _findings(group, commit), "skipped"), "unsettled"
            except RecordError as error:
                entry, outcome = GroupEntry(index=index, outcome="dead", reason=str(error)), "unreadable"
        row = InspectedRow(key, self._number(key), outcome, None, entry)
        self.rows.append(row)
        self._kept[key] = _Kept(row, payload, commit)
        self._num_bytes += len(payload)

    def _number(self, key: str) -> int:
        """Returns a row's number. It follows from the entry's id, so that a link means the same to everyone, and
        exceeds all before it, even if the server's clock was set back."""
        milliseconds, sequence = _key(key.encode())
        least = self.rows[-1].number + 1 if self.rows else 0
        number = milliseconds * _PER_MILLISECOND + min(sequence, _PER_MILLISECOND - 1)
        # An id that no clock gives, which a writer may choose, gets the next number.
        return max(least, number if number < _MOST else 0)

    def _drop_oldest(self) -> None:
        num = 0
        while self._num_bytes > self._kept_bytes and num < len(self.rows) - 1:
            self._num_bytes -= len(self._kept.pop(self.rows[num].key).payload)
            num += 1
        if num:
            self.rows = self.rows[num:]
            self._num_dropped += num
            self.revision += 1

    def _note(self, info: dict[str, Any]) -> None:
        self.notes = [
            "groups on the rollout stream: the trainer's findings (proximal logprobs, weights) are not there yet"
        ]
        if self._num_trimmed:
            self.notes.append(f"{self._num_trimmed:,} entries were trimmed from the stream before this page started")
        missed = info.get("entries-added", 0) - (self._num_trimmed or 0) - self._num_read
        if missed > 0 and info.get("last-generated-id", _START) == self._cursor:
            self.notes.append(f"{missed:,} entries arrived and were trimmed between two reads")
        if self._num_dropped:
            self.notes.append(f"the oldest {self._num_dropped:,} groups were dropped here, to bound memory")

    def _info(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._client.xinfo_stream(self._keys.rollouts)
            return found
        except redis.ResponseError as error:
            if "no such key" in str(error):  # nothing was appended yet
                return {}
            raise


def _findings(group: RolloutGroup, commit: dict[bytes, bytes]) -> Findings:
    """Returns findings that hold lags only."""
    current = _current(commit)

    @cache
    def lag(version: int) -> int:
        behind = lag_by_commit(version, current, commit)
        return -1 if behind is None else behind

    return tuple(
        tuple(SegmentFindings(tuple(lag(span.version) for span in segment.version_spans)) for segment in each.segments)
        for each in group.rollouts
    )


def _current(commit: dict[bytes, bytes]) -> int:
    return number_in(commit.get(Commit.VERSION)) or 0


def _key(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence)
