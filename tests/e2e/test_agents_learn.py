"""Whole runs whose rollouts an agent makes, outside the producers or inside: trained as they were sampled, and the
agent gets better."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from markov_agent import MarkovAgent
from tool_caller import TOOLS
from waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
NUM_UPDATES = 36
BOOT_S = 240.0
RUN_FILE = """
name = "agents"
num_updates = {num_updates}
group_size = 8
groups_per_batch = 4
max_lag = 1
model.path = "{model}"
environment.path = "tool_caller:{environment}"
sampling.max_tokens = 120
engine = {{ kv_cache_gib = 0.25, max_num_seqs = 32, max_model_len = 2048 }}
producers.count = 1
endpoint = {{ port = 0, tool_parser = "hermes" }}
trainer.learning_rate = 4e-4
evaluation.num_prompts = 0
metrics.port = 0
"""


def converse(server, rollout: dict) -> float:
    """Three turns; the reward is the share of turns in which the tool was called."""
    messages: list = [{"role": "user", "content": rollout["prompt"]["text"]}]
    num_calls = 0
    with openai.OpenAI(base_url=rollout["base_url"], api_key="none") as client:
        for _ in range(3):
            message = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
            messages.append(message)
            num_calls += bool(message.tool_calls)
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
            if not message.tool_calls:
                messages.append({"role": "user", "content": "use the tool"})
    server.post(f"/r/{rollout['id']}/finish", body={"reward": num_calls / 3}, cast_to=object)
    return num_calls / 3


def work(url: str, rewards: list[float]) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as server:
        while True:
            try:
                rewards.append(converse(server, server.post("/r", cast_to=object)))
            except openai.RateLimitError:
                time.sleep(0.1)
            except (openai.APIConnectionError, openai.APIStatusError):
                return  # the run is over


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen]]:
    """`start("Environment")` begins the run in `tmp_path / "runs"`."""
    processes = []

    def run(environment: str) -> subprocess.Popen:
        MarkovAgent(tmp_path / "model")
        file = tmp_path / "run.toml"
        file.write_text(RUN_FILE.format(num_updates=NUM_UPDATES, model=tmp_path / "model", environment=environment))
        command = [sys.executable, "-m", "penstock.deploy.cli", "run", str(file), "--runs", str(tmp_path / "runs")]
        variables = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'doubles'}"}
        with (tmp_path / "output").open("wb") as output:
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


def check_that_it_learned(folder: Path) -> None:
    updates = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
    assert len(updates) == NUM_UPDATES
    reward = [line["reward"] for line in updates]
    assert reward[0] < 0.7 and sum(reward[-12:]) / 12 > reward[0] + 0.2, reward
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_groups_trained"] > NUM_UPDATES and summary["num_groups_dead"] == 0
    # What the trainer recomputes is what the engine has sampled, over several turns and across weights.
    assert summary["mismatch_lag0"] is None or summary["mismatch_lag0"] < 1e-5


def test_an_agent_outside_learns_to_call_its_tool(start, tmp_path: Path) -> None:
    process, folder = start("Tasks"), tmp_path / "runs" / "agents"
    log = folder / "logs" / "producer-0.log"
    said = "agents are served at "
    wait_for(
        lambda: log.exists() and said in log.read_text(),
        timeout_s=BOOT_S,
        process=process,
        log=(tmp_path / "output").read_text,
    )
    url = log.read_text().partition(said)[2].split()[0]
    rewards: list[float] = []
    agents = [threading.Thread(target=work, args=(url, rewards), daemon=True) for _ in range(16)]
    for agent in agents:
        agent.start()
    assert process.wait(BOOT_S) == 0, (tmp_path / "output").read_text() + log.read_text()[-3000:]
    for agent in agents:
        agent.join(30)
    assert len(rewards) >= NUM_UPDATES * 32
    check_that_it_learned(folder)


def test_an_environment_of_several_turns_learns_the_same(start, tmp_path: Path) -> None:
    process, folder = start("ToolCaller"), tmp_path / "runs" / "agents"
    assert process.wait(BOOT_S + 200) == 0, (tmp_path / "output").read_text()
    check_that_it_learned(folder)
