"""Draws the held-out reward of Penstock and TRL from a result of `python -m bench trainer --only real`:
`python docs/peer_picture.py bench/results/trainer-real-DATE.json docs/real-trl.png`."""

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from penstock.deploy.report.drawing import INK
from penstock.deploy.report.figures import STYLE, WIDTH_IN

COLOURS = {"penstock": ("Penstock", "#2a78d6"), "trl": ("TRL's GRPOTrainer", "#c05621")}
AXES = ((0, 1.0, "updates"), (2, 60.0, "minutes of processor time"))
"""The field of a point, its divisor, and the label."""


def write_picture(result: Path, file: Path) -> None:
    """Draws every seed's curve by update and by processor time, side by side."""
    runs = json.loads(result.read_text(encoding="utf-8"))["figures"][0]["details"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2 * WIDTH_IN, 3.2), layout="constrained")
        for axes, (place, divisor, label) in zip(figure.subplots(1, 2, sharey=True), AXES, strict=True):
            for side, (name, colour) in COLOURS.items():
                for number, run in enumerate(runs[side]):
                    xs, ys = zip(*((point[place] / divisor, point[3]) for point in run["curve"]), strict=True)
                    axes.plot(xs, ys, "o-", color=colour, label=None if number else name, markersize=4)
            axes.set(xlabel=label, ylim=(0, 1))
        figure.axes[0].set_ylabel("held-out reward")
        figure.axes[0].legend(frameon=False, labelcolor=INK, loc="lower right")
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    write_picture(Path(sys.argv[1]), Path(sys.argv[2]))
