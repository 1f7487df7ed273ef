"""Reads a run folder: its configuration and the lines of trainer and producers, on one axis of time."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec

from penstock.deploy.report.lines import (
    EvaluationPoint,
    ProducerEvent,
    Rate,
    Stamped,
    TelemetryError,
    TrainerLedger,
    Update,
    WarmStartLine,
    read_ledger,
    read_lines,
)
from penstock.schemas.config import RunConfig, load_config
from penstock.schemas.policy import make_version, split_version
from penstock.schemas.process.clock import TOLERATED_S

WARM_START = "warm_start.jsonl"


class RunTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a run folder; fields of missing files are empty or None.

    Times of lines are those of `steady_times`: the newest is as it was written.

    start_s: when the first prompt was claimed; without the trainer's ledger, the earliest time in its lines.
    updates: ascending by number, only those that led to the latest policy (none that a rollback undid).
    evaluations: ascending by update, one per update, of those same policies.
    warm_start: ascending by step, one per step.
    producers: by producer id, events in the order written, in the trainer's time.
    clocks: by producer id, the seconds that its clock was ahead of the trainer's (below 0: behind), if they differed by
        more than `TOLERATED_S`; the times of its events are corrected.
    missing: the expected files that do not exist.
    num_torn_lines: lines left out because they were cut short by a kill, or were being written.
    read_s: when the folder was read, in seconds since the epoch.
    """

    name: str
    config: RunConfig | None
    updates: tuple[Update, ...]
    evaluations: tuple[EvaluationPoint, ...]
    ledger: TrainerLedger | None
    start_s: float | None
    producers: dict[str, tuple[ProducerEvent, ...]]
    missing: tuple[str, ...]
    num_torn_lines: int
    read_s: float = 0.0
    clocks: dict[str, float] = {}
    warm_start: tuple[WarmStartLine, ...] = ()

    def clock_notes(self) -> list[str]:
        """Returns a sentence on each producer of `clocks`."""
        return [
            f"{name}'s clock was {abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the trainer's: its "
            "times are moved by as much."
            for name, ahead_s in self.clocks.items()
        ]

    @property
    def is_over(self) -> bool:
        return self.ledger is not None and self.ledger.is_over(self.updates)

    @property
    def end_s(self) -> float | None:
        """When the last update was done."""
        return self.updates[-1].time_s if self.updates else None


def read_telemetry(run_folder: Path) -> RunTelemetry:
    """Reads a run folder. Missing files are listed and no error.

    Raises:
        TelemetryError: no such folder, or a malformed line (named with its file and number).
        ConfigError: `run.toml` is no run file.
    """
    if not run_folder.is_dir():
        raise TelemetryError(f"{run_folder}: no such run folder")
    missing: list[str] = []
    read_s = time.time()

    def lines(name: str, kind: Any) -> tuple[list[Any], int]:
        file = run_folder / name
        if file.is_file():
            return read_lines(file, kind)
        missing.append(name)
        return [], 0

    config = load_config(run_folder / "run.toml") if (run_folder / "run.toml").is_file() else None
    if config is None:
        missing.append("run.toml")
    updates, torn_updates = lines("updates.jsonl", Update)
    evaluations, torn_evaluations = lines("evaluations.jsonl", EvaluationPoint)
    warm_steps: list[WarmStartLine] = (
        read_lines(run_folder / WARM_START, WarmStartLine)[0] if (run_folder / WARM_START).is_file() else []
    )
    ledger = read_ledger(run_folder / "trainer.json")
    if ledger is None:
        missing.append("trainer.json")
    producer_files = sorted((run_folder / "producers").glob("*.jsonl"), key=_natural_order)
    if not producer_files:
        missing.append("producers/*.jsonl")
    producers: dict[str, tuple[list[ProducerEvent], int]] = {
        file.stem: read_lines(file, ProducerEvent) for file in producer_files
    }
    written = current_line(updates)
    kept = steady_times(written)
    placed = _beside(kept, written, place_evaluations(evaluations, kept))
    start_s = min((line.time_s for line in (*kept, *placed)), default=None)
    if ledger is not None and ledger.first_prompt_s:
        start_s = min(
            ledger.first_prompt_s + (kept[0].time_s - written[0].time_s if kept else 0.0), start_s or math.inf
        )
    clocks = _clocks(updates, {name: events for name, (events, _) in producers.items()})
    return RunTelemetry(
        name=config.name if config else run_folder.resolve().name,
        config=config,
        updates=tuple(kept),
        evaluations=tuple(placed),
        ledger=ledger,
        start_s=start_s,
        producers={name: _moved(events, clocks.get(name, 0.0)) for name, (events, _) in producers.items()},
        missing=tuple(missing),
        num_torn_lines=torn_updates + torn_evaluations + sum(torn for _, torn in producers.values()),
        read_s=read_s,
        clocks=clocks,
        warm_start=tuple({line.step: line for line in warm_steps}.values()),  # a resume may repeat some
    )


