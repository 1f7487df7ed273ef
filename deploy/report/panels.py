"""The figures of the report that a function draws: a run's telemetry, into matplotlib axes."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from penstock.deploy.report.drawing import (
    AMBER,
    BLUE,
    GRID,
    INK,
    LAG_SHADES,
    MASKED_SHADE,
    MUTED,
    RED,
    SERIES,
    TEAL,
    VIOLET,
    binned,
    by_update,
    column,
    figure,
    in_percent,
    legend_above,
    noisy_line,
    numbers,
    running_mean,
    since_start,
    time_axis,
)
from penstock.deploy.report.means import answered, lag_totals, pauses_of, sampled_tokens
from penstock.deploy.report.telemetry import RunTelemetry
from penstock.schemas.config import EvaluationConfig
from penstock.schemas.metrics import error_key, figure_name, part_key, parts_of


def _learning(telemetry: RunTelemetry, ax: Axes, reward_x: np.ndarray, held_out_x: np.ndarray) -> bool:
    """Draws one figure, the goal's or else the reward: of the training batches and of the held-out prompts."""
    evaluation = telemetry.config.evaluation if telemetry.config else EvaluationConfig()
    name = figure_name(evaluation.figure)
    drawn = noisy_line(ax, reward_x, column(telemetry.updates, evaluation.figure), BLUE, f"{name} (training, sampled)")
    held_out = np.array([point.figures.get(evaluation.figure, np.nan) for point in telemetry.evaluations])
    there = np.flatnonzero(np.isfinite(held_out))
    if len(there):
        key = error_key(evaluation.figure)
        errors = np.array([point.metrics.get(key, 0.0) for point in telemetry.evaluations])
        label = f"{name} (held out, {answered(telemetry.config)})"
        ax.plot(held_out_x, held_out, color=AMBER, marker="o", markersize=4.5, label=label)
        if errors.any():
            ax.fill_between(held_out_x, held_out - errors, held_out + errors, color=AMBER, alpha=0.2, linewidth=0)
        ends = ((0, (-4, 6), "right"), (-1, (0, 9), "center")) if len(there) > 1 else ((0, (0, 9), "center"),)
        for i, offset, side in ends:
            where = (held_out_x[there[i]], held_out[there[i]])
            text = f"{where[1]:.3f}"
            ax.annotate(text, where, xytext=offset, textcoords="offset points", ha=side, color=AMBER, fontsize=9)
    if evaluation.goal is not None:
        value = evaluation.goal.value
        ax.axhline(value, color=MUTED, linestyle=(0, (4, 3)), linewidth=1, label=f"goal {value:g}")
    ax.set_ylabel(name)
    ax.margins(x=0.1, y=0.12)
    if drawn or len(there):
        legend_above(ax, columns=3)
    return drawn or bool(len(there))


@figure(
    "Reward and held-out reward by update",
    "Held out should follow training up; a growing gap is memorized tasks, or a reward that pays for something else.",
)
def learning_by_update(telemetry: RunTelemetry, ax: Axes) -> bool:
    ax.set_xlabel("update")
    return _learning(
        telemetry, ax, numbers(telemetry.updates), np.array([p.update for p in telemetry.evaluations], float)
    )


@figure(
    "Reward and held-out reward by time",
    "The same against the clock: a flat stretch here that is none by update is time lost, not learning.",
)
def learning_by_time(telemetry: RunTelemetry, ax: Axes) -> bool:
    reward_s = since_start(telemetry, [line.time_s for line in telemetry.updates])
    held_out_s = since_start(telemetry, [point.time_s for point in telemetry.evaluations])
    unit = time_axis(ax, max([*reward_s, *held_out_s], default=0.0))
    return _learning(telemetry, ax, reward_s / unit, held_out_s / unit)


@figure(
    "Parts of the reward by update",
    "Means over a batch. The part that rises is the one that is learned; one that falls was traded for it.",
)
def reward_parts(telemetry: RunTelemetry, ax: Axes) -> bool:
    names = sorted({name for line in telemetry.updates for name in parts_of(line.metrics)})
    series = [(part_key(name), colour, name) for name, colour in zip(names, SERIES, strict=False)]
    drawn = by_update(telemetry, ax, series, "mean of the part")
    if drawn:
        legend_above(ax)
    return drawn


