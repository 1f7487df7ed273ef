"""Every metric is served, wherever there is a free port."""

import logging
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from penstock.producers.observe.metrics import ProducerMetrics
from penstock.schemas.config import ConfigError, MetricsConfig
from penstock.schemas.metrics import Metric, ProducerMetric


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        return reply.read().decode()


def test_every_metric_of_a_producer_is_served(metrics: ProducerMetrics, tmp_path: Path) -> None:
    port = metrics.registry.serve(MetricsConfig(port=0), tmp_path, "a")
    text = scraped(port)
    metrics.registry.close()
    names = [value.name for value in vars(ProducerMetric).values() if isinstance(value, Metric)]
    assert len(names) == 30
    for name in names:
        assert f"# HELP {name} " in text


def test_labels_of_the_process_are_on_every_sample_and_known_values_are_there_from_the_start() -> None:
    metrics = ProducerMetrics(run="demo", producer="producer-0")
    metrics.weight_loads.labels("failed").inc()
    value = metrics.registry.get_sample_value
    of_process = {"run": "demo", "producer": "producer-0"}
    assert value("penstock_weight_loads_total", {**of_process, "result": "failed"}) == 1
    assert value("penstock_stream_errors_total", {**of_process, "kind": "oom"}) == 0
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert all(sample.labels.items() >= of_process.items() for sample in samples)


def test_a_port_in_use_makes_way_and_a_host_that_is_not_ours_is_refused(metrics: ProducerMetrics, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = metrics.registry.serve(MetricsConfig(port=taken.getsockname()[1]), tmp_path, "a")
        assert port > taken.getsockname()[1]
        metrics.registry.close()
    with pytest.raises(ConfigError, match=r"metrics.host = '192.0.2.1', metrics.port = 9400: cannot listen"):
        metrics.registry.serve(MetricsConfig(host="192.0.2.1"), tmp_path, "a")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address")
def test_metrics_are_for_this_machine_unless_told_otherwise_and_then_it_is_said(
    metrics: ProducerMetrics, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    port = metrics.registry.serve(MetricsConfig(port=0), tmp_path, "a")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    metrics.registry.close()
    assert "whoever reaches" not in caplog.text
    port = metrics.registry.serve(MetricsConfig(port=0, host="0.0.0.0"), tmp_path, "a")
    socket.create_connection(("127.0.0.2", port), timeout=5).close()
    metrics.registry.close()
    assert f"metrics.host = '0.0.0.0': whoever reaches port {port} of this machine reads the metrics" in caplog.text
