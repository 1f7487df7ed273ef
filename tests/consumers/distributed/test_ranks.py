"""The learner on 2 and 4 ranks against the learner of one process."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.schemas.config import (
    AdvantageConfig,
    CorrectionConfig,
    LoraConfig,
    ModelConfig,
    Plug,
    RunConfig,
    SamplingConfig,
    TeacherConfig,
    TrainerConfig,
    WarmStartConfig,
)
from penstock.schemas.rollout import Rollout, RolloutGroup, Segment
from penstock.schemas.routes import Routes
from rank_processes import log_of, on_ranks
from rank_work import MARK, Trained, train, train_from_checkpoints, write_to_a_full_disk
from training_groups import (
    VOCABULARY,
    configuration,
    group_of,
    random_group,
    random_groups,
    segment,
    tiny_model,
    tiny_tokenizer,
    with_top,
)

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(900)]

SIZES = (2, 4)
ON_FOUR = ("plain", "again", "marked", "experts", "split")
"""What is trained on four ranks too."""
MORE_ON_FOUR = ("untied", "steps", "reward-kl", "lora", "lora-bfloat16", "sampled", "beside", "warm")
"""The same in `make test-all`."""
DEMONSTRATIONS = "demonstrations.jsonl"
LORA = LoraConfig(rank=3, alpha=6.0)
SGD = Plug(path="torch.optim:SGD", kwargs={"momentum": 0.9})
WHITENED = "penstock.consumers.learning.advantages:reinforce_plus_plus"
SAMPLED = CorrectionConfig(proximal="sampled_version")
GRPO = "penstock.consumers.learning.objectives.grpo:Grpo"
DPPO = "penstock.consumers.learning.objectives.dppo:DppoTv"
TVPO = "penstock.consumers.learning.objectives.tvpo:Tvpo"
OFF = CorrectionConfig(mode="none")
CENTERED = "penstock.consumers.learning.objectives.score_centering:ScoreCentering"
LEAST_VARIANCE = "penstock.consumers.learning.advantages:minimum_variance"
NUM_TOP = 4


def _trainer(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"device": "cpu", "learning_rate": 1e-3, "tokens_per_microbatch": 60} | changes)


def _configs(folder: Path) -> dict[str, RunConfig]:
    def run(
        model: str = "tied",
        dtype: str = "float32",
        reference: str | None = None,
        replay_routes: bool = False,
        **changes: Any,
    ) -> RunConfig:
        path = str(folder / model)
        if "teacher" in changes:
            changes["teacher"] = TeacherConfig(model=str(folder / "untied"), **changes["teacher"])
        reference = reference and str(folder / reference)
        model_config = ModelConfig(path=path, dtype=dtype, reference=reference, replay_routes=replay_routes)
        return configuration(path, **{"trainer": _trainer(), "record": True} | changes | {"model": model_config})

    warm = WarmStartConfig(demonstrations=str(folder / DEMONSTRATIONS), steps=3, batch_size=5)
    kl = Plug(path=GRPO, kwargs={"kl_coefficient": 0.1, "entropy_coefficient": 0.01})
    return {
        "plain": run(),
        "again": run(),
        "untied": run("untied", trainer=_trainer(gradient_accumulation="sharded", weight_decay=0.1)),
        "steps": run(trainer=_trainer(num_minibatches=2, num_epochs=2)),
        "checkpointing": run(trainer=_trainer(gradient_checkpointing=True)),
        "sgd": run(trainer=_trainer(optimizer=SGD)),
        "one-pass": run(trainer=_trainer(tokens_per_microbatch=100_000)),
        "bfloat16": run(dtype="bfloat16", trainer=_trainer(gradient_checkpointing=True)),
        "float16": run(dtype="float16", trainer=_trainer(gradient_checkpointing=True)),
        "reference": run(objective=kl, reference="untied"),
        "trusted": run(objective=Plug(path=DPPO, kwargs={"behavior_kl_coefficient": 0.1}), correction=OFF),
        "trusted-rows": run(
            objective=Plug(path=TVPO, kwargs={"full_rate_ess": 1.0}), correction=OFF, trainer=_trainer(num_epochs=2)
        ),
        "centered": run(objective=Plug(path=CENTERED), correction=OFF, sampling=SamplingConfig(top_logprobs=NUM_TOP)),
        "least-variance": run(advantage=AdvantageConfig(path=LEAST_VARIANCE), trainer=_trainer(num_minibatches=2)),
        "reward-kl": run(advantage=AdvantageConfig(path=WHITENED, kl_coefficient=0.1), reference="untied"),
        "lora": run(lora=LORA, objective=kl, trainer=_trainer(learning_rate=1e-2, gradient_checkpointing=True)),
        "lora-bfloat16": run(
            dtype="bfloat16", lora=LORA, objective=kl, trainer=_trainer(learning_rate=1.0, optimizer=SGD)
        ),
        "sampled": run(correction=SAMPLED, trainer=_trainer(num_epochs=2)),
        "sampled-lora": run(correction=SAMPLED, lora=LORA),
        "teacher": run(teacher={}),
        "warm": run(warm_start=warm),
        "warm-split": run(warm_start=warm, trainer=_trainer(context_parallel=2)),
        "beside": run(teacher={"alone": False}, correction=CorrectionConfig(mode="sequence_mask")),
        "experts": run(
            "mixture",
            objective=kl,
            trainer=_trainer(expert_parallel=True, num_minibatches=2, weight_decay=0.1, gradient_checkpointing=True),
        ),
        "experts-bfloat16": run("mixture", dtype="bfloat16", trainer=_trainer(expert_parallel=True)),
        "routes": run("mixture", replay_routes=True, trainer=_trainer(gradient_checkpointing=True)),
        "routes-experts": run("mixture", replay_routes=True, trainer=_trainer(expert_parallel=True)),
        "split": run(
            objective=kl,
            trainer=_trainer(context_parallel=2, num_minibatches=2, num_epochs=2, gradient_checkpointing=True),
        ),
        # A row that fills a pass leaves a rank idle before fuller passes.
        "split-uneven": run(trainer=_trainer(context_parallel=2, tokens_per_microbatch=16)),
        "split-sampled": run(correction=SAMPLED, trainer=_trainer(context_parallel=2)),
        "split-lora": run("window", lora=LORA, trainer=_trainer(context_parallel=2)),
        "split-rows": run(
            "nemotron", trainer=_trainer(context_parallel=2, num_minibatches=2, gradient_checkpointing=True)
        ),
        "split-experts": run("mixture", replay_routes=True, trainer=_trainer(context_parallel=2, expert_parallel=True)),
        "marked": run(objective=Plug(path="rank_work:NanAtMark"), trainer=_trainer(num_minibatches=2)),
    }


def _batches() -> list[list]:
    culprit = [[segment([1, 2, 3], [(1, 3)], [7, 7], [MARK, -1.0])], [segment([1, 2], [(1, 2)], [7])]]
    batches = [random_groups(6, seed) for seed in range(8)]
    batches[1][2] = group_of(3, culprit, [1.0, 0.0])
    batches[2] = [random_group(1, 2, siblings=2, rewards=[1.0, 0.0])]
    batches[3] = [random_group(index, 3, rewards=[1.0] * 4 if index % 2 else None) for index in range(1, 7)]
    return batches


def _answers(index: int, *lengths: int) -> RolloutGroup:
    draw = np.random.default_rng(index)
    ids = [[1, 2, *draw.integers(3, VOCABULARY, length).tolist()] for length in lengths]
    rollouts = [[segment(row, [(2, len(row))], [7] * (len(row) - 2))] for row in ids]
    return group_of(index, rollouts, [float(n) for n in range(len(lengths))])


EXPERTS = 8
TINY_NEMOTRON = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


def _mixture(folder: Path) -> None:
    """Saves a random Qwen3-MoE of two layers, of whose experts a token meets two."""
    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=2,
        initializer_range=0.3, max_position_embeddings=64,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def _routed(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """Returns the groups with random routes."""
    generator = np.random.default_rng(0)

    def with_routes(segment: Segment) -> Segment:
        rows = [generator.permutation(EXPERTS)[:2] for _ in range(2 * (segment.num_tokens - 1))]
        ids = np.array(rows, dtype=np.uint8).tobytes()
        return replace(segment, routes=Routes(2, 2, "B", ids))

    def rerouted(rollout: Rollout) -> Rollout:
        return replace(rollout, segments=tuple(map(with_routes, rollout.segments)))

    return [replace(group, rollouts=tuple(map(rerouted, group.rollouts))) for group in groups]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path, request: pytest.FixtureRequest) -> dict[int, dict[str, Trained]]:
    """By the number of ranks."""
    tiny_model(folder / "tied")
    tiny_model(folder / "untied", tied=False, seed=1)
    _mixture(folder / "mixture")
    torch.manual_seed(3)
    NemotronForCausalLM(NemotronConfig(**TINY_NEMOTRON)).save_pretrained(folder / "nemotron")
    tiny_model(folder / "window", use_sliding_window=True, sliding_window=5, max_window_layers=1)
    lines = [{"prompt": f"{n}+{n}", "completion": "-" * n} for n in (1, 2, 3)]
    (folder / DEMONSTRATIONS).write_text("\n".join(map(json.dumps, lines)))
    for name in ("tied", "untied"):
        tiny_tokenizer(folder / name)
    configs, batches = _configs(folder), _batches()
    groups = {name: batches if name == "plain" else batches[:4] for name in configs}
    groups |= {name: [_routed(each) for each in groups[name]] for name in configs if configs[name].model.replay_routes}
    groups["centered"] = [[with_top(group, NUM_TOP) for group in batch] for batch in groups["centered"]]
    groups["split-uneven"] = [[_answers(1, 30, 30), _answers(2, 8, 8), _answers(3, 8, 8)]]
    whole = {name: replace(each, trainer=replace(each.trainer, context_parallel=1)) for name, each in configs.items()}
    on_four = (*ON_FOUR, *MORE_ON_FOUR) if request.config.getoption("exhaustive") else ON_FOUR
    of_size = {1: whole, 2: configs, 4: {name: configs[name] for name in on_four}}
    return {size: on_ranks(size, train, of_size[size], groups, folder=folder / str(size))[0] for size in of_size}


COUNTS = ("num_tokens_trained", "num_tokens_rejected", "num_optimizer_steps", "skipped_reason", "failed", "spared",
          "steps_skipped")  # fmt: skip
NAMES = sorted(_configs(Path()))
ROUNDED = {"bfloat16": 2e-2, "float16": 3e-3, "lora-bfloat16": 5e-2, "experts-bfloat16": 2e-2}
"""Of the weights' norm; an adapter is nothing but updates."""


