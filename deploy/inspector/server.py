"""Serves the page and its data over HTTP: GET only, to clients that name a loopback host or the server's address."""

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from penstock.deploy.inspector.catalogue import Catalogue
from penstock.deploy.inspector.query import QueryError, parse_query
from penstock.schemas.config import ConfigError
from penstock.schemas.record import RecordReadError

HOST = "127.0.0.1"
_ALL_ADDRESSES = "0.0.0.0"
_FOLDER = Path(__file__).parent
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_NAMES = ("127.0.0.1", "localhost", "[::1]")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LINES_PER_CHUNK_BYTES = 65536


class InspectorServer(ThreadingHTTPServer):
    """Listens from its construction on; `url` says where.

    host: an IPv4 address of this machine, or 0.0.0.0 for all, which a container with a published port needs.

    Raises:
        ConfigError: no address of this machine, or a port that is taken or out of range.
    """

    daemon_threads = True

    def __init__(self, catalogue: Catalogue, port: int, host: str = HOST) -> None:
        self.catalogue = catalogue
        # Through a published port or a tunnel, a browser uses a loopback name.
        self.address = HOST if host == _ALL_ADDRESSES else host
        self.names = {*_NAMES, self.address}
        try:
            super().__init__((str(IPv4Address(host)), port), _Handler)
        except ValueError:
            raise ConfigError(f"--host {host}: expected an IPv4 address, such as {HOST} or {_ALL_ADDRESSES}") from None
        except OverflowError:
            raise ConfigError(f"--port {port}: expected 0 to 65535; 0 takes a free one") from None
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port}: {error.strerror}; port 0 takes a free one") from None

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: InspectorServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "penstock", ""
    timeout = 60

    def do_GET(self) -> None:
        # With DNS rebinding, a page of another site sends that site's name.
        host = self.headers.get("Host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in self.server.names:
            self._send_problem(HTTPStatus.FORBIDDEN, f"Host: expected {self.server.address} or localhost")
            return
        try:
            parts = urlsplit(self.path)
        except ValueError as error:
            self._send_problem(HTTPStatus.BAD_REQUEST, f"path: {error}")
            return
        try:
            self._answer(parts.path, dict(parse_qsl(parts.query)))
        except QueryError as error:
            self._send_problem(HTTPStatus.BAD_REQUEST, str(error))
        except (KeyError, RecordReadError) as error:
            what = "no such group here" if isinstance(error, KeyError) else str(error)
            self._send_problem(HTTPStatus.NOT_FOUND, what)
        except (BrokenPipeError, ConnectionResetError):  # the client has gone
            self.close_connection = True

    def _answer(self, path: str, parameters: dict[str, str]) -> None:
        catalogue = self.server.catalogue
        if path in _FILES:
            name, kind = _FILES[path]
            self._send((_FOLDER / name).read_bytes(), kind)
        elif path == "/api/run":
            self._send_json(catalogue.run())
        elif path == "/api/groups":
            self._send_json(catalogue.page(parse_query(parameters)))
        elif path.startswith("/api/groups/"):
            self._send_json(catalogue.group(unquote(path.removeprefix("/api/groups/"))))
        elif path == "/api/export.jsonl":
            self._send_lines(catalogue, parameters)
        else:
            self._send_problem(HTTPStatus.NOT_FOUND, "no such page")

    def _send_json(self, value: Any) -> None:
        self._send(msgspec.json.encode(value), "application/json")

    def _send_problem(self, status: HTTPStatus, problem: str) -> None:
        self._send(msgspec.json.encode({"problem": problem}), "application/json", status)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._begin(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_lines(self, catalogue: Catalogue, parameters: dict[str, str]) -> None:
        """Sends groups as JSON lines, chunked: a client sees that a download was cut off."""
        groups = catalogue.export(parse_query(parameters))
        self._begin(HTTPStatus.OK, "application/jsonl")
        self.send_header("Content-Disposition", f'attachment; filename="{catalogue.name}-groups.jsonl"')
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        waiting = b""
        for group in groups:
            waiting += msgspec.json.encode(group) + b"\n"
            if len(waiting) >= _LINES_PER_CHUNK_BYTES:
                self._send_chunk(waiting)
                waiting = b""
        if waiting:
            self._send_chunk(waiting)
        self._send_chunk(b"")

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _begin(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        for name, value in _HEADERS.items():
            self.send_header(name, value)

    def log_message(self, format: str, *arguments: Any) -> None:
        """No line per request."""
