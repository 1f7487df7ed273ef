"""The producer's Prometheus metrics."""

from prometheus_client import Counter, Gauge, Histogram

from penstock.schemas.metrics import ProducerMetric as M
from penstock.schemas.process.prometheus import LabelledRegistry


class ProducerMetrics:
    """Every `ProducerMetric` in a registry of its own, so that several producers fit one process.

    labels: put on each sample, such as `run="demo", producer="producer-0"`.
    """

    def __init__(self, **labels: str) -> None:
        self.registry = LabelledRegistry(labels)
        make = self.registry.make
        self.tokens_generated = make(Counter, M.TOKENS_GENERATED)
        self.groups_appended = make(Counter, M.GROUPS_APPENDED)
        self.evaluations_appended = make(Counter, M.EVALUATIONS_APPENDED)
        self.in_flight = make(Gauge, M.IN_FLIGHT)
        self.policy_version = make(Gauge, M.POLICY_VERSION)
        self.policy_behind = make(Gauge, M.POLICY_BEHIND)
        self.pause_s = make(Histogram, M.PAUSE)
        self.prefetch_s = make(Histogram, M.PREFETCH)
        self.patch_s = make(Histogram, M.PATCH)
        self.weight_bytes = make(Counter, M.WEIGHT_BYTES)
        self.weight_chain = make(Gauge, M.WEIGHT_CHAIN)
        self.copies_rebuilt = make(Counter, M.COPIES_REBUILT)
        self.policy_age_s = make(Gauge, M.POLICY_AGE)
        self.weight_loads = make(Counter, M.WEIGHT_LOADS)
        self.stream_errors = make(Counter, M.STREAM_ERRORS)
        self.progress_tokens = make(Counter, M.PROGRESS_TOKENS)
        self.progress_bytes = make(Counter, M.PROGRESS_BYTES)
        self.progress_write_s = make(Histogram, M.PROGRESS_WRITE)
        self.progress_failures = make(Counter, M.PROGRESS_FAILURES)
        self.reward_errors = make(Counter, M.REWARD_ERRORS)
        self.agent_rollouts = make(Counter, M.AGENT_ROLLOUTS)
        self.agent_rollouts_open = make(Gauge, M.AGENT_ROLLOUTS_OPEN)
        self.agent_calls_running = make(Gauge, M.AGENT_CALLS_RUNNING)
        self.agent_calls = make(Counter, M.AGENT_CALLS)
        self.agent_segments = make(Counter, M.AGENT_SEGMENTS)
        self.agent_fields_ignored = make(Counter, M.AGENT_FIELDS_IGNORED)
        self.alternate_stops = make(Counter, M.ALTERNATE_STOPS)
        self.agent_tokens = make(Counter, M.AGENT_TOKENS)
        self.agent_tokens_delivered = make(Counter, M.AGENT_TOKENS_DELIVERED)
