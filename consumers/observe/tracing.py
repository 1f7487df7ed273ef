"""OpenTelemetry: one trace per prompt group, exported by its trainer: its own spans, and those of the producers, which
travel with the group. Off, nothing of it is imported here.

A trace's id and its root's are functions of run and index, so that a resumed trainer goes on with the same trace.
`OTEL_*` variables say where spans go (OTLP over HTTP), how they are batched and which share of the traces is kept.
"""

import functools
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.spans import ROOT, Span, Value

log = logging.getLogger(__name__)

FLUSH_S = 1.0
"""How long a collector may keep the trainer. One that is slower counts as away, and nothing waits for it until it has
taken spans again."""

MOST_WAITING = 16_384
"""Spans that may wait to be sent, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise; more are lost."""


def trace_id(run_id: str, index: int) -> str:
    """Returns a group's trace id, 32 hexadecimal digits. run_id: see `penstock.schemas.keys.Commit.RUN_ID`."""
    return _digest(f"{run_id}:{index}", 16)


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def check_tracing(config: RunConfig) -> None:
    """Raises ConfigError if traces are wanted and OpenTelemetry is not installed."""
    if config.metrics.traces:
        _packages()


def _packages() -> tuple[Any, Any, Any]:
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
        from opentelemetry.sdk import trace as sdk
    except ImportError as error:
        raise ConfigError(f"metrics.traces is set: {error}; expected the extra: pip install 'penstock[otel]'") from None
    return trace, sdk, trace_exporter


class Tracing:
    """Exports spans in a thread. A collector that is away costs their loss, and one logged line.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, config: RunConfig) -> None:
        self._trace, sdk, trace_exporter = _packages()
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        logging.getLogger(trace_exporter.__name__).setLevel(logging.CRITICAL)  # `_Exporter` says it, once
        about = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "penstock"),
                "rl.system": "penstock",
                "rl.system.version": version("penstock"),
                "rl.algorithm": config.objective.path.rpartition(":")[2],
                "rl.model.name": config.model.path,
                "penstock.run.name": config.name,
            }
        )
        self._resource_of = functools.cache(lambda name: about.merge(Resource({"service.instance.id": name})))
        self._scope = InstrumentationScope("penstock", version("penstock"))
        self._sampler = sdk.TracerProvider(shutdown_on_exit=False).sampler  # as OTEL_TRACES_SAMPLER says
        self._make: Any = sdk.ReadableSpan
        self._exporter = _Exporter(trace_exporter.OTLPSpanExporter())
        size = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", MOST_WAITING))
        self._processor: Any = BatchSpanProcessor(self._exporter, max_queue_size=size)  # type: ignore[arg-type]
        self._num_before_flush = size // 4
        self._num_since_flush = 0
        # Of spans that are dropped while the collector is away, one line is enough.
        logging.getLogger("opentelemetry.sdk._shared_internal").addFilter(lambda record: not self._exporter.is_away)

    def export(self, run_id: str, index: int, spans: Iterable[Span], instance: str = "trainer") -> None:
        """Exports spans of a group's trace, some time later: waits for the collector (`flush`) if many wait for it. May
        be called in any thread. instance: the process that they are of, such as a producer's id."""
        trace, api = trace_id(run_id, index), self._trace
        number = int(trace, 16)
        if not self._sampler.should_sample(None, number, ROOT).decision.is_sampled():
            return

        def context(identity: str) -> Any:
            span = int(_digest(f"{trace}:{identity}", 8), 16)
            return api.SpanContext(number, span, is_remote=False, trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED))

        own: dict[str, Value] = {"rl.run.id": run_id, "penstock.group.index": index}
        for each in spans:
            is_root, is_call = each.name == ROOT, each.name.startswith("chat ")
            span = self._make(
                each.name,
                context=context("" if is_root else each.id or os.urandom(8).hex()),
                parent=None if is_root else context(each.parent),
                resource=self._resource_of(instance),
                attributes=own | dict(each.attributes) | ({"error.type": each.error} if each.error else {}),
                kind=api.SpanKind.CLIENT if is_call else api.SpanKind.INTERNAL,
                status=api.Status(api.StatusCode.ERROR, each.error) if each.error else api.Status(),
                start_time=int(each.start_s * 1e9),
                end_time=int(each.end_s * 1e9),
                instrumentation_scope=self._scope,
            )
            self._processor.on_end(span)
            self._num_since_flush += 1
        if self._num_since_flush >= self._num_before_flush:
            self.flush()

    def flush(self) -> None:
        """Returns once the collector has all spans so far: after `FLUSH_S` at most, at once if it is away."""
        self._num_since_flush = 0
        if self._exporter.is_away:
            return
        flushing = threading.Thread(target=self._processor.force_flush, daemon=True)  # it may hang as long as it likes
        flushing.start()
        flushing.join(FLUSH_S)
        if flushing.is_alive():
            self._exporter.told(f"it takes longer than {FLUSH_S:g} s")

    def close(self) -> None:
        """Exports what is left, for `FLUSH_S` at most."""
        self.flush()
        self._exporter.shutdown()


class _Exporter:
    """A span exporter that knows whether its collector is there, and says when that changes."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.is_away = False

    def export(self, spans: Sequence[Any]) -> Any:
        began_s = time.monotonic()
        result = self._exporter.export(spans)
        if result.name != "SUCCESS":
            self.told(f"{len(spans)} are lost after {time.monotonic() - began_s:.1f} s")
        elif self.is_away:
            self.is_away = False
            log.info("traces: the collector takes spans again")
        return result

    def told(self, why: str) -> None:
        """Notes that the collector does not take spans; logs the first time since it did."""
        if not self.is_away:
            log.warning(
                "traces: the collector at %s takes no spans (%s); the run goes on without them",
                os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
                or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318"),
                why,
            )
        self.is_away = True

    def shutdown(self) -> None:
        self._exporter.shutdown()
