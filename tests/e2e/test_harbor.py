"""Task folders of Harbor with the real engine: an agent, its sandbox and the task's own tests."""

import json
import os
from pathlib import Path

import pytest

from forked_programs import PYTHONPATH, start_penstock
from harbor_task import make_task
from penstock.producers.environments import container
from penstock.producers.environments.sandbox import Sandboxes
from penstock.schemas.record_reader import Record

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
RUN_S = 1200.0
TEST_SH = "#!/bin/bash\necho $((RANDOM % 2)) > /logs/verifier/reward.txt\n"
"""What this model does is no work: without rewards that differ nothing would be trained."""


def test_tasks_train_a_model_by_what_their_tests_say(calculator_model: Path, tmp_path: Path) -> None:
    if why := Sandboxes().why_not:
        pytest.skip(f"no namespaces: {why}")
    programs = tmp_path / "programs"
    programs.mkdir()
    for runtime in container.RUNTIMES:  # whatever this machine has, its images are not this test's
        (programs / runtime).symlink_to("/bin/false")
    for name, asked in (("one", "What is 12+3*4?"), ("two", "What is 50-7*3?")):
        make_task(tmp_path / "tasks" / name, instruction_md=asked, tests__test_sh=TEST_SH)
    runs = tmp_path / "runs"
    kwargs = f'{{ training = "{tmp_path}/tasks", max_turns = 2, system_prompt = "" }}'
    settings = {
        "environment.path": "penstock.producers.environments.harbor:HarborTasks",
        "environment.kwargs": kwargs,
        "model.path": calculator_model,
        "num_updates": 2,
        "group_size": 4,
        "groups_per_batch": 2,
        "evaluation.num_prompts": 0,
        "record": "true",
        "metrics.port": 0,
        "endpoint.port": 0,
    }
    arguments = ["run", str(ROOT / "deploy/runs/calculator.toml"), "--name", "harbor", "--runs", str(runs)]
    arguments += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    variables = {"PYTHONPATH": PYTHONPATH, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    process = start_penstock(arguments, os.environ | variables, tmp_path / "run")
    assert process.wait(RUN_S) == 0, (tmp_path / "run").read_text()
    folder = runs / "harbor"
    assert len((folder / "updates.jsonl").read_text().splitlines()) == 2
    assert json.loads((folder / "summary.json").read_text())["num_groups_dead"] == 0
    record = Record(folder)
    groups = [recorded.decode() for batch in record.batches for recorded in record.batch(batch)[1]]
    assert {group.prompt.metadata["folder"] for group in groups} == {
        str(tmp_path / "tasks" / n) for n in ("one", "two")
    }
    rewards = [rollout.reward for group in groups for rollout in group.rollouts]
    assert {reward.value for reward in rewards} == {0.0, 1.0}
    assert {"finished"} == {name for reward in rewards for name in reward.parts}
    assert max(len(rollout.segments[0].token_ids) for group in groups for rollout in group.rollouts) > 0
