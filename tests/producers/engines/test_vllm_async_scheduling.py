"""Version labels under asynchronous scheduling: an update waits for the step that is computed ahead."""

import asyncio

import pytest

from labelled_weights import (
    count_mislabelled,
    label_of,
    sample_throughout,
    update_until_seen,
    versions_of,
    weights_of_token,
)
from shared_engine import EngineHost, boot_shared

pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_UPDATES = 8


async def test_no_token_is_mislabelled_by_an_engine_that_computes_a_step_ahead(
    vllm_engine, parameters, monkeypatch, tmp_path
):
    from async_worker import AsyncWorker, async_scheduling_kept
    from penstock.producers.engines import vllm

    monkeypatch.setattr(vllm, "EngineReport", AsyncWorker)
    settings = {"args": {"async_scheduling": True, "enforce_eager": True}}
    with async_scheduling_kept():
        shared = await boot_shared(vllm_engine, tmp_path, tied=True, **settings)
    assert shared.engine.fingerprint.async_scheduling
    host, base, stop = EngineHost(tmp_path), parameters(shared.base), asyncio.Event()
    follower = host.follower(shared.engine)

    async def update() -> None:
        await host.load(follower, host.announce(lambda version: weights_of_token(base, label_of(version))))

    completions: list = []
    try:
        await update()
        await asyncio.gather(
            sample_throughout(shared.engine, stop, 0, completions, longest=160),
            update_until_seen(update, completions, NUM_UPDATES, stop),
        )
    finally:
        host.close()
        await shared.engine.close()
    assert max(len(c.version_spans) for c in completions) >= 3, "no completion saw several updates"
    assert len(versions_of(completions)) > NUM_UPDATES / 2
    num_tokens, num_wrong = count_mislabelled(completions)
    print(f"{num_tokens} tokens")
    assert num_tokens > 1000
    assert num_wrong == 0