def _comparable(metrics: dict[str, float]) -> dict[str, float]:
    """Replaces a policy ratio's chi-square, which may be near 0, by the mean of squares that it is made of."""
    return {name: value + name.startswith("policy_chi2") for name, value in metrics.items()}


@pytest.mark.parametrize("name", sorted({*NAMES} - ROUNDED.keys()))
def test_weights_diagnostics_and_what_is_recorded_are_those_of_one_process(found, name: str) -> None:
    expected_reports, expected_findings, expected = found[1][name]
    for size in [size for size in SIZES if name in found[size]]:
        reports, findings, weights = found[size][name]
        assert weights.keys() == expected.keys()
        for key, tensor in weights.items():
            assert tensor.shape == expected[key].shape and tensor.dtype == expected[key].dtype
            assert (tensor - expected[key]).norm() <= 1e-5 * expected[key].norm(), (size, key)
        for batch, (report, other) in enumerate(zip(reports, expected_reports, strict=True)):
            where = f"{size} ranks, batch {batch}"
            assert report.metrics.keys() == other.metrics.keys(), where
            # Sums of float32 terms of up to 1 in another order, which some of the figures are the exponentials of; how
            # much that is depends on the processor; means of differences of logprobs are as exact as one rounding of a
            # logprob from 2 to 4, however small they are. Later on the weights differ too, which Adam's division
            # carries into them.
            rel = 2e-5 if batch else 5e-6
            near = pytest.approx(_comparable(other.metrics), rel=rel, abs=1e-6 if batch else 2.4e-7)
            assert _comparable(report.metrics) == near, where
            for figure in COUNTS:
                assert getattr(report, figure) == getattr(other, figure), (where, figure)
        for one, several in zip(expected_findings, findings, strict=True):
            assert one.keys() == several.keys() and any(each.kept for each in one.values())
            for place, each in one.items():
                other = several[place]
                assert (other.lags, other.kept) == (each.lags, each.kept), place
                for column in ("proximal_logprobs", "importance_weights"):
                    mine, theirs = (np.frombuffer(getattr(part, column), np.float32) for part in (each, other))
                    assert theirs == pytest.approx(mine, abs=2e-5), (place, column)


