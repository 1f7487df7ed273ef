"""A teacher on a vLLM server: its logprobs of the sampled tokens, for on-policy distillation."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from aiohttp import ClientSession, ClientTimeout, TCPConnector
from msgspec.structs import replace

from penstock.producers.rollout.rewards import RewardError, explained
from penstock.producers.rollout.scoring import tried
from penstock.schemas.config import ConfigError, TeacherConfig
from penstock.schemas.process.cancellation import gather_or_cancel
from penstock.schemas.rollout import RolloutGroup, Segment, one_line, pack_floats, unpack_ids

T = TypeVar("T")
LOWEST_LOGPROB = -9999.0
"""What vLLM writes for minus infinity."""
TOKENS_COMPARED_AT_ONCE = 4096


class TeacherError(RewardError):
    """The teacher's server fails repeatedly, refuses a request, or its answer cannot be used."""


class TeacherServer:
    """Asks a vLLM server, `teacher.url`, for the teacher's logprobs of each segment's sampled tokens.

    It asks for `prompt_logprobs` of the segment's own token ids, so no text is encoded again. They are logprobs of the
    model's distribution at temperature 1. A request that fails is retried.

    Construct it on the event loop that uses it.

    concurrency: requests, one per segment, that are open at once. timeout_s: a request that takes longer fails.
    retries: of a request that fails; then its group is dead.
    """

    def __init__(
        self, config: TeacherConfig, *, concurrency: int = 64, timeout_s: float = 60.0, retries: int = 8
    ) -> None:
        assert config.url is not None
        self._config = config
        self._url = config.url.rstrip("/")
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout_s, self._retries = timeout_s, retries
        self._session = ClientSession(connector=TCPConnector(limit=concurrency), timeout=ClientTimeout(None))

    async def close(self) -> None:
        await self._session.close()

    async def check(self, tokenizer: Any) -> None:
        """Compares the text of every token with the server's. tokenizer: a transformers tokenizer of the model.

        Raises:
            ConfigError: the server does not answer as vLLM does, or has other tokens.
        """
        every = range(len(tokenizer))
        for first in every[::TOKENS_COMPARED_AT_ONCE]:
            some = list(every[first : first + TOKENS_COMPARED_AT_ONCE])
            if await self._text(some) == tokenizer.decode(some):
                continue
            for token in some:
                other, own = await self._text([token]), tokenizer.decode([token])
                if other != own:
                    raise ConfigError(
                        f"teacher.url = {self._config.url!r}: another vocabulary than that of model.path: token "
                        f"{token} is {other!r} there and {own!r} here; expected a teacher with the same tokens"
                    )

    async def score(self, group: RolloutGroup) -> RolloutGroup:
        """Returns the group with the teacher's logprobs of every sampled token.

        Raises:
            TeacherError: it gives none for one of them.
        """
        segments = [segment for rollout in group.rollouts for segment in rollout.segments]
        scored = iter(await gather_or_cancel(map(self._scored, segments)))
        return replace(
            group,
            rollouts=tuple(
                replace(rollout, segments=tuple(itertools.islice(scored, len(rollout.segments))))
                for rollout in group.rollouts
            ),
        )

    async def _scored(self, segment: Segment) -> Segment:
        if not segment.loss_mask:
            return replace(segment, teacher_logprobs=b"")
        ids = unpack_ids(segment.token_ids)[: segment.loss_mask[-1][1]].tolist()
        wanted = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}

        async def once() -> bytes:
            answer = await self._post(f"{self._url}/completions", wanted)
            return pack_floats(_logprobs(answer, ids, segment.loss_mask))

        return replace(segment, teacher_logprobs=await self._tried(once))

    async def _tried(self, once: Callable[[], Awaitable[T]]) -> T:
        return await tried(
            "teacher",
            once,
            partial(explained, kind=TeacherError),
            self._slots,
            timeout_s=self._timeout_s,
            retries=self._retries,
        )

    async def _text(self, token_ids: Sequence[int]) -> Any:
        async def once() -> Any:
            return await self._post(f"{self._url.removesuffix('/v1')}/detokenize", {"tokens": list(token_ids)})

        try:
            return (await self._tried(once))["prompt"]
        except (TeacherError, KeyError, TypeError) as error:
            raise ConfigError(
                f"teacher.url = {self._config.url!r}: {one_line(str(error))}; expected a vLLM server, as in "
                "http://host:8000/v1"
            ) from None

    async def _post(self, url: str, body: dict[str, Any]) -> Any:
        async with self._session.post(url, json=body) as answer:
            if 400 <= answer.status < 500 and answer.status not in (408, 429):
                raise TeacherError(f"HTTP {answer.status}: {one_line(await answer.text())}")
            if not answer.ok:
                raise ConnectionError(f"HTTP {answer.status}: {answer.reason}")
            return await answer.json()


def _logprobs(answer: Any, token_ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> list[float]:
    """Returns the logprobs of the tokens in the runs.

    Raises:
        TeacherError: one is missing, or is no logarithm of a probability above 0.
    """
    found = []
    for place in itertools.chain.from_iterable(itertools.starmap(range, runs)):
        try:
            value = float(answer["choices"][0]["prompt_logprobs"][place][str(token_ids[place])]["logprob"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise TeacherError(
                f"no prompt logprob of token {place}, id {token_ids[place]} ({type(error).__name__}: {error}); "
                "expected an answer of a vLLM server"
            ) from None
        if not LOWEST_LOGPROB < value <= 1e-3:
            raise TeacherError(f"logprob {value} of token {place}, id {token_ids[place]}: expected a finite one")
        found.append(value)
    return found
