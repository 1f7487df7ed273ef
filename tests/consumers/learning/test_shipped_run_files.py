"""Every run file that ships trains: one update of a small random model of its architecture."""

from pathlib import Path

import msgspec
import pytest

from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.learner.learner import Learner
from penstock.schemas.config import load_config
from training_groups import lag_from, random_group, tiny_model, tiny_tokenizer

DEPLOY = Path(__file__).parents[3] / "deploy"
FILES = sorted((*DEPLOY.glob("runs/*.toml"), *DEPLOY.glob("kubernetes/**/*.toml")))
QWEN3 = {"demo", "calculator", "Qwen3-4B", "Qwen3-14B"}
"""The models that the files name; all are of the architecture of `tiny_model`."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(DEPLOY)))
def test_a_shipped_run_file_makes_an_update(tmp_path, file) -> None:
    config = load_config(file)
    assert Path(config.model.path).name in QWEN3
    tiny_model(tmp_path, tied=config.model.path.endswith("4B"))
    if config.teacher is not None:
        assert config.teacher.model == "runs/models/adder"
        tiny_model(tmp_path / "teacher", seed=1)
        tiny_tokenizer(tmp_path)
        tiny_tokenizer(tmp_path / "teacher")
        teacher = msgspec.structs.replace(config.teacher, model=str(tmp_path / "teacher"))
        config = msgspec.structs.replace(config, teacher=teacher)
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=str(tmp_path)),
        trainer=msgspec.structs.replace(config.trainer, device="cpu"),
    )
    learner = Learner(config)
    before = learner.published_weights()
    report = learner.step(pack([random_group(n, 0) for n in range(4)], lag_from(7), config))
    assert report.skipped_reason is None
    assert not all(tensor.equal(before[name]) for name, tensor in learner.published_weights().items())


def test_the_composed_pipeline_runs_a_file_that_ships() -> None:
    compose = (DEPLOY / "compose.yaml").read_text()
    assert "${PENSTOCK_WORKSPACE:-./runs}:/workspace" in compose and "${PENSTOCK_RUN_FILE:-demo.toml}" in compose
    assert DEPLOY / "runs" / "demo.toml" in FILES
