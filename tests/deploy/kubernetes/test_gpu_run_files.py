"""The run files for GPUs that ship: `penstock run` takes them as they are, and the trainer trains what they say."""

import json
from pathlib import Path

import pytest
import torch

from bench.sizing import save_random
from docs.sizing import SHAPES
from penstock.consumers.learning.learner.learner import Learner
from penstock.deploy import cli
from penstock.deploy.launch import start_checks
from penstock.deploy.launch.machine import Gpu, Machine
from penstock.schemas.config import load_config
from training_groups import random_group

OVERLAYS = Path(__file__).parents[3] / "deploy" / "kubernetes" / "overlays"
GPUS = {"gpu": 3, "gpu-nodes": 10}


@pytest.fixture(params=GPUS)
def overlay(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def overrides(overlay: str, tmp_path: Path) -> list[str]:
    """A random model with the heads, the vocabulary and the ties of the one that the file names, and two problems."""
    named = Path(load_config(OVERLAYS / overlay / "run.toml").model.path).name
    (shape,) = (each for each in SHAPES if each.name == named)
    save_random(
        shape._replace(hidden=16, intermediate=32, layers=1, vocabulary=512), tmp_path / "model", dtype=torch.bfloat16
    )
    for name in ("train", "test"):
        problem = {"problem": f"What is 1 + 1, {name}?", "answer": "2"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(problem) + "\n")
    return [
        f"model.path={tmp_path}/model",
        f"environment.kwargs.prompts_file={tmp_path}/train.jsonl",
        f"environment.kwargs.evaluation_file={tmp_path}/test.jsonl",
    ]


def test_a_dry_run_places_its_parts(overlay: str, overrides: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    gpus = tuple(Gpu(n, f"GPU-{n}", "NVIDIA H200", 141 * 10**9, 140 * 10**9, "580.65") for n in range(GPUS[overlay]))
    monkeypatch.setattr(start_checks, "read_machine", lambda: Machine(gpus, "13.0", needs_gpu=True))
    monkeypatch.chdir(tmp_path)
    words = [word for each in overrides for word in ("--set", each)]
    assert cli.main(["run", str(OVERLAYS / overlay / "run.toml"), "--dry-run", *words]) == 0
    shown = capsys.readouterr()
    assert 'deltas = "redis"' in shown.out and "# weights.anchors is not set" in shown.out
    rows = [row.split() for row in shown.err.splitlines()[1:-1]]
    assert [row[2] for row in rows] == ["trainer", "producer-0", "producer-1"]


def test_the_trainer_makes_an_update_of_it_on_a_cpu(overlay: str, overrides: list[str]) -> None:
    cpu = ("trainer.device=cpu", "trainer.num_threads=1")
    learner = Learner(load_config(OVERLAYS / overlay / "run.toml", [*overrides, *cpu]))
    before = learner.published_weights()
    batch = learner.pack([random_group(index, 0) for index in range(4)], lambda version: 0)
    report = learner.step(batch)
    assert report.num_optimizer_steps == 1 and report.skipped_reason is None
    assert report.metrics["grad_norm"] > 0
    masters = dict(learner.model.module.named_parameters())
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert any(not torch.equal(before[name].float(), tensor) for name, tensor in masters.items() if name in before)
