"""Prompts and rewards."""

from typing import Any

import msgspec


def holds_image(content: Any) -> bool:
    """Returns whether the content of a message is a list with an image in it, in any of the APIs' forms."""
    parts = content if isinstance(content, list | tuple) else ()
    return any(isinstance(part, dict) and "image" in str(part.get("type")) for part in parts)


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation, in the roles of the model's chat template."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if holds_image(self.content):
            raise ValueError("Message: content holds an image, expected text: the policy is a model of text")


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A task as an environment poses it: exactly one of `text` and `messages`.

    `text` is tokenized as it is; `messages` go through the tokenizer's chat template with a generation prompt.
    `answer` and `metadata` are for the reward and for readers of the record, never for the model.

    >>> Prompt(text="12+34=", answer="46")
    >>> Prompt(messages=(Message(role="user", content="What is 12+34?"),), answer="46")
    """

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    answer: str = ""
    metadata: dict[str, str] = {}

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(
                f"Prompt: exactly one of text and messages is expected, got {self.text=}, {self.messages=}"
            )


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """A scalar reward and, for the report, its parts."""

    value: float
    parts: dict[str, float] = {}
