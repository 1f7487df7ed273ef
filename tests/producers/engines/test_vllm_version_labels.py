"""Version labels are exact: models whose greedy token says which weights they are, updated while they sample from one
copy that is patched while they load."""

import asyncio
import itertools
from functools import partial

import pytest
import torch

from labelled_weights import (
    count_mislabelled,
    label_of,
    sample_throughout,
    update_until_seen,
    versions_of,
    weights_of_token,
)
from shared_engine import EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_UPDATES = 16


async def load_labelled(host, engine, follower, base) -> None:
    """Announces the next version, whose greedy token names its number, and has it or a newer one loaded."""
    manifest = host.announce(lambda version: weights_of_token(base, label_of(version)))
    await host.load(follower, manifest)
    assert engine.policy_version >= manifest.version


@pytest.mark.asyncio(loop_scope="session")
async def test_no_token_is_mislabelled_on_two_engines_of_one_host_updated_while_they_sample(
    tied_engine, untied_engine, parameters, tmp_path
):
    engines, host, base = (tied_engine, untied_engine), EngineHost(tmp_path), parameters(untied_engine.base)
    followers = [host.follower(shared.engine) for shared in engines]
    for shared, follower in zip(engines, followers, strict=True):
        await load_labelled(host, shared.engine, follower, base)
    sampled: tuple[list, list] = [], []
    work = []
    for seed, (shared, follower, done) in enumerate(zip(engines, followers, sampled, strict=True)):
        stop, update = asyncio.Event(), partial(load_labelled, host, shared.engine, follower, base)
        work.append(sample_throughout(shared.engine, stop, seed, done))
        work.append(update_until_seen(update, done, NUM_UPDATES, stop))
    await asyncio.gather(*work)
    host.close()
    for completions in sampled:
        assert max(len(c.version_spans) for c in completions) >= 3, "no completion saw several updates"
        assert len(versions_of(completions)) > NUM_UPDATES

    num_tokens, num_wrong = count_mislabelled(itertools.chain(*sampled))
    print(f"{num_tokens} tokens")
    assert num_tokens > 5000
    assert num_wrong == 0


def test_the_telling_weights_do_tell(make_qwen3, parameters):
    for tied in (True, False):
        model = make_qwen3(tied=tied, seed=0)
        model.load_state_dict(weights_of_token(parameters(model), 33), strict=False)
        with torch.no_grad():
            assert set(model(torch.randint(0, 64, (4, 50))).logits.argmax(-1).flatten().tolist()) == {33}
