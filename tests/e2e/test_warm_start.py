"""A run with a warm start, as a user begins it: a model of random weights has learned the sums of its demonstrations
when the first rollout is sampled."""

import json
import re
from pathlib import Path

import pytest

from demo_run import DemoRun
from penstock.deploy.demo.make_model import ModelRecipe, make_model
from penstock.producers.environments.arithmetic import Arithmetic

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 60


def test_a_random_model_learns_from_demonstrations_before_the_first_update(tmp_path: Path) -> None:
    make_model(tmp_path / "model", ModelRecipe(train=False))
    environment = Arithmetic(seed=7, width=1, num_evaluation_prompts=6)
    sums = [environment.prompt(index) for index in range(1, 201)]
    demonstrations = tmp_path / "sums.jsonl"
    demonstrations.write_text("\n".join(json.dumps({"prompt": each.text, "completion": each.answer}) for each in sums))
    settings = {"demonstrations": demonstrations, "steps": STEPS, "learning_rate": 2e-3, "batch_size": 32}
    changes = {f"warm_start.{name}": value for name, value in settings.items()}
    changes |= {"environment.kwargs.width": 1, "environment.kwargs.num_evaluation_prompts": 6}
    changes |= {"model.path": tmp_path / "model", "num_updates": 4, "producers.count": 1, "metrics.port": 0}
    run = DemoRun(tmp_path, "warm", **changes)
    try:
        run.start(fresh=False)
        assert run.wait() == 0, run.output()
    finally:
        run.stop()
    updates, summary = run.updates(), run.read("summary.json")
    assert updates[0]["policy_version"] in (STEPS, STEPS + 1)
    assert updates[0]["reward"] > 0.3
    assert summary["warm_start"]["num_steps"] == STEPS
    assert summary["warm_start"]["last"] < 0.5 * summary["warm_start"]["first"]
    assert run.read("parity.json")["verdict"]["status"] == "parity"
    assert re.search(rf"warm start \d+/{STEPS}\b", run.output()) and f"{STEPS} steps, loss" in run.output()
    run.ask("audit", run.name)
