"""The results of a replay: its files, and the table in the terminal."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import msgspec
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table

from penstock.deploy.replay.player import Played
from penstock.deploy.replay.variants import RECORDED
from penstock.deploy.report.drawing import INK, SERIES, legend_above
from penstock.deploy.report.figures import STYLE, WIDTH_IN
from penstock.schemas.process.json_lines import JsonLines

MEASURES = {
    "loss": "loss",
    "rollout_correction/k3_kl": "KL (k3)",
    "ess_fraction": "ESS",
    "rollout_correction/clipped_frac": "corrected",
    "policy_clipped_frac": "clipped",
    "grad_norm": "grad norm",
    "entropy": "entropy",
}
"""Columns of the tables by their names in updates.jsonl. KL and ESS compare the variant's own policy with those that
sampled; `corrected` is the share of tokens whose weight the correction bounded, `clipped` of those whose policy ratio
the objective clipped."""
ALLOWED = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-2}
"""By `model.dtype`, how far a loss or gradient norm may be off on another number of ranks, which sum in another
order."""


def append_lines(folder: Path, played: Iterable[Played]) -> None:
    """Appends every number of each update to `updates.jsonl`."""
    lines = JsonLines(folder / "updates.jsonl")
    for line in played:
        lines.write(
            variant=line.variant,
            update=line.update,
            policy_version=line.policy_version,
            skipped_reason=line.skipped_reason,
            **{name: value if math.isfinite(value) else None for name, value in line.metrics.items()},
        )
    lines.close()


def write_comparison(folder: Path, about: dict[str, Any], played: Sequence[Played]) -> None:
    """Writes `replay.json` (what was replayed), `table.md` and `replay.svg`."""
    (folder / "replay.json").write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=1))
    (folder / "table.md").write_text(table_by_update(played), encoding="utf-8")
    with matplotlib.rc_context(STYLE):
        figure(played).savefig(folder / "replay.svg", format="svg", metadata={"Date": None})


def table_by_update(played: Sequence[Played]) -> str:
    """Returns a Markdown table per measure: a row per update, a column per variant."""
    parts = []
    names = list(dict.fromkeys(line.variant for line in played))
    for measure, title in MEASURES.items():
        by_update: dict[int, dict[str, str]] = {}
        for line in played:
            by_update.setdefault(line.update, {})[line.variant] = shown(line.metrics.get(measure))
        parts += [f"## {title} (`{measure}`)\n", f"| update | {' | '.join(names)} |", "|---:" * (len(names) + 1) + "|"]
        parts += [f"| {n} | {' | '.join(row.get(v, '') for v in names)} |" for n, row in sorted(by_update.items())]
        parts.append("")
    return "\n".join(parts)


def means_table(played: Sequence[Played]) -> Table:
    """Returns the mean of each measure over the updates, a column per variant."""
    by_variant: dict[str, list[Played]] = {}
    for line in played:
        by_variant.setdefault(line.variant, []).append(line)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"mean of {len(next(iter(by_variant.values())))} updates", style="bold", no_wrap=True)
    for name in by_variant:
        table.add_column(name, justify="right", overflow="fold")
    for measure, title in MEASURES.items():
        means = (_mean(line.metrics.get(measure) for line in own) for own in by_variant.values())
        table.add_row(title, *map(shown, means))
    return table


def differing(one: Iterable[Played], other: Iterable[Played], allowed: float) -> list[int]:
    """Returns the updates whose loss or gradient norm differs by more than `allowed`, relative to the larger or 1."""
    return [
        a.update
        for a, b in zip(one, other, strict=True)
        if not all(_alike(a.metrics.get(name), b.metrics.get(name), allowed) for name in ("loss", "grad_norm"))
    ]


def _alike(x: float | None, y: float | None, allowed: float) -> bool:
    if x is None or y is None:
        return x is y
    both_nan = math.isnan(x) and math.isnan(y)
    return x == y or both_nan or abs(x - y) <= allowed * max(1.0, abs(x), abs(y))


def figure(played: Sequence[Played]) -> Figure:
    """Draws a panel per measure that any variant has, a line per variant."""
    measures = [m for m in MEASURES if any(m in line.metrics for line in played)]
    drawn = Figure(figsize=(WIDTH_IN, 1.7 * len(measures)), layout="constrained")
    axes = drawn.subplots(len(measures), 1, sharex=True, squeeze=False)[:, 0]
    names = list(dict.fromkeys(line.variant for line in played))
    for ax, measure in zip(axes, measures, strict=True):
        for number, name in enumerate(names):
            own = [line for line in played if line.variant == name]
            values = np.array([line.metrics.get(measure, math.nan) for line in own], dtype=float)
            is_recorded = name == RECORDED
            ax.plot(
                [line.update for line in own],
                np.where(np.isfinite(values), values, np.nan),
                color=INK if is_recorded else SERIES[(number - 1) % len(SERIES)],
                linestyle=":" if is_recorded else "-",
                label=name,
            )
        ax.set_ylabel(MEASURES[measure])
    legend_above(axes[0])
    axes[-1].set_xlabel("update")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return drawn


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None
