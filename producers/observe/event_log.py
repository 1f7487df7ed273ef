"""A producer's events in the run folder, one JSON object a line, for the report."""

from pathlib import Path
from typing import Any

from penstock.schemas.process import clock
from penstock.schemas.process.json_lines import JsonLines


class EventLog:
    """Appends to `<run folder>/producers/<id>.jsonl`; writes nothing if there is no run folder (on another host)."""

    def __init__(self, run_folder: Path, producer_id: str) -> None:
        self._run_folder = run_folder
        self._file = run_folder / "producers" / f"{producer_id}.jsonl"
        self._lines: JsonLines | None = None

    def write(self, event: str, **fields: Any) -> None:
        if self._lines is None and self._run_folder.is_dir():
            self._lines = JsonLines(self._file)
        if self._lines is not None:
            self._lines.write(event=event, **clock.stamp(), **fields)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
