"""The lag of tokens: their age when they are consumed."""

from collections.abc import Callable
from functools import cache

from penstock.schemas.policy import UnknownVersionError, lag
from penstock.schemas.rollout import RolloutGroup, Segment

Lags = Callable[[int], int]
KnownLags = Callable[[int], int | None]


class LagTable:
    """Maps a policy version to the lag of its tokens at the trainer's current version.

    Raises:
        UnknownVersionError, FutureVersionError: see `penstock.schemas.policy.lag`.
    """

    def __init__(self, current: int, forks: dict[int, int], announced: dict[int, int]) -> None:
        self.current = current
        self.forks = forks
        self.announced = announced
        self._known: dict[int, int] = {}

    def advance(self, version: int) -> None:
        self.current = version
        self._known.clear()

    def __call__(self, version: int) -> int:
        known = self._known.get(version)
        if known is None:
            known = self._known[version] = lag(version, self.current, self.forks, self.announced)
        return known


def is_stale(group: RolloutGroup, lag_of: LagTable, bound: int) -> bool:
    """True if no token of known version lies within the lag bound (and some version is known)."""
    lag = known_lags(lag_of)
    lags = [lag(span.version) for each in group.rollouts for segment in each.segments for span in segment.version_spans]
    known = [each for each in lags if each is not None]
    return bool(known) and min(known) > bound


def known_lags(lag_of: Lags) -> KnownLags:
    """Returns a function like `lag_of` that caches its results and returns None for an UnknownVersionError."""

    @cache
    def lag(version: int) -> int | None:
        try:
            return lag_of(version)
        except UnknownVersionError:
            return None

    return lag


def masked_tokens(group: RolloutGroup, lag: KnownLags, lag_bound: int) -> list[int]:
    """Returns each rollout's number of sampled tokens beyond the lag bound."""
    return [
        sum(
            span.end - span.start
            for segment in rollout.segments
            for span, d in zip(segment.version_spans, span_lags(segment, lag, lag_bound), strict=True)
            if d > lag_bound
        )
        for rollout in group.rollouts
    ]


def span_lags(segment: Segment, lag: KnownLags, lag_bound: int) -> tuple[int, ...]:
    """Returns the lag of each of a segment's version spans; `pack` says what an unknown version counts as."""
    known = [lag(span.version) for span in segment.version_spans]
    # Unknown is not fresh: at least 1, even if every other token is fresh.
    fallback = max(1, max((d for d in known if d is not None), default=lag_bound))
    return tuple(fallback if d is None else d for d in known)
