"""A small model that sees trains by `penstock run`: the real engine, updates in flight, and the parity gate on."""

import json
import shutil
from pathlib import Path

import pytest

import squares_environment
from demo_run import run_to_its_end
from vision_models import tiny_idefics3

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600)]

RUN = """
name = "seen"
seed = 1
num_updates = 4
group_size = 4
groups_per_batch = 4
max_lag = 1
model.path = "model"
environment.path = "squares_environment:Squares"
sampling.max_tokens = 8
engine = { max_model_len = 512, args = { enforce_eager = true } }
producers = { count = 1, groups_in_flight = 4, num_threads = 1 }
trainer = { learning_rate = 1e-3, num_threads = 1 }
correction.proximal = "sampled_version"
parity.gate = "refuse"
metrics.port = 0
"""


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", id="whole"),
        pytest.param("lora = { rank = 8, alpha = 16.0 }\n", id="adapter", marks=pytest.mark.exhaustive),
    ],
)
def test_a_model_that_sees_trains_with_the_real_engine(more: str, tmp_path: Path) -> None:
    tiny_idefics3(tmp_path / "model")
    shutil.copy(squares_environment.__file__, tmp_path)
    (tmp_path / "run.toml").write_text(RUN + more)
    run_to_its_end(tmp_path, "run", "run.toml", "--runs", "runs", timeout_s=500)
    run = tmp_path / "runs" / "seen"
    updates = [json.loads(line) for line in (run / "updates.jsonl").read_text().splitlines()]
    gaps = [update["mismatch_lag0"] for update in updates if "mismatch_lag0" in update]
    assert len(updates) == 4 and len(gaps) > 1 and max(gaps) < 1e-5, gaps
    assert (run / "model" / "processor_config.json").is_file()
