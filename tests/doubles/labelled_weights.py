"""Weights whose greedy token identifies their version, and requests that run while they are updated."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch

from penstock.producers.interfaces import Completion
from penstock.schemas.rollout import SamplingSettings, unpack_ids
from shared_engine import StateDict

FIRST_TOKEN = 8


def weights_of_token(base: Mapping[str, torch.Tensor], token: int) -> StateDict:
    """Returns weights whose greedy token is `token` after any context: the blocks add nothing and one row of the head
    wins, tied to the embedding or not."""
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
    """Returns the greedy token of the weights of `version`."""
    return FIRST_TOKEN + version % 50


async def update_until_seen(
    update: Callable[[], Awaitable[object]], completions: list[Completion], num_updates: int, stop: asyncio.Event
) -> None:
    """Updates `num_updates` times, and further until a completion was sampled by three versions: on a busy machine many
    completions end between two updates."""
    for number in range(20 * num_updates):
        if number >= num_updates and any(len(each.version_spans) >= 3 for each in completions):
            break
        await asyncio.sleep(0.05 if number < num_updates else 0.0)
        await update()
    await asyncio.sleep(0.05)
    stop.set()


async def sample_throughout(
    engine: Any, stop: asyncio.Event, seed: int, done: list[Completion], longest: int = 480
) -> None:
    """Samples requests of all lengths until `stop`; appends their completions to `done`."""
    rng = random.Random(seed)

    async def requests(name: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            prompt = [rng.randrange(2, 64) for _ in range(rng.randrange(1, 20))]
            # vLLM samples one greedy completion per request; siblings come from a distribution just as sharp.
            num_siblings = rng.choice([1, 4])
            temperature = 0.0 if num_siblings == 1 else 0.01
            sampling = SamplingSettings(temperature=temperature, max_tokens=rng.choice([1, 5, 40, longest]))
            done.extend(await engine.generate(prompt, sampling, num_siblings, f"{name}-{number}"))

    await asyncio.gather(*(requests(n) for n in range(8)))


async def assert_exact_labels(
    engine: Any,
    update: Callable[[], Awaitable[object]],
    num_updates: int,
    *,
    longest: int = 160,
    min_tokens: int = 1000,
) -> None:
    """Samples while `update` loads one policy after another; no token may be labelled with another version than the one
    it identifies, and the version spans tile the tokens."""
    stop, completions = asyncio.Event(), list[Completion]()
    await update()
    await asyncio.gather(
        sample_throughout(engine, stop, 0, completions, longest),
        update_until_seen(update, completions, num_updates, stop),
    )
    assert max(len(each.version_spans) for each in completions) >= 3, "no completion saw several updates"
    assert len({span.version for each in completions for span in each.version_spans}) > num_updates / 2
    num_tokens = 0
    for completion in completions:
        ids = unpack_ids(completion.token_ids)
        ends = [0, *(span.end for span in completion.version_spans)]
        assert [span.start for span in completion.version_spans] == ends[:-1] and ends[-1] == len(ids)
        num_tokens += len(ids)
        for span in completion.version_spans:
            assert set(ids[span.start : span.end]) == {label_of(span.version)}, span
    assert num_tokens > min_tokens
