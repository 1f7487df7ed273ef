"""What a producer leaves in the run folder for the report: one JSON object a line."""

import time
from pathlib import Path
from typing import Any, TextIO

import msgspec

_encoder = msgspec.json.Encoder()


class Telemetry:
    """Appends to `<run folder>/producers/<id>.jsonl`; writes nothing where there is no run folder (another host)."""

    def __init__(self, run_folder: Path, producer_id: str) -> None:
        self._file: TextIO | None = None
        if run_folder.is_dir():
            file = run_folder / "producers" / f"{producer_id}.jsonl"
            file.parent.mkdir(exist_ok=True)
            self._file = file.open("a", buffering=1)

    def write(self, event: str, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(_encoder.encode({"event": event, "time_s": time.time(), **fields}).decode() + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
