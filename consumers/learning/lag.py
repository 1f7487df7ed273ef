"""The lag of tokens: how old they are when they are consumed."""

from collections.abc import Callable
from functools import cache

from penstock.schemas.policy import UnknownVersionError, lag
from penstock.schemas.rollout import RolloutGroup, Segment

Lags = Callable[[int], int]
KnownLags = Callable[[int], int | None]


class LagTable:
    """`table(version)` is the lag of a token sampled by `version`, for the trainer's present version.

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
    """Returns `lag_of` with None in place of an UnknownVersionError; it remembers its results."""

    @cache
    def lag(version: int) -> int | None:
        try:
            return lag_of(version)
        except UnknownVersionError:
            return None

    return lag


def masked_tokens(group: RolloutGroup, lag: KnownLags, lag_bound: int) -> list[int]:
    """By rollout, its sampled tokens beyond the lag bound."""
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
    """The lag of each of a segment's version spans, those of an unknown version as `pack` counts them."""
    known = [lag(span.version) for span in segment.version_spans]
    # Unknown is not fresh: at least 1, even if every other token is fresh.
    fallback = max(1, max((d for d in known if d is not None), default=lag_bound))
    return tuple(fallback if d is None else d for d in known)
