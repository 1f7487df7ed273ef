"""The demo's own run file, cut short: killed, continued, and its books balance."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from penstock.deploy.demo.make_model import make_model
from penstock.schemas.policy import VERSIONS_PER_EPOCH

from waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
NUM_UPDATES = 60
BOOT_S = 240.0
"""Two engines on a busy machine."""


class Demo:
    """`penstock run deploy/runs/demo.toml` in a folder of the test's own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder / "runs" / "e2e"
        self._log = folder / "output"
        self._command = [sys.executable, "-m", "penstock.deploy.cli", "run", "deploy/runs/demo.toml"]
        self._command += ["--name", "e2e", "--runs", str(self.folder.parent), "--set", f"model.path={model}"]
        self._command += ["--set", f"num_updates={NUM_UPDATES}", "--set", "checkpoint.every=10"]
        self._command += ["--set", "metrics.port=0"]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([*self._command, *more], cwd=ROOT, stdout=log, stderr=log)

    def output(self) -> str:
        logs = "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in self.folder.glob("logs/*.log"))
        return self._log.read_text() + logs

    def lines(self, name: str) -> list[dict]:
        file = self.folder / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_update(self, update: int) -> None:
        wait_for(
            lambda: any(line["update"] >= update for line in self.lines("updates.jsonl")[-1:]),
            timeout_s=BOOT_S,
            process=self.process,
            log=self.output,
        )

    def metrics(self, role: str) -> str:
        target = json.loads((self.folder / "metrics" / f"{role}.json").read_text())[0]["targets"][0]
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as reply:
            return reply.read().decode()

    def living(self) -> list[int]:
        """Processes that still have a file of the run open."""
        found = set()
        for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if os.readlink(descriptor).startswith(str(self.folder)):
                    found.add(int(descriptor.parts[2]))
            except OSError:
                continue
        return sorted(found - {os.getpid()})

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.process.wait()


@pytest.fixture
def demo(tmp_path):
    make_model(tmp_path / "model", progress=lambda line: None)
    demo = Demo(tmp_path, tmp_path / "model")
    yield demo
    demo.kill()


def test_a_killed_demo_is_continued_learns_and_balances_its_books(demo):
    demo.start()
    demo.wait_for_update(23)
    trainer, producer = demo.metrics("trainer"), demo.metrics("producer-0")
    for name in ("penstock_token_lag_steps_bucket", "penstock_ess_fraction", "penstock_rollout_correction_kl"):
        assert name in trainer
    for name in ("penstock_tokens_generated_total", "penstock_weight_pause_seconds_bucket"):
        assert name in producer
    demo.process.send_signal(signal.SIGKILL)
    demo.process.wait()
    wait_for(demo.living, lambda pids: pids == [], timeout_s=30)

    demo.start("--resume", "--set", "producers.count=1")
    assert demo.process.wait(BOOT_S + 120) == 0, demo.output()
    assert demo.living() == []

    summary = json.loads((demo.folder / "summary.json").read_text())
    settled = sum(summary[f"num_groups_{outcome}"] for outcome in ("trained", "skipped", "dead", "cancelled"))
    assert summary["num_groups_released"] == settled
    assert summary["num_groups_dead"] == summary["num_groups_cancelled"] == 0
    assert summary["num_updates"] == NUM_UPDATES
    assert summary["final_accuracy"] > summary["initial_accuracy"] + 0.2
    assert summary["mismatch_lag0"] is None or summary["mismatch_lag0"] < 1e-5
    assert summary["engine"]["logprobs_mode"] == "processed_logprobs"
    assert (demo.folder / "report.html").stat().st_size > 100_000
    versions = [line["policy_version"] for line in demo.lines("updates.jsonl")]
    assert max(versions) > VERSIONS_PER_EPOCH, "the resumed trainer is of a later epoch"
    assert len(set(versions)) == len(versions), "a version was used twice"
    books = json.loads((demo.folder / "trainer.json").read_text())
    assert books["finished"] and books["num_updates"] == NUM_UPDATES
