"""What is known of a run at one moment."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from penstock.deploy.report.lines import EvaluationPoint, Update
from penstock.deploy.report.means import phase_seconds
from penstock.schemas.config import RunConfig
from penstock.schemas.heartbeat import Heartbeat

RECENT = 20
"""Number of batches that shares, rates and lag are computed over."""
PAUSE_WINDOW_S = 60.0
_LONG_S = 30.0
_LONG_BATCHES = 10


class ProducerSeen(NamedTuple):
    """A producer's state in Redis. lag: of its policy, in optimizer steps; None if it is not known."""

    heartbeat: Heartbeat
    lag: int | None


@dataclass(frozen=True)
class RedisSeen:
    """The state of a run in Redis.

    producers: those alive, by id. num_prompts: released and not appended; num_claimed: those of them that producers
        hold. has_trainer: a trainer holds the lease.
    """

    producers: Mapping[str, ProducerSeen]
    num_prompts: int
    num_claimed: int
    num_stream_entries: int
    finished: bool
    has_trainer: bool


@dataclass(frozen=True)
class Pauses:
    """One producer's pauses for new weights of the last `PAUSE_WINDOW_S`: (unix time, seconds) each, oldest first."""

    seen: tuple[tuple[float, float], ...] = ()
    window_s: float = PAUSE_WINDOW_S

    @property
    def median_s(self) -> float | None:
        return median(pause for _, pause in self.seen) if self.seen else None

    @property
    def longest_s(self) -> float | None:
        return max((pause for _, pause in self.seen), default=None)

    @property
    def share(self) -> float | None:
        return sum(pause for _, pause in self.seen) / self.window_s if self.seen else None


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment. redis: None if it does not answer; `without_redis` then says why.

    pauses: of every producer that the run folder has lines of, by id.
    updates, evaluations: those that led to the current policy, oldest first.
    is_over: the run is finished.
    """

    config: RunConfig
    redis: RedisSeen | None
    without_redis: str = ""
    pauses: Mapping[str, Pauses] = field(default_factory=dict)
    updates: tuple[Update, ...] = ()
    evaluations: tuple[EvaluationPoint, ...] = ()
    is_over: bool = False
    time_s: float = field(default_factory=time.time)

    @property
    def producers(self) -> Mapping[str, ProducerSeen]:
        """Those alive, by id."""
        return self.redis.producers if self.redis is not None else {}

    @property
    def newest(self) -> Update | None:
        return self.updates[-1] if self.updates else None

    @property
    def recent(self) -> tuple[Update, ...]:
        return self.updates[-RECENT:]

    @property
    def is_running(self) -> bool:
        """True while a trainer or a producer is alive."""
        return self.redis is not None and (self.redis.has_trainer or bool(self.redis.producers))

    @property
    def silent_s(self) -> float | None:
        """Seconds since the last update if unusually many, else None."""
        newest = self.newest
        if newest is None:
            return None
        times = [update.time_s for update in self.recent]
        usual_s = median(b - a for a, b in pairwise(times)) if len(times) > 2 else 0.0
        since_s = self.time_s - newest.time_s
        return since_s if since_s > max(_LONG_S, _LONG_BATCHES * usual_s) else None

    @property
    def updates_per_s(self) -> float | None:
        recent = self.recent
        if len(recent) < 2 or recent[-1].time_s <= recent[0].time_s:
            return None
        return (len(recent) - 1) / (recent[-1].time_s - recent[0].time_s)

    @property
    def shares(self) -> dict[str, float] | None:
        """Shares of the trainer's time over the recent batches, by phase."""
        spent = phase_seconds(self.recent)
        total_s = sum(spent.values())
        return {phase: seconds / total_s for phase, seconds in spent.items()} if total_s else None

    @property
    def trained_per_s(self) -> float | None:
        """Tokens that reached the loss, over the recent batches."""
        recent, rate = self.recent, self.updates_per_s
        return rate * sum(update.num_tokens_trained for update in recent) / len(recent) if rate is not None else None

    @property
    def credit(self) -> int:
        newest = self.newest
        return int(newest.metrics["credit"]) if newest and "credit" in newest.metrics else self.config.credit

    @property
    def num_ready(self) -> int:
        """Groups that waited to be trained at the last batch."""
        return (self.newest.queue_depth or 0) if self.newest is not None else 0
