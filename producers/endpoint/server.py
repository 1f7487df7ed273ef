"""The endpoint of one producer, in its own event loop: a handler per path, and every error as its client knows it."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from penstock.producers.endpoint.access import api_key, check_access
from penstock.producers.endpoint.agents import Agents
from penstock.producers.endpoint.beside import answer_bytes, beside
from penstock.producers.endpoint.call_ledger import digest
from penstock.producers.endpoint.calls import FATAL, Calls
from penstock.producers.endpoint.chat.answers import AnswerParser, finish_reason, response
from penstock.producers.endpoint.chat.bodies import parse_finish, parse_json
from penstock.producers.endpoint.chat.dialects import DIALECTS, MESSAGES, Dialect
from penstock.producers.endpoint.chat.errors import ApiError, is_moving
from penstock.producers.endpoint.chat.requests import ChatRequest, parse_chat, without_files
from penstock.producers.endpoint.connections import Connections
from penstock.producers.endpoint.event_stream import EventStream
from penstock.producers.endpoint.groups import AgentRollout
from penstock.producers.endpoint.holders import FORWARDED, RETRY_COUNT, Holders, error_body, rollout_named
from penstock.producers.endpoint.inside import Conversations
from penstock.producers.interfaces import Engine
from penstock.producers.observe.running_loop import running_s
from penstock.producers.rollout.run_environments import RunEnvironments
from penstock.producers.stream.context import ProducerContext
from penstock.producers.stream.in_flight import Claim, InFlightTable
from penstock.producers.stream.progress_store import ProgressStore
from penstock.producers.stream.writer import Writer
from penstock.producers.weights.follower import WeightFollower
from penstock.schemas.images import MAX_IMAGES_BYTES, bytes_in
from penstock.schemas.process.cancellation import cancel_and_wait
from penstock.schemas.process.ports import EVERYWHERE, authority, on_free_port

log = logging.getLogger(__name__)

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BODY_BYTES = 1024 * 1024
BODY_BYTES_PER_TOKEN = 1024
"""Per token of the model's context. Messages may carry the token ids of every answer and its prompt: about 300 calls
that fill the context fit."""
REQUEST_S = 60.0
"""How long a connection may wait for a request's headers, and a request for the rest of its body."""
BACKLOG = 1024
"""Connections that may wait to be accepted; a client that finds no place tries again by itself, but seconds later."""
LINGER_S = 2.0
"""How long the rest of a body is received after its answer, before the connection is closed."""
SHUTDOWN_S = 1.0
"""How long answers in progress may take to reach their clients once everything has ended."""


class Elsewhere(Exception):
    """Another producer, at `url`, holds the rollout."""

    def __init__(self, rollout_id: str, url: str) -> None:
        super().__init__(rollout_id, url)
        self.rollout_id = rollout_id
        self.url = url


