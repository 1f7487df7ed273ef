"""Pipelines of a producer's connection whose execution a test controls."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from penstock.producers.stream.connection import ProducerConnection


def intercept(connection: ProducerConnection, how: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]) -> None:
    """Has every pipeline of a connection executed by `how`, which is given what executes it."""
    make = connection.commands.pipeline

    def pipeline(*arguments: Any, **settings: Any) -> Any:
        made: Any = make(*arguments, **settings)
        made.execute = partial(how, made.execute)
        return made

    connection.commands.pipeline = pipeline  # type: ignore[method-assign]
