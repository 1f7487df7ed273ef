"""Answers the page's requests for a run's groups, from several threads."""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import redis

from penstock.deploy.inspector.content import beginning, group_fields, row_fields, searched_text
from penstock.deploy.inspector.rows import InspectedRow, RowQuery, facets, select
from penstock.deploy.inspector.searching import TextSearch
from penstock.deploy.inspector.sources import Source
from penstock.deploy.inspector.tokens import TokenTexts
from penstock.schemas.record import RecordReadError

REFRESH_S = 0.5
"""Between two reads of new groups."""
SEARCH_S = 1.0
"""The time that one answer may spend on searching texts."""
_KEPT_BEGINNINGS = 20_000


class Catalogue:
    """The groups of one run. texts: None shows tokens as ids. remarks: notes for the page's head, one line each."""

    def __init__(self, name: str, source: Source, texts: TokenTexts | None, remarks: Sequence[str] = ()) -> None:
        self.name = name
        self.source = source
        self._texts = texts
        self._remarks = remarks
        self._lock = threading.Lock()
        self._refreshed_s = time.monotonic()
        self._problem = ""
        self._beginning = lru_cache(_KEPT_BEGINNINGS)(self._read_beginning)
        self._search = TextSearch(self._text_of)
        self._facets: tuple[int, dict[str, list[str]]] = -1, {}

    def run(self) -> dict[str, Any]:
        """Returns the head of the page."""
        with self._lock:
            self._refresh()
            source = self.source
            if self._facets[0] != source.revision:
                self._facets = source.revision, facets(source.rows)
            notes = [self._problem, *self._remarks, *source.notes]
            return {
                "name": self.name,
                "kind": source.kind,
                "revision": source.revision,
                "num_groups": len(source.rows),
                "newest": source.rows[-1].number if source.rows else None,
                "notes": [note for note in notes if note],
                "facets": self._facets[1],
            }

    def page(self, query: RowQuery) -> dict[str, Any]:
        """Returns one page of the list. While a text search is incomplete, `searched` is less than `to_search`, and
        the same query continues it."""
        found, searched, to_search = self._select(query, SEARCH_S)
        start = (query.page - 1) * query.size
        return {
            "rows": [
                row_fields(row) | {"prompt_beginning": self._beginning(row.key)}
                for row in found[start : start + query.size]
            ],
            "num_found": len(found),
            "num_pages": max(1, -(-len(found) // query.size)),
            "searched": searched,
            "to_search": to_search,
        }

    def group(self, key: str) -> dict[str, Any]:
        """Returns a whole group. Raises as `Source.read` does."""
        return group_fields(self.source.read(key), self._texts)

    def export(self, query: RowQuery) -> Iterator[dict[str, Any]]:
        """Yields every group that matches the query; one that can no longer be read is a line that says so."""
        found, _, _ = self._select(query, math.inf)
        for row in found:
            try:
                yield self.group(row.key)
            except (KeyError, RecordReadError) as error:
                yield row_fields(row) | {"problem": f"cannot be read any more: {error}"}

    def _refresh(self) -> None:
        if time.monotonic() - self._refreshed_s < REFRESH_S:
            return
        before = self.source.revision
        try:
            self.source.refresh()
            self._problem = ""
        except (RecordReadError, redis.RedisError, OSError) as error:
            self._problem = f"new groups cannot be read now: {error}"
        if self.source.revision != before:
            self._search.keep(self.source.rows)
        self._refreshed_s = time.monotonic()

    def _select(self, query: RowQuery, limit_s: float) -> tuple[list[InspectedRow], int, int]:
        with self._lock:
            rows = list(self.source.rows)
        found = select(rows, query)
        if not query.q:
            return found, 0, 0
        matching, searched = self._search.matching(found, query.q, limit_s)
        return matching, searched, len(found)

    def _read_beginning(self, key: str) -> str:
        try:
            return beginning(self.source.read(key).group)
        except (KeyError, RecordReadError):
            return ""

    def _text_of(self, row: InspectedRow) -> str:
        try:
            return searched_text(self.source.read(row.key).group)
        except (KeyError, RecordReadError):
            return ""
