"""Asynchronous beside synchronous: the run file's own pipeline, one producer and the trainer on a core each."""

import signal
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean

import msgspec

from deploy.bench.pinned import IDLE, Snapshot
from deploy.bench.result import Breakdown, Figure, Goal, break_down, compare, usable_cores
from deploy.launcher import Launcher, part_command
from deploy.live_view import View
from deploy.run_folder import RunFolder
from deploy.summary import summarize
from deploy.telemetry import Telemetry, WeightsLoaded, read_telemetry
from schemas.config import RunConfig

ACCURACY = 0.9
FIRST_UPDATE = 5
"""Rates leave out what came before: the queue was empty and caches were cold."""


class ModeRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run in one mode, as far as it went.

    phases_s: of each batch in order, by phase. snapshots: of the producer. time_to_accuracy_s, from the first admitted
    prompt, is None where `ACCURACY` was not reached in `wall_s`.
    """

    telemetry: Telemetry
    phases_s: list[dict[str, float]]
    snapshots: list[Snapshot]
    time_to_accuracy_s: float | None
    wall_s: float

    @property
    def num_updates(self) -> int:
        return len(self.telemetry.updates)


class _UntilAccuracy(View):
    """Shows nothing; stops the run once it has reached the accuracy and enough updates for a rate, or the limit."""

    def __init__(self, config: RunConfig, runs: Path, *, min_updates: int, limit_s: float) -> None:
        super().__init__(config, runs)
        self.stopped_by_us = False
        self._min_updates = min_updates
        self._limit_s = limit_s
        self._since: float | None = None

    def note(self, text: str) -> None:
        if "died" in text or "ended" in text:
            print(f"    {text}", flush=True)

    def draw(self) -> None:
        update = self.progress.update
        if update is None or self.stopped_by_us:
            return
        self._since = self._since or time.monotonic()
        reached = any(point.accuracy >= ACCURACY for point in self.progress.evaluations)
        if (reached and update.update >= self._min_updates) or time.monotonic() - self._since > self._limit_s:
            self.stopped_by_us = True
            signal.raise_signal(signal.SIGINT)


def run_mode(config: RunConfig, runs: Path, *, min_updates: int, limit_s: float) -> ModeRun:
    """Runs `config` until `ACCURACY`, its last update or `limit_s` seconds of training.

    Raises:
        KeyboardInterrupt: somebody else stopped it.
        PartDied, ServerError, ConfigError: see the launcher.
    """
    folder = config.folder(runs)
    cores = usable_cores()
    core_of = {"trainer": cores[0], "producer": cores[1]} if len(cores) > 1 else {"trainer": -1, "producer": -1}

    def command_for(part: str, config: RunConfig, runs: Path, resume: bool) -> Sequence[str]:
        role = part.partition("-")[0]
        command = part_command(part, config, runs, resume)
        arguments = command[command.index("deploy.cli") + 1 :]
        profile = folder / f"{role}-profile.jsonl"
        return [sys.executable, "-m", "deploy.bench.pinned", str(core_of[role]), str(profile), *arguments]

    with RunFolder(config, runs, resume=False) as run_folder:
        run_folder.save(config)
        view = _UntilAccuracy(config, runs, min_updates=min_updates, limit_s=limit_s)
        with view:
            launcher = Launcher(config, runs, resume=False, view=view, lock=run_folder.lock, command_for=command_for)
            status = launcher.run()
    if status and not view.stopped_by_us:
        raise KeyboardInterrupt
    return _read(folder)


def _read(folder: Path) -> ModeRun:
    telemetry = read_telemetry(folder)
    summary = summarize(telemetry)
    phases = _lines(folder / "trainer-profile.jsonl", dict[str, float])
    return ModeRun(
        telemetry=telemetry,
        phases_s=phases,
        snapshots=_lines(folder / "producer-profile.jsonl", Snapshot),
        time_to_accuracy_s=summary["time_to_accuracy"][str(ACCURACY)],
        wall_s=summary["wall_s"] or 0.0,
    )


def _lines(file: Path, kind: type) -> list:
    return [msgspec.json.decode(line, type=kind) for line in file.read_bytes().splitlines()]


def mode_figures(asynchronous: ModeRun, synchronous: ModeRun, config: RunConfig) -> list[Figure]:
    """Rates are over the same updates of both runs: later batches hold more groups without variance and cost less."""
    last = min(asynchronous.num_updates, synchronous.num_updates)
    rate, reference_rate = (groups_per_s(run, last, config) for run in (asynchronous, synchronous))
    reference_s = synchronous.time_to_accuracy_s
    if reference_s is None:
        # It took longer than it was given: that is a bound from below.
        reference_s = synchronous.wall_s
    return [
        compare(
            "groups trained per second, asynchronous",
            unit="/s",
            measured=rate,
            reference=reference_rate,
            reference_is='mode = "synchronous"',
            goal=Goal(at_least=1.5),
            details={
                "updates_compared": [FIRST_UPDATE, last],
                "updates_per_s": rate / config.groups_per_step,
                "synchronous_updates_per_s": reference_rate / config.groups_per_step,
                "cores": usable_cores()[:2],
                "paused_share": paused_share(asynchronous, last),
            },
        ),
        compare(
            f"time to {ACCURACY} held-out accuracy, asynchronous",
            unit="s",
            measured=asynchronous.time_to_accuracy_s,
            reference=reference_s,
            reference_is='mode = "synchronous"',
            goal=Goal(at_most=1.0),
            details={
                "synchronous_reached_it": synchronous.time_to_accuracy_s is not None,
                "asynchronous_accuracies": _curve(asynchronous),
                "synchronous_accuracies": _curve(synchronous),
            },
        ),
    ]


def groups_per_s(run: ModeRun, last: int, config: RunConfig) -> float:
    """Groups that went through the trainer (trained or skipped for want of variance) per second."""
    start, end = _span(run, last)
    return (last - FIRST_UPDATE) * config.groups_per_step / (end - start)


def paused_share(run: ModeRun, last: int) -> float:
    """Share of the time in which the producer sampled nothing because weights were loaded."""
    start, end = _span(run, last)
    events = [event for events in run.telemetry.producers.values() for event in events]
    loads = [event for event in events if isinstance(event, WeightsLoaded) and start <= event.time_s < end]
    return sum(load.pause_s for load in loads) / (end - start)


def _span(run: ModeRun, last: int) -> tuple[float, float]:
    """Wall-clock times at which updates `FIRST_UPDATE` and `last` were done.

    Raises:
        ValueError: the run did not get that far.
    """
    if last <= FIRST_UPDATE:
        raise ValueError(f"{run.num_updates} updates, expected more than {FIRST_UPDATE}; give the modes more time")
    updates = run.telemetry.updates
    return updates[FIRST_UPDATE - 1].time_s, updates[last - 1].time_s


def _curve(run: ModeRun) -> list[tuple[int, float]]:
    return [(point.update, point.accuracy) for point in run.telemetry.evaluations]


def mode_breakdowns(name: str, run: ModeRun) -> list[Breakdown]:
    """Where an update's time goes, on the trainer's core and on the producer's."""
    last = run.num_updates
    start, end = _span(run, last)
    num_updates = last - FIRST_UPDATE
    return [
        break_down(
            f"{name}: trainer",
            trainer_parts(run, last),
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


def trainer_parts(run: ModeRun, last: int) -> dict[str, float]:
    """Mean seconds per update by phase."""
    updates, phases = run.telemetry.updates[FIRST_UPDATE:last], run.phases_s[FIRST_UPDATE:last]
    steps = mean(update.step_s or 0.0 for update in updates)
    parts = {"wait for groups": mean(update.wait_s or 0.0 for update in updates)}
    for phase in sorted({name for line in phases for name in line}):
        parts[phase] = mean(line.get(phase, 0.0) for line in phases)
    parts["pack"] = max(0.0, steps - sum(seconds for name, seconds in parts.items() if name != "wait for groups"))
    parts["publish and release"] = mean(update.publish_s or 0.0 for update in updates)
    return parts


def producer_parts(snapshots: Sequence[Snapshot], start: float, end: float) -> dict[str, float]:
    """Processor seconds between two wall-clock times: the engine process, and the producer's own by what it did."""
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
