"""Where the groups come from: the `Source` protocol, and a run's record."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.deploy.inspector.rows import InspectedRow
from penstock.schemas.record import BatchHead, Findings, RecordReadError
from penstock.schemas.record_reader import BatchAt, GroupAt, Record
from penstock.schemas.rollout import RolloutGroup


class Looked(NamedTuple):
    """One group whole.

    group: None if its bytes are no group; `problem` then says why.
    findings: by rollout and segment; a lag of -1 is unknown.
    batch: that it was part of; None on the stream. remark: which policy its lags are counted from, in words.
    """

    row: InspectedRow
    group: RolloutGroup | None
    findings: Findings
    batch: BatchHead | None
    remark: str
    problem: str = ""


class Source(Protocol):
    """The groups behind the page. One thread at a time calls its methods, several call `look`.

    kind: "record" or "stream".
    rows: in order of arrival. revision: changes whenever they do.
    notes: what a reader should know, one line each.
    """

    @property
    def kind(self) -> str: ...

    @property
    def rows(self) -> Sequence[InspectedRow]: ...

    @property
    def revision(self) -> int: ...

    @property
    def notes(self) -> Sequence[str]: ...

    def refresh(self) -> None:
        """Takes in what was written since the last look. Raises RecordReadError or redis.RedisError."""

    def look(self, key: str) -> Looked:
        """Raises KeyError if no group has this key, RecordReadError if it cannot be read any more."""


class RecordSource:
    """A run's record, followed while it is written.

    Keys are `<trainer's epoch>-<batch's position>-<place in it>`: a batch that is done again after a rollback has the
    position of the one that it replaces.
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

    def look(self, key: str) -> Looked:
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
            return Looked(row, None, (), head, "", f"dead: {row.entry.reason}")
        remark = f"lags are counted from policy {head.policy_version}, the trainer's when it took the batch"
        try:
            return Looked(row, recorded.decode(), recorded.findings, head, remark)
        except ValueError as error:
            return Looked(row, None, (), head, remark, str(error))

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
"""In a batch; keeps the rows' numbers growing."""
_KEY = re.compile(r"([0-9]{1,15})-([0-9]{1,15})-([0-9]{1,15})")
_Batch = tuple[int, int]
"""The trainer's epoch and the batch's position."""


def _name(at: BatchAt) -> _Batch:
    return at.file.header.epoch, at.position
