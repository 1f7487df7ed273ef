"""Batches filled with groups that have variance against batches of the first to arrive: samples and seconds to an
accuracy."""

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from bench.pipeline.modes import ACCURACY, ModeRun
from bench.result import Figure, compare
from penstock.producers.environments.arithmetic import Arithmetic
from penstock.schemas.config import RunConfig
from penstock.schemas.prompt import Prompt, Reward

MEDIAN_DELAY_S = 0.2
SIGMA = 1.2
"""Of the delays' logarithm: one in a hundred is 16 times the median."""


class SlowlyJudged(Arithmetic):
    """Additions whose groups arrive with a long tail, as those of reasoning models do: each task's rewards take a time
    that is drawn once, log-normal."""

    async def reward(self, prompt: Prompt, completion: str) -> Reward:  # type: ignore[override]
        await asyncio.sleep(MEDIAN_DELAY_S * random.Random(prompt.text).lognormvariate(0.0, SIGMA))
        return super().reward(prompt, completion)


WORKLOADS = {
    "the demo": (),
    "groups that arrive with a long tail": (
        'environment.path="bench.pipeline.fill:SlowlyJudged"',
        "reward.concurrency=4096",
        "producers.groups_in_flight=128",
    ),
}


def samples_to_accuracy(run: ModeRun, config: RunConfig) -> int | None:
    """Counts the completions of all groups that were trained or skipped up to the first evaluation with `ACCURACY`."""
    reached = next((point.update for point in run.telemetry.evaluations if point.reward >= ACCURACY), None)
    if reached is None:
        return None
    groups = sum(
        update.num_groups_trained + update.num_groups_skipped + update.metrics.get("fill_skipped_groups", 0.0)
        for update in run.telemetry.updates
        if update.update <= reached
    )
    return round(groups) * config.group_size


def fill_figures(
    workload: str, config: RunConfig, with_variance: Sequence[ModeRun], any_: Sequence[ModeRun]
) -> Iterator[Figure]:
    """Compares one run of each kind for each seed. One cut off before `ACCURACY` counts as slower than the others."""
    runs = {"with_variance": with_variance, "any": any_}
    num_updates = {fill: [run.num_updates for run in found] for fill, found in runs.items()}
    measures: tuple[tuple[str, str, Callable[[ModeRun], float | None]], ...] = (
        ("samples", "samples", lambda run: samples_to_accuracy(run, config)),
        ("seconds", "s", lambda run: run.time_to_accuracy_s),
    )
    for name, unit, measure in measures:
        by_seed = {fill: [measure(run) for run in found] for fill, found in runs.items()}
        yield compare(
            f"{name} to {ACCURACY}, batches filled with variance, {workload}",
            unit=unit,
            measured=_median(by_seed["with_variance"]),
            reference=_median(by_seed["any"]),
            reference_is='batch.fill = "any"',
            details={"by_seed": by_seed, "num_updates": num_updates},
        )


def _median(values: Sequence[float | None]) -> float | None:
    found = median(math.inf if value is None else value for value in values)
    return None if found == math.inf else found
