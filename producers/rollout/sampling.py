"""Sampling the completions of one prompt; what the engine aborts is resumed."""

import hashlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import InitVar, dataclass

import msgspec

from penstock.producers.interfaces import NO_IMAGES, Completion, Engine, EngineError, PlacedImages
from penstock.schemas.config import EnvironmentConfig, RunConfig
from penstock.schemas.process.cancellation import gather_or_cancel
from penstock.schemas.rollout import ReproducibleSampling, SamplingSettings, VersionSpan, unpack_ids
from penstock.schemas.routes import Routes, joined_routes
from penstock.schemas.segments import joined_masks, joined_top

log = logging.getLogger(__name__)

RESUMES_WITHOUT_A_TOKEN = 3


def training_sampling(config: RunConfig, environment: EnvironmentConfig) -> SamplingSettings:
    """Returns the settings with which an environment's training prompts are sampled."""
    shared = {name: getattr(config.sampling, name) for name in ReproducibleSampling.__struct_fields__}
    shared["top_logprobs"] = config.sampling.top_logprobs or msgspec.UNSET
    return SamplingSettings(**shared | {"max_tokens": environment.max_tokens or config.sampling.max_tokens})


def evaluation_sampling(config: RunConfig, environment: EnvironmentConfig) -> SamplingSettings:
    """Returns the settings with which an environment's held-out prompts are sampled."""
    how = config.held_out[environment.name]
    own = {name: getattr(how, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    return SamplingSettings(stop_token_ids=config.sampling.stop_token_ids, **own)


def request_seed(config: RunConfig, *place: int) -> int | None:
    """Derives a request's seed in synchronous mode from the run's own and the request's place (index, attempt and so
    on). None in asynchronous mode, where what is sampled depends on when new weights arrive."""
    return _seed(config.seed, *place) if config.mode == "synchronous" else None


def _seed(*parts: int) -> int:
    # 7 bytes: siblings count on from it, within 64 bits.
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest())


@dataclass(eq=False)
class Siblings:
    """The completions of one prompt, which can be read while they are sampled; the engine may end one at a text of
    `stop`.

    One that the engine aborts is resumed from its tokens so far, with the rest of its budget and a seed of its own,
    derived from `seed`, its number and its length; version spans and logprobs of the parts are joined.

    adopted: what an earlier holder of the prompt has sampled of each. Finished ones stay as they are, the others are
        resumed in the same way.
    """

    engine: Engine
    prompt_ids: list[int]
    sampling: SamplingSettings
    num_siblings: int
    request_id: str
    stop: Sequence[str] = ()
    seed: int | None = None
    images: PlacedImages = NO_IMAGES
    adopted: InitVar[Sequence[Completion]] = ()

    def __post_init__(self, adopted: Sequence[Completion]) -> None:
        self._parts = [[one] for one in adopted]
        """Of each sibling, what ended requests have sampled; empty before the first request has ended."""
        self._running: dict[str, int] = {}
        """The running requests, and the first sibling that each samples."""
        self._is_unclear = False
        """The engine has once failed to say what is sampled, which is logged once."""

    async def sample(self) -> list[Completion]:
        """Samples what is missing; returns the whole completions.

        Raises:
            EngineError: the engine serves no longer, aborts repeatedly without a token, or answers with another number
                of completions.
            ValueError: it refuses the prompt.
        """
        if not self._parts:
            request = self.prompt_ids, self.sampling, self.num_siblings, self.request_id, self.seed
            self._parts = [[one] for one in await self._generate(*request)]
        if any(parts[-1].finish_reason == "abort" for parts in self._parts):
            await gather_or_cancel(self._finish(n, parts) for n, parts in enumerate(self._parts))
        return list(map(join, self._parts))

    def so_far(self) -> list[Completion] | None:
        """Returns what is sampled of every sibling, an unfinished one with the finish reason "abort"; None while the
        engine does not know it."""
        parts: dict[int, list[Completion]] = dict(enumerate(self._parts))
        for request_id, first in self._running.items():
            try:
                found = self.engine.sampled(request_id)
            except EngineError as error:  # only its final answer counts
                if not self._is_unclear:
                    log.warning("progress of a rollout is not kept: %s", error)
                self._is_unclear = True
                return None
            if not found:
                return None
            for n, one in enumerate(found, first):
                parts[n] = [*parts.get(n, ()), one]
        return [join(parts[n]) for n in range(len(parts))] or None

    async def _finish(self, n: int, parts: list[Completion]) -> None:
        num_empty = 0
        for attempt in itertools.count(1):
            if parts[-1].finish_reason != "abort":
                return
            num_sampled = sum(part.num_tokens for part in parts)
            if num_sampled >= self.sampling.max_tokens:
                parts[-1] = msgspec.structs.replace(parts[-1], finish_reason="length")
                return
            num_empty = 0 if parts[-1].token_ids else num_empty + 1
            if num_empty > RESUMES_WITHOUT_A_TOKEN:
                break
            context = self.prompt_ids + [token for part in parts for token in unpack_ids(part.token_ids)]
            left = msgspec.structs.replace(self.sampling, max_tokens=self.sampling.max_tokens - num_sampled)
            # A seeded generator cannot be wound forward to a position, and one noise must not be drawn at two.
            seed = None if self.seed is None else _seed(self.seed + n, num_sampled)
            # An id may be used only once.
            parts += await self._generate(context, left, 1, f"{self.request_id}-{n}-{attempt}", seed, n)
        raise EngineError(f"request {self.request_id}-{n}: aborted {num_empty} times in a row without a token")

    async def _generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingSettings,
        num_siblings: int,
        request_id: str,
        seed: int | None,
        first: int = 0,
    ) -> list[Completion]:
        self._running[request_id] = first
        try:
            completions = await self.engine.generate(
                prompt_ids, sampling, num_siblings, request_id, self.stop, seed, self.images
            )
        finally:
            del self._running[request_id]
        if len(completions) != num_siblings:
            raise EngineError(f"request {request_id}: {len(completions)} completions, expected {num_siblings}")
        wanted = sampling.top_logprobs or 0
        for one in completions:
            found = one.top_logprobs.count if one.top_logprobs else 0
            if one.num_tokens and found != wanted:
                raise EngineError(
                    f"request {request_id}: the engine returns {found} likeliest ids with each token; expected "
                    f"sampling.top_logprobs = {wanted}"
                )
        return completions


def join(parts: Sequence[Completion]) -> Completion:
    """Joins consecutive parts into one completion."""
    if len(parts) == 1:
        return parts[0]
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.version_spans:
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(span.version, spans[-1].start, span.end + offset)
            else:
                spans.append(VersionSpan(span.version, span.start + offset, span.end + offset))
        offset += part.num_tokens
    return Completion(
        token_ids=b"".join(part.token_ids for part in parts),
        behavior_logprobs=b"".join(part.behavior_logprobs for part in parts),
        version_spans=tuple(spans),
        finish_reason=parts[-1].finish_reason,
        sampling_mask=joined_masks(part.sampling_mask for part in parts),
        routes=_joined_routes(parts),
        top_logprobs=joined_top(part.top_logprobs for part in parts),
    )


def _joined_routes(parts: Sequence[Completion]) -> Routes | None:
    """Keeps the context's routes of the first part that has tokens: later ones computed it again."""
    first, *later = [part for part in parts if part.routes is not None] or [parts[0]]
    return joined_routes([first.routes, *(part.routes and part.routes.part(part.num_context_routes) for part in later)])