def _clocks(updates: Sequence[Update], producers: Mapping[str, Sequence[ProducerEvent]]) -> dict[str, float]:
    of_trainer = [update.clock_ahead_s for update in updates if update.clock_ahead_s is not None]
    found: dict[str, float] = {}
    for name, events in producers.items():
        rates = [event for event in events if isinstance(event, Rate)]
        own = [event.clock_ahead_s for event in rates if event.clock_ahead_s is not None]
        if own and of_trainer and abs(ahead_s := median(own) - median(of_trainer)) > TOLERATED_S:
            found[name] = ahead_s
    return found


def _moved(events: Sequence[ProducerEvent], ahead_s: float) -> tuple[ProducerEvent, ...]:
    """Corrects the times of events from a clock that was ahead."""
    return tuple(msgspec.structs.replace(event, time_s=event.time_s - ahead_s) for event in steady_times(events))


StampedLine = TypeVar("StampedLine", bound=Stamped)


def steady_times(lines: Sequence[StampedLine]) -> list[StampedLine]:
    """Returns lines, in the order written, with times that no step of the clock has moved.

    Between lines of one process the uptime tells the time that passed, elsewhere the clock does, and never less than
    none. The last line keeps its time.
    """
    found: list[StampedLine] = []
    later_s = math.inf
    for line, after in zip(reversed(lines), [None, *reversed(lines)], strict=False):
        if after is None:
            later_s = line.time_s
        elif line.started_s == after.started_s and line.uptime_s is not None and after.uptime_s is not None:
            later_s -= max(0.0, after.uptime_s - line.uptime_s)
        else:
            later_s -= max(0.0, after.time_s - line.time_s)
        found.append(msgspec.structs.replace(line, time_s=later_s))
    return found[::-1]


def _beside(
    steady: Sequence[Update], written: Sequence[Update], points: Sequence[EvaluationPoint]
) -> list[EvaluationPoint]:
    """Moves evaluations as `steady_times` has moved the updates of their process, else the update of their policy."""
    of_process = {line.started_s: line.time_s - line.uptime_s for line in steady if line.uptime_s is not None}
    moved_s = {after.update: after.time_s - before.time_s for after, before in zip(steady, written, strict=True)}
    return [
        msgspec.structs.replace(
            point,
            time_s=of_process[point.started_s] + point.uptime_s
            if point.uptime_s is not None and point.started_s in of_process
            else point.time_s + moved_s.get(point.update, 0.0),
        )
        for point in points
    ]


def current_line(lines: Iterable[Update]) -> list[Update]:
    """Returns the updates that led to the latest policy, ascending by number.

    After a rollback, numbers repeat from the checkpoint on: the later line counts, and updates beyond it are left out.
    A batch whose step was not finite made no update and is left out too: it repeats the previous number.
    """
    kept: list[Update] = []
    for line in lines:
        last = kept[-1].update if kept else 0
        if (
            line.skipped_reason is not None
            and line.update <= last
            and _epoch(line) == (_epoch(kept[-1]) if kept else 0)
        ):
            continue
        while kept and kept[-1].update >= line.update:
            kept.pop()
        kept.append(line)
    return kept


def place_evaluations(points: Iterable[EvaluationPoint], updates: Iterable[Update]) -> list[EvaluationPoint]:
    """Returns one point per update, ascending, each with the number of the update that made its policy.

    The line itself may name a later update, during which the last answer arrived. Policies that a rollback undid are
    left out; of two evaluations of one update, the later line counts.
    """
    made_by: dict[int, int] = {}
    first: Update | None = None
    for line in updates:
        first = first or line
        made_by.setdefault(make_version(_epoch(line), 0), line.update - 1)
        made_by.setdefault(line.policy_version, line.update)
    if first is None:
        return sorted(points, key=lambda point: point.update)
    placed: dict[int, EvaluationPoint] = {}
    for point in points:
        update = made_by.get(point.policy_version)
        if first.update == 1 and _epoch(point) == _epoch(first) and point.policy_version < first.policy_version:
            update = 0  # the model as it is, or as a warm start has made it
        if update is not None:
            placed[update] = msgspec.structs.replace(point, update=update)
    return [placed[update] for update in sorted(placed)]


def _epoch(line: Update | EvaluationPoint) -> int:
    return split_version(line.policy_version)[0]


def _natural_order(file: Path) -> tuple[int, str]:
    """Sorts producer-2 before producer-10."""
    return len(file.stem), file.stem
