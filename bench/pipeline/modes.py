"""Asynchronous against synchronous: the run file's own pipeline, one producer and the trainer on a core each."""

import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean

import msgspec

from bench.machine import usable_cores
from bench.pipeline.pinned import IDLE, CpuSnapshot
from bench.result import BenchError, Breakdown, Figure, Goal, break_down, compare
from bench.running import DeathsView, launch
from penstock.deploy.report.summary import summarize
from penstock.deploy.report.telemetry import RunTelemetry, WeightsLoaded, read_telemetry
from penstock.schemas.config import RunConfig

ACCURACY = 0.9
"""Of the demo's task, whose reward is 1 for the exact sum and 0 for any other."""
FIRST_UPDATE = 5
"""Rates exclude the updates before this one: the queue is empty and caches are cold."""


class ModeRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run in one mode, complete or cut off.

    phases_s: of each batch in order, by phase. snapshots: of the producer. time_to_accuracy_s, from the first admitted
    prompt, is None where `ACCURACY` was not reached in `wall_s`.
    """

    telemetry: RunTelemetry
    phases_s: list[dict[str, float]]
    snapshots: list[CpuSnapshot]
    time_to_accuracy_s: float | None
    wall_s: float

    @property
    def num_updates(self) -> int:
        return len(self.telemetry.updates)


class _Until(DeathsView):
    """Stops the run after `limit_s` seconds of training, or once it has reached `accuracy`."""

    def __init__(self, config: RunConfig, runs: Path, *, limit_s: float, accuracy: float | None) -> None:
        super().__init__(config, runs)
        self.stopped_by_us = False
        self._limit_s = limit_s
        self._accuracy = accuracy
        self._since: float | None = None

    def draw(self) -> None:
        if self.progress.update is None or self.stopped_by_us:
            return
        self._since = self._since or time.monotonic()
        goal = self._accuracy
        reached = goal is not None and any(point.reward >= goal for point in self.progress.lines.evaluations)
        if reached or time.monotonic() - self._since > self._limit_s:
            self.stopped_by_us = True
            signal.raise_signal(signal.SIGINT)


def run_mode(
    config: RunConfig, runs: Path, *, limit_s: float, accuracy: float | None = None, pinned: bool = True
) -> ModeRun:
    """Runs `config` until `accuracy` on the held-out prompts, its last update or `limit_s` seconds of training.

    pinned: the trainer and the producers have a core each.

    Raises:
        KeyboardInterrupt: it was stopped from outside.
        PartDied, ServerError, ConfigError: see the launcher.
    """
    folder, cores = config.folder(runs), usable_cores()
    core_of = dict(zip(("trainer", "producer"), cores, strict=False)) if pinned and len(cores) > 1 else {}

    def starter(role: str) -> Sequence[str]:
        return ["bench.pipeline.pinned", str(core_of.get(role, -1)), str(folder / f"{role}-profile.jsonl")]

    view = _Until(config, runs, limit_s=limit_s, accuracy=accuracy)
    if launch(config, runs, view, starter) and not view.stopped_by_us:
        raise KeyboardInterrupt
    return _read(folder)


def _read(folder: Path) -> ModeRun:
    telemetry = read_telemetry(folder)
    summary = summarize(telemetry)
    reached = (point.time_s for point in telemetry.evaluations if point.reward >= ACCURACY)
    phases = _lines(folder / "trainer-profile.jsonl", dict[str, float])
    return ModeRun(
        telemetry=telemetry,
        phases_s=phases,
        snapshots=_lines(folder / "producer-profile.jsonl", CpuSnapshot),
        time_to_accuracy_s=next((time_s - (telemetry.start_s or 0.0) for time_s in reached), None),
        wall_s=summary["wall_s"] or 0.0,
    )


def _lines(file: Path, kind: type) -> list:
    return [msgspec.json.decode(line, type=kind) for line in file.read_bytes().splitlines()]


def rate_figure(asynchronous: ModeRun, synchronous: ModeRun, config: RunConfig) -> Figure:
    """Compares groups per second of two runs whose policy does not change.

    In a run that learns, later batches hold more groups without variance, which cost the trainer next to nothing.
    """
    rate, reference = (groups_per_s(run, config) for run in (asynchronous, synchronous))
    return compare(
        "groups trained per second, asynchronous",
        unit="/s",
        measured=rate,
        reference=reference,
        reference_is='mode = "synchronous"',
        goal=Goal(at_least=1.5),
        details={
            "num_updates": asynchronous.num_updates,
            "synchronous_num_updates": synchronous.num_updates,
            "updates_per_s": rate / config.groups_per_batch,
            "synchronous_updates_per_s": reference / config.groups_per_batch,
            "skipped_share": skipped_share(asynchronous),
            "paused_share": paused_share(asynchronous),
            "cores": usable_cores()[:2],
        },
    )


def time_figure(asynchronous: ModeRun, synchronous: ModeRun) -> Figure:
    """Compares the time to `ACCURACY` of two runs that learn. A synchronous one that was cut off counts with the time
    it had."""
    reference_s = synchronous.time_to_accuracy_s
    return compare(
        f"time to {ACCURACY} held-out accuracy, asynchronous",
        unit="s",
        measured=asynchronous.time_to_accuracy_s,
        reference=synchronous.wall_s if reference_s is None else reference_s,
        reference_is='mode = "synchronous"',
        goal=Goal(at_most=1.0),
        details={
            "synchronous_reached_it": reference_s is not None,
            "num_updates": asynchronous.num_updates,
            "synchronous_num_updates": synchronous.num_updates,
            "accuracy_by_update": accuracy_by_update(asynchronous),
            "synchronous_accuracy_by_update": accuracy_by_update(synchronous),
        },
    )


def groups_per_s(run: ModeRun, config: RunConfig) -> float:
    """Returns the groups that went through the trainer (trained, or skipped for lack of variance) per second."""
    start, end = _span(run)
    return (run.num_updates - FIRST_UPDATE) * config.groups_per_batch / (end - start)


def skipped_share(run: ModeRun) -> float:
    updates = run.telemetry.updates[FIRST_UPDATE:]
    num_skipped = sum(update.num_groups_skipped for update in updates)
    return num_skipped / (num_skipped + sum(update.num_groups_trained for update in updates))


def paused_share(run: ModeRun) -> float:
    """Returns the share of time in which the producer sampled nothing because weights were loaded."""
    start, end = _span(run)
    events = [event for events in run.telemetry.producers.values() for event in events]
    loads = [event for event in events if isinstance(event, WeightsLoaded) and start <= event.time_s < end]
    return sum(load.pause_s for load in loads) / (end - start)


def _span(run: ModeRun) -> tuple[float, float]:
    """Returns the wall-clock times at which update `FIRST_UPDATE` and the last one were done.

    Raises:
        BenchError: the run did not get that far.
    """
    updates = run.telemetry.updates
    if len(updates) <= FIRST_UPDATE:
        raise BenchError(f"{len(updates)} updates in the time given, expected more than {FIRST_UPDATE}")
    return updates[FIRST_UPDATE - 1].time_s, updates[-1].time_s


def accuracy_by_update(run: ModeRun) -> list[tuple[int, float]]:
    return [(point.update, point.reward) for point in run.telemetry.evaluations]


def mode_breakdowns(name: str, run: ModeRun) -> list[Breakdown]:
    """Breaks an update's time down by what it is spent on, on the trainer's core and on the producer's."""
    start, end = _span(run)
    num_updates = run.num_updates - FIRST_UPDATE
    return [
        break_down(
            f"{name}: trainer",
            trainer_parts(run),
            (end - start) / num_updates,
            "time per update",
            rest="evaluation, checkpoint, bookkeeping",
        ),
        break_down(
            f"{name}: producer's core",
            {part: seconds / num_updates for part, seconds in producer_parts(run.snapshots, start, end).items()},
            (end - start) / num_updates,
            "time per update",
            rest="nothing to do (waits for prompts, weights, Redis)",
        ),
    ]


