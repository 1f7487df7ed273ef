"""A pretrained model on real tasks: the recipe `reasoning-gym` and TRL's GRPOTrainer, one after the other on the same
cores, both in float32, with equal tasks, reward, batch, learning rate and held-out tasks.

Both have as many threads as there are cores, Penstock one more for its engine. Seconds of a machine that other programs
use say little; those of the processor, of all processes, say what the work is.
"""

import math
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import msgspec

from bench.pipeline.modes import ModeRun, run_mode
from bench.result import BenchError, Figure, Goal, absent
from bench.running import save_config
from bench.section import Bench
from bench.trainer.peer import run_trl
from bench.trainer.peer_job import TrlJob, TrlUpdates
from penstock.deploy.launch.command_line import recipes
from penstock.schemas.config import RunConfig, load_config

NAME = "SmolLM2-135M on chain_sum"
GAINS = (0.15, 0.25)
"""In held-out accuracy. A run ends at the larger one."""
PIECES = 4
"""Passes in which TRL trains a batch; Penstock's are of 1,024 tokens, which are as many."""


class RealSettings(msgspec.Struct, frozen=True, kw_only=True):
    """overrides: of the recipe. updates, limit_s: the most of one run. every: updates between evaluations."""

    seeds: tuple[int, ...] = (1, 2, 3)
    overrides: tuple[str, ...] = ()
    updates: int = 40
    every: int = 5
    limit_s: float = 3600.0
    threads: int = 2


class Point(NamedTuple):
    """A held-out accuracy, and what it took until then."""

    update: int
    seconds: float
    processor_s: float
    accuracy: float


class RealRun(msgspec.Struct, frozen=True, kw_only=True):
    """One seed of one trainer, from the first prompt on. seconds, processor_s: of an update; TRL's are without
    evaluations, Penstock's `seconds` without the first update. tokens: sampled for an update, on average."""

    seed: int
    updates: int
    seconds: float
    processor_s: float
    tokens: float
    curve: list[Point]

    def first(self, gain: float) -> Point | None:
        """Returns the first point that is better than the first of all by `gain`."""
        goal = self.curve[0].accuracy + gain
        return next((point for point in self.curve if point.accuracy >= goal), None)


def measure_real(bench: Bench) -> list[Figure]:
    settings: RealSettings = bench.settings.real
    model = _config(settings, settings.seeds[0]).model.path
    if not (Path(model) / "config.json").is_file():
        return [absent(NAME, f"no model in {model}: penstock fetch-model smollm2 {model}")]
    ours: list[RealRun] = []
    theirs: list[RealRun | str] = []
    for place, seed in enumerate(settings.seeds):
        config = _config(settings, seed)

        def run_ours(config: RunConfig = config, seed: int = seed) -> None:
            found = run_mode(config, bench.folder / "runs", limit_s=settings.limit_s, gain=GAINS[-1], pinned=False)
            ours.append(of_run(found, seed))

        def run_theirs(config: RunConfig = config, seed: int = seed) -> None:
            found = run_trl(
                bench,
                config.name,
                TrlJob(
                    run_file=save_config(bench, config),
                    updates=settings.updates,
                    num_threads=settings.threads,
                    gain=GAINS[-1],
                    every=settings.every,
                    limit_s=settings.limit_s,
                    pieces=PIECES,
                ),
                2 * settings.limit_s,
            )
            theirs.append(found if isinstance(found, str) else of_trl(found, seed, settings.every))

        # Whoever shares the machine is met by both in turn.
        for run in (run_ours, run_theirs)[:: -1 if place % 2 else 1]:
            run()
    return real_figures(ours, [each for each in theirs if not isinstance(each, str)])


