"""Work for long requests beside the event loop, which other calls and the producer's claims need."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

LONG_BYTES = 64 * 1024
"""Requests of more bytes are parsed, rendered, encoded and answered in threads; so much takes up to 0.1 s."""


async def beside(num_bytes: int, work: Callable[[], Result]) -> Result:
    """Returns what `work` returns, in a thread for a request of more than `LONG_BYTES`."""
    return await asyncio.to_thread(work) if num_bytes > LONG_BYTES else work()
