"""The calculator agent's own run file, cut short: it learns to call its tool, inside the producer and outside."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forked_programs import ForkedProgram, start_penstock
from waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NUM_UPDATES = 32
RUN_S = 400.0
"""An engine's boot and a run on a busy machine."""

Process = subprocess.Popen[bytes] | ForkedProgram
Start = Callable[..., Process]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "e2e"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("agent", "example.py", "argument")` runs Python, `start("run", "run", "demo")` runs `penstock run demo`.
    The output is in `tmp_path / "agent"` or `tmp_path / "run"`."""
    processes: list[Process] = []
    variables = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'doubles'}"}

    def run(name: str, *arguments: str) -> Process:
        if name == "run":
            processes.append(start_penstock(arguments, variables, tmp_path / name))
            return processes[-1]
        with (tmp_path / name).open("wb") as output:
            command = [sys.executable, *arguments]
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=variables))
        return processes[-1]

    yield run
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_arguments(folder: Path, model: Path, **settings: object) -> list[str]:
    settings |= {"model.path": model, "num_updates": NUM_UPDATES, "groups_per_batch": 8, "evaluation.num_prompts": 0}
    settings |= {"metrics.port": 0, "endpoint.port": 0}
    command = ["run", str(ROOT / "deploy/runs/calculator.toml"), "--name", folder.name, "--runs", str(folder.parent)]
    return [*command, *(part for name, value in settings.items() for part in ("--set", f"{name}={value}"))]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def check(folder: Path) -> None:
    """Learned, with the tokens that were sampled, and every group accounted for."""
    updates = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in updates]
    assert len(rewards) == NUM_UPDATES
    assert mean(rewards[:4]) < 0.6 and mean(rewards[-8:]) > max(0.75, mean(rewards[:4]) + 0.2), rewards
    summary = json.loads((folder / "summary.json").read_text())
    settled = sum(summary[f"num_groups_{outcome}"] for outcome in ("trained", "skipped", "dead", "cancelled"))
    assert summary["num_groups_released"] == settled
    assert summary["num_groups_dead"] == 0 and summary["num_tokens_rejected"] == 0
    assert summary["mismatch_lag0"] is None or summary["mismatch_lag0"] < 1e-5
    assert json.loads((folder / "trainer.json").read_text())["finished"]


def test_the_calculator_environment_learns_to_call_its_tool(
    start: Start, calculator_model: Path, folder: Path, tmp_path: Path
) -> None:
    plug = {"path": "recorded_calculator:RecordedCalculator", "kwargs.file": tmp_path / "rewards"}
    settings = {f"environment.{name}": value for name, value in plug.items()}
    process = start("run", *run_arguments(folder, calculator_model, **settings))
    assert process.wait(RUN_S) == 0, (tmp_path / "run").read_text()
    check(folder)
    rewards = [json.loads(line) for line in (tmp_path / "rewards").read_text().splitlines()]
    assert len(rewards) >= NUM_UPDATES * 64
    called = [reward["called"] for reward in rewards]
    assert mean(called[:256]) < 0.6 and mean(called[-512:]) > max(0.8, mean(called[:256]) + 0.2)
    # No head is up to it: what is right has been computed by the tool.
    assert mean([reward["called"] for reward in rewards if reward["exact"]]) > 0.95


def test_the_example_of_an_agent_outside_learns_the_same(
    start: Start, calculator_model: Path, folder: Path, tmp_path: Path
) -> None:
    tasks = "penstock.producers.environments.calculator:CalculatorTasks"
    process = start("run", *run_arguments(folder, calculator_model, **{"environment.path": tasks}))
    log, said = folder / "logs" / "producer-0.log", "agents are served at "
    wait_for(
        lambda: log.exists() and said in log.read_text(),
        timeout_s=RUN_S,
        process=process,
        log=(tmp_path / "run").read_text,
    )
    url = log.read_text().partition(said)[2].split()[0]
    agent = start("agent", "docs/examples/outside_agent.py", url)
    assert process.wait(RUN_S) == 0, (tmp_path / "run").read_text() + (tmp_path / "agent").read_text()
    assert agent.wait(60) == 0, (tmp_path / "agent").read_text()
    check(folder)
    assert (tmp_path / "agent").read_text().count(": 1.0\n") > NUM_UPDATES * 64 / 2
