"""A real Prometheus for tests, started on a free port and queried over HTTP."""

import json
import math
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from real_server import at_free_port
from waiting import wait_for


def has_prometheus() -> bool:
    return bool(shutil.which("prometheus") and shutil.which("promtool"))


needs_prometheus = pytest.mark.skipif(
    not has_prometheus(),
    reason="needs prometheus and promtool on PATH (the Debian package prometheus)",
)


def wait_until_served(url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 60.0) -> None:
    """Waits for an answer from `url`; fails with the log if the process ends or after `timeout_s`."""

    def answers() -> bool:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            return False
        return True

    wait_for(answers, timeout_s=timeout_s, poll_s=0.1, process=process, log=log.read_text)


class PrometheusServer:
    """A server with the rules and targets of the file `config`; its data are in `folder`."""

    def __init__(self, config: Path, folder: Path) -> None:
        self._command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        self._log = folder / "prometheus.log"
        self._process = at_free_port(self._start)

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        self.url = f"http://127.0.0.1:{port}"
        with self._log.open("wb") as log:
            command = [*self._command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
            process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until_served(f"{self.url}/-/ready", process, self._log)
        return process

    def ask(self, path: str, **parameters: object) -> Any:
        """Returns the `data` of an answer of the HTTP API."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=60) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def over(
        self, expr: str, start_s: float, end_s: float, step_s: float = 1.0
    ) -> list[tuple[dict[str, str], list[float]]]:
        """Returns the labels and finite values of each series of `expr` over a period; omits series without any."""
        found = self.ask("query_range", query=expr, start=start_s, end=end_s, step=step_s)["result"]
        series = [(one["metric"], [float(value) for _, value in one["values"]]) for one in found]
        finite = [(labels, [value for value in values if math.isfinite(value)]) for labels, values in series]
        return [(labels, values) for labels, values in finite if values]

    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
