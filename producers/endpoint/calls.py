"""One call of an agent: rendered, spliced, sampled, parsed, and recorded in the rollout's ledger."""

import asyncio
import copy
import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import msgspec
from redis.exceptions import RedisError

from penstock.producers.endpoint.beside import LONG_BYTES
from penstock.producers.endpoint.call_ledger import Call, digest
from penstock.producers.endpoint.chat.answers import AnswerParser, Answers, PlainText
from penstock.producers.endpoint.chat.errors import ApiError, bad_request, has_ended, is_moving, too_long
from penstock.producers.endpoint.chat.requests import ChatRequest
from penstock.producers.endpoint.groups import AgentRollout
from penstock.producers.endpoint.prompts import Expand, Prompts, RenderedPrompt
from penstock.producers.endpoint.recording import KeptCall, RunningCall
from penstock.producers.interfaces import Engine, EngineError, PlacedImages
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.observe.running_loop import running_s
from penstock.producers.rollout.sampling import Siblings, request_seed
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.process import clock
from penstock.schemas.process.cancellation import cancel_and_wait
from penstock.schemas.process.outage import RedisGoneError
from penstock.schemas.rollout import pack_ids

log = logging.getLogger(__name__)

Json = dict[str, Any]

FIELDS_NAMED, FIELD_LENGTH = 32, 64
"""The most ignored fields that are named, and characters of each name: clients may invent any number of any length."""
LONG_TEXTS = 4
"""Long requests that are rendered at once."""
TELL_S, MOST_TELL_S = 0.05, 1.0
"""The shortest and the longest pause between two parts of a streamed answer."""
TELL_SHARE = 0.05
"""The part of its time that a stream spends on parsing, which grows with the answer."""
FATAL = (EngineError, RedisGoneError, RedisError)
"""Errors that end the producer, whichever call raises them."""


class FreshWeights(Protocol):
    async def wait_for(self, version: int, lag_bound: int, run_id: str) -> None:
        """Returns once the engine's weights are at most `lag_bound` older than `version` of run `run_id`."""


class Listener(Protocol):
    """Receives an answer while it is sampled."""

    @property
    def sent(self) -> Mapping[str, str]:
        """The text of the answer's `reasoning` and `content` that has left here."""
        ...

    async def begin(self, prompt_ids: Sequence[int]) -> None:
        """Called once, before anything is sampled and after whatever could refuse the request."""
        ...

    async def text(self, parts: Mapping[str, str]) -> None:
        """Called every now and then, with all text of each part that nothing sampled later will change."""
        ...


class Answered(NamedTuple):
    call: Call
    message: Json
    logprobs: Json | None
    stop: str | None
    """The stop string that ended it."""