def trainer_parts(run: ModeRun, first_update: int = FIRST_UPDATE) -> dict[str, float]:
    """Returns the mean seconds per update by phase, from `first_update` on."""
    updates, phases = run.telemetry.updates[first_update:], run.phases_s[first_update : run.num_updates]
    steps = mean(update.step_s or 0.0 for update in updates)
    parts = {"wait for groups": mean(update.wait_s or 0.0 for update in updates)}
    for phase in sorted({name for line in phases for name in line}):
        parts[phase] = mean(line.get(phase, 0.0) for line in phases)
    parts["pack"] = max(0.0, steps - sum(seconds for name, seconds in parts.items() if name != "wait for groups"))
    parts["publish and release"] = mean(update.publish_s or 0.0 for update in updates)
    return parts


def producer_parts(snapshots: Sequence[CpuSnapshot], start: float, end: float) -> dict[str, float]:
    """Returns the processor seconds between two wall-clock times: of the engine process, and the producer's own by
    activity."""
    within = [snapshot for snapshot in snapshots if start <= snapshot.time_s <= end]
    if len(within) < 2:
        return {}
    # Neighbours, since the count of children's time falls when one of them ends.
    pairs = list(pairwise(within))
    scale = (end - start) / (within[-1].time_s - within[0].time_s)
    parts = {
        "engine process: scheduling and sampling": scale
        * sum(max(0.0, b.children_cpu_s - a.children_cpu_s) for a, b in pairs)
    }
    first, final = within[0], within[-1]
    seen = {kind: count - first.samples.get(kind, 0) for kind, count in final.samples.items() if kind != IDLE}
    busy = sum(seen.values())
    for kind, count in seen.items():
        if count:
            parts[kind] = scale * (final.cpu_s - first.cpu_s) * count / busy
    return parts
