"""The books as a file of the run folder, for views and reports. Training does not depend on it."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class LedgerFile:
    """`trainer.json`: what became of every released group, as of the last checkpoint. Whole or as it was before."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_behind = False

    def write(self, books: Mapping[str, Any]) -> None:
        """A full disk leaves the books of before: the checkpoint holds what matters, and the next one writes these."""
        partial = self._file.with_suffix(".json.partial")
        try:
            partial.write_text(json.dumps(books, indent=1))
            partial.replace(self._file)
        except OSError as error:
            if not self._is_behind:
                log.warning("%s cannot be written: %s; it is written with a later checkpoint", self._file, error)
            self._is_behind = True
            return
        if self._is_behind:
            log.info("%s is written again", self._file)
        self._is_behind = False
