"""Prompts and rewards."""

from typing import Any

import msgspec

from penstock.schemas.images import data_url, digest_of, file_of

IMAGE = "[image]"


class TextPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text in a message that also holds images."""

    text: str

    @property
    def openai(self) -> dict[str, Any]:
        """The part as in OpenAI's requests."""
        return {"type": "text", "text": self.text}


class ImagePart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="image"):
    """An image in a message.

    digest: identifies it, see `ImagePlace`.
    data: the image file; unset in a group, whose `images` have it.
    """

    digest: str
    data: bytes | msgspec.UnsetType = msgspec.UNSET

    @property
    def openai(self) -> dict[str, Any]:
        """The part as in OpenAI's requests; the model is told the kind by the file, not by the URL."""
        return {"type": "image_url", "image_url": {"url": data_url(self.data or b"")}}


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation, in the roles of the model's chat template.

    content: a text, or parts. A list in any of the APIs' forms of a text with images becomes parts.
    """

    role: str
    content: str | tuple[TextPart | ImagePart, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            msgspec.structs.force_setattr(self, "content", tuple(map(_part, self.content)))

    @property
    def openai(self) -> dict[str, Any]:
        """The message as in OpenAI's requests, with the files of its images in it."""
        content = self.content if isinstance(self.content, str) else [part.openai for part in self.content]
        return {"role": self.role, "content": content}

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it, in which an image is a place alone."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        parts = [part.openai if isinstance(part, TextPart) else {"type": "image"} for part in self.content]
        return {"role": self.role, "content": parts}

    @property
    def text(self) -> str:
        """The content as a text in which `IMAGE` stands for each image."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text if isinstance(part, TextPart) else IMAGE for part in self.content)


def _part(part: Any) -> TextPart | ImagePart:
    """Returns a part in any of the APIs' forms as one of a message.

    Raises:
        ImageError: an image of no known form.
        ValueError: another kind of part.
    """
    if isinstance(part, TextPart | ImagePart):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return TextPart(text=part["text"])
    if kind in ("image", "image_url", "input_image"):
        source = part.get("image_url" if "image_url" in part else "image")
        data = file_of(source["url"] if isinstance(source, dict) and "url" in source else source)
        return ImagePart(digest=digest_of(data), data=data)
    raise ValueError(f"Message: content holds {repr(part)[:80]}, expected parts of the types text and image_url")


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

    @property
    def images(self) -> list[ImagePart]:
        """The images of the messages, in order."""
        return [part for message in self.messages or () for part in message.content if isinstance(part, ImagePart)]

    def without_files(self) -> tuple["Prompt", dict[str, bytes]]:
        """Returns the prompt as it is in a group, and the image files by digest."""
        files = {part.digest: part.data for part in self.images if part.data is not msgspec.UNSET}
        if not files:
            return self, {}
        replace = msgspec.structs.replace
        messages = tuple(
            message
            if isinstance(message.content, str)
            else replace(
                message,
                content=tuple(
                    ImagePart(digest=part.digest) if isinstance(part, ImagePart) else part for part in message.content
                ),
            )
            for message in self.messages or ()
        )
        return replace(self, messages=messages), files


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """A scalar reward and, for the report, its parts."""

    value: float
    parts: dict[str, float] = {}
