"""The calculator agent's run file, shortened: the model learns to call the tool, inside the producer and outside."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forked_programs import PYTHONPATH, ForkedProgram, start_penstock
from penstock.schemas.record_reader import Record
from penstock.schemas.rollout import RolloutGroup
from real_server import free_port
from waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
NUM_UPDATES = 32
RUN_S = 800.0
"""Allows for an engine's boot and a run on a busy machine."""

Process = subprocess.Popen[bytes] | ForkedProgram
Start = Callable[..., Process]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "e2e"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("agent", "example.py", "argument")` runs Python, `start("run", "run", "demo")` runs `penstock run demo`.
    The output goes to `tmp_path / "agent"` or `tmp_path / "run"`."""
    processes: list[Process] = []
    variables = os.environ | {"PYTHONPATH": PYTHONPATH}

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
    defaults = {"model.path": model, "num_updates": NUM_UPDATES, "groups_per_batch": 8, "evaluation.num_prompts": 0}
    settings = {**defaults, "metrics.port": 0, "endpoint.port": 0, **settings}
    command = ["run", str(ROOT / "deploy/runs/calculator.toml"), "--name", folder.name, "--runs", str(folder.parent)]
    return [*command, *(part for name, value in settings.items() for part in ("--set", f"{name}={value}"))]


def served_url(process: Process, folder: Path, tmp_path: Path) -> str:
    log, said = folder / "logs" / "producer-0.log", "agents are served at "
    await_run(process, lambda: log.exists() and said in log.read_text(), tmp_path)
    return log.read_text().partition(said)[2].split()[0]


def await_run(process: Process, condition: Callable[[], object], tmp_path: Path) -> None:
    wait_for(condition, timeout_s=RUN_S, poll_s=0.1, process=process, log=(tmp_path / "run").read_text)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def recorded_groups(folder: Path) -> list[RolloutGroup]:
    record = Record(folder)
    return [recorded.decode() for batch in record.batches for recorded in record.batch(batch)[1]]


def check(folder: Path) -> None:
    """Checks that the run learned, on the tokens that were sampled, and that every group is accounted for."""
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
    process = start("run", *run_arguments(folder, calculator_model, record="true"))
    assert process.wait(RUN_S) == 0, (tmp_path / "run").read_text()
    check(folder)
    rewards = [rollout.reward.parts for group in recorded_groups(folder) for rollout in group.rollouts]
    assert len(rewards) >= NUM_UPDATES * 64
    called = [reward["called"] for reward in rewards]
    assert mean(called[:256]) < 0.6 and mean(called[-512:]) > max(0.8, mean(called[:256]) + 0.2)
    # The model cannot compute the result itself: a correct answer comes from the tool.
    assert mean([reward["called"] for reward in rewards if reward["exact"]]) > 0.95


@pytest.mark.exhaustive
def test_the_example_of_an_agent_outside_learns_the_same(
    start: Start, calculator_model: Path, folder: Path, tmp_path: Path
) -> None:
    tasks = "penstock.producers.environments.calculator:CalculatorTasks"
    process = start("run", *run_arguments(folder, calculator_model, **{"environment.path": tasks}))
    url = served_url(process, folder, tmp_path)
    agent = start("agent", "docs/examples/outside_agent.py", url)
    assert process.wait(RUN_S) == 0, (tmp_path / "run").read_text() + (tmp_path / "agent").read_text()
    assert agent.wait(120) == 0, (tmp_path / "agent").read_text()
    check(folder)
    assert (tmp_path / "agent").read_text().count(": 1.0\n") > NUM_UPDATES * 64 / 2


def test_agents_outside_go_on_when_their_producer_is_killed_and_started_again(
    start: Start, calculator_model: Path, folder: Path, tmp_path: Path
) -> None:
    """Uses the example's agents, with the retries that docs/agents.md recommends, on the real engine."""
    settings: dict[str, object] = {"environment.path": "penstock.producers.environments.calculator:CalculatorTasks"}
    settings |= {"num_updates": 8, "record": "true", "endpoint.port": free_port()}
    process = start("run", *run_arguments(folder, calculator_model, **settings))
    url = served_url(process, folder, tmp_path)
    openings = tmp_path / "openings"
    openings.mkdir()
    start("agent", str(ROOT / "tests/doubles/patient_agents.py"), str(openings), url)
    asked = [sys.executable, "-m", "penstock.deploy.cli", "producers", str(folder), "--json"]
    (producer,) = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)["alive"]
    updates = folder / "updates.jsonl"
    await_run(process, lambda: updates.exists() and updates.read_text().count("\n") >= 3, tmp_path)
    # An opened rollout whose answer dies with the producer has no agent: its place stays empty until it is idle.
    (openings / "hold").touch()
    wait_for(lambda: not list(openings.glob("opening-*")))
    os.kill(producer["pid"], signal.SIGKILL)
    (openings / "hold").unlink()
    assert process.wait(RUN_S) == 0, (tmp_path / "run").read_text() + (tmp_path / "agent").read_text()
    groups = recorded_groups(folder)
    continued = [group for group in groups if len(group.samplers) == 2]
    assert continued and {group.missing for group in groups} == {""}, "no rollout was lost"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_groups_trained"] + summary["num_groups_skipped"] == 8 * 8
    assert summary["num_groups_dead"] == 0 and summary["num_tokens_rejected"] == 0
    assert summary["mismatch_lag0"] is None or summary["mismatch_lag0"] < 1e-5
    assert "another course" not in (tmp_path / "run").read_text()
