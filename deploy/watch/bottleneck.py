"""Who is waited for."""

from statistics import fmean

from penstock.deploy.watch.snapshot import RunSnapshot

WAITING = 0.2
"""A trainer that waits for this share of its time is held up; the recording rules say the same."""
PAUSED = 0.3
"""Producers that are paused for this share of theirs are held up by weight updates."""
FULL = 0.8
"""A queue filled to this share of the credit keeps producers waiting."""


def bottleneck(seen: RunSnapshot) -> tuple[str, str]:
    """(part, why): `producers`, `weight updates`, `trainer`, `nobody`, or what is missing; ("", "") for what is over or
    not running."""
    if seen.is_over or not seen.is_running:
        return "", ""
    if (missing := _missing(seen)) is not None:
        return missing
    shares = seen.shares
    if shares is None:
        return "start", "no batch has been trained yet"
    waits, credit, ready = shares["wait"], seen.credit, seen.num_ready
    if waits >= WAITING:
        paused = [pauses.share for pauses in seen.pauses.values() if pauses.share is not None]
        if paused and fmean(paused) >= PAUSED:
            return "weight updates", f"the trainer waits {waits:.0%} of its time, they pause for {fmean(paused):.0%}"
        if seen.config is not None and seen.config.mode == "synchronous":
            return "producers", f"the trainer waits {waits:.0%} of its time; synchronous: in turns"
        return "producers", f"the trainer waits {waits:.0%} of its time for groups"
    if credit and ready is not None and ready >= FULL * credit:
        return "trainer", f"busy {1 - waits:.0%} of its time, {ready} of {credit} groups wait"
    return "nobody", f"the trainer is busy {1 - waits:.0%} of its time, producers have work"


def _missing(seen: RunSnapshot) -> tuple[str, str] | None:
    if seen.redis is None and seen.without_redis:
        return "Redis", "it does not answer"
    if seen.redis is not None and not seen.redis.heartbeats:
        return "producers", "none is alive"
    if seen.redis is not None and not seen.redis.has_trainer and seen.trainer is None:
        return "trainer", "none is alive"
    if seen.silent_s is not None:
        return "trainer", f"no update for {seen.silent_s:.0f} s: see logs/trainer.log"
    return None
