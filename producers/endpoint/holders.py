"""Which rollout a request is for, and which producer holds it: every producer serves every rollout, and forwards."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web
from redis.exceptions import RedisError

from penstock.producers.endpoint.access import API_KEY
from penstock.producers.endpoint.chat.dialects import CHAT, MESSAGES
from penstock.producers.endpoint.chat.errors import ApiError, bad_request, is_moving
from penstock.producers.endpoint.chat.requests import shown
from penstock.producers.endpoint.chat.streams import event
from penstock.producers.endpoint.event_stream import HEADERS as STREAM_HEADERS
from penstock.producers.endpoint.groups import origin_of
from penstock.producers.stream.context import ProducerContext
from penstock.producers.stream.journals import Journals
from penstock.schemas.heartbeat import decode_heartbeat
from penstock.schemas.process.cancellation import cancel_and_wait

LOOK_UP_S = 2.0
CONNECT_S = 5.0
"""How long another producer may take to accept a connection."""
HOLDER_S = 2.0
"""How often a request that waits for another producer looks up whether that one still holds the rollout."""
RETRY_COUNT = "x-stainless-retry-count"
"""The header in which OpenAI's clients say how often they have sent a request before."""
SESSION = "X-Session-ID"
"""The header that names a rollout where the path does not."""
FORWARDED = "X-Penstock-Forwarded"
"""The header of a request that another producer has forwarded; it is not forwarded again."""
VERSION = "anthropic-version"
"""The header that Anthropic's clients send with every request."""
PASSED_ON = ("Authorization", API_KEY, "Content-Type", RETRY_COUNT, SESSION, VERSION)


class Holders:
    """Finds the holder of a rollout by its journal, else by its id, and forwards requests to it.

    is_here: says whether this producer holds the group of an index.
    """

    def __init__(self, context: ProducerContext, journals: Journals, is_here: Callable[[int], bool]) -> None:
        self._context = context
        self._is_here = is_here
        self._journals = journals
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout, auto_decompress=False
        )

    async def close(self) -> None:
        await self._session.close()

    async def url_of(self, rollout_id: str) -> str | None:
        """Returns the address of the other producer that holds a rollout; empty while none does, or if it is not known;
        None if none ever will."""
        if (origin := origin_of(rollout_id)) is None or self._is_here(origin[1]):
            return None
        opener, index = origin
        context = self._context
        data: object = None
        try:
            async with asyncio.timeout(LOOK_UP_S):
                holder = await self._journals.holder_of(index, context.run_id)
                producer_id = opener if holder is None else holder.producer_id
                if producer_id != context.producer_id:
                    data = await context.connection.commands.get(context.keys.producer(producer_id))
            if not isinstance(data, bytes):
                return None if holder is None else ""
            return decode_heartbeat(data).endpoint
        except (TimeoutError, RedisError, ValueError):
            return ""

    async def forwarded(self, request: web.Request, rollout_id: str, url: str) -> web.StreamResponse | None:
        """Returns the answer of the producer at `url`, a stream once it has been passed on; None if that producer no
        longer holds the rollout: a suspended one still accepts requests. A stream that breaks ends with an error.

        Raises:
            aiohttp.ClientError, OSError: it does not answer.
        """
        stream = web.StreamResponse(headers=STREAM_HEADERS)
        forwarding = asyncio.create_task(self._forward(request, url, stream))
        try:
            while not (await asyncio.wait({forwarding}, timeout=HOLDER_S))[0]:
                origin = origin_of(rollout_id)
                is_here = origin is not None and self._is_here(origin[1])
                if is_here or await self.url_of(rollout_id) not in (url, "", None):
                    break
            else:
                return forwarding.result()
        except (aiohttp.ClientError, OSError):
            if not stream.prepared:
                raise
        finally:
            await cancel_and_wait([forwarding])
        if not stream.prepared:
            return None
        await stream.write(event(error_body(request, is_moving(f"rollout {rollout_id}"))))
        await stream.write_eof()
        return stream

    async def _forward(self, request: web.Request, url: str, stream: web.StreamResponse) -> web.StreamResponse:
        # A client that hangs up here hangs up there.
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers[FORWARDED] = self._context.producer_id
        where, data = url + request.raw_path, await request.read()
        async with self._session.request(request.method, where, data=data, headers=headers) as reply:
            if reply.content_type == stream.content_type:
                await stream.prepare(request)
                async for data in reply.content.iter_any():
                    await stream.write(data)
                await stream.write_eof()
                return stream
            kept = {name: reply.headers[name] for name in ("Content-Type", "Retry-After") if name in reply.headers}
            return web.Response(status=reply.status, body=await reply.read(), headers=kept)


def error_body(request: web.Request, error: ApiError) -> dict[str, Any]:
    """Returns the body of a response that refuses a request, in the shape of the API that the client speaks."""
    is_anthropic = VERSION in request.headers or f"/v1/{MESSAGES.path}" in request.path
    return (MESSAGES if is_anthropic else CHAT).error(error)


def rollout_named(request: web.Request, document: Mapping[str, Any] | None = None) -> str:
    """Returns the rollout's id in the path, else that in the body, else that in the header; a framework may use the
    header for sessions of its own.

    Raises:
        ApiError: 400, there is none.
    """
    if rollout_id := request.match_info.get("rollout"):
        return rollout_id
    metadata = (document or {}).get("metadata")
    named, session = metadata.get("rollout_id") if isinstance(metadata, dict) else None, request.headers.get(SESSION)
    if named is not None:
        if not isinstance(named, str):
            raise bad_request(f"metadata.rollout_id is {shown(named)}, expected a rollout's id", "metadata")
        return named
    if session and origin_of(session) is not None:
        return session
    found = f"{SESSION} is {shown(session)}, which is no rollout's id; " if session else ""
    raise bad_request(
        f"{found}expected a rollout's id in the path, /r/ID/v1, in the body as metadata.rollout_id, or in the header "
        f"{SESSION}",
        SESSION,
    )
