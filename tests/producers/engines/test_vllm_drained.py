"""engine.update = "drained": requests in flight end under the weights they began with, and nothing of them is left."""

import asyncio

import pytest

from penstock.schemas.rollout import SamplingSettings, unpack_ids
from shared_engine import BUDGET, gap, publish, qwen3, run_config, weights_of

pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.timeout(300)]

PROMPT = list(range(3, 43))
"""Longer than a block of the KV cache, so that a prefix can be found again."""
LENGTH = 400


@pytest.fixture
async def drained_engine(vllm_engine, tmp_path):
    model = qwen3(tied=False, seed=0)
    # Every completion is as long as it may be.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    # Without a salt a prefix that older weights computed would be found, had the update not cleared the cache.
    settings = {"update": "drained", "prefix_caching": True, "args": {"block_size": 32, "enforce_eager": True}}
    engine = await vllm_engine.start(run_config(tmp_path / "model", engine=settings))
    engine._salted = False
    yield engine
    await engine.close()


async def test_a_drained_update_waits_for_what_is_in_flight_and_clears_the_cache(drained_engine, tmp_path):
    engine = drained_engine
    old, new = qwen3(tied=False, seed=0), qwen3(tied=False, seed=1)
    sampling = SamplingSettings(max_tokens=LENGTH)
    requests = engine._llm.output_processor.request_states
    for attempt in range(20):  # on a busy machine it may have ended before it is seen under way
        before = asyncio.create_task(engine.generate(PROMPT, sampling, 4, f"before-{attempt}"))
        # vLLM has no event.
        while not before.done() and [state.is_prefilling for state in requests.values()] != [False] * 4:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if not before.done():
            break
    assert not before.done(), "nothing is in flight when the update comes"
    loading = asyncio.create_task(engine.load_weights(*publish(weights_of(new), 1, tmp_path)))
    await asyncio.sleep(0)
    during = asyncio.create_task(engine.generate(PROMPT, sampling, 4, "during"))
    await loading
    assert engine.policy_version == 1
    assert engine.fingerprint.other["engine.update"] == '"drained"'

    # An update in flight would have landed among their tokens, which take many times as long as it does.
    completions = await before
    assert {len(unpack_ids(c.token_ids)) for c in completions} == {LENGTH}
    assert {span.version for c in completions for span in c.version_spans} == {0}
    assert gap(old, completions, prompt=PROMPT) <= BUDGET
    after = await engine.generate(PROMPT, sampling, 4, "after")
    assert {span.version for c in after for span in c.version_spans} == {1}
    assert gap(new, after, prompt=PROMPT) <= BUDGET
    # It may have come before the pause or after it; either way one version sampled all of it.
    for completion in await during:
        [span] = completion.version_spans
        assert gap(old if span.version == 0 else new, [completion], prompt=PROMPT) <= 3 * BUDGET
