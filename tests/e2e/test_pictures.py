"""The recipe `pictures`: a model that sees learns to count by `penstock run`, with the real engine and the gate on."""

import json
from pathlib import Path

import pytest

from demo_run import run_to_its_end
from penstock.deploy.demo.make_model import RECIPES, make_model

# In `make test` test_images.py trains a model that sees, if only for a few updates.
pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(1500)]


def test_the_recipe_learns_to_count_what_it_sees(tmp_path: Path) -> None:
    make_model(tmp_path / "runs" / "models" / "pictures", RECIPES["pictures"], progress=lambda line: None)
    settings = "--set", "metrics.port=0", "--set", "evaluation.stop_at_goal=true"
    run_to_its_end(tmp_path, "run", "recipe:pictures", *settings, timeout_s=1300)
    run = tmp_path / "runs" / "pictures"
    rewards = [json.loads(line)["reward"] for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert rewards[0] < 0.3 and rewards[-1] >= 0.9, rewards
    updates = [json.loads(line) for line in (run / "updates.jsonl").read_text().splitlines()]
    gaps = [update["mismatch_lag0"] for update in updates if "mismatch_lag0" in update]
    assert len(gaps) > 1 and max(gaps) < 1e-5, gaps
