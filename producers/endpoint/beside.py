"""Work for long requests beside the event loop, which other calls and the producer's claims need."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

LONG_BYTES = 64 * 1024
"""Requests of more bytes are parsed, rendered, encoded and answered in threads; so much takes up to 0.1 s."""
TOKEN_BYTES = 16
"""Of an answer for each token of its prompt and of its own, at least: their ids and logprobs come back."""


async def beside(num_bytes: int, work: Callable[[], Result]) -> Result:
    """Returns what `work` returns, in a thread for a request or an answer of more than `LONG_BYTES`."""
    return await asyncio.to_thread(work) if num_bytes > LONG_BYTES else work()


def answer_bytes(finished: dict[str, Any]) -> int:
    """Returns how long a finished chat completion is at least."""
    return TOKEN_BYTES * finished["usage"]["total_tokens"]