class AgentEndpoint:
    """Serves agents between `start` and `close`; `run` runs in between.

    tokenizer: a transformers tokenizer with a chat template.
    parser: of reasoning and tool calls; None leaves both in the text.
    pass_on: see `Agents`.
    """

    def __init__(
        self,
        context: ProducerContext,
        *,
        table: InFlightTable,
        weights: WeightFollower,
        writer: Writer,
        progress: ProgressStore,
        engine: Engine,
        environments: RunEnvironments,
        tokenizer: Any,
        parser: AnswerParser | None,
        pass_on: Callable[[Claim], None],
    ) -> None:
        """
        Raises:
            ConfigError: a tokenizer without a chat template, or see `api_key`.
        """
        config, endpoint = context.config, context.config.endpoint
        assert endpoint is not None
        self._context = context
        self._config = endpoint
        self._key = api_key(endpoint)
        self._model = Path(config.model.path).name
        """The name under which the policy is served."""
        self.calls = Calls.of(config, engine, weights, tokenizer, parser, context.metrics)
        self.agents = Agents(
            context,
            endpoint,
            environments=environments,
            table=table,
            weights=weights,
            writer=writer,
            progress=progress,
            engine=engine,
            pass_on=pass_on,
        )
        self.conversations = Conversations(
            environments, self.calls, endpoint, producer_id=context.producer_id, fingerprint=engine.fingerprint
        )
        self._sampling = next(iter(environments)).sampling  # all have the same, apart from max_tokens
        self._max_body_bytes = BODY_BYTES + BODY_BYTES_PER_TOKEN * engine.max_model_len
        self._max_body_bytes += MAX_IMAGES_BYTES * 4 // 3 * engine.takes_images  # as Base64
        self._answering: set[asyncio.Protocol] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._holders: Holders | None = None
        self._closing = AsyncExitStack()
        self.url = ""
        """Where agents reach this producer; empty before `start`."""

    async def start(self) -> None:
        """Listens on the first free port from `endpoint.port` on.

        Raises:
            ConfigError: the host cannot be listened on, or no port in the range is free.
        """
        app = web.Application(middlewares=[self._guard], client_max_size=self._max_body_bytes)
        app.router.add_post("/r", self._open)
        for base in ("/r/{rollout}/v1", "/v1"):
            for dialect in DIALECTS:
                app.router.add_post(f"{base}/{dialect.path}", partial(self._answer, dialect))
            app.router.add_post(f"{base}/{MESSAGES.path}/count_tokens", self._count_tokens)
            app.router.add_get(f"{base}/models", self._models)
            app.router.add_get(f"{base}/models/{{model:.+}}", self._models)
        app.router.add_post("/r/{rollout}/finish", self._finish)
        self._holders = Holders(self._context, self.agents.journals, self.agents.holds)
        self._closing.push_async_callback(self._holders.close)
        # A client that disconnects cancels its handler, so that no tokens are sampled for an answer that nobody reads.
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=REQUEST_S,
            lingering_time=LINGER_S,
            shutdown_timeout=SHUTDOWN_S,
        )
        self._closing.push_async_callback(runner.cleanup)
        await runner.setup()
        host = self._config.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = on_free_port(
            "endpoint",
            host,
            self._config.port,
            lambda port: socket.create_server((host, port), family=family, backlog=BACKLOG),
        )
        port = listening.getsockname()[1]
        assert runner.server is not None  # since `setup`
        connections = Connections(listening, runner.server, self._answering)
        self._accepting = asyncio.create_task(connections.accept())
        self._closing.push_async_callback(cancel_and_wait, [self._accepting])
        host = socket.gethostname() if host in EVERYWHERE else host
        self.url = f"http://{authority(host, port)}"
        log.info("agents are served at %s", self.url)

    async def run(self) -> None:
        """Holds the conversations of conversing environments; ends idle rollouts and overdue groups, which time
        unblocks. Runs until cancelled.

        Raises:
            EngineError, RedisGoneError: from a request; the error ends this producer.
        """
        assert self._accepting is not None  # since `start`
        watching = [asyncio.create_task(self.agents.watch())]
        if self._context.config.producers.progress_s:
            watching.append(asyncio.create_task(self.agents.keep_saved()))
        parts = (self.calls.failed, self._accepting, *watching)
        try:
            async with asyncio.TaskGroup() as tasks:
                if self.conversations.environments.any_converse:
                    tasks.create_task(self.conversations.run(self.agents))
                await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                await next(part for part in parts if part.done())
        finally:
            for task in watching:
                task.cancel()

    async def close(self, *, append: bool) -> None:
        """Ends what is open and closes every connection. append: see `Agents.close`."""
        await self.agents.close(append=append)
        await self._closing.aclose()
        self.calls.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check_access(request.headers, self._key)
            await _receive_body(request)
            self._answering.add(request.protocol)
            try:
                return await handler(request)
            except Elsewhere as where:
                return await self._forwarded(request, where)
        except ConnectionError:
            return web.Response()  # the client has gone
        except Exception as error:  # the isolation boundary of this server: one request never ends the others
            if isinstance(error, web.HTTPException) and error.status < 400:
                raise
            answer = self._refusal(request, error)
        finally:
            self._answering.discard(request.protocol)
        return web.json_response(error_body(request, answer), status=answer.status, headers=answer.headers)

    def _refusal(self, request: web.Request, error: Exception) -> ApiError:
        """Returns the answer to a request that has met an error; one that ends the producer is passed on."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            return ApiError(
                413,
                f"the body has more than {self._max_body_bytes:,} bytes; messages need not carry the token ids of "
                "answers, which this producer knows",
                code="body_too_large",
            )
        if isinstance(error, web.HTTPException):
            code = error.reason.lower().replace(" ", "_")
            return ApiError(error.status, f"{request.method} {request.path}: {error.reason}", code=code)
        if isinstance(error, FATAL):
            self.calls.fail(error)
            return ApiError(503, "this producer serves no longer", code="producer_failed")
        log.error("%s %s failed", request.method, request.path, exc_info=error)
        return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")

    async def _open(self, request: web.Request) -> web.Response:
        rollout = await self.agents.open()
        group = rollout.group
        group.start()
        await self.agents.save(group)
        prompt = msgspec.to_builtins(group.asked[0])
        if group.prompt.images:
            prompt["messages"] = [message.openai for message in group.prompt.messages or ()]
        return _json({
            "id": rollout.id,
            "base_url": f"{request.scheme}://{request.host}/r/{rollout.id}/v1",
            "index": group.claim.index,
            "environment": group.claim.environment,
            "prompt": prompt,
        })  # fmt: skip

    async def _models(self, request: web.Request) -> web.Response:
        await self._rollout(request)
        asked = request.match_info.get("model")  # under any name, as in a request for an answer
        model = {"id": asked or self._model, "object": "model", "created": 0, "owned_by": "penstock"}
        model |= {"root": self._model, "parent": None}
        model |= {"type": "model", "display_name": self._model, "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's
        page = {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}
        return _json(model if asked else page)

    async def _finish(self, request: web.Request) -> web.Response:
        data = await request.read()
        reward = await beside(len(data), lambda: parse_finish(data))
        rollout_id = rollout_named(request)
        if not self.agents.is_finished_with(rollout_id, reward):
            rollout = await self._rollout(request)
            await self.agents.check_held(rollout.group)
            if problem := self.agents.finish(rollout, reward):
                raise ApiError(400, f"rollout {rollout_id} cannot be finished: {problem}", code=rollout.reason)
            await self.agents.save(rollout.group)
        return _json({"id": rollout_id, "status": "finished"})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        rollout, _, asked, _ = await self._asked(MESSAGES, request)
        return _json({"input_tokens": await self.calls.count(rollout, asked)})

    async def _asked(self, dialect: Dialect, request: web.Request) -> tuple[AgentRollout, Json, ChatRequest, bytes]:
        """Returns the rollout that a request for an answer names, its body, what it asks for, and its identity."""
        data = await request.read()

        def parse() -> tuple[Json, ChatRequest, bytes]:
            document = parse_json(data)
            ignore = self._config.unsupported == "ignore"
            given, files = without_files(document, bytes_in) if self.calls.takes_images else (document, {})
            asked = parse_chat(dialect.as_chat(given), self._sampling, ignore=ignore, num_bytes=len(data), images=files)
            return document, asked, digest(request.path.encode() + b"\0" + data)

        document, asked, identity = await beside(len(data), parse)
        return await self._rollout(request, document), document, asked, identity

    async def _answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        rollout, document, asked, identity = await self._asked(dialect, request)
        number = rollout.begin_call(identity, is_retry=request.headers.get(RETRY_COUNT, "0") != "0")
        completion_id = f"chatcmpl-{rollout.id}-{number}"
        stream: EventStream | None = None
        if asked.stream:
            events = dialect.events(completion_id, self._model, document, asked)
            stream = EventStream(request, events, asked.num_bytes)
        try:
            answered = await self.calls.answer(rollout, asked, number, identity, stream)
            await self.agents.save(rollout.group)
        except Exception as error:
            if stream is None or not stream.response.prepared:
                raise
            await stream.fail(self._refusal(request, error))
            return stream.response
        reason = finish_reason(answered.call.completion, answered.message)
        finished = response(
            completion_id, self._model, asked, answered.message, answered.logprobs, reason, answered.stop
        )
        answer: web.StreamResponse
        if stream is None:
            answer = await beside(
                max(asked.num_bytes, answer_bytes(finished)), lambda: _json(dialect.answer(document, finished))
            )
            await answer.prepare(request)
            await answer.write_eof()
        else:
            answer = stream.response
            await stream.end(finished)
        if request.transport is not None:
            answered.call.delivered = True
            answered.call.connection = request.transport
        return answer

    async def _rollout(self, request: web.Request, document: Json | None = None) -> AgentRollout:
        """Returns the rollout that the path, the body or a header names.

        Raises:
            Elsewhere: another producer holds it.
            ApiError: 400 without either, 404 if no producer knows it, 410 if it has ended, 503 while it moves from one
                producer to another.
        """
        rollout_id = rollout_named(request, document)
        rollout = self.agents.find(rollout_id)
        if rollout is not None:
            rollout.last_seen = running_s()
            return rollout
        assert self._holders is not None  # since `start`
        url = await self._holders.url_of(rollout_id)
        if url is None:
            raise ApiError(404, f"rollout {rollout_id}: no such rollout, or no longer", code="no_such_rollout")
        if not url or FORWARDED in request.headers:
            raise is_moving(f"rollout {rollout_id}")
        raise Elsewhere(rollout_id, url)

    async def _forwarded(self, request: web.Request, where: Elsewhere) -> web.StreamResponse:
        """Returns the answer of the producer that holds the rollout.

        Raises:
            ApiError: 503, it does not answer, or no longer holds it.
        """
        assert self._holders is not None  # since `start`
        try:
            answer = await self._holders.forwarded(request, where.rollout_id, where.url)
        except (aiohttp.ClientError, OSError) as error:
            log.info("%s does not answer for a rollout that it holds: %s", where.url, error)
            answer = None
        if answer is None:
            raise is_moving(f"rollout {where.rollout_id}")
        return answer


async def _receive_body(request: web.Request) -> None:
    """Receives the body, which `request.read` returns from then on.

    Raises:
        ApiError: 408, it is not complete after `REQUEST_S`.
    """
    try:
        async with asyncio.timeout(REQUEST_S):
            await request.read()
    except TimeoutError:
        message = f"the body was not complete {REQUEST_S:g} s after the headers"
        raise ApiError(408, message, code="request_timeout") from None


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
