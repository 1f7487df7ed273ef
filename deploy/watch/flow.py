"""The view **Flow**: which part of a run waits for which."""

from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.deploy.launch.live_view import shown_version
from penstock.deploy.report.means import metric_values
from penstock.deploy.watch.snapshot import Pauses, RunSnapshot
from penstock.deploy.watch.text import (
    NOTHING,
    bar,
    count,
    joined,
    milliseconds,
    percent,
    safe,
    size,
    sparkline,
)
from penstock.schemas import limits

_NAME = 48
"""Longest shown name of a producer, in characters; it wraps if the other columns need the space."""
_ROOMY = 100
"""Width of a terminal, in characters, from which two spaces separate the columns of producers; 80 have room for one."""
_WEIGHT_FIGURES = (
    "weight_changed_frac",
    "weight_chunk_bytes",
    "publish_blocked_s",
    "weight_chain",
    "weight_redis_bytes",
)
_COLOURS = {"wait": "yellow", "step": "green", "publish": "cyan"}


def flow(seen: RunSnapshot, width: int) -> RenderableType:
    part, why = bottleneck(seen)
    lines: list[RenderableType] = []
    if part:
        colour = "green" if part == "nobody" else "yellow"
        lines += [joined([Text("waited for", style="dim"), Text(part, style=f"bold {colour}"), why]), Text()]
    return Group(*lines, _trainer(seen, width), Text(), _groups(seen), Text(), *_weights(seen), _producers(seen, width))


def _trainer(seen: RunSnapshot, width: int) -> RenderableType:
    shares, rate = seen.shares, seen.updates_per_s
    head = joined(
        [
            Text("trainer", style="bold"),
            f"busy {percent(1 - shares['wait'])}" if shares else "no batch yet",
            f"{rate:.2f} updates/s" if rate is not None and not seen.is_over else "",
            f"{count(seen.trained_per_s)} tokens/s trained",
        ]
    )
    if shares is None:
        return head
    line = Text()
    room = max(10, width - 40)
    for phase, share in shares.items():
        line.append(bar(share, room), style=_COLOURS[phase])
    line.append("  " + "  ".join(f"{phase} {percent(share)}" for phase, share in shares.items()))
    return Group(head, line)


def _groups(seen: RunSnapshot) -> RenderableType:
    if seen.redis is None:
        if seen.is_over:
            return Text("Redis has ended with the run", style="dim")
        return Text(f"Redis does not answer: {safe(seen.without_redis)}", style="red")
    redis = seen.redis
    table = Table.grid(padding=(0, 3))
    cells = {
        "credit": seen.credit,
        "prompts queued": max(0, redis.num_prompts - redis.num_claimed),
        "in producers": redis.num_claimed,
        "ready to train": seen.num_ready,
        "free credit": max(0, seen.credit - redis.num_prompts - seen.num_ready),
        "stream": redis.num_stream_entries,
    }
    table.add_row(*(Text(name, style="dim") for name in cells))
    table.add_row(*(Text(count(value), style="bold") for value in cells.values()))
    return table


def _weights(seen: RunSnapshot) -> list[RenderableType]:
    """Shows how policies reach producers, as far as recent batches tell."""
    changed, sizes, blocked_s, chains, in_redis = (metric_values(seen.recent, key) for key in _WEIGHT_FIGURES)
    parts = [
        f"{percent(fmean(changed))} changed by an update" if changed else "",
        f"{size(fmean(sizes))} each" if sizes else "",
        f"training held up {milliseconds(fmean(blocked_s))}" if blocked_s else "",
        f"{count(chains[-1])} deltas on the anchor" if chains else "",
        f"{size(in_redis[-1])} in Redis" if in_redis else "",
    ]
    return [joined([Text("weights", style="bold"), *parts]), Text()] if any(parts) else []


def _producers(seen: RunSnapshot, width: int) -> RenderableType:
    gap = 2 if width >= _ROOMY else 1
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0))
    table.add_column("producer", overflow="fold", min_width=len("producer-0"))
    for name in ("policy", "lag", "tokens/s", "groups", "pauses", "p50", "longest", "paused"):
        table.add_column(name, justify="right", no_wrap=True)
    for producer in sorted({*seen.pauses, *seen.producers}, key=lambda name: (len(name), name)):
        pauses = seen.pauses.get(producer, Pauses())
        paused = [str(len(pauses.seen)), milliseconds(pauses.median_s), milliseconds(pauses.longest_s)]
        paused.append(percent(pauses.share))
        if producer in seen.producers:
            heartbeat, lag = seen.producers[producer]
            table.add_row(
                safe(producer, _NAME),
                shown_version(heartbeat.policy_version),
                NOTHING if lag is None else str(lag),
                f"{heartbeat.tokens_per_s:,.0f}",
                str(len(heartbeat.in_flight)),
                *paused,
            )
        else:
            state = "ended" if seen.is_over else "away" if seen.redis is not None else "unknown"
            style = "red" if seen.is_running else "dim"
            table.add_row(safe(producer, _NAME), state, "", "", "", *paused, style=style)
    if not table.row_count:
        table.add_row("none")
    errors = [
        Text(f"{safe(name, 24)}: {safe(heartbeat.last_error)}", style="red")
        for name, (heartbeat, _) in sorted(seen.producers.items())
        if heartbeat.last_error
    ]
    total = Text()
    if seen.producers:
        sampled = sum(heartbeat.tokens_per_s for heartbeat, _ in seen.producers.values())
        total = joined([Text("all", style="bold"), f"{count(sampled)} tokens/s sampled", _queue(seen, width)])
    return Group(table, total, *errors)


def _queue(seen: RunSnapshot, width: int) -> str:
    depths = [float(update.queue_depth) for update in seen.updates if update.queue_depth is not None]
    line = sparkline(depths[-200:], max(0, width - 50))
    return f"queue {line} {count(depths[-1])}" if depths else ""


def bottleneck(seen: RunSnapshot) -> tuple[str, str]:
    """Names what the run waits for, and why: `producers`, `weight updates`, `trainer`, `nobody`, or what is missing;
    ("", "") for a run that is over or not running."""
    if seen.is_over or seen.redis is None or not seen.is_running:
        return "", ""
    if not seen.producers:
        return "producers", "none is alive"
    if not seen.redis.has_trainer:
        return "trainer", "none is alive"
    if seen.silent_s is not None:
        return "trainer", f"no update for {seen.silent_s:.0f} s: see logs/trainer.log"
    if seen.shares is None:
        return "start", "no batch has been trained yet"
    waits = seen.shares["wait"]
    paused = fmean([pauses.share for pauses in seen.pauses.values() if pauses.share is not None] or [0.0])
    if waits >= limits.WAITING:
        if paused >= limits.PAUSED:
            return "weight updates", f"the trainer waits {waits:.0%} of its time, they pause for {paused:.0%}"
        if seen.config.mode == "synchronous":
            return "producers", f"the trainer waits {waits:.0%} of its time; synchronous: in turns"
        return "producers", f"the trainer waits {waits:.0%} of its time for groups"
    if seen.num_ready >= limits.QUEUE_FILLED * seen.credit:
        return "trainer", f"busy {1 - waits:.0%} of its time, {seen.num_ready} of {seen.credit} groups wait"
    return "nobody", f"the trainer is busy {1 - waits:.0%} of its time, producers have work"
