"""Weights whose greedy token identifies their version, and requests that run while they are updated."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
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


def count_mislabelled(completions: Iterable[Completion]) -> tuple[int, int]:
    """Returns the number of tokens, and of those labelled with another version than they identify. Checks that the
    version spans tile the tokens."""
    num_tokens = num_wrong = 0
    for completion in completions:
        ids = unpack_ids(completion.token_ids)
        ends = [0, *(span.end for span in completion.version_spans)]
        assert [span.start for span in completion.version_spans] == ends[:-1] and ends[-1] == len(ids)
        num_tokens += len(ids)
        for span in completion.version_spans:
            num_wrong += sum(token != label_of(span.version) for token in ids[span.start : span.end])
    return num_tokens, num_wrong


def versions_of(completions: Iterable[Completion]) -> set[int]:
    """Returns the versions that sampled the completions."""
    return set(itertools.chain(*({span.version for span in c.version_spans} for c in completions)))
