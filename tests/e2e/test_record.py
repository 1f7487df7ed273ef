"""The demo's own run file with `record = true`: killed, continued, and its record gives its losses again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from penstock.deploy.demo.make_model import make_model
from penstock.schemas.record import sampled_tokens
from penstock.schemas.record_reader import Record

from waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
NUM_UPDATES = 24
BOOT_S = 240.0


class RecordedDemo:
    """`penstock run deploy/runs/demo.toml` with one producer, a checkpoint every tenth update."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder / "runs" / "e2e"
        self._log = folder / "output"
        self._command = [sys.executable, "-m", "penstock.deploy.cli", "run", "deploy/runs/demo.toml", "--name", "e2e"]
        self._command += ["--runs", str(self.folder.parent)]
        for setting in (
            f"model.path={model}",
            f"num_updates={NUM_UPDATES}",
            "record=true",
            "checkpoint.every=10",
            "producers.count=1",
            "evaluation.num_prompts=16",
            "metrics.port=0",
        ):
            self._command += ["--set", setting]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([*self._command, *more], cwd=ROOT, stdout=log, stderr=log)

    def output(self) -> str:
        logs = "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in self.folder.glob("logs/*.log"))
        return self._log.read_text() + logs

    def last_update(self) -> int:
        file = self.folder / "updates.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return json.loads(lines[-1])["update"] if lines else 0

    def wait_for_update(self, update: int) -> None:
        wait_for(self.last_update, lambda seen: seen >= update, timeout_s=BOOT_S, process=self.process, log=self.output)

    def is_alive(self) -> bool:
        """Whether any process has a file of the run open."""
        for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if os.readlink(descriptor).startswith(str(self.folder)) and int(descriptor.parts[2]) != os.getpid():
                    return True
            except OSError:
                continue
        return False

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()


@pytest.fixture
def demo(tmp_path):
    make_model(tmp_path / "model", progress=lambda line: None)
    demo = RecordedDemo(tmp_path, tmp_path / "model")
    yield demo
    demo.kill()


def test_the_record_of_a_killed_and_continued_demo_gives_its_losses_again(demo):
    demo.start()
    demo.wait_for_update(13)
    demo.kill()
    wait_for(lambda: not demo.is_alive(), timeout_s=30)
    demo.start("--resume")
    assert demo.process.wait(BOOT_S + 120) == 0, demo.output()

    record = Record(demo.folder)
    # Three were taken behind the checkpoint at least; the last one's record may have been under way.
    assert len(record.undone) >= 2 and record.missing == []
    heads = [record.head(at) for at in record.batches]
    assert [head.update for head in heads] == list(range(1, NUM_UPDATES + 1))
    indexes = [group.entry.index for group in record.groups()]
    ledger = json.loads((demo.folder / "trainer.json").read_text())
    assert len(set(indexes)) == len(indexes) == ledger["num_groups_trained"] + ledger["num_groups_skipped"]
    trained = [group for group in record.groups() if group.entry.outcome == "trained"]
    assert len(trained) == ledger["num_groups_trained"]
    gaps = []
    for group in trained[:100]:
        recorded = record.group(group)
        (rollout, *_), ((findings, *_), *_) = recorded.decode().rollouts, recorded.findings
        tokens = list(sampled_tokens(rollout.segments[0], findings))
        # A token sampled after an update that met its row saw keys and values of older weights.
        if all(token.lag == 0 for token in tokens):
            gaps += [
                abs(token.proximal_logprob - token.behavior_logprob)
                for token in tokens
                if token.proximal_logprob is not None
            ]
    assert gaps and max(gaps) < 1e-4, "in a row at lag 0 the trainer finds what the engine found"

    command = [sys.executable, "-m", "penstock.deploy.cli", "replay", str(demo.folder), "--name", "own"]
    played = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert played.returncode == 0, played.stdout + played.stderr
    assert f"bit for bit, at all {NUM_UPDATES} updates" in played.stdout
    lines = [json.loads(line) for line in (demo.folder / "replay" / "own" / "updates.jsonl").read_text().splitlines()]
    own = {line["update"]: line["loss"] for line in lines if line["variant"] == "own"}
    written = [json.loads(line) for line in (demo.folder / "updates.jsonl").read_text().splitlines()]
    said = {line["update"]: line["loss"] for line in written}
    assert own == said, "the last line of an update is that of the line that survived"
