"""Sampling the completions of one prompt; what the engine aborts is resumed."""

import asyncio
import hashlib
import itertools
from collections.abc import Sequence

import msgspec

from penstock.producers.interfaces import Completion, Engine, EngineError
from penstock.schemas.config import EnvironmentConfig, RunConfig
from penstock.schemas.process.cancellation import cancel_and_wait
from penstock.schemas.rollout import SamplingSettings, VersionSpan, unpack_ids
from penstock.schemas.segments import joined_masks

RESUMES_WITHOUT_A_TOKEN = 3


def training_sampling(config: RunConfig, environment: EnvironmentConfig) -> SamplingSettings:
    """The settings that an environment's training prompts are sampled with."""
    shared = {name: getattr(config.sampling, name) for name in SamplingSettings.__struct_fields__}
    return SamplingSettings(**shared | {"max_tokens": environment.max_tokens or config.sampling.max_tokens})


def evaluation_sampling(config: RunConfig, environment: EnvironmentConfig) -> SamplingSettings:
    """The settings of its held-out prompts."""
    how = config.held_out[environment.name]
    own = {name: getattr(how, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    return SamplingSettings(stop_token_ids=config.sampling.stop_token_ids, **own)


def request_seed(config: RunConfig, *place: int) -> int | None:
    """The seed of a request in synchronous mode, by the run's own and the request's place in the run: index, attempt
    and so on. None in asynchronous mode, where what is sampled depends on when new weights arrive."""
    return _seed(config.seed, *place) if config.mode == "synchronous" else None


def _seed(*parts: int) -> int:
    # 7 bytes: siblings count on from it, within 64 bits.
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest())


async def sample(
    engine: Engine,
    prompt_ids: list[int],
    sampling: SamplingSettings,
    num_siblings: int,
    request_id: str,
    stop: Sequence[str] = (),
    seed: int | None = None,
) -> list[Completion]:
    """Samples completions of one prompt; the engine may end one at a text of `stop`. One that the engine aborts is
    resumed from its tokens so far, with the rest of its budget and a seed of its own; version spans and logprobs of
    the parts are joined.

    Raises:
        EngineError: the engine serves no longer, aborts again and again without a token, or answers with another
            number of completions.
        ValueError: it refuses the prompt.
    """
    completions = await _generate(engine, prompt_ids, sampling, num_siblings, request_id, stop, seed)
    if all(one.finish_reason != "abort" for one in completions):
        return completions
    tasks = [
        asyncio.create_task(
            _finish(engine, prompt_ids, sampling, f"{request_id}-{n}", stop, None if seed is None else seed + n, one)
        )
        for n, one in enumerate(completions)
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)


async def _finish(
    engine: Engine,
    prompt_ids: list[int],
    sampling: SamplingSettings,
    request_id: str,
    stop: Sequence[str],
    seed: int | None,
    part: Completion,
) -> Completion:
    parts: list[Completion] = []
    num_sampled = num_empty = 0
    for attempt in itertools.count(1):
        num_part = len(part.token_ids) // 4
        if num_part:
            parts.append(part)
        num_sampled += num_part
        if part.finish_reason != "abort":
            return join(parts, part)
        if num_sampled >= sampling.max_tokens:
            return msgspec.structs.replace(join(parts, part), finish_reason="length")
        num_empty = 0 if num_part else num_empty + 1
        if num_empty > RESUMES_WITHOUT_A_TOKEN:
            break
        context = prompt_ids + [token for part in parts for token in unpack_ids(part.token_ids)]
        left = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - num_sampled)
        # An id may be used once only.
        part_seed = None if seed is None else _seed(seed, attempt)
        (part,) = await _generate(engine, context, left, 1, f"{request_id}-{attempt}", stop, part_seed)
    raise EngineError(f"request {request_id}: aborted {num_empty} times in a row without a token")


async def _generate(
    engine: Engine,
    prompt_ids: list[int],
    sampling: SamplingSettings,
    num_siblings: int,
    request_id: str,
    stop: Sequence[str],
    seed: int | None,
) -> list[Completion]:
    completions = await engine.generate(prompt_ids, sampling, num_siblings, request_id, stop, seed)
    if len(completions) != num_siblings:
        raise EngineError(f"request {request_id}: {len(completions)} completions, expected {num_siblings}")
    return completions


def join(parts: Sequence[Completion], last: Completion) -> Completion:
    """Joins consecutive parts to one completion that ended as `last` did."""
    if len(parts) == 1:
        return msgspec.structs.replace(parts[0], finish_reason=last.finish_reason)
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.version_spans:
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(span.version, spans[-1].start, span.end + offset)
            else:
                spans.append(VersionSpan(span.version, span.start + offset, span.end + offset))
        offset += len(part.token_ids) // 4
    return Completion(
        token_ids=b"".join(part.token_ids for part in parts),
        behavior_logprobs=b"".join(part.behavior_logprobs for part in parts),
        version_spans=tuple(spans),
        finish_reason=last.finish_reason,
        sampling_mask=joined_masks(part.sampling_mask for part in parts),
    )
