"""How old a token is when it is consumed."""

from penstock.schemas.policy import UnknownVersionError, lag
from penstock.schemas.rollout import RolloutGroup


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
    """True where no token of known version lies within the lag bound (and some version is known)."""
    known = []
    for rollout in group.rollouts:
        for segment in rollout.segments:
            for span in segment.version_spans:
                try:
                    known.append(lag_of(span.version))
                except UnknownVersionError:
                    continue
    return bool(known) and min(known) > bound
