"""Serves data sets as the Hugging Face Hub does, as far as the library `datasets` requests it."""

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

Files = Mapping[str, bytes]


def commit_of(files: Files) -> str:
    """Returns a commit hash for a revision's files."""
    return hashlib.sha1(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()


class HubServer(ThreadingHTTPServer):
    """Serves data sets by name, each with its files by revision, until `close`. `requests` lists every request."""

    daemon_threads = True

    def __init__(self, datasets: Mapping[str, Mapping[str, Files]]) -> None:
        self.datasets = {
            name: {**revisions, **{commit_of(files): files for files in revisions.values()}}
            for name, revisions in datasets.items()
        }
        self.requests: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


_KINDS = (("datasets", "resolve"), ("api/datasets", "revision"), ("api/datasets", "tree"))


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        for name, revisions in self.server.datasets.items():
            for start in (f"/{place}/{name}/{kind}/" for place, kind in _KINDS):
                if path.startswith(start):
                    revision, _, rest = path.removeprefix(start).partition("/")
                    if revision not in revisions:
                        return self._refuse("RevisionNotFound")
                    kind, files = start.rstrip("/").rpartition("/")[2], revisions[revision]
                    return getattr(self, f"_{kind}")(name, files, rest)
        return self._refuse("RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *arguments: Any) -> None:
        pass

    def _resolve(self, name: str, files: Files, path: str) -> None:
        if path not in files:
            return self._refuse("EntryNotFound", {"X-Repo-Commit": commit_of(files)})
        etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
        self._answer(200, files[path], {"X-Repo-Commit": commit_of(files), "ETag": etag})

    def _revision(self, name: str, files: Files, path: str) -> None:
        siblings = [{"rfilename": file} for file in files]
        self._answer(200, {"id": name, "sha": commit_of(files), "private": False, "tags": [], "siblings": siblings})

    def _tree(self, name: str, files: Files, path: str) -> None:
        inside = [file for file in files if file.startswith(f"{path}/" if path else "")]
        folders = {parent.as_posix() for file in inside for parent in PurePosixPath(file).parents} - {".", path}
        found: list[dict[str, Any]] = [
            {"type": "file", "path": file, "size": len(files[file]), "oid": hashlib.sha1(files[file]).hexdigest()}
            for file in inside
        ]
        found += [{"type": "directory", "path": folder, "size": 0, "oid": "0" * 40} for folder in sorted(folders)]
        self._answer(200, found) if found else self._refuse("EntryNotFound")

    def _refuse(self, code: str, headers: Mapping[str, str] | None = None) -> None:
        self._answer(404, {"error": code}, {"X-Error-Code": code, **(headers or {})})

    def _answer(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
