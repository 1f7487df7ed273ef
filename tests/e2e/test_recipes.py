"""A recipe on the real engine, small, as `make recipes-check` runs each; its judge is played."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench.recipes_check import SMALL, faults, write_data
from demo_run import BOOT_S, VARIABLES
from forked_programs import start_penstock

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600)]


class LengthJudge(BaseHTTPRequestHandler):
    """Finds every other length of an answer good."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.loads(asked["messages"][-1]["content"])["answer"]
        judgement = json.dumps({"reason": "", "verdict": ("yes", "no")[len(answer) % 2]})
        body = json.dumps({"choices": [{"finish_reason": "stop", "message": {"content": judgement}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None: ...


@pytest.fixture
def judge_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), LengthJudge) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_a_recipe_with_a_judge_trains_and_balances_its_ledger(judge_url: str, demo_model: Path, tmp_path: Path) -> None:
    settings = SMALL["judge"] | {
        "model.path": demo_model,
        "num_updates": 2,
        "environment.kwargs.judge.base_url": judge_url,
        "sampling.max_tokens": 8,
    }
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with contextlib.chdir(tmp_path):
        write_data(tmp_path)
        run = start_penstock(["run", "recipe:judge", *changes], VARIABLES, tmp_path / "output")
        try:
            assert run.wait(2 * BOOT_S) == 0, (tmp_path / "output").read_text()
        finally:
            run.send_signal(15)
    folder = tmp_path / "runs" / "judge"
    assert faults(folder, 2) == []
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_groups_trained"] > 0 and summary["num_groups_dead"] == 0
