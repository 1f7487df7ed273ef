"""A real run looked at while it trains: at a terminal, through a pipe, by its report, and in its logs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from penstock.deploy.demo.make_model import make_model

from terminal import Terminal
from waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
BOOT_S = 240.0
VARIABLES = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
VARIABLES |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PENSTOCK_LOG": "json"}


class Run:
    """`penstock run` of the demo's run file with one producer, too long to end by itself."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.runs = folder / "runs"
        self.folder = self.runs / "seen"
        self._output = folder / "output"
        settings = [f"model.path={model}", "num_updates=5000", "producers.count=1", "metrics.port=0"]
        command = [*self.command("run", "deploy/runs/demo.toml"), "--name", "seen"]
        for setting in settings:
            command += ["--set", setting]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=VARIABLES, stdout=output, stderr=output)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "penstock.deploy.cli", *arguments, "--runs", str(self.runs)]

    def ask(self, *arguments: str) -> str:
        done = subprocess.run(self.command(*arguments), env=VARIABLES, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait_for_updates(self, count: int) -> None:
        file = self.folder / "updates.jsonl"
        wait_for(
            lambda: file.read_bytes().count(b"\n") if file.exists() else 0,
            lambda seen: seen >= count,
            timeout_s=BOOT_S,
            process=self.process,
            log=self._output.read_text,
        )

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(180)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("watch")
    make_model(folder / "model")
    run = Run(folder, folder / "model")
    try:
        run.wait_for_updates(25)
        yield run
    finally:
        run.stop()


def tell_of_a_run_under_way(run: Run) -> None:
    text = run.ask("watch", "seen", "--once")
    assert "waited for" in text and "mismatch at lag 0" in text and max(map(len, text.splitlines())) <= 80
    assert "not over, as of" in " ".join(run.ask("report", "seen").split())
    assert "This run is not over" in (run.folder / "report.html").read_text()


def test_a_run_is_seen_while_it_trains_and_after_its_end(run):
    tell_of_a_run_under_way(run)
    terminal = Terminal(run.command("watch", "seen"), environment=VARIABLES, width=100)
    try:
        shown = "\n".join(terminal.wait_for(lambda frame: any("waited for" in text for text in frame)))
        assert "producer-0" in shown and "updates/s" in shown and "away" not in shown, shown
        terminal.press("2")
        shown = "\n".join(terminal.wait_for(lambda frame: any("gradient norm" in text for text in frame)))
        assert all(word in shown for word in ("reward", "accuracy", "entropy", "KL to behavior", "learning rate")), (
            shown
        )
        terminal.press("3")
        shown = "\n".join(terminal.wait_for(lambda frame: any("mismatch at lag 0" in text for text in frame)))
        assert "within" in shown and "ESS" in shown and "bound 2" in shown, shown
        terminal.resize(80)
        terminal.wait_for(lambda frame: max(map(len, frame)) <= 80)
        terminal.press("1")
        run.stop()
        gone = ("not running", "Redis is away")
        shown = "\n".join(terminal.wait_for(lambda frame: all(any(word in text for text in frame) for word in gone)))
        assert "wait" in shown, "what there was is shown on"
        terminal.press("q")
        assert terminal.wait() == 0 and terminal.attributes_now() == terminal.attributes
    finally:
        terminal.close()


def test_every_line_of_its_processes_is_a_record(run):
    run.stop()
    for name in ("trainer", "producer-0"):
        records = []
        for line in (run.folder / "logs" / f"{name}.log").read_text().splitlines():
            assert line.startswith("{"), f"{name}: {line}"
            records.append(json.loads(line))
        assert {record["run"] for record in records} == {"seen"}
        own = [record for record in records if record["role"] == name.partition("-")[0]]
        assert own and any("policy_version" in record for record in own)
        assert len(records) < 200, "no line per request or token"
        if name == "producer-0":
            assert {record["id"] for record in records} == {"producer-0"}
            assert {record["role"] for record in records} <= {"producer", "engine"}
