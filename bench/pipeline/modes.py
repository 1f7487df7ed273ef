"""Asynchronous against synchronous: the run file's own pipeline, one producer and the trainer on a core each."""

import re
import signal
import time
from pathlib import Path
from statistics import mean

import msgspec

from bench.machine import children_cpu_s, usable_cores
from bench.result import BenchError, Figure, Goal, absent
from bench.running import DeathsView, demo_config, demo_model, launch
from bench.section import Bench
from penstock.deploy.report.lines import WeightsLoaded
from penstock.deploy.report.summary import summarize
from penstock.deploy.report.telemetry import RunTelemetry, read_telemetry
from penstock.schemas.config import RunConfig

ACCURACY = 0.9
"""Of the demo's task, whose reward is 1 for the exact sum and 0 for any other."""
EVALUATE_EVERY = 5
"""Updates between evaluations while the time to an accuracy is measured; they bound its resolution."""
NEVER = 10**9
FIRST_UPDATE = 5
"""Rates exclude the updates before this one: the queue is empty and caches are cold."""
CHECKPOINT_LINE = re.compile(r"checkpoint \S+ at update \d+: ([0-9.]+) s")


class ModeRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run in one mode, complete or cut off.

    phases_s: of each update in order, by phase. checkpoints_s: of each checkpoint. time_to_accuracy_s, from the first
    admitted prompt, is None where `ACCURACY` was not reached in `wall_s`. processor_s: of all processes, by update.
    """

    telemetry: RunTelemetry
    phases_s: list[dict[str, float]]
    checkpoints_s: list[float]
    time_to_accuracy_s: float | None
    wall_s: float
    processor_s: dict[int, float] = {}

    @property
    def num_updates(self) -> int:
        return len(self.telemetry.updates)


class _Phases(msgspec.Struct):
    """A line of updates.jsonl."""

    phase_s: dict[str, float]


class _Until(DeathsView):
    """Stops the run after `limit_s` seconds of training, or once it has reached `accuracy`, or its first accuracy and
    `gain`. processor_s: of its processes, once a producer serves (0) and when
    each update was seen."""

    def __init__(
        self, config: RunConfig, runs: Path, *, limit_s: float, accuracy: float | None, gain: float | None
    ) -> None:
        super().__init__(config, runs)
        self.processor_s: dict[int, float] = {}
        self._gain = gain
        self.stopped_by_us = False
        self._limit_s = limit_s
        self._accuracy = accuracy
        self._since: float | None = None

    def draw(self) -> None:
        if self.heartbeats:
            self.processor_s.setdefault(0, children_cpu_s())
        if self.progress.update is None or self.stopped_by_us:
            return
        self._since = self._since or time.monotonic()
        self.processor_s.setdefault(self.progress.update.update, children_cpu_s())
        goal, points = self._accuracy, self.progress.lines.evaluations
        if self._gain is not None:
            goal = points[0].reward + self._gain if points else None
        reached = goal is not None and any(point.reward >= goal for point in points)
        if reached or time.monotonic() - self._since > self._limit_s:
            self.stopped_by_us = True
            signal.raise_signal(signal.SIGINT)


def run_mode(
    config: RunConfig,
    runs: Path,
    *,
    limit_s: float,
    accuracy: float | None = None,
    gain: float | None = None,
    pinned: bool = True,
) -> ModeRun:
    """Runs `config` until `accuracy` on the held-out prompts, or a `gain` above the first one, its last update or
    `limit_s` seconds of training.

    pinned: the trainer and the producers have a core each.

    Raises:
        KeyboardInterrupt: it was stopped from outside.
        PartDied, ServerError, ConfigError: see the launcher.
    """
    cores = usable_cores()
    core_of = dict(zip(("trainer", "producer"), cores, strict=False)) if pinned and len(cores) > 1 else {}

    view = _Until(config, runs, limit_s=limit_s, accuracy=accuracy, gain=gain)
    if launch(config, runs, view, core_of) and not view.stopped_by_us:
        raise KeyboardInterrupt
    return msgspec.structs.replace(read_run(config.folder(runs)), processor_s=view.processor_s)


def read_run(folder: Path) -> ModeRun:
    telemetry = read_telemetry(folder)
    lines = (folder / "updates.jsonl").read_bytes().splitlines()
    log = (folder / "logs" / "trainer.log").read_text("utf-8", errors="replace")
    reached = (point.time_s for point in telemetry.evaluations if point.reward >= ACCURACY)
    return ModeRun(
        telemetry=telemetry,
        phases_s=[msgspec.json.decode(line, type=_Phases).phase_s for line in lines],
        checkpoints_s=[float(seconds) for seconds in CHECKPOINT_LINE.findall(log)],
        time_to_accuracy_s=next((time_s - (telemetry.start_s or 0.0) for time_s in reached), None),
        wall_s=summarize(telemetry)["wall_s"] or 0.0,
    )


def mode_config(mode: str, what: str, *overrides: str) -> RunConfig:
    single = (f"mode={mode}", "producers.count=1", "producers.num_threads=1", "trainer.num_threads=1")
    return demo_config(f"{mode}-{what}", demo_model(), *single, *overrides)


def mode_figures(bench: Bench) -> list[Figure]:
    """Measures runs of both modes: with a policy that does not change, for rates; then learning, for the time it
    takes."""
    modes, runs, settings = ("asynchronous", "synchronous"), bench.folder / "runs", bench.settings
    # So small a learning rate moves no weight: every update meets the same work.
    still = ("trainer.learning_rate=1e-12", f"evaluation.every={NEVER}")
    configs = [mode_config(mode, "fixed", *still) for mode in modes]
    fixed = [run_mode(config, runs, limit_s=settings.rate_limit_s) for config in configs]
    configs = [mode_config(mode, "learning", f"evaluation.every={EVALUATE_EVERY}") for mode in modes]
    learning = [run_mode(config, runs, limit_s=settings.learning_limit_s, accuracy=ACCURACY) for config in configs]
    return [rate_figure(*fixed, configs[0]), time_figure(*learning), checkpoint_figure(fixed[0], configs[0])]


def rate_figure(asynchronous: ModeRun, synchronous: ModeRun, config: RunConfig) -> Figure:
    """Compares groups per second of two runs whose policy does not change.

    In a run that learns, later batches hold more groups without variance, which cost the trainer next to nothing.
    """
    rate, reference = (groups_per_s(run, config) for run in (asynchronous, synchronous))
    return Figure(
        "groups trained per second, asynchronous",
        unit="/s",
        measured=rate,
        reference=reference,
        reference_is='mode = "synchronous"',
        goal=Goal(at_least=1.5),
        details={
            "num_updates": asynchronous.num_updates,
            "synchronous_num_updates": synchronous.num_updates,
            "trainer_s_per_update": trainer_parts(asynchronous),
            "synchronous_trainer_s_per_update": trainer_parts(synchronous),
            "paused_share": paused_share(asynchronous),
            "cores": usable_cores()[:2],
        },
    )


def time_figure(asynchronous: ModeRun, synchronous: ModeRun) -> Figure:
    """Compares the time to `ACCURACY` of two runs that learn. A synchronous one that was cut off counts with the time
    it had."""
    reference_s = synchronous.time_to_accuracy_s
    return Figure(
        f"time to {ACCURACY} held-out accuracy, asynchronous",
        unit="s",
        measured=asynchronous.time_to_accuracy_s,
        reference=synchronous.wall_s if reference_s is None else reference_s,
        reference_is='mode = "synchronous"',
        goal=Goal(at_most=1.0),
        details={
            "synchronous_reached_it": reference_s is not None,
            "accuracy_by_update": accuracy_by_update(asynchronous),
            "synchronous_accuracy_by_update": accuracy_by_update(synchronous),
        },
    )


def checkpoint_figure(run: ModeRun, config: RunConfig) -> Figure:
    """Compares a checkpoint with the time between two."""
    if not run.checkpoints_s:
        return absent("a checkpoint", "the run ended before its first one")
    s_per_update = config.groups_per_batch / groups_per_s(run, config)
    return Figure(
        "a checkpoint, against the time between two",
        unit="s",
        measured=mean(run.checkpoints_s),
        reference=config.checkpoint.every * s_per_update,
        reference_is=f"{config.checkpoint.every} updates of the asynchronous run",
        goal=Goal(at_most=0.03),
        details={"checkpoints_s": run.checkpoints_s},
    )


def groups_per_s(run: ModeRun, config: RunConfig) -> float:
    """Returns the groups that went through the trainer (trained, or skipped for lack of variance) per second."""
    start, end = _span(run)
    return (run.num_updates - FIRST_UPDATE) * config.groups_per_batch / (end - start)


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


def trainer_parts(run: ModeRun, first_update: int = FIRST_UPDATE) -> dict[str, float]:
    """Returns the mean seconds per update by phase, from `first_update` on."""
    updates, phases = run.telemetry.updates[first_update:], run.phases_s[first_update : run.num_updates]
    names = sorted({name for line in phases for name in line})
    return {
        "wait for groups": mean(update.wait_s or 0.0 for update in updates),
        **{name: mean(line.get(name, 0.0) for line in phases) for name in names},
        "publish and release": mean(update.publish_s or 0.0 for update in updates),
    }
