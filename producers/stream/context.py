"""The state that all parts of one producer share."""

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.producers.observe.event_log import EventLog
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ProducerConnection
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Keys
from penstock.schemas.rollout import RolloutGroup

Teacher = Callable[[RolloutGroup], Awaitable[RolloutGroup]]
"""Adds a teacher's logprobs to a finished group, or raises TeacherError."""


@dataclass(eq=False)
class ProducerContext:
    """One producer of one run: its settings and id, its connection to Redis, and where it reports.

    runs: the folder of all runs' folders; this run's may be missing on this host.
    metrics_port: of this process; 0 if nothing serves its metrics.
    teacher: None in a run without a teacher's server.
    instance: of this start of the producer, see `penstock.schemas.heartbeat.Heartbeat`.
    run_id: of the run that this producer has joined, see `penstock.schemas.keys.Commit`; empty before that.
    """

    config: RunConfig
    runs: Path
    producer_id: str
    connection: ProducerConnection
    metrics: ProducerMetrics
    metrics_port: int = 0
    teacher: Teacher | None = None
    instance: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    run_id: str = ""

    def __post_init__(self) -> None:
        self.keys = Keys(self.config.name)
        self.events = EventLog(self.config.folder(self.runs), self.producer_id)
