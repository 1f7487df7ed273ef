"""The `Source` protocol of the page's groups, and the source that reads a run's record."""

import re
from typing import NamedTuple, Protocol

from penstock.deploy.inspector.rows import InspectedRow
from penstock.schemas.record import BatchHead, Findings, RecordReadError
from penstock.schemas.record_reader import BatchAt, GroupAt, Record
from penstock.schemas.rollout import RolloutGroup


class InspectedGroup(NamedTuple):
    """One whole group.

    group: None if its bytes cannot be decoded; `problem` then says why.
    findings: by rollout and segment; a lag of -1 is unknown.
    batch: the batch that it was part of; None on the stream. remark: the policy that its lags are counted from.
    """

    row: InspectedRow
    group: RolloutGroup | None
    findings: Findings
    batch: BatchHead | None
    remark: str
    problem: str = ""


class Source(Protocol):
    """The groups behind the page. One thread at a time calls its methods, several call `read`.

    kind: "record" or "stream".
    rows: in order of arrival. revision: changes whenever they do.
    notes: what a reader should know, one line each.
    """

    kind: str
    rows: list[InspectedRow]
    revision: int
    notes: list[str]

    def refresh(self) -> None:
        """Reads what was written since the last call. Raises RecordReadError or redis.RedisError."""

    def read(self, key: str) -> InspectedGroup:
        """Returns a group. Raises KeyError if none has this key, RecordReadError if it can no longer be read."""


class RecordSource:
    """A run's record, followed while it is written.

    Keys are `<trainer's epoch>-<batch's position>-<place in the batch>`: a batch that is repeated after a rollback has
    the position of the one that it replaces.
    """

    kind = "record"

    def __init__(self, record: Record) -> None:
        self._record = record
        self.rows: list[InspectedRow] = []
        self.revision = 0
        self.notes: list[str] = []
        self._known: dict[_Batch, list[InspectedRow]] = {}
        self._places: dict[_Batch, BatchAt] = {}
        self._undone: set[_Batch] = set()
        self._take()

    def refresh(self) -> None:
        self._record.refresh()
        self._take()

    def read(self, key: str) -> InspectedGroup:
        match = _KEY.fullmatch(key)
        if match is None:
            raise KeyError(key)
        epoch, position, place = map(int, match.groups())
        if (epoch, position) in self._undone:
            raise RecordReadError(f"batch {position} of trainer {epoch} was undone by a rollback")
        at = self._places[epoch, position]
        head = self._record.head(at)
        if place >= len(head.groups):
            raise KeyError(key)
        recorded = self._record.group(GroupAt(at, head, place))
        row = self._known[epoch, position][place]
        if not recorded.payload:
            return InspectedGroup(row, None, (), head, "", f"dead: {row.entry.reason}")
        remark = f"lags are counted from policy {head.policy_version}, the trainer's when it took the batch"
        try:
            return InspectedGroup(row, recorded.decode(), recorded.findings, head, remark)
        except ValueError as error:
            return InspectedGroup(row, None, (), head, remark, str(error))

    def _take(self) -> None:
        known: dict[_Batch, list[InspectedRow]] = {}
        places = {_name(at): at for at in self._record.batches}
        self.notes = list(self._record.notes)
        for name, at in places.items():
            try:
                known[name] = self._known.get(name) or self._rows_of(at)
            except RecordReadError as error:  # one batch that was altered or dropped does not hide the others
                self.notes.append(str(error))
        if known.keys() != self._known.keys():
            self.rows = [row for rows in known.values() for row in rows]
            self.revision += 1
        self._known, self._places = known, places
        self._undone = set(map(_name, self._record.undone))

    def _rows_of(self, at: BatchAt) -> list[InspectedRow]:
        head = self._record.head(at)
        epoch, position = _name(at)
        return [
            InspectedRow(
                f"{epoch}-{position}-{place}", position * _MAX_GROUPS + place, entry.outcome, head.update, entry
            )
            for place, entry in enumerate(head.groups)
        ]


_MAX_GROUPS = 10**6
"""More than any batch has: row numbers grow from batch to batch."""
_KEY = re.compile(r"([0-9]{1,15})-([0-9]{1,15})-([0-9]{1,15})")
_Batch = tuple[int, int]
"""The trainer's epoch and the batch's position."""


def _name(at: BatchAt) -> _Batch:
    return at.file.header.epoch, at.position
