"""The plan section: runs in real time, each planned from its own record, and each from the record of another one."""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from bench.plan.part import PartPace
from bench.result import Breakdown, Figure, Goal, compare
from bench.running import DeathsView, launch
from bench.section import Bench, BenchSection, make_model
from penstock.deploy.plan.planning import Plan, plan
from penstock.schemas.config import RunConfig, load_config

WITHIN = {"updates_per_s": 1.10, "lag_mean": 1.15}
"""The factor by which a planned figure may differ from the recorded one, either way."""
NAMES = {"updates_per_s": ("updates per second", "/s"), "lag_mean": ("mean lag", "steps")}
PACE = PartPace(base_s=0.03, sequence_s=0.001, median=30.0, sigma=0.8, pause_s=0.1, update_s=1.5)
SHARED = (
    "group_size=4",
    "groups_per_batch=8",
    "sampling.max_tokens=200",
    "producers.groups_in_flight=16",
    "producers.progress_s=0",
    'environment.path="bench.plan.part:Tossed"',
    "evaluation.num_prompts=0",
    "parity.gate=off",
    "record=true",
    "checkpoint.every=1000",
    "metrics.port=0",
)


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults take about a quarter of an hour, most of it asleep."""

    num_updates: int = 40


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """overrides: of the run file. median: of the lengths of its completions."""

    producers: int
    max_lag: int
    overrides: tuple[str, ...] = ()
    median: float = PACE.median


PRODUCERS = {
    "one producer": Scenario(producers=1, max_lag=2),
    "three producers": Scenario(producers=3, max_lag=2),
    "one producer, max_lag = 6": Scenario(producers=1, max_lag=6),
    "three producers, max_lag = 0": Scenario(producers=3, max_lag=0),
}
"""Producers limit the first run."""
TRAINER = {
    "slow trainer": Scenario(producers=2, max_lag=2),
    "slow trainer, max_lag = 5": Scenario(producers=2, max_lag=5),
    "slow trainer, four producers, max_lag = 1": Scenario(producers=4, max_lag=1),
    "slow trainer, completions twice as long": Scenario(producers=2, max_lag=2, median=2 * PACE.median),
    "slow trainer, half as large batches": Scenario(producers=2, max_lag=2, overrides=("groups_per_batch=4",)),
}
"""The trainer limits the first run."""
SLOW_TRAINER = msgspec.structs.replace(PACE, update_s=0.6, token_s=0.001)


def measure_plans(scenarios: Mapping[str, Scenario], pace: PartPace, bench: Bench) -> list[Figure | Breakdown]:
    """Runs each scenario in real time, then plans it from its own record and from that of the first one."""
    # Each table has runs of its own, under the same names.
    model, runs = bench.folder / "model", Path(tempfile.mkdtemp(prefix="runs-", dir=bench.folder))
    make_model(model, train=False)
    figures: list[Figure | Breakdown] = []
    first: RunConfig | None = None
    for n, (name, scenario) in enumerate(scenarios.items()):
        print(f"  {name} ...", flush=True)
        changed = (f"max_lag={scenario.max_lag}", *scenario.overrides)
        sizes = (f"name=plan-{n}", f'model.path="{model}"', f"num_updates={bench.settings.num_updates}")
        config = load_config(bench.run_file, [*SHARED, *sizes, f"producers.count={scenario.producers}", *changed])
        run_paced(config, msgspec.structs.replace(pace, median=scenario.median), runs)
        own = plan(config.folder(runs))
        figures += plan_figures(f"{name}, by its own record", own)
        if first is None:
            first, first_name = config, name
            continue
        lengths = None if scenario.median == pace.median else f"log-normal:{scenario.median:g}:{pace.sigma:g}"
        found = plan(first.folder(runs), producers=scenario.producers, lengths=lengths, set=changed)
        found = msgspec.structs.replace(found, recorded=own.recorded)
        figures += plan_figures(f"{name}, by the record of {first_name}", found)
    return figures


def plan_figures(what: str, found: Plan) -> Sequence[Figure]:
    """Compares the planned figures with those recorded."""
    figures = []
    for key, within in WITHIN.items():
        planned, recorded = found.planned[key], (found.recorded or {})[key]
        name, unit = NAMES[key]
        factor = max(planned / recorded, recorded / planned) if planned and recorded else 1.0 + abs(planned - recorded)
        figures.append(
            compare(
                f"{name}, {what}",
                unit=unit,
                measured=planned,
                reference=recorded,
                reference_is="recorded",
                goal=Goal(at_most=within),
                ratio=factor,
                details={"planned": found.planned, "recorded": found.recorded},
            )
        )
    return figures


def run_paced(config: RunConfig, pace: PartPace, runs: Path) -> None:
    """Runs `config` to its end at `pace`. Raises KeyboardInterrupt, and what `launch` raises."""
    starter = ["bench.plan.part", msgspec.json.encode(pace).decode()]
    if launch(config, runs, DeathsView(config, runs), lambda role: starter):
        raise KeyboardInterrupt


PLAN = BenchSection(
    "plan",
    {"producers": partial(measure_plans, PRODUCERS, PACE), "trainer": partial(measure_plans, TRAINER, SLOW_TRAINER)},
    PlanSettings(),
    PlanSettings(num_updates=6),
    uses_run_file=True,
)
