"""What a producer leaves in the run folder for the report: one JSON object a line."""

import time
from pathlib import Path
from typing import Any

from penstock.schemas.process.json_lines import JsonLines


class EventLog:
    """Appends to `<run folder>/producers/<id>.jsonl`; writes nothing where there is no run folder (another host)."""

    def __init__(self, run_folder: Path, producer_id: str) -> None:
        self._lines: JsonLines | None = None
        if run_folder.is_dir():
            self._lines = JsonLines(run_folder / "producers" / f"{producer_id}.jsonl")

    def write(self, event: str, **fields: Any) -> None:
        if self._lines is not None:
            self._lines.write(event=event, time_s=time.time(), **fields)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
