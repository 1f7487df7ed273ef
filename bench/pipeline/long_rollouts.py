"""An engine in the middle of rollouts that are too long to sample here."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import RequestState

from bench.pipeline.bare import Meter
from penstock.producers.engines.completions import pack_unfinished
from penstock.producers.engines.vllm import VllmEngine
from penstock.producers.interfaces import Completion
from penstock.schemas.rollout import SamplingSettings

TOKENS_PER_S = 20
"""Of each rollout."""


class LongRollouts(Meter):
    """Rollouts that are about `num_tokens` long for some `seconds`. None of them ends; their tokens so far are packed
    from vLLM's own records."""

    def __init__(self, engine: VllmEngine, num_tokens: int, seconds: float) -> None:
        super().__init__(engine)
        self._num_tokens = max(1, num_tokens - round(seconds * TOKENS_PER_S / 2))
        self._states: dict[str, list[Any]] = {}

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingSettings,
        num_siblings: int,
        request_id: str,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> list[Completion]:
        states = [_state(prompt_token_ids, request_id) for _ in range(num_siblings)]
        _grow(states, self._num_tokens)
        self._states[request_id] = states
        try:
            while True:
                await asyncio.sleep(1 / TOKENS_PER_S)
                _grow(states, 1)
        finally:
            del self._states[request_id]

    def sampled(self, request_id: str) -> list[Completion]:
        return [pack_unfinished(state, request_id, masked=False) for state in self._states.get(request_id, ())]


def _state(prompt_token_ids: list[int], request_id: str) -> Any:
    params = SamplingParams(
        logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=1 << 30
    )
    request = EngineCoreRequest(
        request_id, prompt_token_ids, None, params, None, time.time(), None, None, None, external_req_id=request_id
    )
    state = RequestState.from_new_request(None, request, None, None, 0, None, log_stats=False, stream_interval=1)
    state.track_weight_version("0")
    return state


def _grow(states: Sequence[Any], num_tokens: int) -> None:
    """Appends random tokens, each an object of its own in both records, as those that vLLM receives."""
    for state in states:
        token_ids, logprobs = np.random.randint(1 << 10, 1 << 17, num_tokens), -np.random.rand(num_tokens)
        state.detokenizer.update(token_ids.tolist(), False)
        flat, start = state.logprobs_processor.logprobs, state.detokenizer.num_output_tokens() - num_tokens
        flat.token_ids += token_ids.tolist()
        flat.logprobs += logprobs.tolist()
        flat.ranks += [1] * num_tokens
        flat.decoded_tokens += [None] * num_tokens
        flat.start_indices += range(start, start + num_tokens)
        flat.end_indices += range(start + 1, start + num_tokens + 1)
