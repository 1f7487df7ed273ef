"""What is checked, wherever it comes from: rollouts, the weights they name, the run they belong to."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.consumers.parity.errors import ParityError
from penstock.deploy.parity.weights import WeightVersions
from penstock.producers.rollout.episode import load_tokenizer
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.policy import lag
from penstock.schemas.rollout import RolloutGroup


@dataclass(frozen=True)
class Material:
    """Rollouts and what belongs to them.

    title: where they come from, as in "run demo".
    policy_version: the trainer's newest; -1 where it is not known.
    forks, announced: of the run, as `penstock.schemas.policy.lag` takes them.
    notes: what a reader should know of how they were chosen.
    """

    title: str
    config: RunConfig
    groups: Sequence[RolloutGroup]
    weights: WeightVersions
    policy_version: int
    forks: dict[int, int]
    announced: dict[int, int]
    notes: tuple[str, ...] = ()

    @property
    def lag_of(self) -> Callable[[int], int] | None:
        """The lag of a version for the newest one; None where that is not known."""
        if self.policy_version < 0:
            return None
        return lambda version: lag(version, self.policy_version, self.forks, self.announced)


def versions_of(groups: Iterable[RolloutGroup]) -> set[int]:
    """Every policy version that sampled a token of `groups`."""
    return {
        span.version
        for group in groups
        for rollout in group.rollouts
        for segment in rollout.segments
        for span in segment.version_spans
    }


def tokenizer_for(config: RunConfig) -> Any:
    """The tokenizer in the model's folder.

    Raises:
        ParityError: there is none.
    """
    try:
        return load_tokenizer(config)
    except ConfigError as error:
        raise ParityError(f"{error}; --no-tokenizer checks without one") from None
