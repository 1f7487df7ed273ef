"""vLLM's AsyncLLM driven directly, the reference for the engine that wraps it."""

import asyncio
import copy
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.producers.interfaces import Completion
from penstock.schemas.rollout import SamplingSettings

if TYPE_CHECKING:
    from penstock.producers.engines.vllm import VllmEngine

Request = tuple[float, float, int]
"""Began, ended (monotonic seconds), tokens sampled."""


class BareEngine:
    """The AsyncLLM inside a running engine, with the engine's own sampling parameters and without its bookkeeping."""

    def __init__(self, engine: "VllmEngine", sampling: SamplingSettings, num_siblings: int) -> None:
        from penstock.producers.engines.vllm import sampling_params

        self._llm: Any = engine._llm
        self._params: Any = sampling_params(sampling, num_siblings, masked=False)
        self._numbers = itertools.count()

    async def generate(self, prompts: Sequence[list[int]], num_in_flight: int, stop: asyncio.Event) -> list[Request]:
        """Keeps `num_in_flight` requests of `num_siblings` each running until `stop` is set, then lets them finish."""
        requests: list[Request] = []

        async def keep_one_going() -> None:
            while not stop.is_set():
                number = next(self._numbers)
                began = time.monotonic()
                # The form that skips vLLM's own input processing, as the producer's engine does.
                prompt = {"type": "token", "prompt_token_ids": prompts[number % len(prompts)]}
                outputs = [final async for final in self._llm.generate(prompt, self._params, f"{id(self)}-{number}")]
                num_tokens = sum(len(sibling.token_ids) for sibling in outputs[-1].outputs)
                requests.append((began, time.monotonic(), num_tokens))

        await asyncio.gather(*(keep_one_going() for _ in range(num_in_flight)))
        return requests

    async def stream(self, prompt: list[int], num_in_flight: int, stop: asyncio.Event) -> None:
        """Samples as `generate` does, streaming, until `stop` is set."""
        params = copy.copy(self._params)
        params.output_kind = type(params.output_kind).DELTA

        async def keep_one_going() -> None:
            while not stop.is_set():
                number = next(self._numbers)
                request = {"type": "token", "prompt_token_ids": prompt}
                async for _ in self._llm.generate(request, params, f"{id(self)}-{number}"):
                    if stop.is_set():
                        break

        await asyncio.gather(*(keep_one_going() for _ in range(num_in_flight)))

    async def load(self, path: str) -> float:
        """Loads a file in vLLM's own update session, awaiting each call; returns the seconds."""
        began = time.perf_counter()
        await self._llm.start_weight_update()
        await self._llm.collective_rpc("update_weights", kwargs={"update_info": {"paths": [path]}})
        await self._llm.finish_weight_update()
        return time.perf_counter() - began


class Meter:
    """An engine that records its requests and pauses; see `penstock.producers.interfaces.Engine`.

    requests: every group sampled. pauses: (ended, seconds paused) of every load; `ended` is monotonic.
    """

    def __init__(self, engine: "VllmEngine") -> None:
        self._engine = engine
        self.policy_version = engine.policy_version
        self.fingerprint = engine.fingerprint
        self.max_model_len = engine.max_model_len
        self.takes_images = engine.takes_images
        self.requests: list[Request] = []
        self.pauses: list[tuple[float, float]] = []

    async def expand(self, *arguments: Any) -> Any:
        return await self._engine.expand(*arguments)

    async def generate(self, *arguments: Any, **options: Any) -> list[Completion]:
        began = time.monotonic()
        completions = await self._engine.generate(*arguments, **options)
        num_tokens = sum(len(completion.token_ids) for completion in completions) // 4
        self.requests.append((began, time.monotonic(), num_tokens))
        return completions

    def sampled(self, request_id: str) -> list[Completion]:
        return self._engine.sampled(request_id)

    async def load_weights(self, *arguments: Any, **options: Any) -> float:
        pause_s = await self._engine.load_weights(*arguments, **options)
        self.policy_version = self._engine.policy_version
        self.pauses.append((time.monotonic(), pause_s))
        return pause_s

    async def check(self) -> None:
        await self._engine.check()

    async def close(self) -> None:
        await self._engine.close()


def tokens_between(requests: Sequence[Request], start: float, end: float) -> float:
    """Counts the tokens sampled from `start` to `end`, each request's spread evenly over its life.

    Requests start and end in waves: counted at their end, whole waves would fall into the window or out of it.
    """
    total = 0.0
    for began, ended, num_tokens in requests:
        overlap = min(ended, end) - max(began, start)
        if overlap > 0:
            total += num_tokens * overlap / (ended - began)
    return total
