"""Serves one process' metrics over HTTP: a registry, a server, and a file that gives Prometheus its address."""

import contextlib
import json
import logging
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client import Metric as Family

from penstock.schemas.config import MetricsConfig
from penstock.schemas.metrics import Metric
from penstock.schemas.process.files import write_whole
from penstock.schemas.process.ports import EVERYWHERE, authority, on_free_port

log = logging.getLogger(__name__)


class LabelledRegistry(CollectorRegistry):
    """A registry that adds the same labels to every sample; a process may have several."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__()
        self._labels = dict(labels)
        self._closing = contextlib.ExitStack()

    def collect(self) -> Iterator[Family]:
        for family in super().collect():
            family.samples = [one._replace(labels={**self._labels, **one.labels}) for one in family.samples]
            yield family

    def make(self, metric: Metric) -> Any:
        """Makes the counter, gauge or histogram of a definition, with a series for each known label value."""
        factory: Any = Histogram if metric.buckets else Counter if metric.name.endswith("_total") else Gauge
        options = {"buckets": metric.buckets} if metric.buckets else {}
        made = factory(metric.name, metric.help, metric.labels, registry=self, **options)
        for value in metric.values:
            made.labels(value)
        return made

    def make_all(self, definitions: type) -> dict[str, Any]:
        """Makes every metric that a class defines; returns them by the names of its members."""
        return {name: self.make(metric) for name, metric in vars(definitions).items() if isinstance(metric, Metric)}

    def serve(self, config: MetricsConfig, run_folder: Path, role: str) -> int:
        """Serves `/metrics` on the first free port from `config.port` and returns that port. If the run's folder
        exists, `<run>/metrics/<role>.json` names the port until `close`.

        Raises:
            ConfigError: the host cannot be listened on, or no port in the range is free.
        """
        server, thread = on_free_port(
            "metrics",
            config.host,
            config.port,
            lambda port: start_http_server(port, addr=config.host, registry=self),
        )
        port = server.server_port
        if config.host in EVERYWHERE:
            log.info("metrics.host = %r: whoever reaches port %d of this machine reads the metrics", config.host, port)
        self._closing.callback(thread.join)
        self._closing.callback(server.server_close)
        self._closing.callback(server.shutdown)
        if run_folder.is_dir():
            register_metrics_port(run_folder, role, config.host, port)
            self._closing.callback(unregister_metrics_port, run_folder, role, config.host, port)
        return port

    def close(self) -> None:
        """Stops serving, if `serve` was called."""
        self._closing.close()


def register_metrics_port(run_folder: Path, role: str, host: str, port: int) -> None:
    """Writes `<run>/metrics/<role>.json` in Prometheus' file_sd format."""
    file = _target_file(run_folder, role)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, _target(run_folder, role, host, port))


def unregister_metrics_port(run_folder: Path, role: str, host: str, port: int) -> None:
    """Deletes the file, so that no alert fires for a process that has shut down. A successor's file is kept."""
    file = _target_file(run_folder, role)
    with contextlib.suppress(OSError):
        if file.read_text("utf-8") == _target(run_folder, role, host, port):
            file.unlink()


def _target_file(run_folder: Path, role: str) -> Path:
    return run_folder / "metrics" / f"{role}.json"


def _target(run_folder: Path, role: str, host: str, port: int) -> str:
    if host in EVERYWHERE:
        host = socket.gethostname()  # where others find it, in a container's network too
    return json.dumps([{"targets": [authority(host, port)], "labels": {"run": run_folder.name, "role": role}}])
