"""Draws the picture of a run that the README shows: `python docs/run_picture.py FOLDER docs/demo.png`."""

import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from penstock.deploy.report.figures import FIGURES, STYLE, WIDTH_IN, draw
from penstock.deploy.report.telemetry import RunTelemetry, read_telemetry

NAMES = ("learning-by-update", "lag-by-update", "ess-chi2", "tokens-per-s")
"""The figures of the picture, row by row."""


def write_picture(telemetry: RunTelemetry, file: Path) -> None:
    """Draws the figures of `NAMES` two in a row, 160 dots per inch."""
    specs = [next(spec for spec in FIGURES if spec.name == name) for name in NAMES]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2 * WIDTH_IN, 3.4 * ((len(specs) + 1) // 2)), layout="constrained")
        parts = figure.subfigures((len(specs) + 1) // 2, 2, squeeze=False, wspace=0.03, hspace=0.04).flat
        for spec, part in zip(specs, parts, strict=False):
            part.suptitle(spec.title, x=0.02, ha="left", fontweight="bold", fontsize=11.5)
            draw(spec, part, telemetry)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="png", dpi=160, metadata={"Software": None})


if __name__ == "__main__":
    folder, file = map(Path, sys.argv[1:])
    write_picture(read_telemetry(folder), file)
