"""Lets a test control the execution of a producer's pipelines."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from penstock.producers.stream.connection import ProducerConnection


def intercept(connection: ProducerConnection, how: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]) -> None:
    """Executes every pipeline of a connection through `how`, which receives the pipeline's own `execute`."""
    make = connection.commands.pipeline

    def pipeline(*arguments: Any, **settings: Any) -> Any:
        made: Any = make(*arguments, **settings)
        made.execute = partial(how, made.execute)
        return made

    connection.commands.pipeline = pipeline  # type: ignore[method-assign]


def lose_answers(connection: ProducerConnection, errors: list[Exception]) -> None:
    """Has Redis execute a pipeline without an answer for each of `errors`, which is raised in its place."""

    async def execute_and_lose(execute: Callable[[], Awaitable[Any]]) -> Any:
        answers = await execute()
        if errors:
            raise errors.pop()
        return answers

    intercept(connection, execute_and_lose)
