"""OpenTelemetry: one trace per prompt group, to which every process exports its own spans. Off, nothing of it is
imported here.

A trace's id and its root's are functions of run and index, so no context travels: a producer, the one that takes its
prompt over and a resumed trainer make one trace without knowing of each other. `OTEL_*` variables say where spans go
(OTLP over HTTP), how they are batched and which share of the traces is kept.

Names, as of November 2026. The proposal for reinforcement learning (open-telemetry/semantic-conventions-genai, issue
88, a draft) has `rl.loop` as root, `rl.sample`, `rl.reward`, `rl.train` and `rl.sync` in it, and `rl.run.id`,
`rl.system`, `rl.algorithm`, `rl.model.name`, `rl.environment.name`, `rl.loop.iteration`, `rl.*.batch_size`,
`rl.sync.bytes`; its loop is one iteration of a synchronous trainer, here it is one group's way through the pipeline.
A second proposal (alibaba/loongsuite-semantic-conventions-genai, issue 27) adds `rl.sample.turns`,
`rl.sample.output_tokens` and `rl.reward.score`. Calls and tools are the GenAI conventions' `chat`, `execute_tool` and
`invoke_agent` (in development). What neither has, waits above all, is `penstock.*`.
"""

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from typing import Any, NamedTuple

from penstock.schemas.config import ConfigError, RunConfig

log = logging.getLogger(__name__)

ROOT, QUEUE, SAMPLE, REWARD = "rl.loop", "penstock.queue", "rl.sample", "rl.reward"
STREAM, BATCH, TRAIN, SYNC = "penstock.stream", "penstock.batch", "rl.train", "rl.sync"
FLUSH_S = 1.0
"""How long a collector may keep a group from being appended or committed. One that is slower counts as away, and
nothing waits for it until it has taken spans again."""

MOST_WAITING = 16_384
"""Spans that may wait to be sent, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise; more are lost. OpenTelemetry's own
2,048 are fewer than those of one batch of 1,000 groups."""

Value = str | int | float | Sequence[str] | Sequence[int]


class Span(NamedTuple):
    """A span of a group's trace.

    start_s, end_s: seconds since the epoch.
    id: by which others name it as their `parent`, within the group; random if empty. The parent "" is the root.
    """

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Value] = {}
    id: str = ""
    parent: str = ""
    error: str = ""


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

    instance: of this process, such as the producer's id.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, config: RunConfig, instance: str) -> None:
        self._trace, sdk, trace_exporter = _packages()
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        logging.getLogger(trace_exporter.__name__).setLevel(logging.CRITICAL)  # `_Exporter` says it, once
        self._resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "penstock"),
                "service.instance.id": instance,
                "rl.system": "penstock",
                "rl.system.version": version("penstock"),
                "rl.algorithm": config.objective.path.rpartition(":")[2],
                "rl.model.name": config.model.path,
                "penstock.run.name": config.name,
            }
        )
        self._scope = InstrumentationScope("penstock", version("penstock"))
        self._sampler = sdk.TracerProvider(shutdown_on_exit=False).sampler  # as OTEL_TRACES_SAMPLER says
        self._make: Any = sdk.ReadableSpan
        self._exporter = _Exporter(trace_exporter.OTLPSpanExporter())
        size = None if os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") else MOST_WAITING
        self._processor: Any = BatchSpanProcessor(self._exporter, max_queue_size=size)  # type: ignore[arg-type]
        # Of spans that are dropped while the collector is away, one line is enough.
        logging.getLogger("opentelemetry.sdk._shared_internal").addFilter(lambda record: not self._exporter.is_away)

    def export(self, run_id: str, index: int, spans: Iterable[Span]) -> None:
        """Exports spans of a group's trace, some time later. May be called in any thread."""
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
                resource=self._resource,
                attributes=own | dict(each.attributes) | ({"error.type": each.error} if each.error else {}),
                kind=api.SpanKind.CLIENT if is_call else api.SpanKind.INTERNAL,
                status=api.Status(api.StatusCode.ERROR, each.error) if each.error else api.Status(),
                start_time=int(each.start_s * 1e9),
                end_time=int(each.end_s * 1e9),
                instrumentation_scope=self._scope,
            )
            self._processor.on_end(span)

    def flush(self) -> None:
        """Returns once the collector has all spans so far: after `FLUSH_S` at most, at once if it is away."""
        if (flushed := self._flush()) is not None:
            try:
                flushed.result(FLUSH_S)
            except TimeoutError:
                self._exporter.told(f"it takes longer than {FLUSH_S:g} s")

    async def flushed(self) -> None:
        """Does the same as `flush` in an event loop."""
        if (flushed := self._flush()) is not None:
            done, _ = await asyncio.wait({asyncio.wrap_future(flushed)}, timeout=FLUSH_S)
            if not done:
                self._exporter.told(f"it takes longer than {FLUSH_S:g} s")

    def _flush(self) -> "Future[None] | None":
        if self._exporter.is_away:
            return None
        flushed: Future[None] = Future()

        def flush() -> None:
            self._processor.force_flush()
            flushed.set_result(None)

        threading.Thread(target=flush, daemon=True).start()  # one that hangs must not keep the process
        return flushed

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
