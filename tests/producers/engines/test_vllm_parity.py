"""vLLM's logprobs against a plain transformers forward pass of the same weights, before and after updates in flight."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from penstock.producers.interfaces import Completion
from penstock.producers.rollout.sampling import Siblings
from penstock.schemas.rollout import SamplingSettings, unpack_floats, unpack_ids
from shared_engine import BUDGET, EOS, PROMPT, gap, qwen3, reference_logprobs, weights_of
from waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]


async def test_logprobs_equal_transformers_from_the_first_token_on(shared_engine):
    assert gap(shared_engine.base, shared_engine.boot_completions) <= BUDGET
    assert {span.version for c in shared_engine.boot_completions for span in c.version_spans} == {0}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_transformers_after_an_update_in_flight(shared_engine, temperature):
    engine = shared_engine.engine
    tied = shared_engine.base.config.tie_word_embeddings
    older, newer = qwen3(tied=tied, seed=1), qwen3(tied=tied, seed=2)
    sampling = SamplingSettings(temperature=temperature, max_tokens=48)
    first = await shared_engine.load(weights_of(older))
    running = asyncio.create_task(
        engine.generate(PROMPT, SamplingSettings(temperature=temperature, max_tokens=400), 16, "running")
    )
    before = await engine.generate(PROMPT, sampling, 16, "before")
    second = await shared_engine.load(weights_of(newer))
    after = await engine.generate(PROMPT, sampling, 16, "after")
    await running

    assert {span.version for c in before for span in c.version_spans} == {first}
    assert {span.version for c in after for span in c.version_spans} == {second}
    assert gap(older, before, temperature) <= BUDGET
    assert gap(newer, after, temperature) <= BUDGET
    assert gap(older, after, temperature) > 0.1


def has_tokens(sampled: list[Completion]) -> bool:
    return any(len(completion.token_ids) for completion in sampled)


async def test_a_request_in_flight_keeps_its_kv_and_goes_on_with_the_new_weights(shared_engine):
    tied = shared_engine.base.config.tie_word_embeddings
    older, newer = qwen3(tied=tied, seed=3), qwen3(tied=tied, seed=4)
    engine, spanning = shared_engine.engine, []
    for attempt in range(20):  # a random model may end every completion before the update comes
        first = await shared_engine.load(weights_of(older))
        sampling = SamplingSettings(max_tokens=400)
        name = f"spanning-{attempt}"
        running = asyncio.create_task(engine.generate(PROMPT, sampling, 32, name))
        await until(lambda of=name, task=running: task.done() or has_tokens(engine.sampled(of)))
        second = await shared_engine.load(weights_of(newer))
        spanning = [c for c in await running if [s.version for s in c.version_spans] == [first, second]]
        if spanning:
            break

    assert spanning, "no completion was sampled by both versions"
    for completion in spanning:
        expected = continued_logprobs(
            older, newer, list(unpack_ids(completion.token_ids)), completion.version_spans[0].end
        )
        found = np.array(unpack_floats(completion.behavior_logprobs))
        assert np.abs(found - expected).mean() <= BUDGET


@torch.no_grad()
def continued_logprobs(older, newer, sampled: list[int], switch: int) -> np.ndarray:
    """Logprobs where `newer` takes over at token `switch`, on the KV that `older` left behind."""
    ids = torch.tensor([PROMPT + sampled])
    cache = DynamicCache(config=older.config)
    split = len(PROMPT) + switch - 1
    logits = torch.cat(
        [
            model(ids[:, part], past_key_values=cache).logits[0]
            for model, part in ((older, slice(split)), (newer, slice(split, None)))
        ]
    )
    logprobs = torch.log_softmax(logits[len(PROMPT) - 1 : -1], dim=-1)
    return logprobs[torch.arange(len(sampled)), torch.tensor(sampled)].numpy()


async def test_a_continued_rollout_has_the_logprobs_of_the_policy_that_samples_on(shared_engine):
    engine, sampling = shared_engine.engine, SamplingSettings(max_tokens=200)
    older, newer = (qwen3(tied=shared_engine.base.config.tie_word_embeddings, seed=seed) for seed in (1, 2))
    first = await shared_engine.load(weights_of(older))
    for attempt in range(20):  # a busy machine may be told of a sample only when every sibling has ended
        interrupted = Siblings(engine, PROMPT, sampling, 16, f"interrupted-{attempt}")
        running = asyncio.create_task(interrupted.sample())
        await until(lambda one=interrupted, task=running: goes_on_from(one.so_far(), 12) or task.done())
        before = interrupted.so_far() or []
        running.cancel()
        await asyncio.wait({running})
        assert engine.sampled(f"interrupted-{attempt}") == []
        if goes_on_from(before, 12):
            break
    assert goes_on_from(before, 12) and gap(older, before) <= BUDGET

    second = await shared_engine.load(weights_of(newer))
    after = await Siblings(engine, PROMPT, sampling, 16, "continued", adopted=before).sample()
    for part, whole in zip(before, after, strict=True):
        assert whole.token_ids.startswith(part.token_ids)
        assert whole.behavior_logprobs.startswith(part.behavior_logprobs)
        spans, num_before, num_tokens = whole.version_spans, len(part.token_ids) // 4, len(whole.token_ids) // 4
        if part.finish_reason == "abort":
            assert [(span.version, span.end) for span in spans] == [(first, num_before), (second, num_tokens)]
            sampled, logprobs = list(unpack_ids(whole.token_ids)), np.array(unpack_floats(whole.behavior_logprobs))
            differences = np.abs(logprobs - reference_logprobs(newer, PROMPT, sampled, 1.0))
            assert differences[num_before:].mean() <= BUDGET and differences[:num_before].mean() > 0.01
        else:
            assert whole == part and spans[-1].version == first
        assert num_tokens == 200 if whole.finish_reason == "length" else sampled_last(whole) == EOS


def goes_on_from(siblings: list[Completion] | None, num_tokens: int) -> bool:
    """Some go on, and each of these from so many tokens or more: siblings do not start at the same step."""
    going_on = [len(one.token_ids) // 4 for one in siblings or () if one.finish_reason == "abort"]
    return bool(going_on) and min(going_on) >= num_tokens


def sampled_last(completion) -> int:
    return unpack_ids(completion.token_ids)[-1]
