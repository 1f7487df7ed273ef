"""Version labels are exact: models whose greedy token says which weights they are, updated while they sample from one
copy that is patched while they load."""

import asyncio
from typing import Any

import pytest
import torch

from labelled_weights import assert_exact_labels, label_of, weights_of_token
from shared_engine import EngineHost, boot_shared, qwen3, weights_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]


def labelled(host: EngineHost, engine: Any, base: dict[str, torch.Tensor]) -> Any:
    """Returns an update: it announces the next version, whose greedy token names its number, and has it or a newer one
    loaded."""
    follower = host.follower(engine)

    async def update() -> None:
        manifest = host.announce(lambda version: weights_of_token(base, label_of(version)))
        await host.load(follower, manifest)
        assert engine.policy_version >= manifest.version

    return update


@pytest.mark.asyncio(loop_scope="session")
async def test_no_token_is_mislabelled_on_two_engines_of_one_host_updated_while_they_sample(
    tied_engine, untied_engine, tmp_path
):
    host, base = EngineHost(tmp_path), weights_of(untied_engine.base)
    engines = [shared.engine for shared in (tied_engine, untied_engine)]
    await asyncio.gather(
        *(
            assert_exact_labels(engine, labelled(host, engine, base), 16, longest=480, min_tokens=2500)
            for engine in engines
        )
    )
    host.close()


@pytest.mark.exhaustive
async def test_no_token_is_mislabelled_by_an_engine_that_computes_a_step_ahead(vllm_engine, monkeypatch, tmp_path):
    """Under asynchronous scheduling an update waits for the step that is computed ahead."""
    from async_worker import AsyncWorker, async_scheduling_kept
    from penstock.producers.engines import vllm

    monkeypatch.setattr(vllm, "EngineReport", AsyncWorker)
    settings = {"args": {"async_scheduling": True, "enforce_eager": True}}
    with async_scheduling_kept():
        shared = await boot_shared(vllm_engine, tmp_path, tied=True, **settings)
    assert shared.engine.fingerprint.async_scheduling
    host = EngineHost(tmp_path)
    try:
        await assert_exact_labels(shared.engine, labelled(host, shared.engine, weights_of(shared.base)), 8)
    finally:
        host.close()
        await shared.engine.close()


def test_the_telling_weights_do_tell():
    for tied in (True, False):
        model = qwen3(tied=tied, seed=0)
        model.load_state_dict(weights_of_token(weights_of(model), 33), strict=False)
        with torch.no_grad():
            assert set(model(torch.randint(0, 64, (4, 50))).logits.argmax(-1).flatten().tolist()) == {33}