class Calls:
    """Answers calls, many concurrently. Rendering, encoding and parsing run in threads of their own, since they would
    hold up the event loop, which has claims to refresh. Those of requests with much text run beside the others'.

    answers: used in one thread only.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        weights: FreshWeights,
        prompts: Prompts,
        answers: Answers,
        metrics: ProducerMetrics,
    ) -> None:
        self._prompts = prompts
        self._answers = answers
        self._engine = engine
        self.takes_images = engine.takes_images
        self._weights = weights
        self._config = config
        self._metrics = metrics
        self.num_tokens = 0
        """Tokens sampled since the start."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="endpoint")
        self._long_texts = ThreadPoolExecutor(LONG_TEXTS, thread_name_prefix="endpoint-long")
        self._request_numbers = itertools.count()
        self._ignored: set[str] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises the error that ends this producer once a call has met it, even if that call was cancelled."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        engine: Engine,
        weights: FreshWeights,
        tokenizer: Any,
        parser: AnswerParser | None,
        metrics: ProducerMetrics,
    ) -> "Calls":
        """Returns the calls of a run with an endpoint. tokenizer, parser: see `AgentEndpoint`.

        Raises:
            ConfigError: a tokenizer without a chat template.
        """
        assert config.endpoint is not None
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(
                f"model.path = {config.model.path!r}: its tokenizer has no chat template, which [endpoint] needs"
            )
        own = copy.deepcopy(tokenizer)
        prompts = Prompts(
            own,
            stop_token_ids=config.sampling.stop_token_ids,
            max_model_len=engine.max_model_len,
            expand=_expand_in(asyncio.get_running_loop(), engine) if engine.takes_images else None,
        )
        finds_reasoning = config.endpoint.reasoning_parser is not None
        answers = Answers(own, parser or PlainText(), finds_reasoning=finds_reasoning)
        return cls(config, engine, weights, prompts, answers, metrics)

    async def answer(
        self,
        rollout: AgentRollout,
        request: ChatRequest,
        number: int,
        identity: bytes = b"",
        listener: Listener | None = None,
    ) -> Answered:
        """Waits for weights that are fresh enough for the group, which a load unblocks, then samples. The end of the
        rollout cancels it, and cancelling it aborts the engine's request.

        number: see `CallLedger.begin`.
        identity: what identifies the request. An answer to it that an earlier holder of the rollout has begun is
            continued; empty for a request that is always sampled.

        Raises:
            ApiError: 400 or 409, the request cannot be answered; 410, the rollout has ended; 500, the engine failed at
                this request; 503, another producer continues the rollout.
            EngineError: the engine serves no longer.
        """
        if not rollout.is_open or rollout.group.journal.has_moved:
            raise _gone(rollout)
        self._count_ignored(request.ignored)
        task = asyncio.create_task(self._answer(rollout, request, number, identity, listener))
        task.add_done_callback(self._fail_with)  # the awaiting request may be cancelled, and its error lost
        rollout.running.add(task)
        try:
            await asyncio.wait({task})
        finally:
            rollout.running.discard(task)
            rollout.last_seen = running_s()
            task.cancel()
        if task.cancelled():
            raise _gone(rollout)
        return task.result()

    async def count(self, rollout: AgentRollout, request: ChatRequest) -> int:
        """Returns the tokens of the prompt that the engine would be given.

        Raises:
            ApiError: 400 or 409, the request cannot be answered.
        """
        self._count_ignored(request.ignored)
        run = asyncio.get_running_loop().run_in_executor
        prompt = await run(self._thread_for(request), self._prompts.prompt, request, rollout.ledger)
        return len(prompt.token_ids)

    def _thread_for(self, request: ChatRequest) -> ThreadPoolExecutor:
        return self._thread if request.num_bytes <= LONG_BYTES else self._long_texts

    def fail(self, error: Exception) -> None:
        """Makes `failed` raise `error`, unless it raises another already."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _count_ignored(self, fields: Sequence[str]) -> None:
        counts: Counter[str] = Counter()
        for field in fields:
            name = field[:FIELD_LENGTH]
            if name not in self._ignored and len(self._ignored) < FIELDS_NAMED:
                self._ignored.add(name)
                log.warning('agents send %r, which is ignored (endpoint.unsupported = "ignore")', name)
            counts[name if name in self._ignored else "other"] += 1
        for name, count in counts.items():
            self._metrics.agent_fields_ignored.labels(name).inc(count)

    def _fail_with(self, task: asyncio.Task[Answered]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), FATAL):
            self.fail(error)

    async def _answer(
        self, rollout: AgentRollout, request: ChatRequest, number: int, identity: bytes, listener: Listener | None
    ) -> Answered:
        with self._metrics.agent_calls_running.track_inprogress():
            run = asyncio.get_running_loop().run_in_executor
            prompt = await run(self._thread_for(request), self._prompts.prompt, request, rollout.ledger)
            self._count_ignored(prompt.left_out)
            before = rollout.take_earlier(identity, prompt.token_ids)
            try:
                return await self._sample(rollout, request, number, identity, prompt, before, listener)
            except BaseException:
                if before is not None:
                    rollout.earlier.insert(0, before)
                raise
            finally:
                rollout.calls.pop(number, None)

    async def _sample(
        self,
        rollout: AgentRollout,
        request: ChatRequest,
        number: int,
        identity: bytes,
        prompt: RenderedPrompt,
        before: KeptCall | None,
        listener: Listener | None,
    ) -> Answered:
        run = asyncio.get_running_loop().run_in_executor
        group = rollout.group
        sampling = msgspec.structs.replace(group.sampling, max_tokens=self._room(request, prompt, rollout))
        if listener is not None:
            await listener.begin(prompt.token_ids)
        seed = request_seed(self._config, group.claim.index, group.claim.attempt, rollout.place, number)
        adopted = [] if before is None else [before.completion]
        request_id = f"{rollout.id}-{number}-{next(self._request_numbers)}"  # a rollout may come back from elsewhere
        began_s = clock.steady_s()
        siblings = Siblings(
            self._engine, prompt.token_ids, sampling, 1, request_id, request.stop, seed, prompt.images, adopted
        )
        running = RunningCall(number, digest(pack_ids(prompt.token_ids)), identity, siblings, before)
        rollout.calls[number] = running
        telling = listener and asyncio.create_task(self._tell(listener, request, prompt.token_ids, siblings))
        try:
            await self._weights.wait_for(group.claim.version, self._config.lag_bound, group.claim.run_id)
            (completion,) = await siblings.sample()
        except ValueError as error:
            raise bad_request(str(error), "messages") from error
        finally:
            if telling:
                await cancel_and_wait([telling])
        if telling and not telling.cancelled():
            telling.result()  # its client has gone
        num_tokens = completion.num_tokens - sum(one.num_tokens for one in adopted)
        self.num_tokens += num_tokens
        self._metrics.tokens_generated.inc(num_tokens)
        if completion.finish_reason == "error":
            raise ApiError(500, "the engine failed at this request", code="engine_error")
        stop = None
        if request.stop:
            completion, stop = await run(self._thread, self._answers.ended, request, completion)
        message = await run(self._thread, self._answers.message, request, prompt.token_ids, completion)
        message |= before.reply if before is not None else {}  # the ids of its calls are the client's already
        self._answers.keep_sent(message, {} if listener is None else listener.sent)
        logprobs = await run(self._thread, self._answers.logprobs, request, message) if request.logprobs else None
        known = prompt.base.spans[-1][1] if prompt.base is not None else 0
        call = Call(
            number=number,
            base=prompt.base,
            context=pack_ids(prompt.token_ids[known:]),
            completion=completion,
            rendered=prompt.rendered,
            images=prompt.images.places,
            files=dict(prompt.images.files),
            request=identity,
            began_s=began_s,
            ended_s=clock.steady_s(),
        )
        if before is not None and before.is_answered:
            call.began_s, call.ended_s = before.began_s, before.ended_s
        conversation = await run(self._thread_for(request), rollout.ledger.conversation, request.messages)
        rollout.record(running, call, request.messages, message, conversation)
        if prompt.parent is not None:
            prompt.parent.rendered = None  # calls mostly continue the newest one; branches are encoded in full
        self._metrics.agent_calls.labels(prompt.kind).inc()
        if prompt.reason:
            self._metrics.agent_segments.labels(prompt.reason).inc()
        sampled = message["generation_token_ids"]
        stopped = completion.finish_reason == "stop" and stop is None
        if stopped and sampled and self._prompts.is_alternate_stop(sampled[-1]):
            self._metrics.alternate_stops.inc()
        return Answered(call, message, logprobs, stop)

    async def _tell(self, listener: Listener, request: ChatRequest, prompt_ids: list[int], siblings: Siblings) -> None:
        """Tells a listener what is sampled until now, each time after a pause; runs until cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = TELL_S
        while True:
            await asyncio.sleep(pause_s)
            began, parts = loop.time(), dict[str, str]()
            if sampled := siblings.so_far():
                parts = await loop.run_in_executor(self._thread, self._answers.so_far, request, prompt_ids, sampled[0])
            pause_s = min(max(TELL_S, (loop.time() - began) / TELL_SHARE), MOST_TELL_S)
            await listener.text(parts)

    def close(self) -> None:
        for threads in (self._thread, self._long_texts):
            threads.shutdown(wait=False, cancel_futures=True)
        if self.failed.done():
            self.failed.exception()  # marks it as retrieved: `AgentEndpoint.run` has raised it if it was running

    def _room(self, request: ChatRequest, prompt: RenderedPrompt, rollout: AgentRollout) -> int:
        """Returns the most tokens that the answer may have."""
        longest, num_prompt = self._engine.max_model_len, len(prompt.token_ids)
        if num_prompt >= longest:
            raise too_long(longest, num_prompt)
        room = rollout.ledger.room(prompt.base, num_prompt, prompt.images.files)
        return min(longest - num_prompt, rollout.group.sampling.max_tokens, request.max_tokens or longest, room)


def _expand_in(loop: asyncio.AbstractEventLoop, engine: Engine) -> Expand:
    """Returns `engine.expand` for threads beside the event loop."""

    def expand(ids: list[int], files: Sequence[bytes]) -> tuple[list[int], PlacedImages]:
        return asyncio.run_coroutine_threadsafe(engine.expand(ids, files), loop).result()

    return expand


def _gone(rollout: AgentRollout) -> ApiError:
    return is_moving(f"rollout {rollout.id}") if rollout.is_open else has_ended(rollout.id, rollout.reason)