def test_fewer_rows_than_ranks_are_told_of_by_rank_0_alone_and_once(found, folder: Path) -> None:
    logs = [log_of(folder / "4", rank) for rank in range(4)]
    assert logs[0].count("a batch of 2 rows for 4 ranks: some are idle") == len(found[4])
    assert not any("compute nothing" in log for log in logs[1:])


@pytest.mark.parametrize("name", ROUNDED)
def test_16_bit_bodies_follow_one_process_within_their_rounding(found, name: str) -> None:
    expected_reports, _, expected = found[1][name]
    for size in [size for size in SIZES if name in found[size]]:
        reports, _, weights = found[size][name]
        assert all(
            tensor.dtype == (torch.float16 if name == "float16" else torch.bfloat16) for tensor in weights.values()
        )
        assert reports[0].metrics["grad_norm"] == pytest.approx(expected_reports[0].metrics["grad_norm"], rel=2e-2)
        for key, tensor in weights.items():
            assert (tensor.float() - expected[key].float()).norm() <= ROUNDED[name] * expected[key].float().norm(), key


@pytest.mark.parametrize("size", SIZES)
def test_the_same_number_of_ranks_gives_the_same_bits_and_a_group_that_is_not_finite_fails_alone(found, size) -> None:
    again = found[size]["again"]
    for batch, (report, other) in enumerate(zip(again.reports, found[size]["plain"].reports, strict=False)):
        assert report.metrics == other.metrics, batch
        assert again.findings[batch] == found[size]["plain"].findings[batch], batch
    report = found[size]["marked"].reports[1]
    assert report.failed == {3: "loss is not finite"}
    assert report.spared == found[1]["marked"].reports[1].spared and report.spared


