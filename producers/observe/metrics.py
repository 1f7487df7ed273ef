"""What a producer counts, for Prometheus."""

import logging
from threading import Thread
from wsgiref.simple_server import WSGIServer

from penstock.schemas.config import ConfigError, MetricsConfig
from penstock.schemas.metrics import Metric, ProducerMetric
from penstock.schemas.process.prometheus import LabelledRegistry
from prometheus_client import Counter, Gauge, Histogram, start_http_server

log = logging.getLogger(__name__)

PORTS_TRIED = 256


class ProducerMetrics:
    """Every `ProducerMetric` in a registry of its own, so that several producers fit one process.

    labels: what each of its samples says of this process, such as `run="demo", producer="producer-0"`.
    """

    def __init__(self, **labels: str) -> None:
        self.registry = LabelledRegistry(labels)
        self.tokens_generated = self._counter(ProducerMetric.TOKENS_GENERATED)
        self.groups_appended = self._counter(ProducerMetric.GROUPS_APPENDED)
        self.evaluations_appended = self._counter(ProducerMetric.EVALUATIONS_APPENDED)
        self.in_flight = self._gauge(ProducerMetric.IN_FLIGHT)
        self.policy_version = self._gauge(ProducerMetric.POLICY_VERSION)
        self.policy_behind = self._gauge(ProducerMetric.POLICY_BEHIND)
        self.pause_s = self._histogram(ProducerMetric.PAUSE)
        self.prefetch_s = self._histogram(ProducerMetric.PREFETCH)
        self.weight_bytes = self._counter(ProducerMetric.WEIGHT_BYTES)
        self.weight_loads = self._counter(ProducerMetric.WEIGHT_LOADS)
        self.stream_errors = self._counter(ProducerMetric.STREAM_ERRORS)
        self.reward_errors = self._counter(ProducerMetric.REWARD_ERRORS)
        self.agent_rollouts = self._counter(ProducerMetric.AGENT_ROLLOUTS)
        self.agent_rollouts_open = self._gauge(ProducerMetric.AGENT_ROLLOUTS_OPEN)
        self.agent_calls_running = self._gauge(ProducerMetric.AGENT_CALLS_RUNNING)
        self.agent_calls = self._counter(ProducerMetric.AGENT_CALLS)
        self.agent_segments = self._counter(ProducerMetric.AGENT_SEGMENTS)
        self.alternate_stops = self._counter(ProducerMetric.ALTERNATE_STOPS)
        self.agent_tokens = self._counter(ProducerMetric.AGENT_TOKENS)
        self.agent_tokens_delivered = self._counter(ProducerMetric.AGENT_TOKENS_DELIVERED)
        self._server: tuple[WSGIServer, Thread] | None = None

    def serve(self, config: MetricsConfig) -> int:
        """Serves the metrics on the first free port from `config.port` on; returns that port.

        Raises:
            ConfigError: the host cannot be listened on, or no port in the range is free.
        """
        last = config.port if config.port == 0 else min(config.port + PORTS_TRIED - 1, 65535)
        for port in range(config.port, last + 1):
            try:
                self._server = start_http_server(port, addr=config.host, registry=self.registry)
            except OSError as error:
                reason = error
                continue
            taken: int = self._server[0].server_port
            if config.port not in (0, taken):
                log.info("metrics.port = %d is in use: metrics are on port %d", config.port, taken)
            return taken
        raise ConfigError(
            f"metrics.host = {config.host!r}, metrics.port = {config.port}: cannot listen there nor on the ports up to "
            f"{last}: {reason}"
        )

    def close(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    def _counter(self, metric: Metric) -> Counter:
        counter = Counter(metric.name, metric.help, metric.labels, registry=self.registry)
        for value in metric.values:
            counter.labels(value)
        return counter

    def _gauge(self, metric: Metric) -> Gauge:
        return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets)
