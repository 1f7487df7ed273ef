"""A conversation whose answers are written down."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any


class ScriptedConversation:
    """Gives these answers one after another: texts, messages without their role, or errors to raise.

    asked: the messages of each call, as they were then.
    """

    facts = SimpleNamespace(finish_reason="stop")

    def __init__(self, *answers: str | dict[str, Any] | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[list[dict[str, Any]]] = []
        self.fields: list[dict[str, Any]] = []

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        self.asked.append(list(messages))
        self.fields.append(fields)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"role": "assistant", **({"content": answer} if isinstance(answer, str) else {"content": "", **answer})}

    async def act(self, action: Callable[[], Awaitable[Any]], state: object = None) -> Any:
        return await action()

    @property
    def read(self) -> list[str]:
        """What the model read last before each answer."""
        return [messages[-1]["content"] for messages in self.asked]
