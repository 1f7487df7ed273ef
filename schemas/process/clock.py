"""Compares this host's clock with Redis', which all hosts of a run share."""

import logging

log = logging.getLogger(__name__)

TOLERATED_S = 5.0


def seconds_ahead(redis_time: tuple[int, int], before_s: float, after_s: float) -> float:
    """Returns how many seconds this host's clock is ahead of Redis'.

    redis_time: Redis' reply to TIME, seconds and microseconds. before_s, after_s: this clock before and after the call;
        the error is at most half of the time between them.
    """
    seconds, microseconds = redis_time
    return (before_s + after_s) / 2 - seconds - microseconds / 1e6


def tell_if_wrong(ahead_s: float) -> None:
    """Logs a warning if the clocks differ by more than `TOLERATED_S`."""
    if abs(ahead_s) > TOLERATED_S:
        log.warning(
            "this host's clock is %.0f s %s that of Redis: times in its logs and records are wrong by as much; "
            "`penstock report` allows for it",
            abs(ahead_s),
            "ahead of" if ahead_s > 0 else "behind",
        )
