"""The list's text search, which takes bounded time per answer and bounded memory."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from penstock.deploy.inspector.rows import InspectedRow

_KEPT_CHARACTERS = 64_000_000
_KEPT_QUERIES = 8


class TextSearch:
    """Searches the texts of groups, from several threads; a repeated query continues where the last answer stopped.

    Keeps the answers for the last `_KEPT_QUERIES` queries, and up to `kept_characters` of the groups' texts; others are
    read again for each query.

    text_of: returns a group's text, case-folded.
    """

    def __init__(self, text_of: Callable[[InspectedRow], str], kept_characters: int = _KEPT_CHARACTERS) -> None:
        self._text_of = text_of
        self._kept_characters = kept_characters
        self._lock = threading.Lock()
        self._texts: dict[str, str] = {}
        self._num_characters = 0
        self._answers: dict[str, dict[str, bool]] = {}
        """Whether a group holds the text, by query, the latest last, and by the group's key."""

    def matching(self, rows: Sequence[InspectedRow], wanted: str, limit_s: float) -> tuple[list[InspectedRow], int]:
        """Searches as many rows as `limit_s` allows; returns those that hold `wanted`, and how many were searched."""
        deadline = time.monotonic() + limit_s
        wanted = wanted.casefold()
        with self._lock:
            answers = self._answers[wanted] = self._answers.pop(wanted, {})
            if len(self._answers) > _KEPT_QUERIES:
                del self._answers[next(iter(self._answers))]
        found: list[InspectedRow] = []
        for n, row in enumerate(rows):
            holds = answers.get(row.key)
            if holds is None:
                if time.monotonic() > deadline:
                    return found, n
                holds = wanted in self._text(row)
                with self._lock:
                    answers[row.key] = holds
            if holds:
                found.append(row)
        return found, len(rows)

    def keep(self, rows: Iterable[InspectedRow]) -> None:
        """Drops what is kept of every other group."""
        keys = {row.key for row in rows}
        with self._lock:
            for key in self._texts.keys() - keys:
                self._num_characters -= len(self._texts.pop(key))
            for answers in self._answers.values():
                for key in answers.keys() - keys:
                    del answers[key]

    def _text(self, row: InspectedRow) -> str:
        text = self._texts.get(row.key)
        if text is None:
            text = self._text_of(row)
            with self._lock:
                if row.key not in self._texts and self._num_characters + len(text) <= self._kept_characters:
                    self._texts[row.key] = text
                    self._num_characters += len(text)
        return text