def _config(settings: RealSettings, seed: int) -> RunConfig:
    changes = (
        f"name=real-{seed}",
        f"seed={seed}",
        f"num_updates={settings.updates}",
        f"evaluation.every={settings.every}",
        f"trainer.num_threads={settings.threads}",
        "metrics.port=0",
        "record=false",
    )
    return load_config(recipes()["recipe:reasoning-gym"], [*changes, *settings.overrides])


def of_run(run: ModeRun, seed: int) -> RealRun:
    updates, start_s = run.telemetry.updates, run.telemetry.start_s
    if len(updates) < 3 or start_s is None:
        raise BenchError(f"Penstock made {len(updates)} updates, expected three or more")
    first, last = updates[0], updates[-1]
    seen = sorted(run.processor_s)
    boot_s = run.processor_s[0]
    at = {update.update: update.time_s - start_s for update in updates}

    def point(update: int, accuracy: float) -> Point:
        spent = max((run.processor_s[number] for number in seen if number <= update), default=boot_s)
        return Point(update, at.get(update, 0.0), spent - boot_s, accuracy)

    return RealRun(
        seed=seed,
        updates=len(updates),
        seconds=(last.time_s - first.time_s) / (len(updates) - 1),
        processor_s=(run.processor_s[seen[-1]] - boot_s) / seen[-1],
        tokens=mean(update.num_tokens_sampled for update in updates),
        curve=[point(each.update, each.reward) for each in run.telemetry.evaluations],
    )


def of_trl(found: TrlUpdates, seed: int, every: int) -> RealRun:
    spent = [0.0, *found.processor_s]
    numbers = [min(place * every, len(found.seconds)) for place in range(len(found.curve))]
    return RealRun(
        seed=seed,
        updates=len(found.seconds),
        seconds=found.s_per_update,
        processor_s=spent[-1] / len(found.processor_s),
        tokens=mean(found.tokens),
        curve=[Point(n, s, spent[n], accuracy) for n, (s, accuracy) in zip(numbers, found.curve, strict=True)],
    )


def real_figures(ours: list[RealRun], theirs: list[RealRun]) -> list[Figure]:
    """Compares medians over the seeds; a seed that has not reached a gain counts as later than all that have."""
    if not theirs:
        return [absent(NAME, "TRL did not run: make venv-peers")]
    reference_is = "TRL's GRPOTrainer with transformers' generate"
    details = {"penstock": msgspec.to_builtins(ours), "trl": msgspec.to_builtins(theirs)}
    figures = [
        _figure(f"{NAME}: processor seconds per update", ours, theirs, lambda run: run.processor_s, reference_is, "s"),
        _figure("the same: seconds per update", ours, theirs, lambda run: run.seconds, reference_is, "s"),
        _figure(
            "the same: tokens of batches per second",
            ours,
            theirs,
            lambda run: run.tokens / run.seconds,
            reference_is,
            "/s",
        ),
    ]
    goals = {"updates": Goal(at_most=1.2), "seconds": Goal(at_most=0.4), "processor_s": Goal(at_most=0.4)}
    for gain in GAINS:
        for what, goal in goals.items():
            unit = "" if what == "updates" else "s"
            said = {"processor_s": "processor seconds"}.get(what, what)

            def taken(run: RealRun, gain: float = gain, what: str = what) -> float | None:
                point = run.first(gain)
                return None if point is None else getattr(point, what.removesuffix("s") if what == "updates" else what)

            figures.append(_figure(f"the same: {said} to +{gain}", ours, theirs, taken, reference_is, unit, goal))
    return [msgspec.structs.replace(figures[0], details=details), *figures[1:]]


def _figure(name, ours, theirs, of, reference_is, unit, goal=None) -> Figure:  # type: ignore[no-untyped-def]
    sides = [[of(run) for run in runs] for runs in (ours, theirs)]
    middle = [median(math.inf if value is None else value for value in side) for side in sides]
    measured, reference = (None if value == math.inf else value for value in middle)
    return Figure(name, unit=unit, measured=measured, reference=reference, reference_is=reference_is, goal=goal)
