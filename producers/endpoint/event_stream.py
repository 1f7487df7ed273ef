"""The answer to one request with `stream`, sent while it is sampled."""

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence

from aiohttp import web

from penstock.producers.endpoint.beside import answer_bytes, beside
from penstock.producers.endpoint.chat.errors import ApiError
from penstock.producers.endpoint.chat.streams import Events

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
KEEP_ALIVE_S = 1.0
"""The longest time without a byte while there is no new text."""
PARTS = ("reasoning", "content")
"""The parts of a message that are text, in the order in which they are sampled."""


class EventStream:
    """Sends the events of one answer; a `Listener` of its call. num_bytes: of the request, parts of which come back."""

    def __init__(self, request: web.Request, events: Events, num_bytes: int = 0) -> None:
        self._sent: dict[str, str] = {}
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request
        self._events = events
        self._num_bytes = num_bytes
        self._written_at = 0.0

    @property
    def sent(self) -> Mapping[str, str]:
        """The text of each part that the client was sent."""
        return self._sent

    async def begin(self, prompt_ids: Sequence[int]) -> None:
        """Sends the status and the first events. A request that is refused before has a status of its own."""
        await self.response.prepare(self._request)
        await self._write(self._events.begin(prompt_ids))

    async def text(self, parts: Mapping[str, str]) -> None:
        """Sends what `parts`, the text until now, adds to what was sent; nothing if it contradicts that."""
        data = self._more(parts)
        if data or asyncio.get_running_loop().time() - self._written_at >= KEEP_ALIVE_S:
            await self._write(data or [self._events.keep_alive])

    async def end(self, finished: dict) -> None:
        """Sends the rest of a finished chat completion, whose text begins with what was sent."""
        message = finished["choices"][0]["message"]
        data = self._more(message)
        self._num_bytes = max(self._num_bytes, answer_bytes(finished))
        await self._write(itertools.chain(data, self._events.end(finished)))
        await self.response.write_eof()

    async def fail(self, error: ApiError) -> None:
        """Sends an error as the end of the answer."""
        await self._write(self._events.fail(error))
        await self.response.write_eof()

    def _more(self, parts: Mapping[str, str | None]) -> list[bytes]:
        data: list[bytes] = []
        for part in PARTS:
            text, sent = parts.get(part) or "", self._sent.get(part, "")
            if len(text) > len(sent) and text.startswith(sent):
                self._sent[part] = text
                data += self._events.more(part, text[len(sent) :])
        return data

    async def _write(self, data: Iterable[bytes]) -> None:
        self._written_at = asyncio.get_running_loop().time()
        await self.response.write(await beside(self._num_bytes, lambda: b"".join(data)))
