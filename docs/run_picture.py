"""Draws a picture of a run, as the README shows: `python docs/run_picture.py FOLDER docs/demo.png [FIGURE ...]`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from penstock.deploy.report.figures import FIGURES, STYLE, WIDTH_IN, draw
from penstock.deploy.report.telemetry import RunTelemetry, read_telemetry

NAMES = ("learning-by-update", "lag-by-update", "ess-chi2", "tokens-per-s")
"""The figures of a picture, row by row, if no others are named."""


def write_picture(telemetry: RunTelemetry, file: Path, names: Sequence[str] = NAMES) -> None:
    """Draws the named figures two in a row, 160 dots per inch; a single one at its width, 80 dots per inch."""
    specs = [next(spec for spec in FIGURES if spec.name == name) for name in names]
    num_columns, dpi = (2, 160) if len(specs) > 1 else (1, 80)
    num_rows = -(-len(specs) // num_columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(num_columns * WIDTH_IN, 3.4 * num_rows), layout="constrained")
        parts = figure.subfigures(num_rows, num_columns, squeeze=False, wspace=0.03, hspace=0.04).flat
        for spec, part in zip(specs, parts, strict=False):
            part.suptitle(spec.title, x=0.02, ha="left", fontweight="bold", fontsize=11.5)
            draw(spec, part, telemetry)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="png", dpi=dpi, metadata={"Software": None})


if __name__ == "__main__":
    folder, file, *names = sys.argv[1:]
    write_picture(read_telemetry(Path(folder)), Path(file), names or NAMES)
