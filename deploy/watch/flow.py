"""The view **Flow**: which part of a run waits for which."""

from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.deploy.launch.live_view import shown_version
from penstock.deploy.report.telemetry import metric_values
from penstock.deploy.watch.snapshot import Pauses, RunSnapshot
from penstock.deploy.watch.text import (
    NOTHING,
    bar,
    count,
    duration,
    joined,
    milliseconds,
    percent,
    safe,
    size,
    sparkline,
)

WAITING = 0.2
"""A trainer that waits for this share of its time is held up. The recording rules have this number and the next two."""
PAUSED = 0.3
"""Producers that are paused for this share of their time are held up by weight updates."""
FULL = 0.8
"""A queue filled to this share of the credit keeps producers waiting."""
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
    shares = seen.shares
    if seen.trainer is None and shares is None:
        return Text(f"trainer: {_why_no_trainer(seen)}")
    rate = seen.updates_per_s
    head = joined(
        [
            Text("trainer", style="bold"),
            f"busy {percent(1 - shares['wait'])}" if shares else "no batch yet",
            f"{rate:.2f} updates/s" if rate is not None and not seen.is_over else "",
            f"{count(seen.trained_per_s)} tokens/s trained",
        ]
    )
    unread = [Text(_why_no_trainer(seen), style="red")] if seen.trainer is None and seen.is_running else []
    if shares is None:
        return Group(head, *unread)
    line = Text()
    room = max(10, width - 40)
    for phase, share in shares.items():
        line.append(bar(share, room), style=_COLOURS[phase])
    line.append("  " + "  ".join(f"{phase} {percent(share)}" for phase, share in shares.items()))
    return Group(head, line, *unread)


def _why_no_trainer(seen: RunSnapshot) -> str:
    why = safe(seen.without_trainer or "no endpoint is known")
    return f"its metrics cannot be read: {why}"


def _groups(seen: RunSnapshot) -> RenderableType:
    if seen.redis is None:
        if seen.is_over:
            return Text("Redis has ended with the run", style="dim")
        return Text(f"Redis does not answer: {safe(seen.without_redis)}", style="red")
    redis, credit, ready = seen.redis, seen.credit, seen.num_ready
    queued = max(0, redis.num_prompts - redis.num_claimed)
    room = None if credit is None or ready is None else max(0, credit - redis.num_prompts - ready)
    table = Table.grid(padding=(0, 3))
    cells = {
        "credit": count(credit),
        "prompts queued": count(queued),
        "in producers": count(redis.num_claimed),
        "ready to train": count(ready),
        "free credit": count(room),
        "stream": f"{redis.num_stream_entries:,}",
    }
    table.add_row(*(Text(name, style="dim") for name in cells))
    table.add_row(*(Text(value, style="bold") for value in cells.values()))
    return table


def _weights(seen: RunSnapshot) -> list[RenderableType]:
    """Shows how policies reach producers, as far as recent batches, Redis and endpoints tell."""
    changed, sizes, blocked_s, chains, in_redis = (metric_values(seen.recent, key) for key in _WEIGHT_FIGURES)
    parts = [
        f"{percent(fmean(changed))} changed by an update" if changed else "",
        f"{size(fmean(sizes))} each" if sizes else "",
        f"training held up {milliseconds(fmean(blocked_s))}" if blocked_s else "",
        f"{count(chains[-1])} deltas on the anchor" if chains else "",
        f"{size(in_redis[-1])} in Redis" if in_redis else "",
    ]
    producers = seen.redis.producers if seen.redis is not None else {}
    held = [(each.announced_s, name) for name, each in producers.items() if each.announced_s is not None]
    if held and seen.is_running:
        announced_s, oldest = min(held)
        parts.append(f"oldest held {duration(seen.time_s - announced_s)}: {safe(oldest, 24)}")
    faults = {reason: num for reason, num in sorted(seen.rebuilt.items()) if reason != "new"}
    if faults:
        reasons = ", ".join(f"{safe(reason, 24)} {num}" for reason, num in faults.items())
        parts.append(f"copies rebuilt: {reasons}")
    return [joined([Text("weights", style="bold"), *parts]), Text()] if any(parts) else []


