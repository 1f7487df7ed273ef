"""A server that answers a teacher's requests as vLLM does: prompt logprobs, and the texts of token ids."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


def logprob_of(token_ids: list[int], place: int) -> float:
    """Returns the stub's logprob of a token, which depends on the token and on all before it."""
    return -0.125 * (1 + (sum(token_ids[: place + 1]) + place) % 40)


class StubTeacher:
    """A stub of a teacher's server.

    script: the treatment of the next requests for logprobs: "fail", "hang", "refuse", None to answer, or an answer to
    give; later requests are answered. tokens: the text of each token id.
    """

    def __init__(self, tokens: list[str]) -> None:
        self.script: deque[Any] = deque()
        self.tokens = tokens
        self.asked: list[dict[str, Any]] = []
        self.inside = self.most = 0
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            todo = self.script.popleft() if self.script else None
            if todo == "hang":
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            if todo == "fail":
                return web.Response(status=503)
            if todo == "refuse":
                return web.json_response({"error": {"message": "maximum context length is 8"}}, status=400)
            return web.json_response(
                {"choices": [{"prompt_logprobs": self._answer(body["prompt"])}]} if todo is None else todo
            )
        finally:
            self.inside -= 1

    def _answer(self, token_ids: list[int]) -> list[Any]:
        places = range(1, len(token_ids))
        return [None, *({str(token_ids[n]): {"logprob": logprob_of(token_ids, n), "rank": 1}} for n in places)]

    async def detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": "".join(self.tokens[n] for n in (await request.json())["tokens"])})

    @classmethod
    @asynccontextmanager
    async def running(cls, tokens: list[str]) -> "AsyncIterator[StubTeacher]":
        """Runs a stub on a free port."""
        stub, app = cls(tokens), web.Application()
        app.router.add_post("/v1/completions", stub.complete)
        app.router.add_post("/detokenize", stub.detokenize)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stub.url = "http://{}:{}/v1".format(*runner.addresses[0])
        try:
            yield stub
        finally:
            await runner.cleanup()
