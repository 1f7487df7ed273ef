"""Answers the page's questions about a run's groups, from several threads."""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import redis

from penstock.deploy.inspector.content import beginning, group_fields, row_fields, searched_text
from penstock.deploy.inspector.rows import InspectedRow, RowQuery, facets, select
from penstock.deploy.inspector.searching import TextSearch
from penstock.deploy.inspector.sources import Source
from penstock.deploy.inspector.tokens import TokenTexts
from penstock.schemas.record import RecordReadError

LOOK_S = 0.5
"""Between two looks at what came since."""
SEARCH_S = 1.0
"""The time that one answer searches texts for."""
_KEPT_BEGINNINGS = 20_000


class Catalogue:
    """texts: None if tokens are shown as ids. remarks: what a reader should know, one line each."""

    def __init__(self, name: str, source: Source, texts: TokenTexts | None, remarks: Sequence[str] = ()) -> None:
        self.name = name
        self.source = source
        self._texts = texts
        self._remarks = remarks
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._problem = ""
        self._beginnings: dict[str, str] = {}
        self._search = TextSearch(self._text_of)
        self._facets: tuple[int, dict[str, list[str]]] = -1, {}

    def run(self) -> dict[str, Any]:
        """The head of the page."""
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
        """One page of the list. While a text search is incomplete, `searched` is less than `to_search`; the same query
        again continues it."""
        found, searched, to_search = self._select(query, SEARCH_S)
        start = (query.page - 1) * query.size
        return {
            "rows": [row_fields(row) | self._beginning_of(row) for row in found[start : start + query.size]],
            "num_found": len(found),
            "num_pages": max(1, -(-len(found) // query.size)),
            "searched": searched,
            "to_search": to_search,
        }

    def group(self, key: str) -> dict[str, Any]:
        """Raises KeyError and RecordReadError as `Source.look` does."""
        return group_fields(self.source.look(key), self._texts)

    def export(self, query: RowQuery) -> Iterator[dict[str, Any]]:
        """Every group that matches the query, whole; a group that cannot be read any more is a line that says so."""
        found, _, _ = self._select(query, math.inf)
        for row in found:
            try:
                yield self.group(row.key)
            except (KeyError, RecordReadError) as error:
                yield row_fields(row) | {"problem": f"cannot be read any more: {error}"}

    def _refresh(self) -> None:
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        before = self.source.revision
        try:
            self.source.refresh()
            self._problem = ""
        except (RecordReadError, redis.RedisError, OSError) as error:
            self._problem = f"what came since cannot be read now: {error}"
        if self.source.revision != before:
            self._search.keep(self.source.rows)
        self._looked_s = time.monotonic()

    def _select(self, query: RowQuery, limit_s: float) -> tuple[list[InspectedRow], int, int]:
        with self._lock:
            rows = list(self.source.rows)
        found = select(rows, query)
        if not query.q:
            return found, 0, 0
        matching, searched = self._search.matching(found, query.q, limit_s)
        return matching, searched, len(found)

    def _beginning_of(self, row: InspectedRow) -> dict[str, str]:
        """The beginning of a group's prompt, kept for the pages that were looked at last."""
        with self._lock:
            text = self._beginnings.pop(row.key, None)
        if text is None:
            try:
                text = beginning(self.source.look(row.key).group)
            except (KeyError, RecordReadError):
                text = ""
        with self._lock:
            self._beginnings[row.key] = text
            if len(self._beginnings) > _KEPT_BEGINNINGS:
                del self._beginnings[next(iter(self._beginnings))]
        return {"prompt_beginning": text}

    def _text_of(self, row: InspectedRow) -> str:
        try:
            return searched_text(self.source.look(row.key).group)
        except (KeyError, RecordReadError):
            return ""