def _producers(seen: RunSnapshot, width: int) -> RenderableType:
    gap = 2 if width >= _ROOMY else 1
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0))
    table.add_column("producer", overflow="fold", min_width=len("producer-0"))
    for name in ("policy", "lag", "tokens/s", "groups", "mismatch", "pauses", "p50", "longest", "paused"):
        table.add_column(name, justify="right", no_wrap=True)
    alive = seen.redis.producers if seen.redis is not None else {}
    for producer in sorted({*seen.producers, *alive}, key=lambda name: (len(name), name)):
        pauses = seen.pauses.get(producer, Pauses())
        paused = [str(len(pauses.seen)), milliseconds(pauses.median_s), milliseconds(pauses.longest_s)]
        if producer not in alive:
            is_starting = producer in seen.starting
            state = "starting" if is_starting else "gone" if seen.redis is not None else "unknown"
            state, style = ("ended", "dim") if seen.is_over else (state, "yellow" if is_starting else "red")
            style = style if seen.is_running else "dim"
            table.add_row(safe(producer, _NAME), state, "", "", "", "", *paused, percent(pauses.share), style=style)
            continue
        heartbeat, lag, _, found = alive[producer]
        table.add_row(
            safe(producer, _NAME),
            shown_version(heartbeat.policy_version),
            NOTHING if lag is None else str(lag),
            f"{heartbeat.tokens_per_s:,.0f}",
            str(len(heartbeat.in_flight)),
            NOTHING if found is None or found.gap is None else f"{found.gap:.1e}",
            *paused,
            percent(pauses.share),
            style="red" if found is not None and found.quarantined_s else None,
        )
    errors = [f"{safe(name, 24)}: {safe(each.heartbeat.last_error)}"
              for name, each in sorted(alive.items()) if each.heartbeat.last_error]  # fmt: skip
    errors += [
        f"{safe(name, 24)}: quarantined: {safe(found.reason)}"
        for name, (*_, found) in sorted(alive.items())
        if found is not None and found.quarantined_s
    ]
    if not table.row_count:
        table.add_row("none")
    total = Text()
    if alive:
        total = joined([Text("all", style="bold"), f"{count(seen.tokens_per_s)} tokens/s sampled", _queue(seen, width)])
    return Group(table, total, *(Text(error, style="red") for error in errors))


def _queue(seen: RunSnapshot, width: int) -> str:
    depths = [float(update.queue_depth) for update in seen.updates if update.queue_depth is not None]
    line = sparkline(depths[-200:], max(0, width - 50))
    return f"queue {line} {count(depths[-1])}" if depths else ""


def bottleneck(seen: RunSnapshot) -> tuple[str, str]:
    """Names what the run waits for, and why: `producers`, `weight updates`, `trainer`, `nobody`, or what is missing;
    ("", "") for a run that is over or not running."""
    if seen.is_over or not seen.is_running:
        return "", ""
    if (missing := _missing(seen)) is not None:
        return missing
    shares = seen.shares
    if shares is None:
        return "start", "no batch has been trained yet"
    paused = [pauses.share for pauses in seen.pauses.values() if pauses.share is not None]
    in_turns = seen.config is not None and seen.config.mode == "synchronous"
    return waited_for(shares["wait"], fmean(paused or [0.0]), seen.num_ready, seen.credit, in_turns=in_turns)


def waited_for(
    waits: float, paused: float, ready: float | None, credit: float | None, *, in_turns: bool
) -> tuple[str, str]:
    """Names what a run that trains waits for, and why.

    waits: share of its time that the trainer waits. paused: share of theirs that producers are paused. ready: groups
    that wait to be trained. in_turns: the run is synchronous.
    """
    if waits >= WAITING:
        if paused >= PAUSED:
            return "weight updates", f"the trainer waits {waits:.0%} of its time, they pause for {paused:.0%}"
        if in_turns:
            return "producers", f"the trainer waits {waits:.0%} of its time; synchronous: in turns"
        return "producers", f"the trainer waits {waits:.0%} of its time for groups"
    if credit and ready is not None and ready >= FULL * credit:
        return "trainer", f"busy {1 - waits:.0%} of its time, {ready:.0f} of {credit:.0f} groups wait"
    return "nobody", f"the trainer is busy {1 - waits:.0%} of its time, producers have work"


def _missing(seen: RunSnapshot) -> tuple[str, str] | None:
    if seen.redis is None and seen.without_redis:
        return "Redis", "it does not answer"
    if seen.redis is not None and not seen.redis.producers:
        return ("start", "the producers are starting") if seen.starting else ("producers", "none is alive")
    if seen.redis is not None and not seen.redis.has_trainer and seen.trainer is None:
        return "trainer", "none is alive"
    abandoned = seen.count("penstock_abandoned_groups")
    if abandoned and (seen.silent_s is not None or seen.newest is None):
        return "agents", f"they abandoned the last {abandoned} groups"
    if seen.silent_s is not None:
        return "trainer", f"no update for {seen.silent_s:.0f} s: see logs/trainer.log"
    return None
