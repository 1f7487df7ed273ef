"""How a run is doing, read from the lines its processes append to the run folder."""

import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
from penstock.deploy.report.telemetry import EvaluationPoint, ProducerEvent, Update, WeightsLoaded, to_record

_RATE_WINDOW = 60
"""Looks at the run's progress over which the rate is taken."""
_PAUSES_KEPT = 200


class Tail:
    """The records appended to a JSON-lines file since the last look; lines that are no such record are passed over."""

    def __init__(self, file: Path, kind: Any) -> None:
        self._file = file
        self._kind = kind
        self._offset = 0
        self._rest = b""

    def read(self) -> list[Any]:
        try:
            with self._file.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        records = []
        for line in lines:
            try:
                records.append(to_record(msgspec.json.decode(line), self._kind))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # a view shows what it can read; the report is where a broken line is an error
        return records


class Progress:
    """What the trainer and the local producers have reported so far.

    update: the latest batch, None before the first. evaluations: all points, oldest first.
    pauses_s: by producer id, the latest pauses for new weights in seconds.
    """

    def __init__(self, run_folder: Path) -> None:
        self.update: Update | None = None
        self.evaluations: list[EvaluationPoint] = []
        self.pauses_s: dict[str, deque[float]] = {}
        self._folder = run_folder
        self._updates = Tail(run_folder / "updates.jsonl", Update)
        self._evaluations = Tail(run_folder / "evaluations.jsonl", EvaluationPoint)
        self._producers: dict[str, Tail] = {}
        self._seen: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)
        # Lines of an earlier session of a resumed run say how far it came, not how fast this one is.
        self.poll()
        self._seen.clear()

    def poll(self) -> None:
        """Takes in what was appended since the last call."""
        updates = self._updates.read()
        if updates:
            self.update = updates[-1]
            if self._seen and self._seen[-1][1] > updates[-1].update:
                self._seen.clear()
            self._seen.append((time.monotonic(), updates[-1].update))
        self.evaluations += self._evaluations.read()
        for file in (self._folder / "producers").glob("*.jsonl"):
            tail = self._producers.setdefault(file.stem, Tail(file, ProducerEvent))
            pauses = self.pauses_s.setdefault(file.stem, deque(maxlen=_PAUSES_KEPT))
            pauses.extend(event.pause_s for event in tail.read() if isinstance(event, WeightsLoaded))

    @property
    def updates_per_s(self) -> float | None:
        """Batches per second over the last looks; None before there are two."""
        if len(self._seen) < 2:
            return None
        (start_s, start), (end_s, end) = self._seen[0], self._seen[-1]
        return (end - start) / (end_s - start_s) if end > start else None

    def left_s(self, num_updates: int) -> float | None:
        """Seconds until update `num_updates` at the present rate."""
        rate = self.updates_per_s
        if rate is None or self.update is None:
            return None
        return max(0, num_updates - self.update.update) / rate

    @property
    def mean_lag(self) -> float | None:
        """Mean lag of the last batch's tokens, in optimizer steps."""
        if self.update is None:
            return None
        total = sum(self.update.lag_histogram.values())
        return sum(lag * count for lag, count in self.update.lag_histogram.items()) / total if total else None
