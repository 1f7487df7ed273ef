"""The learner on 2 and 4 ranks against the learner of one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.schemas.config import (
    AdvantageConfig,
    CorrectionConfig,
    LoraConfig,
    ModelConfig,
    Plug,
    RunConfig,
    TeacherConfig,
    TrainerConfig,
)
from rank_processes import log_of, on_ranks
from rank_work import MARK, Trained, train, train_from_checkpoints
from training_groups import configuration, group_of, random_group, segment, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(900)]

SIZES = (2, 4)
LORA = LoraConfig(rank=3, alpha=6.0)
SGD = Plug(path="torch.optim:SGD", kwargs={"momentum": 0.9})
WHITENED = "penstock.consumers.learning.advantages:reinforce_plus_plus"
SAMPLED = CorrectionConfig(proximal="sampled_version")
GRPO = "penstock.consumers.learning.objectives.grpo:Grpo"


def _trainer(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"device": "cpu", "learning_rate": 1e-3, "tokens_per_microbatch": 60} | changes)


def _configs(folder: Path) -> dict[str, RunConfig]:
    def run(
        model: str = "tied",
        dtype: str = "float32",
        reference: str | None = None,
        **changes: Any,
    ) -> RunConfig:
        path = str(folder / model)
        if "teacher" in changes:
            changes["teacher"] = TeacherConfig(model=str(folder / "untied"), **changes["teacher"])
        reference = reference and str(folder / reference)
        model_config = ModelConfig(path=path, dtype=dtype, reference=reference)
        return configuration(path, **{"trainer": _trainer(), "record": True} | changes | {"model": model_config})

    kl = Plug(path=GRPO, kwargs={"kl_coefficient": 0.1, "entropy_coefficient": 0.01})
    return {
        "plain": run(),
        "once": run(),
        "again": run(),
        "untied": run("untied", trainer=_trainer(gradient_accumulation="sharded", weight_decay=0.1)),
        "steps": run(trainer=_trainer(num_minibatches=2, num_epochs=2)),
        "checkpointing": run(trainer=_trainer(gradient_checkpointing=True)),
        "sgd": run(trainer=_trainer(optimizer=SGD)),
        "one-pass": run(trainer=_trainer(tokens_per_microbatch=100_000)),
        "bfloat16": run(dtype="bfloat16", trainer=_trainer(gradient_checkpointing=True)),
        "reference": run(objective=kl, reference="untied"),
        "reward-kl": run(advantage=AdvantageConfig(path=WHITENED, kl_coefficient=0.1), reference="untied"),
        "lora": run(lora=LORA, objective=kl, trainer=_trainer(learning_rate=1e-2, gradient_checkpointing=True)),
        "lora-bfloat16": run(
            dtype="bfloat16", lora=LORA, objective=kl, trainer=_trainer(learning_rate=1.0, optimizer=SGD)
        ),
        "sampled": run(correction=SAMPLED, trainer=_trainer(num_epochs=2)),
        "sampled-lora": run(correction=SAMPLED, lora=LORA),
        "teacher": run(teacher={}),
        "beside": run(teacher={"alone": False}, correction=CorrectionConfig(mode="sequence_mask")),
        "marked": run(objective=Plug(path="rank_work:NanAtMark"), trainer=_trainer(num_minibatches=2)),
    }


def _batches() -> list[list]:
    culprit = [[segment([1, 2, 3], [(1, 3)], [7, 7], [MARK, -1.0])], [segment([1, 2], [(1, 2)], [7])]]
    batches = [[random_group(index, seed) for index in range(1, 7)] for seed in range(10)]
    batches[1][2] = group_of(3, culprit, [1.0, 0.0])
    batches[2] = [random_group(1, 2, siblings=2, rewards=[1.0, 0.0])]
    batches[3] = [random_group(index, 3, rewards=[1.0] * 4 if index % 2 else None) for index in range(1, 7)]
    return batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, dict[str, Trained]]:
    """By the number of ranks."""
    tiny_model(folder / "tied")
    tiny_model(folder / "untied", tied=False, seed=1)
    for name in ("tied", "untied"):
        tiny_tokenizer(folder / name)
    configs, batches = _configs(folder), _batches()
    work = configs, {name: batches if name == "plain" else batches[:4] for name in configs}
    return {size: on_ranks(size, train, *work, folder=folder / str(size))[0] for size in (1, *SIZES)}


NAMES = sorted(_configs(Path()))
ROUNDED = {"bfloat16": 2e-2, "lora-bfloat16": 5e-2}
"""Of the weights' norm; an adapter is nothing but updates."""


