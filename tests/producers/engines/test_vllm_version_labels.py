"""Version labels are exact: models whose greedy token says which weights they are, updated while they sample from one
copy that is patched while they load."""

import asyncio
import itertools
import random

import pytest
import torch

from penstock.schemas.rollout import SamplingSettings, unpack_ids
from shared_engine import EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_UPDATES = 16
FIRST_TOKEN = 8


def telling(base, token: int):
    """Weights whose greedy token is `token` after any context: blocks add nothing, one row of the head wins, tied to
    the embedding or not."""
    weights = {name: tensor.clone() for name, tensor in base.items()}
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name == "model.embed_tokens.weight" or name == "lm_head.weight":
            tensor.fill_(0.1)
        elif name == "model.norm.weight":
            tensor.fill_(1.0)
    for name in {"lm_head.weight", "model.embed_tokens.weight"} & weights.keys():
        weights[name][token] = 1.0
    return weights


def label_of(version: int) -> int:
    return FIRST_TOKEN + version % 50


async def sample_throughout(shared, stop: asyncio.Event, seed: int):
    """Completions of requests that come and go, of all lengths, until `stop`."""
    rng = random.Random(seed)
    done = []

    async def requests(name: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            prompt = [rng.randrange(2, 64) for _ in range(rng.randrange(1, 20))]
            # vLLM samples one greedy completion per request; siblings come from a distribution just as sharp.
            num_siblings = rng.choice([1, 4])
            temperature = 0.0 if num_siblings == 1 else 0.01
            sampling = SamplingSettings(temperature=temperature, max_tokens=rng.choice([1, 5, 40, 480]))
            done.extend(await shared.engine.generate(prompt, sampling, num_siblings, f"{name}-{number}"))

    await asyncio.gather(*(requests(n) for n in range(8)))
    return done


async def update_all_along(host, follower, base, stop: asyncio.Event):
    for _ in range(NUM_UPDATES):
        await asyncio.sleep(0.05)
        version = await load_telling(host, follower, base)
        assert follower._engine.policy_version >= version
    await asyncio.sleep(0.05)
    stop.set()


async def load_telling(host, follower, base) -> int:
    """Announces the next version, whose greedy token names its number, and has it or a newer one loaded."""
    manifest = host.announce(lambda version: telling(base, label_of(version)))
    await follower._load(manifest)
    return manifest.version


@pytest.mark.asyncio(loop_scope="session")
async def test_no_token_is_mislabelled_on_two_engines_of_one_host_updated_while_they_sample(
    tied_engine, untied_engine, parameters, tmp_path
):
    engines, host, base = (tied_engine, untied_engine), EngineHost(tmp_path), parameters(untied_engine.base)
    followers = [host.follower(shared.engine) for shared in engines]
    for follower in followers:
        await load_telling(host, follower, base)
    stops = [asyncio.Event() for _ in engines]
    sampling = [
        sample_throughout(shared, stop, seed) for seed, (shared, stop) in enumerate(zip(engines, stops, strict=True))
    ]
    updating = [update_all_along(host, each, base, stop) for each, stop in zip(followers, stops, strict=True)]
    *sampled, _, _ = await asyncio.gather(*sampling, *updating)
    host.close()
    for completions in sampled:
        assert max(len(c.version_spans) for c in completions) >= 3, "no completion saw several updates"
        assert len({span.version for c in completions for span in c.version_spans}) > NUM_UPDATES

    num_tokens = num_wrong = 0
    for completion in itertools.chain(*sampled):
        ids = unpack_ids(completion.token_ids)
        assert [s.start for s in completion.version_spans] == [0, *(s.end for s in completion.version_spans[:-1])]
        assert completion.version_spans[-1].end == len(ids)
        for span in completion.version_spans:
            num_tokens += span.end - span.start
            num_wrong += sum(token != label_of(span.version) for token in ids[span.start : span.end])
    print(f"{num_tokens} tokens")
    assert num_tokens > 5000
    assert num_wrong == 0


def test_the_telling_weights_do_tell(make_qwen3, parameters):
    for tied in (True, False):
        model = make_qwen3(tied=tied, seed=0)
        model.load_state_dict(telling(parameters(model), 33), strict=False)
        with torch.no_grad():
            assert set(model(torch.randint(0, 64, (4, 50))).logits.argmax(-1).flatten().tolist()) == {33}
