"""Times of records: durations that no step of a clock changes, and this host's clock against Redis'."""

import logging
import time

log = logging.getLogger(__name__)

TOLERATED_S = 5.0


def _since_boot_s() -> float:
    """Returns seconds of a clock that nothing sets; it also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_STARTED_S, _STARTED_TICKS = time.time(), _since_boot_s()


def uptime_s() -> float:
    """Returns the seconds since this process imported the module."""
    return _since_boot_s() - _STARTED_TICKS


def steady_s() -> float:
    """Returns seconds since the epoch, by the clock as it was when this process began."""
    return _STARTED_S + uptime_s()


def stamp() -> dict[str, float]:
    """Returns the times of a line that is written now: `time_s`, of the clock; `started_s`, the same for all lines of
    this process; and `uptime_s`, from which readers take durations."""
    return {"time_s": time.time(), "started_s": _STARTED_S, "uptime_s": uptime_s()}


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
