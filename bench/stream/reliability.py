"""The cost of reliability in a real run: the demo with its checkpoints against the same run without them."""

import os
import re
import shutil
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import msgspec

from bench.pipeline.modes import FIRST_UPDATE, ModeRun, groups_per_s, run_mode
from bench.result import Figure, Goal, compare_rounds, in_turns
from bench.section import Bench, redis_server, run_file_model
from penstock.schemas.config import RunConfig, load_config

NEVER = 10**9
GOAL = Goal(at_least=0.97)
CHECKPOINT_LINE = re.compile(r"checkpoint \S+ at update (\d+): ([0-9.]+) s")


class ReliabilityVariant(msgspec.Struct, frozen=True, kw_only=True):
    checkpoints: bool
    append_only_file: bool


VARIANTS = {
    "reliable": ReliabilityVariant(checkpoints=True, append_only_file=True),
    "no checkpoints": ReliabilityVariant(checkpoints=False, append_only_file=True),
    "no checkpoints, no file": ReliabilityVariant(checkpoints=False, append_only_file=False),
}


def reliability_figures(bench: Bench) -> list[Figure]:
    """Compares groups per second of short runs in turns, each with the producers and threads of the run file, pinned to
    no core. So small a learning rate moves no weight: every update meets the same work."""
    checkpoint_s: list[float] = []
    numbers = iter(range(10**6))

    def rate(name: str) -> float:
        config = _config(bench, f"reliability-{next(numbers)}", VARIANTS[name])
        run = _run(bench, config, VARIANTS[name])
        checkpoint_s.extend(_checkpoints_s(bench.folder / "runs" / config.name, run))
        return groups_per_s(run, config)

    found = in_turns(bench.settings.reliability_rounds, {name: partial(rate, name) for name in VARIANTS})
    config = _config(bench, "reliability", VARIANTS["reliable"])
    details = {
        "checkpoint_every": config.checkpoint.every,
        "checkpoint_s": median(checkpoint_s) if checkpoint_s else None,
        "num_updates": bench.settings.reliability_updates,
        "reliable_groups_per_s_by_round": found["reliable"],
    }
    return [
        compare_rounds(
            f"groups/s of the demo with checkpoints, against {without}",
            found["reliable"],
            found[name],
            reference_is=reference_is,
            goal=GOAL,
            details={**details, "reference_groups_per_s_by_round": found[name]},
        )
        for name, without, reference_is in (
            ("no checkpoints", "none", "the same run without checkpoints"),
            (
                "no checkpoints, no file",
                "none and no append-only file",
                "the same run without checkpoints and with appendonly no",
            ),
        )
    ]


def _config(bench: Bench, name: str, variant: ReliabilityVariant) -> RunConfig:
    overrides = [f"name={name}", "metrics.port=0", "trainer.learning_rate=1e-12"]
    overrides.append(f"num_updates={bench.settings.reliability_updates}")
    if not variant.checkpoints:
        overrides.append(f"checkpoint.every={NEVER}")
    return load_config(bench.run_file, overrides)


def _run(bench: Bench, config: RunConfig, variant: ReliabilityVariant) -> ModeRun:
    run_file_model(bench)
    folder = bench.folder / f"{config.name}-server"
    with redis_server(folder) as server:
        server.client.config_set("appendonly", "yes" if variant.append_only_file else "no")
        with patch.dict(os.environ, REDIS_URL=server.url):
            run = run_mode(config, bench.folder / "runs", limit_s=bench.settings.reliability_limit_s, pinned=False)
    shutil.rmtree(folder)
    return run


def _checkpoints_s(run_folder: Path, run: ModeRun) -> list[float]:
    """Returns the seconds of each checkpoint among the updates that count for the rate."""
    lines = (run_folder / "logs" / "trainer.log").read_text(errors="replace")
    taken = [(int(update), float(seconds)) for update, seconds in CHECKPOINT_LINE.findall(lines)]
    return [seconds for update, seconds in taken if FIRST_UPDATE <= update < run.num_updates]
