"""A server with the part of the Hugging Face Hub's API that uploads use, over real HTTP: large files by git-lfs."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_good"


class HubServer:
    """takes_large: False answers the upload of a large file with 403. files: by name, those of the commits so far.
    repos: the bodies of the requests that created one. commits: their messages."""

    def __init__(self) -> None:
        self.takes_large = True
        self.files: dict[str, bytes] = {}
        self.repos: list[dict[str, Any]] = []
        self.commits: list[str] = []
        self._large: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_PUT(self) -> None:
                hub._large[self.path.rpartition("/")[2]] = self._body()
                self._answer({}, 200 if hub.takes_large else 403)

            def do_POST(self) -> None:
                body = self._body()
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    self._answer({"error": "Invalid username or password."}, 401)
                else:
                    self._answer(hub.answer(self.path, body))

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") == "chunked":
                    parts = []
                    while size := int(self.rfile.readline(), 16):
                        parts.append(self.rfile.read(size))
                        self.rfile.readline()
                    self.rfile.readline()
                    return b"".join(parts)
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def _answer(self, content: Any, status: int = 200) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.git-lfs+json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes) -> Any:
        if path == "/api/repos/create":
            self.repos.append(json.loads(body))
            return {"url": f"{self.url}/lab/sums"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            large = lambda name: "lfs" if name.endswith(".safetensors") else "regular"  # noqa: E731
            asked = json.loads(body)["files"]
            return {"files": [{**file, "uploadMode": large(file["path"]), "shouldIgnore": False} for file in asked]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = lambda oid: {"upload": {"href": f"{self.url}/lfs/{oid}"}}  # noqa: E731
            return {"transfer": "basic", "objects": [{**each, "actions": upload(each["oid"])} for each in objects]}
        assert "/commit/" in path, path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.commits.append(line["value"]["summary"])
            elif line["key"] == "lfsFile":
                self.files[line["value"]["path"]] = self._large[line["value"]["oid"]]
            else:
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return {"commitUrl": f"{self.url}/lab/sums/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
