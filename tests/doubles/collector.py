"""An OTLP collector over HTTP that keeps the spans it is sent."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class KeptSpan(NamedTuple):
    """start_s, end_s: seconds since the epoch. attributes: the resource's too."""

    name: str
    trace: str
    id: str
    parent: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    error: str

    @property
    def index(self) -> int:
        return self.attributes["penstock.group.index"]


class Collector:
    """url: for OTEL_EXPORTER_OTLP_ENDPOINT. status: of its answers; other than 200, it keeps nothing."""

    def __init__(self) -> None:
        self.spans: list[KeptSpan] = []
        self.status = 200
        self.num_requests = 0
        self._lock = threading.Lock()
        self._may_take = threading.Event()
        self._may_take.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._may_take.wait()
                collector.take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Answers nothing meanwhile."""
        self._may_take.clear()
        try:
            yield
        finally:
            self._may_take.set()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            self.num_requests += 1
            if self.status == 200:
                self.spans += _spans(request)

    def traces(self) -> dict[int, list[KeptSpan]]:
        """Returns the spans by group index, one of each id, and checks that each group has one trace."""
        with self._lock:
            found: dict[int, dict[str, KeptSpan]] = {}
            for span in self.spans:
                found.setdefault(span.index, {})[span.id] = span
        assert all(len({span.trace for span in spans.values()}) == 1 for spans in found.values())
        return {index: list(spans.values()) for index, spans in found.items()}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()


def _spans(request: Any) -> Iterator[KeptSpan]:
    for resource in request.resource_spans:
        shared = _values(resource.resource.attributes)
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield KeptSpan(
                name=span.name,
                trace=span.trace_id.hex(),
                id=span.span_id.hex(),
                parent=span.parent_span_id.hex(),
                start_s=span.start_time_unix_nano / 1e9,
                end_s=span.end_time_unix_nano / 1e9,
                attributes=shared | _values(span.attributes),
                error=span.status.message,
            )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind) if kind else None
    return [_value(each) for each in found.values] if kind == "array_value" else found
