"""The trainer's Prometheus metrics, and its lines of telemetry."""

import errno
import json
import logging
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from schemas.config import MetricsConfig
from schemas.endpoint import register_metrics_port
from schemas.metrics import Metric
from schemas.metrics import TrainerMetric as M

log = logging.getLogger(__name__)

PORTS_TO_TRY = 100

_GAUGES_BY_NAME = {
    "reward": M.REWARD,
    "entropy": M.ENTROPY,
    "kl": M.KL,
    "k3_kl": M.K3_KL,
    "chi2": M.CHI2,
    "ess_fraction": M.ESS,
    "clipped_frac": M.CLIPPED,
    "policy_clipped_frac": M.POLICY_CLIPPED,
    "mismatch_lag0": M.MISMATCH,
    "grad_norm": M.GRAD_NORM,
    "loss": M.LOSS,
    "learning_rate": M.LEARNING_RATE,
    "policy_version": M.POLICY_VERSION,
    "queue_depth": M.QUEUE_DEPTH,
}


class TrainerMetrics:
    """Every metric of the trainer under the names of `schemas.metrics.TrainerMetric`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges = {name: self._make(Gauge, metric) for name, metric in _GAUGES_BY_NAME.items()}
        self._lag = self._make(Histogram, M.TOKEN_LAG)
        self._tokens_trained = self._make(Counter, M.TOKENS_TRAINED)
        self._tokens_masked = self._make(Counter, M.TOKENS_MASKED)
        self._updates = self._make(Counter, M.UPDATES)
        self._steps_skipped = self._make(Counter, M.STEPS_SKIPPED)
        self._seconds = self._make(Histogram, M.STEP_SECONDS)
        self.accuracy = self._make(Gauge, M.ACCURACY)
        self.groups_settled = self._make(Counter, M.GROUPS_SETTLED)
        self.groups_released = self._make(Counter, M.GROUPS_RELEASED)
        self.groups_released_again = self._make(Counter, M.GROUPS_RELEASED_AGAIN)
        self.duplicates = self._make(Counter, M.DUPLICATES)
        self.prompts_open = self._make(Gauge, M.PROMPTS)
        self.weight_bytes = self._make(Counter, M.WEIGHT_BYTES)
        self.checkpoint_seconds = self._make(Histogram, M.CHECKPOINT_SECONDS)
        self.stream_errors = self._make(Counter, M.STREAM_ERRORS)

    def record(self, line: dict[str, Any]) -> None:
        """Takes over one line of updates.jsonl."""
        for name, gauge in self._gauges.items():
            if line.get(name) is not None:
                gauge.set(line[name])
        for lag, num_tokens in line["lag_histogram"].items():
            # One observation per token, without a call per token.
            self._lag._sum.inc(float(lag) * num_tokens)
            for bound, bucket in zip(self._lag._upper_bounds, self._lag._buckets, strict=True):
                if float(lag) <= bound:
                    bucket.inc(num_tokens)
                    break
        self._tokens_trained.inc(line["num_tokens_trained"])
        self._tokens_masked.labels("lag").inc(line["num_tokens_masked_lag"])
        self._updates.inc()
        if line["skipped_reason"]:
            self._steps_skipped.labels(line["skipped_reason"]).inc()
        for phase in ("wait", "step", "publish"):
            self._seconds.labels(phase).observe(line[f"{phase}_s"])

    def serve(self, config: MetricsConfig, run_folder: Path) -> int:
        """Serves `/metrics` on the first free port from `config.port` on; returns the port."""
        for port in range(config.port, config.port + (PORTS_TO_TRY if config.port else 1)):
            try:
                server, _ = start_http_server(port, addr=config.host, registry=self.registry)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            port = server.server_port
            register_metrics_port(run_folder, "trainer", config.host, port)
            log.info("metrics at http://%s:%d/metrics", config.host, port)
            return port
        raise OSError(f"metrics.port = {config.port}: {PORTS_TO_TRY} ports from there are in use")

    def _make(self, kind: Any, metric: Metric) -> Any:
        options = {"buckets": metric.buckets} if metric.buckets else {}
        return kind(metric.name, metric.help, metric.labels, registry=self.registry, **options)


class Lines:
    """Appends JSON lines to a file of the run folder. A line that a kill has torn stays one line of its own."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torn = file.exists() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")
        self._stream = file.open("a", buffering=1)
        if torn:
            self._stream.write("\n")

    def write(self, **fields: Any) -> None:
        self._stream.write(json.dumps(fields) + "\n")

    def close(self) -> None:
        self._stream.close()
