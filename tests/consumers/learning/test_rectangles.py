"""Rows padded to a rectangle train as packed rows do, whatever the architecture's layers are."""

import pytest
import torch

from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.batch.sharing import Sharing
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model import packed_model
from penstock.consumers.learning.model.attention import IMPLEMENTATION
from penstock.schemas.config import LoraConfig, TrainerConfig
from training_groups import configuration, gradients_of, lag_from, random_group, tiny_model

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
    for passes in (((IMPLEMENTATION, False),), (("none", False), ("sdpa", True))):
        monkeypatch.setattr(packed_model, "_PASSES", passes)
        learner = Learner(config)
        assert learner.model.in_rectangles == (len(passes) > 1)
        gradients = gradients_of(learner)
        learner.step(learner.pack(GROUPS, lag_from(7)))
        (found[learner.model.in_rectangles],) = gradients
    assert found[False].keys() == found[True].keys() and found[False]
    for name, gradient in found[False].items():
        torch.testing.assert_close(found[True][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert "slower than packing" in caplog.text and "% of the first batch's rectangles" in caplog.text


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_pass_is_one_rectangle_within_the_budget(num_ranks) -> None:
    config = configuration("unused", trainer=TrainerConfig(device="cpu", tokens_per_microbatch=60))
    sharing = Sharing(num_ranks, in_rectangles=True)
    batch, packed = (pack(GROUPS, lag_from(7), config, sharing=each) for each in (sharing, Sharing(num_ranks)))
    (minibatch,) = batch.minibatches
    sizes = [[bucket.shape for bucket in each.layout.buckets] for each in minibatch.microbatches]
    assert all(len(of_pass) == 1 for of_pass in sizes) and len(sizes) % num_ranks == 0
    assert all(rows * longest <= 60 or rows == 1 for ((rows, longest),) in sizes)
    real = sum(each.layout.num_padding for each in minibatch.microbatches)
    assert batch.padding == real / sum(rows * longest for ((rows, longest),) in sizes)
    places = [sorted(sum(each.minibatches[0].places, ())) for each in (batch, packed)]
    assert places[0] == places[1]
