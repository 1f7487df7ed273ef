"""Exporting traces: what a collector that is away costs, which traces are kept, and no import when it is off."""

import logging
import subprocess
import sys

import pytest
from msgspec.structs import replace

from penstock.consumers.observe.tracing import Tracing, check_tracing, trace_id
from penstock.schemas.config import ConfigError, EnvironmentConfig, MetricsConfig, ModelConfig, RunConfig
from penstock.schemas.spans import ROOT, STREAM, Span

CONFIG = RunConfig(
    name="test",
    model=ModelConfig(path="none"),
    environment=EnvironmentConfig(path="none:None"),
    metrics=MetricsConfig(traces=True),
)
SPANS = [Span(ROOT, 1.0, 3.0), Span(STREAM, 1.0, 2.0, error="RewardError")]


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_spans_of_several_processes_make_one_trace(collector):
    for instance, span in zip(("producer-0", "trainer"), reversed(SPANS), strict=True):
        tracing = Tracing(CONFIG)
        tracing.export("run", 7, [span], instance)
        tracing.close()
    child, root = collector.traces()[7]
    assert root.trace == trace_id("run", 7) and (root.parent, child.parent) == ("", root.id)
    assert (child.start_s, child.end_s, child.error, child.attributes["error.type"]) == (1.0, 2.0, *["RewardError"] * 2)
    assert root.attributes["rl.run.id"] == "run" and root.attributes["penstock.run.name"] == "test"
    assert (root.attributes["service.name"], root.attributes["service.instance.id"]) == ("penstock", "trainer")


def test_a_collector_that_is_away_is_told_once_and_not_waited_for(collector, caplog):
    caplog.set_level(logging.INFO)
    collector.status = 400
    tracing = Tracing(CONFIG)
    for _ in range(3):
        tracing.export("run", 7, SPANS)
        tracing.flush()
    assert collector.num_requests == 1, "the second and third flush return at once"
    (warning,) = warnings(caplog)
    assert f"the collector at {collector.url} takes no spans (2 are lost" in warning
    tracing._processor.force_flush()
    assert collector.num_requests == 2 and warnings(caplog) == [warning]
    collector.status = 200
    tracing.export("run", 8, SPANS)
    tracing._processor.force_flush()
    assert collector.traces().keys() == {8} and "takes spans again" in caplog.messages[-1]
    collector.status = 400
    tracing.export("run", 9, SPANS)
    tracing.close()
    assert len(warnings(caplog)) == 2, "an outage after that is told again"


def test_thousands_of_spans_wait_for_the_collector(collector, caplog):
    tracing = Tracing(CONFIG)
    with collector.holding():
        for index in range(900):
            tracing.export("run", index, [*SPANS, *SPANS])
    tracing._processor.force_flush()
    assert len(collector.spans) == 3_600 and warnings(caplog) == []
    tracing.close()


def test_a_slow_collector_counts_as_away(collector, caplog, monkeypatch):
    monkeypatch.setattr("penstock.consumers.observe.tracing.FLUSH_S", 0.05)
    tracing = Tracing(CONFIG)
    with collector.holding():
        tracing.export("run", 7, SPANS)
        tracing.flush()
        tracing.flush()
    (warning,) = warnings(caplog)
    assert "takes no spans (it takes longer than 0.05 s)" in warning
    tracing.close()


def test_a_share_of_the_traces_is_kept_whole(collector, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    for _ in ("before", "resumed"):
        tracing = Tracing(CONFIG)
        for index in range(400):
            tracing.export("run", index, SPANS[1:])
        tracing.close()
    traces = collector.traces()
    assert 60 < len(traces) < 140 and {len(spans) for spans in traces.values()} == {2}


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    check_tracing(replace(CONFIG, metrics=MetricsConfig()))
    with pytest.raises(ConfigError, match=r"metrics.traces is set: .*pip install 'penstock\[otel\]'"):
        check_tracing(CONFIG)


OFF = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import penstock.producers.__main__, penstock.consumers.__main__, penstock.deploy.cli
import penstock.producers.endpoint.server
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_neither_trainer_nor_producer_imports_it_when_it_is_off():
    shown = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True)
    assert shown.stdout == "[]\n", shown.stderr
