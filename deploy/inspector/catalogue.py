"""Answers the page's requests for a run's groups, from several threads: its record in one table, asked in SQL."""

import math
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from penstock.deploy.inspector.content import (
    InspectedGroup,
    InspectedRow,
    beginning,
    group_fields,
    row_fields,
    searched_text,
)
from penstock.deploy.inspector.query import GROUPS_PER_BATCH, RowQuery, condition, ordering
from penstock.deploy.report.tokens import TokenTexts
from penstock.schemas.record import SCHEMA, GroupEntry, RecordReadError, from_row, to_row
from penstock.schemas.record_reader import BatchAt, GroupAt, Record
from penstock.schemas.rollout import RolloutGroup

REFRESH_S = 0.5
"""Between two reads of new groups."""
SEARCH_S = 1.0
"""The time that one answer may spend on reading texts to search."""
_KEPT_BEGINNINGS = 20_000
_MAX_CHOICES = 500
_TEXTS = "CREATE TABLE texts (position INTEGER, place INTEGER, text TEXT, PRIMARY KEY (position, place))"
_ROWS = "FROM groups JOIN batches USING (position) LEFT JOIN texts USING (position, place)"
_KEY = re.compile(r"([0-9]{1,15})-([0-9]{1,15})-([0-9]{1,15})")