@figure(
    "Tokens by lag",
    "Most tokens should lie at or below max_lag; red is beyond what is trained on and was masked.",
)
def lag_histogram(telemetry: RunTelemetry, ax: Axes) -> bool:
    totals = lag_totals(telemetry.updates)
    if not totals.total():
        return False
    bound = telemetry.config.oldest_lag if telemetry.config else None
    lags = np.arange(max(totals) + 1) if max(totals) <= 40 else np.array(sorted(totals))
    shares = np.array([totals[lag] / totals.total() for lag in lags])
    masked = lags > bound if bound is not None else np.zeros(len(lags), dtype=bool)
    bars = ax.bar(lags, shares, width=0.8, color=np.where(masked, RED, BLUE))
    if len(lags) <= 12:
        ax.bar_label(bars, [f"{share:.1%}" if share else "" for share in shares], padding=2, fontsize=9, color=INK)
    if bound is not None:
        ax.axvline(bound + 0.5, color=MUTED, linestyle=(0, (4, 3)), linewidth=1)
        ax.annotate(
            f"bound {bound}",
            (bound + 0.5, 1),
            xycoords=("data", "axes fraction"),
            xytext=(5, -10),
            textcoords="offset points",
            color=MUTED,
            fontsize=9,
        )
        ax.set_xlim(right=max(lags[-1], bound + 1) + 0.6)
    ax.margins(y=0.14)
    ax.grid(axis="x", visible=False)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_xlabel("lag (optimizer steps between sampling and training)")
    ax.set_ylabel("share of tokens")
    return True


@figure(
    "Lag by update",
    "Bands of steady height are a pipeline in balance; where darker bands grow, rollouts wait longer.",
)
def lag_by_update(telemetry: RunTelemetry, ax: Axes) -> bool:
    updates = [line for line in telemetry.updates if line.lag_histogram]  # the others would be gaps
    top = len(LAG_SHADES) - 1
    counts = np.zeros((top + 1, len(updates)))
    for i, line in enumerate(updates):
        for lag, count in line.lag_histogram.items():
            counts[min(lag, top), i] += count
    if not counts.sum():
        return False
    x, *rows = binned(numbers(updates), *counts)
    stacked = np.array([running_mean(row) for row in rows])
    shares = stacked / np.maximum(stacked.sum(axis=0), 1)
    used = [lag for lag in range(top + 1) if shares[lag].any()]
    bound = telemetry.config.oldest_lag if telemetry.config else top
    ax.stackplot(
        x,
        shares[used],
        colors=[MASKED_SHADE if lag > bound else LAG_SHADES[lag] for lag in used],
        labels=[f"{lag} or more" if lag == top else str(lag) for lag in used],
        linewidth=0,
    )
    _share_axes(ax, "share of tokens")
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], title="lag", loc="center left", bbox_to_anchor=(1.0, 0.5), title_fontsize=9)
    return True


def _share_axes(ax: Axes, ylabel: str) -> None:
    """Sets up axes that bands of shares fill."""
    ax.margins(0)
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_xlabel("update")
    ax.set_ylabel(ylabel)


@figure(
    "Effective sample size and χ² by update",
    "ESS near 100 % and χ² near 0 mean the data are nearly on-policy; a slide in ESS comes before a collapse.",
    height_in=3.7,
)
def ess_chi2(telemetry: RunTelemetry, ess_ax: Axes, chi2_ax: Axes) -> bool:
    series = [("ess_fraction", TEAL, "before truncation"), ("applied_ess_fraction", AMBER, "of the weights applied")]
    has_ess = by_update(telemetry, ess_ax, series, "ESS / tokens")
    if len(ess_ax.lines) > 3:  # where nothing is truncated the two means lie on each other: both must be seen
        ess_ax.lines[3].set_linestyle("--")
        legend_above(ess_ax)
    has_chi2 = by_update(telemetry, chi2_ax, [("chi2", VIOLET, "χ²")], "χ² (per token)")
    ess_ax.set_xlabel("")
    in_percent(ess_ax)
    return has_ess or has_chi2


@figure(
    "Gradient norm by update",
    "Spikes above the clip line are cut there; a trend upwards calls for a lower learning rate.",
)
def grad_norm(telemetry: RunTelemetry, ax: Axes) -> bool:
    has_data = by_update(telemetry, ax, [("grad_norm", BLUE, "before clipping")], "gradient norm")
    if has_data and telemetry.config:
        limit = telemetry.config.trainer.max_grad_norm
        ax.axhline(limit, color=RED, linestyle=(0, (4, 3)), linewidth=1, label=f"clipped at {limit:g}")
        legend_above(ax)
    ax.set_ylim(bottom=0)
    return has_data


