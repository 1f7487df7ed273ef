"""Loads that cannot succeed: the version before them goes on serving, and its tokens say so."""

import asyncio
import os

import psutil
import pytest
import torch

from penstock.producers.interfaces import EngineError, WeightLoadError
from penstock.schemas.rollout import SamplingSettings
from scripted_engine import ScriptedEngine
from shared_engine import PROMPT, EngineHost, assert_serves, qwen3, weights_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]


def of_wrong_shape(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return weights | {"model.layers.1.mlp.up_proj.weight": torch.zeros(7, 64)}


async def test_a_file_that_does_not_fit_or_is_broken_is_refused_before_the_pause(tied_engine):
    model = qwen3(tied=True, seed=11)
    serving = await tied_engine.load(weights_of(model))
    for wrong in ("wrong shape", "gone", "cut short"):
        weights = weights_of(qwen3(tied=True, seed=13))
        version = next(tied_engine.versions)
        manifest, path = tied_engine.publish(of_wrong_shape(weights) if wrong == "wrong shape" else weights, version)
        if wrong == "gone":
            os.unlink(path)
        elif wrong == "cut short":
            os.truncate(path, 100)
        with pytest.raises(WeightLoadError, match=f"policy {version}"):
            await tied_engine.engine.load_weights(manifest, path)
        await assert_serves(tied_engine.engine, model, serving)


async def test_a_load_that_fails_half_way_brings_the_old_version_back(shared_engine, monkeypatch, tmp_path):
    tied = shared_engine.base.config.tie_word_embeddings
    old, new = qwen3(tied=tied, seed=14), qwen3(tied=tied, seed=15)
    host = EngineHost(tmp_path)
    follower, beside = host.follower(shared_engine.engine), host.follower(ScriptedEngine())
    serving = host.announce(lambda _: weights_of(old))
    await host.load(follower, serving)
    running = asyncio.create_task(shared_engine.engine.generate(PROMPT, SamplingSettings(max_tokens=300), 8, "running"))
    with monkeypatch.context() as unchecked:
        unchecked.setattr("penstock.producers.engines.vllm.check", lambda *_: None)
        for _ in range(2):
            wrong = host.announce(lambda _: of_wrong_shape(weights_of(new)))
            with pytest.raises(WeightLoadError, match=rf"policy {wrong.version}"):
                await host.load(follower, wrong)
            # Another producer has moved the copy on meanwhile.
            await host.load(beside, wrong)
    assert {span.version for c in await running for span in c.version_spans} == {serving.version}
    await assert_serves(shared_engine.engine, old, serving.version)

    newer = host.announce(lambda _: weights_of(new))
    await host.load(follower, newer)
    await assert_serves(shared_engine.engine, new, newer.version)
    host.close()


async def test_an_engine_whose_old_weights_cannot_be_had_again_serves_no_longer(tied_engine, monkeypatch, tmp_path):
    old = qwen3(tied=True, seed=21)
    host = EngineHost(tmp_path)
    follower = host.follower(tied_engine.engine)
    serving = host.announce(lambda _: weights_of(old))
    await host.load(follower, serving)
    wrong = host.announce(lambda _: of_wrong_shape(weights_of(old)))
    host.trim(wrong.version)
    with monkeypatch.context() as unchecked:
        unchecked.setattr("penstock.producers.engines.vllm.check", lambda *_: None)
        with pytest.raises(EngineError, match=r"could not be loaded .*, nor policy 1 again .*kept no longer"):
            await host.load(follower, wrong)
    # Sampling stays paused until a load succeeds.
    await host.load(follower, host.announce(lambda _: weights_of(old)))
    await assert_serves(tied_engine.engine, old, wrong.version + 1)
    host.close()


async def test_a_cancelled_load_still_ends_with_weights_and_label_in_step(tied_engine):
    await tied_engine.load(weights_of(qwen3(tied=True, seed=16)))
    model = qwen3(tied=True, seed=17)
    loading = asyncio.create_task(tied_engine.load(weights_of(model)))
    await asyncio.sleep(0.002)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    following = qwen3(tied=True, seed=18)
    version = await tied_engine.load(weights_of(following))
    await assert_serves(tied_engine.engine, following, version)


async def test_a_tied_head_may_be_published_or_left_out(tied_engine):
    model = qwen3(tied=True, seed=19)
    weights = weights_of(model)
    version = await tied_engine.load(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    await assert_serves(tied_engine.engine, model, version)


async def test_updates_do_not_leak_memory(tied_engine):
    weights = weights_of(qwen3(tied=True, seed=20))

    def resident_bytes() -> int:
        return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))

    async def update(times: int) -> None:
        for _ in range(times):
            version = await tied_engine.load(weights)
            (tied_engine.folder / f"v{version}.safetensors").unlink()
            await tied_engine.engine.generate(PROMPT, SamplingSettings(max_tokens=2), 2, f"leak-{version}")

    await update(20)
    before, descriptors = resident_bytes(), psutil.Process().num_fds()
    await update(100)
    assert resident_bytes() - before < 10e6
    assert psutil.Process().num_fds() <= descriptors
