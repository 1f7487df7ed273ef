"""What is known of a run at one moment."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from penstock.deploy.launch.endpoints import Samples
from penstock.deploy.report.telemetry import EvaluationPoint, Update, phase_seconds
from penstock.schemas.config import RunConfig
from penstock.schemas.heartbeat import Heartbeat
from penstock.schemas.producer_parity import ProducerParity

RECENT = 20
"""Number of batches that shares, rates and lag are computed over."""
PAUSE_WINDOW_S = 60.0
_LONG_S = 30.0
_LONG_BATCHES = 10


class ProducerSeen(NamedTuple):
    """A producer's state in Redis. announced_s: the unix time of its policy. parity: the trainer's findings on its
    rows."""

    heartbeat: Heartbeat
    lag: int | None
    announced_s: float | None = None
    parity: ProducerParity | None = None


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
    """A run at one moment. redis, trainer: None if they do not answer; `without_redis`, `without_trainer` then say why.

    updates, evaluations: those that led to the current policy, oldest first.
    producers: the ids of all seen so far, with a heartbeat or without. starting: those that answer and have sampled
        nothing yet.
    rebuilt: copies of the weights on producers' hosts that were rebuilt, by reason.
    is_over: the run is finished.
    """

    name: str
    config: RunConfig | None
    redis: RedisSeen | None
    without_redis: str = ""
    trainer: Samples | None = None
    without_trainer: str = ""
    producers: tuple[str, ...] = ()
    starting: frozenset[str] = frozenset()
    pauses: Mapping[str, Pauses] = field(default_factory=dict)
    rebuilt: Mapping[str, int] = field(default_factory=dict)
    updates: tuple[Update, ...] = ()
    evaluations: tuple[EvaluationPoint, ...] = ()
    is_over: bool = False
    time_s: float = field(default_factory=time.time)

    @property
    def newest(self) -> Update | None:
        return self.updates[-1] if self.updates else None

    @property
    def recent(self) -> tuple[Update, ...]:
        return self.updates[-RECENT:]

    @property
    def is_running(self) -> bool:
        """True while a trainer or a producer is alive."""
        in_redis = self.redis is not None and (self.redis.has_trainer or self.redis.producers)
        return bool(self.trainer is not None or self.starting or in_redis)

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
    def tokens_per_s(self) -> float | None:
        """Tokens sampled by all producers, from their heartbeats."""
        if self.redis is None:
            return None
        return sum(producer.heartbeat.tokens_per_s for producer in self.redis.producers.values())

    @property
    def trained_per_s(self) -> float | None:
        """Tokens that reached the loss, over the recent batches."""
        recent, rate = self.recent, self.updates_per_s
        return rate * sum(update.num_tokens_trained for update in recent) / len(recent) if rate is not None else None

    @property
    def credit(self) -> int | None:
        if self.recent and "credit" in self.recent[-1].metrics:
            return int(self.recent[-1].metrics["credit"])
        if self.config is not None:
            return self.config.credit
        return self.count("penstock_credit_groups")

    @property
    def num_ready(self) -> int | None:
        """Groups that are generated and not settled: neither queued nor in producers."""
        groups_open = self.count("penstock_groups_open")
        # The trainer's gauge is that of the last batch; Redis is current.
        prompts_open = self.redis.num_prompts if self.redis is not None else self.count("penstock_prompts_open")
        if groups_open is not None and prompts_open is not None:
            return max(0, groups_open - prompts_open)
        return self.newest.queue_depth if self.newest is not None else None

    def count(self, name: str) -> int | None:
        """Returns a gauge of the trainer's endpoint as a whole number."""
        value = self.trainer.get(name) if self.trainer is not None else None
        return None if value is None else round(value)
