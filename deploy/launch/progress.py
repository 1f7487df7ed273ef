"""A run's progress, read from the lines that its processes append to the run folder."""

import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import msgspec

from penstock.deploy.launch.endpoints import Samples, scrape
from penstock.deploy.report.lines import EvaluationPoint, ProducerEvent, Update, WarmStartLine, WeightsLoaded, to_record
from penstock.deploy.report.means import masked_lag_frac, mean_lag
from penstock.deploy.report.summary_table import masked_advice
from penstock.deploy.report.telemetry import WARM_START
from penstock.schemas import limits
from penstock.schemas.metrics import TrainerMetric as M

_RATE_WINDOW = 60
"""New batches seen over which the rate is measured."""
_LAG_BATCHES = 10
"""Batches over which tokens masked for their lag are counted before a warning."""
_UPDATES_KEPT = 5000
_PAUSES_KEPT = 2000


class Tail:
    """Reads the records appended to a JSON-lines file since the last call; skips lines that are no records."""

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
                continue  # the report treats a broken line as an error, a view does not
        return records


class RunLines:
    """The lines that the processes of a run have appended to its folder so far.

    updates: the newest `_UPDATES_KEPT`. evaluations: all, oldest first.
    pauses: by producer id, the newest `_PAUSES_KEPT` pauses for new weights as (unix time, seconds). num_pauses: all.
    """

    def __init__(self, run_folder: Path) -> None:
        self.updates: deque[Update] = deque(maxlen=_UPDATES_KEPT)
        self.evaluations: list[EvaluationPoint] = []
        self.pauses: dict[str, deque[tuple[float, float]]] = {}
        self.num_pauses: Counter[str] = Counter()
        self._folder = run_folder
        self._update_lines = Tail(run_folder / "updates.jsonl", Update)
        self._evaluation_lines = Tail(run_folder / "evaluations.jsonl", EvaluationPoint)
        self.warm_step: WarmStartLine | None = None
        """The newest step on demonstrations."""
        self._warm_lines = Tail(run_folder / WARM_START, WarmStartLine)
        self._producer_lines: dict[str, Tail] = {}

    def read(self) -> None:
        """Reads what was appended since the last call."""
        self.updates.extend(self._update_lines.read())
        self.evaluations += self._evaluation_lines.read()
        if steps := self._warm_lines.read():
            self.warm_step = steps[-1]
        for file in sorted((self._folder / "producers").glob("*.jsonl")):
            lines = self._producer_lines.setdefault(file.stem, Tail(file, ProducerEvent))
            found = [(event.time_s, event.pause_s) for event in lines.read() if isinstance(event, WeightsLoaded)]
            self.pauses.setdefault(file.stem, deque(maxlen=_PAUSES_KEPT)).extend(found)
            self.num_pauses[file.stem] += len(found)


class Progress:
    """The progress of a run on this machine, by the lines in its folder and the trainer's metrics.

    num_dead: groups that have died since the trainer started. num_abandoned: those that agents have abandoned since
        the last good one; 0 if a batch came between the last two scrapes. Otherwise the run waits for agents.
    """

    scrape_s = 3.0
    """Seconds between two scrapes of the trainer's metrics."""

    def __init__(self, run_folder: Path) -> None:
        self.lines = RunLines(run_folder)
        self.num_dead = self.num_abandoned = 0
        self._folder = run_folder
        self._scrape_at = 0.0
        self._warm_at: float | None = None
        self._scraped_after: int | None = None
        self._seen: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)
        # Lines of a resumed run's earlier sessions do not count for the rate of this one.
        self.poll()
        self._seen.clear()

    @property
    def update(self) -> Update | None:
        """The latest batch, None before the first."""
        return self.lines.updates[-1] if self.lines.updates else None

    def poll(self) -> None:
        """Reads what was appended since the last call, and the trainer's metrics every `scrape_s`."""
        before, warm = self.update, self.lines.warm_step
        self.lines.read()
        if self.lines.warm_step is not warm:
            self._warm_at = time.monotonic()
        update = self.update
        if update is not None and update is not before:
            if self._seen and self._seen[-1][1] > update.update:
                self._seen.clear()
            self._seen.append((time.monotonic(), update.update))
        if time.monotonic() >= self._scrape_at:
            if (trainer := scrape(self._folder, "trainer")) is not None:
                self._look(trainer)
            self._scrape_at = time.monotonic() + self.scrape_s

    def _look(self, trainer: Samples) -> None:
        update = self.update.update if self.update is not None else 0
        self.num_dead = round(trainer.get(M.GROUPS_SETTLED.name, outcome="dead") or 0)
        self.num_abandoned = round(trainer.get(M.GROUPS_ABANDONED.name) or 0) if update == self._scraped_after else 0
        self._scraped_after = update

    @property
    def seen_at(self) -> float | None:
        """When a batch was seen last, or a step of the warm start, in monotonic seconds; None before the first."""
        return self._seen[-1][0] if self._seen else self._warm_at

    @property
    def warm_step(self) -> WarmStartLine | None:
        """The newest step of a warm start that is under way."""
        step = self.lines.warm_step
        return step if self.update is None and step is not None and step.step < step.num_steps else None

    @property
    def num_idle(self) -> int:
        """Batches since the last one that trained a group."""
        trained = (n for n, update in enumerate(reversed(self.lines.updates)) if update.num_groups_trained)
        return next(trained, len(self.lines.updates))

    @property
    def updates_per_s(self) -> float | None:
        """Batches per second over the last `_RATE_WINDOW` seen; None before two were seen."""
        if len(self._seen) < 2:
            return None
        (start_s, start), (end_s, end) = self._seen[0], self._seen[-1]
        return (end - start) / (end_s - start_s) if end > start else None

    def left_s(self, num_updates: int) -> float | None:
        """Returns the seconds until update `num_updates` at the current rate; None without a rate."""
        rate, update = self.updates_per_s, self.update
        return None if rate is None or update is None else max(0, num_updates - update.update) / rate

    @property
    def lag_advice(self) -> str | None:
        """Which setting helps, if many tokens of the last `_LAG_BATCHES` batches were masked for their lag, else
        None."""
        recent = [*self.lines.updates][-_LAG_BATCHES:]
        share = masked_lag_frac(recent) if len(recent) == _LAG_BATCHES else None
        return masked_advice(share) if share is not None and share > limits.BEYOND_BOUND else None

    @property
    def mean_lag(self) -> float | None:
        """Mean lag of the last batch's tokens, in optimizer steps."""
        return mean_lag(self.update.lag_histogram) if self.update is not None else None