@figure(
    "Tokens per second over time",
    "Flat lines are steady work; the trainer lacks, of the producers' sum, what is skipped or evaluation.",
)
def tokens_per_s(telemetry: RunTelemetry, ax: Axes) -> bool:
    start_s, end_s = telemetry.start_s, telemetry.end_s
    if start_s is None or end_s is None or end_s <= start_s:
        return False
    unit = time_axis(ax, end_s - start_s)
    edges = np.linspace(start_s, end_s, max(2, min(120, int((end_s - start_s) / 2.0)) + 1))
    middles = ((edges[1:] + edges[:-1]) / 2 - start_s) / unit
    drawn = False
    curves = {producer: sampled_tokens(events) for producer, events in telemetry.producers.items()}
    for (producer, (times, tokens)), colour in zip(curves.items(), SERIES * len(curves), strict=False):
        if len(times) > 1:
            rates = np.diff(np.interp(edges, times, tokens)) / np.diff(edges)
            absent = (edges[1:] <= times[0]) | (edges[:-1] >= times[-1])
            ax.plot(middles, np.where(absent, np.nan, rates), color=colour, linewidth=1.5, label=producer)
            drawn = True
    if telemetry.updates:
        when = (start_s, *(line.time_s for line in telemetry.updates))
        trained = np.cumsum((0, *(line.num_tokens_trained for line in telemetry.updates)))
        totals = np.interp(edges, when, trained)
        ax.plot(
            middles, np.diff(totals) / np.diff(edges), color=INK, linewidth=1.5, linestyle=(0, (5, 2)), label="trainer"
        )
        drawn = True
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.set_ylabel("tokens per second")
    ax.set_ylim(bottom=0)
    if drawn:
        legend_above(ax)
    return drawn


@figure(
    "Pause per weight update",
    "How long sampling stood still for each load of weights: a narrow peak is good, a long tail is a busy machine.",
)
def pauses(telemetry: RunTelemetry, ax: Axes) -> bool:
    pauses_s = {producer: values for producer, values in pauses_of(telemetry).items() if values}
    by_producer = {producer: np.array(values) * 1000 for producer, values in pauses_s.items()}
    if not by_producer:
        return False
    everything = np.concatenate(list(by_producer.values()))
    # The longest 1 % would squeeze the rest into one bar: they share the last.
    limit = float(np.percentile(everything, 99)) * 1.15 + 1e-9
    bins = np.linspace(max(0.0, float(everything.min()) * 0.9), limit, 40)
    clipped = [np.minimum(values, limit) for values in by_producer.values()]
    colours = (SERIES * len(clipped))[: len(clipped)]
    ax.hist(clipped, bins=list(bins), stacked=True, color=colours, label=list(by_producer), rwidth=0.92)
    for q, style in ((50, "-"), (99, (0, (4, 3)))):
        value = float(np.percentile(everything, q))
        ax.axvline(value, color=INK, linewidth=1, linestyle=style, label=f"p{q} {value:.1f} ms")
    ax.set_xlabel("pause (ms)" + (", the longest in the last bar" if everything.max() > limit else ""))
    ax.set_ylabel("weight loads")
    ax.grid(axis="x", visible=False)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    legend_above(ax)
    return True


@figure(
    "Groups with a learning signal",
    "Siblings that all earned the same teach nothing: a falling share means tasks too easy or too hard.",
)
def learning_signal(telemetry: RunTelemetry, ax: Axes) -> bool:
    trained = column(telemetry.updates, "num_groups_trained")
    skipped = column(telemetry.updates, "num_groups_skipped")
    if not np.any(trained + skipped):
        return False
    x, share = binned(numbers(telemetry.updates), trained / np.maximum(trained + skipped, 1))
    share = running_mean(share)
    labels = ["trained", "skipped: all rewards equal"]
    ax.stackplot(x, [share, 1 - share], colors=[TEAL, GRID], labels=labels, linewidth=0)
    _share_axes(ax, "share of groups")
    legend_above(ax)
    return True


@figure(
    "Where the trainer's time goes",
    "Time per update by phase: much waiting asks for more producers, much publishing for a faster store of weights.",
)
def trainer_time(telemetry: RunTelemetry, ax: Axes) -> bool:
    phases = (("step_s", BLUE, "step"), ("publish_s", AMBER, "publish weights"), ("wait_s", GRID, "wait for groups"))
    columns = [np.nan_to_num(column(telemetry.updates, name)) for name, _, _ in phases]
    if not telemetry.updates or not np.any(columns):
        return False
    x, *rows = binned(numbers(telemetry.updates), *columns)
    colours, labels = [colour for _, colour, _ in phases], [label for _, _, label in phases]
    ax.stackplot(x, [running_mean(row) * 1000 for row in rows], colors=colours, labels=labels, linewidth=0)
    ax.margins(x=0)
    ax.set_xlabel("update")
    ax.set_ylabel("time per update (ms)")
    legend_above(ax)
    return True
