"""The warm start's steps: their loss, what they change, and how they are continued."""

from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from fp64_oracle import sampled_logprobs
from penstock.consumers.learning.learner import warm_start
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.warm_start import warm_steps
from penstock.schemas.config import LoraConfig, ModelConfig, RunConfig, WarmStartConfig
from training_groups import assert_near, configuration, gradients_of, lag_from, random_groups, segment, weights_of

TURNS = [
    segment([3, 5, 7, 11, 2], [(2, 5)], [-1] * 3),
    segment([1, 9, 9, 4, 8, 6, 2], [(1, 3), (5, 7)], [-1] * 4),
    segment([13, 2], [(1, 2)], [-1]),
]
NUM_TOKENS = 8


def _config(folder: Path, **changes) -> RunConfig:
    warm_start = WarmStartConfig(demonstrations="demonstrations.jsonl", steps=4, learning_rate=1e-2, batch_size=2)
    return configuration(folder, **{"warm_start": warm_start} | changes)


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn is a demonstration, as if they had been read."""
    found = [(turn,) for turn in TURNS]
    monkeypatch.setattr(warm_start, "read_demonstrations", lambda config, longest: found)


@pytest.mark.parametrize("budget", [3, 8192])
def test_the_loss_is_the_mean_over_the_tokens_of_the_turns_however_they_are_split(folder, budget):
    config = _config(folder)
    trainer = msgspec.structs.replace(config.trainer, tokens_per_microbatch=budget, max_grad_norm=1e9)
    learner = Learner(msgspec.structs.replace(config, trainer=trainer))
    oracle = AutoModelForCausalLM.from_pretrained(folder).double()
    expected = -torch.cat([sampled_logprobs(oracle, turn) for turn in TURNS]).sum() / NUM_TOKENS
    expected.backward()
    packed, gradients = learner.pack_demonstrations(TURNS), gradients_of(learner)
    assert (packed.num_tokens, len(packed.microbatches)) == (NUM_TOKENS, 3 if budget == 3 else 1)
    loss, grad_norm = learner.warm_step(packed)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_near(gradients[0], oracle, 1e-5)
    assert grad_norm == pytest.approx(torch.stack([g.norm() for g in gradients[0].values()]).norm().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_demonstrations_are_learned_in_every_type_and_end_with_no_moments(folder, dtype):
    learner = Learner(_config(folder, model=ModelConfig(path=str(folder), dtype=dtype)))
    taken = list(warm_steps(learner))
    assert [step.step for step in taken] == [1, 2, 3, 4]
    assert taken[-1].loss < taken[0].loss - 1
    assert not learner.optimizer.state
    assert list(warm_steps(learner)) == [] and learner.num_steps == 0


def test_an_adapter_alone_is_trained(folder):
    learner = Learner(_config(folder, lora=LoraConfig(rank=2)))
    assert learner.model.is_base
    before = weights_of(learner)
    taken = list(warm_steps(learner))
    changed = {name for name, tensor in weights_of(learner).items() if not torch.equal(tensor, before[name])}
    assert changed and all("lora_" in name for name in changed)
    assert taken[-1].loss < taken[0].loss and not learner.model.is_base


@pytest.mark.parametrize("num_before", [2, 4])
def test_a_checkpoint_is_continued_bit_for_bit_and_no_step_is_taken_twice(folder, tmp_path, num_before):
    whole, first, second = (Learner(_config(folder)) for _ in range(3))
    of_whole = list(warm_steps(whole))
    taken = list(islice(warm_steps(first), num_before))
    first.begin_checkpoint(tmp_path).result()
    second.load_checkpoint(tmp_path, first.state())
    taken += warm_steps(second)
    assert [step[:5] for step in taken] == [step[:5] for step in of_whole]
    for learner in (whole, second):
        learner.step(learner.pack(random_groups(), lag_from(7)))
    expected = weights_of(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(second).items())


def test_a_loss_that_is_not_finite_leaves_the_model_unchanged_and_is_told(folder, caplog):
    learner = Learner(_config(folder))
    before = weights_of(learner)
    learner.scorer.cross_entropy = lambda microbatch, num_tokens: (  # type: ignore[method-assign]
        learner.scorer.logprobs(microbatch)[0].sum() * float("nan")
    )
    assert len(list(warm_steps(learner))) == 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(learner).items())
    assert "warm start: step 1 is skipped: loss nan" in caplog.text
