"""The figures of the mismatch by lag, with a line for each of `penstock.schemas.metrics.LAG_LABELS`."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from penstock.deploy.report.drawing import (
    AMBER,
    BLUE,
    LAG_COLOURS,
    binned,
    column,
    figure,
    legend_above,
    numbers,
    running_mean,
)
from penstock.deploy.report.summary import mismatch_by_lag
from penstock.deploy.report.telemetry import RunTelemetry
from penstock.schemas.metrics import LAG_LABELS, lag_key


@figure(
    "Mismatch against lag",
    "The point at 0, of rows that met no update, is the gap between engine and trainer; what rises from there is "
    "drift, which a smaller lag or a correction keeps out of the gradient. 0-mixed: tokens of lag 0 in rows that began "
    "under older weights, whose keys and values they saw.",
)
def mismatch_against_lag(telemetry: RunTelemetry, ax: Axes) -> bool:
    """Draws means over the whole run, a point for each lag bucket above 0 on a logarithmic axis."""
    found = mismatch_by_lag(telemetry.updates)
    drawn: list[float] = []
    for name, colour, label, marker in (("k3_kl", BLUE, "k3 KL (nats per token)", "o"), ("chi2", AMBER, "χ²", "s")):
        points = {i: found.get(label_, {}).get(name, 0.0) for i, label_ in enumerate(LAG_LABELS)}
        above = {i: value for i, value in points.items() if value > 0}
        if above:
            ax.plot(list(above), list(above.values()), color=colour, marker=marker, markersize=5, label=label)
            drawn += above.values()
    if drawn:
        ax.set_yscale("log")
        # From a power of ten to another: however little the points differ, there are two ticks to read them by.
        low, high = math.floor(math.log10(min(drawn))), math.floor(math.log10(max(drawn))) + 1
        ax.set_ylim(10.0**low, 10.0**high)
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high - low < 3 else (1.0,)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        legend_above(ax)
    ax.set_xticks(range(len(LAG_LABELS)), LAG_LABELS)
    ax.set_xlim(-0.4, len(LAG_LABELS) - 0.6)
    ax.set_xlabel("lag (optimizer steps between sampling and training)")
    ax.set_ylabel("mean over the run's tokens")
    return bool(drawn)


@figure(
    "Effective sample size by lag",
    "As a share of the tokens: of the ratios as they are, and of the weights applied. What lies between the two is "
    "what truncation hides.",
    height_in=3.9,
)
def ess_by_lag(telemetry: RunTelemetry, ratio_ax: Axes, applied_ax: Axes) -> bool:
    for ax in (ratio_ax, applied_ax):
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.4g} %"))
    series = {"ess_fraction": "ESS of ratios", "applied_ess_fraction": "ESS of weights"}
    return _lines(telemetry, (ratio_ax, applied_ax), series)


@figure(
    "KL between engine and trainer by lag",
    "Per token. The line of lag 0 must stay flat: if it rises, the engine computes something else. That of 0-mixed, "
    "in rows that met an update, is drift already. k3 is never negative.",
    height_in=3.9,
)
def kl_by_lag(telemetry: RunTelemetry, kl_ax: Axes, k3_ax: Axes) -> bool:
    return _lines(telemetry, (kl_ax, k3_ax), {"kl": "KL (nats)", "k3_kl": "k3 (nats)"})


@figure(
    "χ² by lag",
    "The variance that the ratios bring into the gradient; above 1 an old token says less than its noise.",
)
def chi2_by_lag(telemetry: RunTelemetry, ax: Axes) -> bool:
    return _lines(telemetry, (ax,), {"chi2": "χ² (per token)"})


@figure(
    "Importance weight and share of tokens corrected by lag",
    "Weights near 1 are without bias; one that falls with lag is the correction trusting old tokens less. Below "
    "the share of tokens whose weight it bounded or took away.",
    height_in=3.9,
)
def weight_by_lag(telemetry: RunTelemetry, weight_ax: Axes, corrected_ax: Axes) -> bool:
    series = {"weight_mean": "mean weight applied", "corrected_frac": "tokens corrected"}
    drawn = _lines(telemetry, (weight_ax, corrected_ax), series)
    _as_shares(corrected_ax)
    return drawn


@figure(
    "Rejected tokens by lag and sign of the advantage",
    "Share of the tokens of that sign that the correction gave no weight; a share that "
    "differs much between the signs tilts what is learned.",
    height_in=3.9,
)
def masked_by_lag(telemetry: RunTelemetry, positive_ax: Axes, negative_ax: Axes) -> bool:
    series = {"masked_frac_positive": "advantage > 0", "masked_frac_negative": "advantage < 0"}
    _lines(telemetry, (positive_ax, negative_ax), series)
    _as_shares(positive_ax, negative_ax)
    return any(
        np.any(np.asarray(line.get_ydata(), dtype=float) > 0) for ax in (positive_ax, negative_ax) for line in ax.lines
    )


def _as_shares(*axes: Axes) -> None:
    for ax in axes:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        ax.set_ylim(bottom=0, top=max(ax.get_ylim()[1], 0.01))


def _lines(telemetry: RunTelemetry, axes: Sequence[Axes], series: Mapping[str, str]) -> bool:
    """Draws a metric in each of the axes; series: label by metric.

    A line is a bucket's running mean over the batches that have a value; a batch without neighbours is a dot.
    """
    drawn = False
    for ax, (name, ylabel) in zip(axes, series.items(), strict=True):
        for label, colour in zip(LAG_LABELS, LAG_COLOURS, strict=True):
            x, values = binned(numbers(telemetry.updates), column(telemetry.updates, lag_key(name, label)))
            there = np.isfinite(values)
            if not there.any():
                continue
            smooth = np.where(there, running_mean(values), np.nan)
            ax.plot(x, smooth, color=colour, label=f"lag {label}", linewidth=1.5)
            around = np.pad(there, 1)
            alone = there & ~around[:-2] & ~around[2:]
            ax.plot(x[alone], smooth[alone], color=colour, linestyle="none", marker="o", markersize=3)
            drawn = True
        ax.set_ylabel(ylabel)
    axes[-1].set_xlabel("update")
    if axes[0].lines:
        legend_above(axes[0], columns=len(LAG_LABELS))
    return drawn
