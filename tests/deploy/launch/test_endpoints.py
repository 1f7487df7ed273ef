"""The endpoint of a trainer's metrics, as the live view reads it: whatever else answers there ends no view."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.deploy.launch.endpoints import scrape
from penstock.schemas.config import MetricsConfig
from penstock.schemas.metrics import Metric
from penstock.schemas.process.prometheus import LabelledRegistry, register_metrics_port

ANSWERS = (
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"-ERR unknown command 'GET'\r\n",
    b"HTTP/1.1 abc\r\n\r\n",
    b"",
    b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\na 1\n",
    b"HTTP/1.1 200 OK\r\n\r\n<html>",
    b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe",
    b'HTTP/1.1 200 OK\r\n\r\na{x="1", ="2"} 3\n',
    b"HTTP/1.1 404 Not Found\r\n\r\n",
)


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """The port of a server that sends `answer` to everybody."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_metrics_are_read_and_anything_else_is_none(tmp_path):
    with answering(b'HTTP/1.1 200 OK\r\n\r\nn{a="1"} 3\nn{a="2"} 4\nm NaN\n') as port:
        register_metrics_port(tmp_path, "trainer", "127.0.0.1", port)
        samples = scrape(tmp_path, "trainer")
    assert samples is not None and samples.get("n") == 3.0 and samples.get("n", a="2") == 4.0
    assert samples.get("m") is None and samples.get("o") is None
    assert scrape(tmp_path, "trainer") is None, "nobody listens any more"
    for answer in ANSWERS:
        with answering(answer) as port:
            register_metrics_port(tmp_path, "trainer", "127.0.0.1", port)
            assert scrape(tmp_path, "trainer") is None, answer
    registry = LabelledRegistry({})
    registry.make(Metric("n", "A number."))
    port = registry.serve(MetricsConfig(host="::1", port=0), tmp_path, "producer-0")
    (target,) = json.loads((tmp_path / "metrics" / "producer-0.json").read_text())[0]["targets"]
    assert target == f"[::1]:{port}", "as Prometheus reads it"
    assert (samples := scrape(tmp_path, "producer-0")) is not None and samples.get("n") == 0.0
    registry.close()
    for host in ("no-such-host.invalid", "a b", "a\x00b", "a\r\nHost: c", "ü" * 70, "[::1", "a:b", "", "."):
        register_metrics_port(tmp_path, "trainer", host, 1)
        assert scrape(tmp_path, "trainer") is None, host
    (tmp_path / "metrics" / "trainer.json").write_text("{")
    assert scrape(tmp_path, "trainer") is None
    assert scrape(tmp_path, "none") is None