def _comparable(metrics: dict[str, float]) -> dict[str, float]:
    """Replaces a policy ratio's chi-square, which may be near 0, by the mean of squares that it is made of."""
    return {name: value + name.startswith("policy_chi2") for name, value in metrics.items()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", sorted({*NAMES} - ROUNDED.keys()))
def test_weights_and_diagnostics_are_those_of_one_process(found, size: int, name: str) -> None:
    (expected_reports, _, expected), (reports, _, weights) = found[1][name], found[size][name]
    assert weights.keys() == expected.keys()
    for key, tensor in weights.items():
        assert tensor.shape == expected[key].shape and tensor.dtype == expected[key].dtype
        assert (tensor - expected[key]).norm() <= 1e-5 * expected[key].norm(), key
    for batch, (report, other) in enumerate(zip(reports, expected_reports, strict=True)):
        where = f"batch {batch}"
        assert report.metrics.keys() == other.metrics.keys(), where
        # Sums of float32 terms of up to 1 in another order, which some of the figures are the exponentials of; how much
        # that is depends on the processor; means of differences of logprobs are as exact as one rounding of a logprob
        # from 2 to 4, however small they are. Later on the weights differ too, which Adam's division carries into them.
        rel = 2e-5 if batch else 5e-6
        near = pytest.approx(_comparable(other.metrics), rel=rel, abs=1e-6 if batch else 2.4e-7)
        assert _comparable(report.metrics) == near, where
        for figure in ("num_tokens_trained", "num_tokens_rejected", "num_optimizer_steps", "skipped_reason", "failed"):
            assert getattr(report, figure) == getattr(other, figure), where
        assert report.spared == other.spared and report.steps_skipped == other.steps_skipped, where


def test_fewer_rows_than_ranks_are_told_of_by_rank_0_alone_and_once(found, folder: Path) -> None:
    logs = [log_of(folder / "4", rank) for rank in range(4)]
    assert logs[0].count("a batch of 2 rows for 4 ranks: some are idle") == len(NAMES)
    assert not any("compute nothing" in log for log in logs[1:])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ROUNDED)
def test_bfloat16_bodies_follow_one_process_within_their_rounding(found, size: int, name: str) -> None:
    (expected_reports, _, expected), (reports, _, weights) = found[1][name], found[size][name]
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    assert reports[0].metrics["grad_norm"] == pytest.approx(expected_reports[0].metrics["grad_norm"], rel=2e-2)
    for key, tensor in weights.items():
        assert (tensor.float() - expected[key].float()).norm() <= ROUNDED[name] * expected[key].float().norm(), key


@pytest.mark.parametrize("size", SIZES)
def test_the_same_number_of_ranks_gives_the_same_bits(found, size: int) -> None:
    (reports, findings, weights), (again, findings_again, weights_again) = found[size]["once"], found[size]["again"]
    assert [report.metrics for report in reports] == [report.metrics for report in again]
    assert findings == findings_again
    assert all(torch.equal(tensor, weights_again[key]) for key, tensor in weights.items())


@pytest.mark.parametrize("size", SIZES)
def test_a_group_that_is_not_finite_fails_alone_on_every_number_of_ranks(found, size: int) -> None:
    report = found[size]["marked"].reports[1]
    assert report.failed == {3: "loss is not finite"}
    assert report.spared == found[1]["marked"].reports[1].spared and report.spared


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", sorted({*NAMES} - ROUNDED.keys()))
def test_what_is_recorded_of_each_segment_is_what_one_process_records(found, size: int, name: str) -> None:
    for one, several in zip(found[1][name].findings, found[size][name].findings, strict=True):
        assert one.keys() == several.keys()
        assert any(findings.kept for findings in one.values())
        for place, findings in one.items():
            other = several[place]
            assert other.lags == findings.lags and other.kept == findings.kept, place
            for column in ("proximal_logprobs", "importance_weights"):
                mine, theirs = (np.frombuffer(getattr(each, column), np.float32) for each in (findings, other))
                assert theirs == pytest.approx(mine, abs=2e-5), (place, column)


@pytest.mark.parametrize(
    ("before", "after", "optimizer", "lora"),
    [
        (1, 2, None, None),
        (2, 1, None, None),
        (2, 4, None, None),
        (4, 2, None, None),
        (1, 2, SGD, None),
        (4, 1, None, LORA),
    ],
)
def test_a_checkpoint_is_continued_on_another_number_of_ranks(
    tmp_path: Path, before: int, after: int, optimizer: Plug | None, lora: LoraConfig | None
) -> None:
    tiny_model(tmp_path / "model", tied=False)
    trainer = _trainer(optimizer=optimizer, weight_decay=0.0 if optimizer else 0.1)
    model = ModelConfig(path=str(tmp_path / "model"))
    kl = Plug(path=GRPO, kwargs={"kl_coefficient": 0.1 if before == 2 else 0.0})
    config = configuration(model.path, trainer=trainer, model=model, objective=kl, lora=lora)
    batches = _batches()[4:]

    def train_on(size: int, part: list, read: str, write: str) -> dict[str, torch.Tensor]:
        places = tmp_path / read, tmp_path / write
        return on_ranks(size, train_from_checkpoints, config, part, *places, folder=tmp_path / f"{write}-work")[0]

    expected = train_on(1, batches, "none", "whole")
    train_on(before, batches[:3], "none", "first")
    weights = train_on(after, batches[3:], "first", "second")
    assert len(list((tmp_path / "first").glob("*.safetensors"))) == before
    for key, tensor in weights.items():
        assert (tensor - expected[key]).norm() <= 1e-5 * expected[key].norm(), key


@pytest.mark.slow
def test_compiled_blocks_are_shared_and_checkpointed_and_train_the_same_weights(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model", num_hidden_layers=1)
    eager, compiled = (
        configuration(tmp_path / "model", trainer=_trainer(gradient_checkpointing=True, compile=each))
        for each in (False, True)
    )
    batches = {"run": _batches()[4:]}
    expected = on_ranks(1, train, {"run": eager}, batches, folder=tmp_path / "eager")[0]["run"].weights
    weights = on_ranks(2, train, {"run": compiled}, batches, folder=tmp_path / "compiled")[0]["run"].weights
    assert weights.keys() == expected.keys()
    for key, tensor in weights.items():
        assert (tensor - expected[key]).norm() <= 1e-5 * expected[key].norm(), key