class Catalogue:
    """The groups of one run's record, which is followed while it is written.

    Keys are `<trainer's epoch>-<batch's position>-<place in the batch>`: a batch that is repeated after a rollback has
    the position of the one that it replaces. texts: None shows tokens as ids. remarks: notes for the page's head, one
    line each.
    """

    def __init__(self, name: str, record: Record, texts: TokenTexts | None, remarks: Sequence[str] = ()) -> None:
        self.name = name
        self._record = record
        self._texts = texts
        self._remarks = remarks
        self._lock = threading.Lock()
        self._table = sqlite3.connect("", check_same_thread=False)  # a temporary database: it may outgrow the memory
        self._table.executescript(f"{SCHEMA}{_TEXTS}")
        self._listed: dict[int, BatchAt] = {}
        """By position, the batches in the table."""
        self._revision = 0
        self._notes: list[str] = []
        self._problem = ""
        self._beginning = lru_cache(_KEPT_BEGINNINGS)(self._read_beginning)
        self._take()
        self._refreshed_s = time.monotonic()

    @property
    def num_groups(self) -> int:
        with self._lock:
            return int(self._value("SELECT count(*) FROM groups"))

    def run(self) -> dict[str, Any]:
        """Returns the head of the page."""
        with self._lock:
            self._refresh()
            newest = self._value(f"SELECT max(position * {GROUPS_PER_BATCH} + place) FROM groups")
            return {
                "name": self.name,
                "revision": self._revision,
                "num_groups": self._value("SELECT count(*) FROM groups"),
                "newest": newest,
                "notes": [note for note in (self._problem, *self._remarks, *self._notes) if note],
                "facets": {
                    "outcome": self._choices("outcome", "groups"),
                    "finish": self._choices("value", "groups, json_each(finish_reasons)"),
                    "producer": self._choices("producer_id", "groups"),
                    "environment": self._choices("environment", "groups"),
                },
            }

    def page(self, query: RowQuery) -> dict[str, Any]:
        """Returns one page of the list. While a text search is incomplete, `searched` is less than `to_search`, and
        the same query continues it."""
        with self._lock:
            where, values, searched, to_search = self._searched(query, SEARCH_S)
            num_found = int(self._value(f"SELECT count(*) {_ROWS} WHERE {where}", values))
            values |= {"size": query.size, "start": (query.page - 1) * query.size}
            rows = self._select(query, f"{where} ORDER BY {ordering(query)} LIMIT :size OFFSET :start", values)
        return {
            "rows": [row_fields(row) | {"prompt_beginning": self._beginning(row.key)} for row in rows],
            "num_found": num_found,
            "num_pages": max(1, -(-num_found // query.size)),
            "searched": searched,
            "to_search": to_search,
        }

    def group(self, key: str) -> dict[str, Any]:
        """Returns a whole group. Raises as `read` does."""
        return group_fields(self.read(key), self._texts)

    def export(self, query: RowQuery) -> Iterator[dict[str, Any]]:
        """Yields every group that matches the query; one that can no longer be read is a line that says so."""
        with self._lock:
            where, values, _, _ = self._searched(query, math.inf)
            rows = self._select(query, f"{where} ORDER BY {ordering(query)}", values)
        for row in rows:
            try:
                yield self.group(row.key)
            except (KeyError, RecordReadError) as error:
                yield row_fields(row) | {"problem": f"cannot be read any more: {error}"}

    def read(self, key: str) -> InspectedGroup:
        """Reads a group. Raises KeyError if none has this key, RecordReadError if it can no longer be read."""
        match = _KEY.fullmatch(key)
        if match is None:
            raise KeyError(key)
        epoch, position, place = map(int, match.groups())
        at = self._listed.get(position)
        if at is None or at.file.header.epoch != epoch:
            if any(undone.position == position and undone.file.header.epoch == epoch for undone in self._record.undone):
                raise RecordReadError(f"batch {position} of trainer {epoch} was undone by a rollback")
            raise KeyError(key)
        head = self._record.head(at)
        if place >= len(head.groups):
            raise KeyError(key)
        row = InspectedRow(key, position * GROUPS_PER_BATCH + place, head.update, head.groups[place])
        recorded = self._record.group(GroupAt(at, head, place))
        if not recorded.payload:
            return InspectedGroup(row, None, (), head, "", f"dead: {row.entry.reason}")
        remark = f"lags are counted from policy {head.policy_version}, the trainer's when it took the batch"
        try:
            return InspectedGroup(row, recorded.decode(), recorded.findings, head, remark)
        except ValueError as error:
            return InspectedGroup(row, None, (), head, remark, str(error))

    def _refresh(self) -> None:
        if time.monotonic() - self._refreshed_s < REFRESH_S:
            return
        try:
            self._record.refresh()
            self._take()
            self._problem = ""
        except (RecordReadError, OSError) as error:
            self._problem = f"new groups cannot be read now: {error}"
        self._refreshed_s = time.monotonic()

    def _take(self) -> None:
        """Makes the table that of the batches on the record's surviving line."""
        surviving = {at.position: at for at in self._record.batches}
        notes = list(self._record.notes)
        listed: dict[int, BatchAt] = {}
        changed = False
        for position, at in self._listed.items():
            now = surviving.get(position)
            if now is not None and now.file.header.epoch == at.file.header.epoch:
                listed[position] = now  # perhaps in a later file
                continue
            changed = True
            for table in ("batches", "groups", "texts"):
                self._table.execute(f"DELETE FROM {table} WHERE position = ?", (position,))
        for position in surviving.keys() - listed.keys():
            try:
                head = self._record.head(surviving[position])
            except RecordReadError as error:  # one batch that was altered or dropped does not hide the others
                notes.append(str(error))
                continue
            changed = True
            listed[position] = surviving[position]
            self._insert("batches", to_row(head))
            for place, entry in enumerate(head.groups):
                self._insert("groups", (position, place, *to_row(entry)))
        self._listed, self._notes = listed, notes
        self._revision += changed

    def _searched(self, query: RowQuery, limit_s: float) -> tuple[str, dict[str, Any], int, int]:
        """Returns a query's condition and its parameters, and how many of the groups that its other filters match
        have been searched for its text, of how many."""
        where, values = condition(query)
        if not query.q:
            return where, values, 0, 0
        deadline = time.monotonic() + limit_s
        to_search = int(self._value(f"SELECT count(*) {_ROWS} WHERE {where}", values))
        unread = f"SELECT position, place {_ROWS} WHERE {where} AND text IS NULL ORDER BY {ordering(query)}"
        num_unread = 0
        for position, place in self._table.execute(unread, values).fetchall():
            if num_unread or time.monotonic() > deadline:
                num_unread += 1
            else:
                self._insert("texts", (position, place, searched_text(self._group(self._key(position, place)))))
        values["q"] = query.q.casefold()
        return f"{where} AND instr(text, :q)", values, to_search - num_unread, to_search

    def _select(self, query: RowQuery, rest: str, values: dict[str, Any]) -> list[InspectedRow]:
        found = self._table.execute(f"SELECT update_number, groups.* {_ROWS} WHERE {rest}", values)
        return [
            InspectedRow(
                self._key(position, place), position * GROUPS_PER_BATCH + place, update, from_row(GroupEntry, entry)
            )
            for update, position, place, *entry in found
        ]

    def _insert(self, table: str, row: Sequence[Any]) -> None:
        self._table.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

    def _value(self, sql: str, values: dict[str, Any] | None = None) -> Any:
        return self._table.execute(sql, values or {}).fetchone()[0]

    def _choices(self, column: str, table: str) -> list[str]:
        sql = f"SELECT DISTINCT {column} FROM {table} WHERE {column} <> '' ORDER BY 1 LIMIT {_MAX_CHOICES}"
        return [choice for (choice,) in self._table.execute(sql)]

    def _key(self, position: int, place: int) -> str:
        return f"{self._listed[position].file.header.epoch}-{position}-{place}"

    def _group(self, key: str) -> RolloutGroup | None:
        try:
            return self.read(key).group
        except (KeyError, RecordReadError):
            return None

    def _read_beginning(self, key: str) -> str:
        return beginning(self._group(key))
