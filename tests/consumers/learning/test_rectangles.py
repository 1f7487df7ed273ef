"""Rows padded to a rectangle, or whole, train as packed rows do, whatever the architecture's layers are."""

import pytest
import torch
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next

from families import small_model
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.batch.sharing import Sharing
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model import packed_model
from penstock.consumers.learning.model.attention import IMPLEMENTATION
from penstock.schemas.config import LoraConfig, TrainerConfig
from training_groups import VOCABULARY, configuration, gradients_of, lag_from, random_group, tiny_model

GROUPS = [random_group(index, 1, siblings=3) for index in range(1, 5)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_rectangles_have_the_gradients_of_packed_rows(tmp_path, monkeypatch, lora, checkpointing, caplog) -> None:
    tiny_model(tmp_path)
    trainer = TrainerConfig(
        device="cpu", tokens_per_microbatch=60, max_grad_norm=1e9, gradient_checkpointing=checkpointing
    )
    config = configuration(tmp_path, trainer=trainer, lora=lora)
    found = {}
    for passes in (((IMPLEMENTATION, "packed"),), (("none", "packed"), ("sdpa", "rectangles"))):
        monkeypatch.setattr(packed_model, "_PASSES", passes)
        learner = Learner(config)
        assert learner.model.arrangement == passes[-1][1]
        gradients = gradients_of(learner)
        learner.step(learner.pack(GROUPS, lag_from(7)))
        (found[learner.model.arrangement],) = gradients
    assert found["packed"].keys() == found["rectangles"].keys() and found["packed"]
    for name, gradient in found["packed"].items():
        torch.testing.assert_close(found["rectangles"][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert "slower than packing" in caplog.text and "% of the first batch's rectangles" in caplog.text


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_pass_is_one_rectangle_within_the_budget(num_ranks) -> None:
    config = configuration("unused", trainer=TrainerConfig(device="cpu", tokens_per_microbatch=60))
    sharing = Sharing(num_ranks, arrangement="rectangles")
    batch, packed = (pack(GROUPS, lag_from(7), config, sharing=each) for each in (sharing, Sharing(num_ranks)))
    (minibatch,) = batch.minibatches
    sizes = [[bucket.shape for bucket in each.layout.buckets] for each in minibatch.microbatches]
    assert all(len(of_pass) == 1 for of_pass in sizes) and len(sizes) % num_ranks == 0
    assert all(rows * longest <= 60 or rows == 1 for ((rows, longest),) in sizes)
    real = sum(each.layout.num_padding for each in minibatch.microbatches)
    assert batch.padding == real / sum(rows * longest for ((rows, longest),) in sizes)
    places = [sorted(sum(each.minibatches[0].places, ())) for each in (batch, packed)]
    assert places[0] == places[1]


def by_row(compute, dim: int):
    """Returns a layer's function that begins anew with each row, as kernels do that are told where rows begin. dim: of
    the tokens."""

    def of_rows(*arguments, seq_idx=None, cu_seqlens=None, **named):
        if seq_idx is None and cu_seqlens is None:
            return compute(*arguments, **named)
        sizes = (seq_idx[0].bincount() if cu_seqlens is None else cu_seqlens.diff()).tolist()

        def parts(value):
            is_split = torch.is_tensor(value) and value.ndim >= 3 and value.shape[dim] == sum(sizes)
            return value.split(sizes, dim) if is_split else [value] * len(sizes)

        found = [
            compute(*own, **dict(zip(named, rest, strict=True)))
            for own, rest in zip(
                zip(*map(parts, arguments), strict=True),
                zip(*map(parts, named.values()), strict=True) if named else [()] * len(sizes),
                strict=True,
            )
        ]
        if isinstance(found[0], tuple):
            return torch.cat([output for output, _ in found], dim), None
        return torch.cat(found, dim)

    return of_rows


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_whole_rows_follow_one_another_where_layers_heed_their_boundaries(tmp_path, monkeypatch, kind, caplog) -> None:
    modeling = {"lfm2": modeling_lfm2, "qwen3_next": modeling_qwen3_next}[kind]
    small_model(kind, vocab_size=VOCABULARY).save_pretrained(tmp_path)
    config = configuration(tmp_path, trainer=TrainerConfig(device="cpu", tokens_per_microbatch=60, max_grad_norm=1e9))
    found = {}
    for heeds in (False, True):
        if heeds:
            monkeypatch.setattr(modeling, "causal_conv1d_fn", by_row(modeling.causal_conv1d_fn, 2))
            if kind == "qwen3_next":
                name = "torch_chunk_gated_delta_rule"
                monkeypatch.setattr(modeling, name, by_row(getattr(modeling, name), 1))
        learner = Learner(config)
        gradients = gradients_of(learner)
        learner.step(learner.pack(GROUPS, lag_from(7)))
        (found[learner.model.arrangement],) = gradients
    assert found.keys() == {"rectangles", "whole"} and "the rows of a pass are whole" in caplog.text
    for name, gradient in found["rectangles"].items():
        torch.testing.assert_close(found["whole"][name], gradient, rtol=1e-3, atol=1e-6, msg=name)