@pytest.mark.parametrize(
    ("before", "after", "optimizer", "lora", "by_expert"),
    [(1, 2, SGD, None, False), (2, 4, None, None, False), (4, 1, None, LORA, False), (4, 2, None, None, True)],
)
def test_a_checkpoint_is_continued_on_another_number_of_ranks(
    tmp_path: Path, before: int, after: int, optimizer: Plug | None, lora: LoraConfig | None, by_expert: bool
) -> None:
    # Of rows that no number of ranks divides.
    odd = {
        "hidden_size": 18,
        "intermediate_size": 25,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 6,
    }
    if by_expert:
        _mixture(tmp_path / "model")
    else:
        tiny_model(tmp_path / "model", tied=False, **odd)
    trainer = _trainer(optimizer=optimizer, weight_decay=0.0 if optimizer else 0.1, expert_parallel=by_expert)
    model = ModelConfig(path=str(tmp_path / "model"))
    kl = Plug(path=GRPO, kwargs={"kl_coefficient": 0.1 if before == 2 else 0.0})
    config = configuration(model.path, trainer=trainer, model=model, objective=kl, lora=lora)
    batches = _batches()[4:]

    def train_on(size: int, part: list, read: str, write: str) -> tuple[dict[str, torch.Tensor], ...]:
        places = tmp_path / read, tmp_path / write
        return on_ranks(size, train_from_checkpoints, config, part, *places, folder=tmp_path / f"{write}-work")[0]

    _, expected = train_on(1, batches, "none", "whole")
    _, saved = train_on(before, batches[:3], "none", "first")
    loaded, weights = train_on(after, batches[3:], "first", "second")
    assert len(list((tmp_path / "first").glob("*.safetensors"))) == before
    for key, tensor in weights.items():
        assert torch.equal(loaded[key], saved[key]), key
        assert (tensor - expected[key]).norm() <= 1e-5 * expected[key].norm(), key


@pytest.mark.parametrize(
    ("kind", "size", "problem"),
    [
        ("tied", 3, r"trainer\.context_parallel = 3: expected a divisor of the 2 ranks"),
        ("bloom", 2, r"trainer\.context_parallel = 2 with model\.path = .*Bloom\w+ cannot be run in rectangles"),
    ],
)
def test_rows_that_ranks_cannot_share_are_refused(tmp_path: Path, kind: str, size: int, problem: str) -> None:
    if kind == "tied":
        tiny_model(tmp_path / kind)
    else:
        config = BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2, initializer_range=0.5)
        BloomForCausalLM(config).save_pretrained(tmp_path / kind)
    config = configuration(tmp_path / kind, trainer=_trainer(context_parallel=size))
    with pytest.raises(Exception, match=problem):
        on_ranks(2, train, {"run": config}, {"run": []}, folder=tmp_path / "work")


def test_a_disk_that_is_full_for_one_rank_is_the_leads_error(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    config = configuration(tmp_path / "model")
    error = on_ranks(2, write_to_a_full_disk, config, tmp_path / "tensors", folder=tmp_path / "work")[0]
    assert re.search(r"rank 1: .*Errno 27|rank 1: .*File too large", error), error


@pytest.mark.exhaustive
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
