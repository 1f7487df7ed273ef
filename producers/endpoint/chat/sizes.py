"""How much a JSON text holds, counted before it is parsed.

Parsing and writing JSON are single steps, which hold up every thread: a second for a million keys. So a text of many
parts is refused, and a long one of few is not.
"""

from penstock.producers.endpoint.chat.errors import bad_request

MOST_PARTS = 2**17
"""The most texts (keys are some), objects and lists of a request. A message has 5, one that calls a tool 16."""


def num_parts(json_text: bytes) -> int:
    """Returns the number of texts, objects and lists; of more than `MOST_PARTS`, some number above it. Numbers take
    little time and do not count."""
    quotes = json_text.replace(rb"\\", b"").replace(rb"\"", b"")
    num_texts = quotes.count(b'"') // 2
    if num_texts > MOST_PARTS:
        return num_texts
    outside = b"".join(quotes.split(b'"')[::2])
    return num_texts + outside.count(b"{") + outside.count(b"[")


def check_num_parts(json_text: bytes, name: str, param: str | None = None) -> None:
    """Raises ApiError 400 for a text, called `name`, of more than `MOST_PARTS` parts."""
    if num_parts(json_text) > MOST_PARTS:
        raise bad_request(
            f"{name} has more than {MOST_PARTS:,} texts (keys included), objects and lists, expected fewer",
            param,
            "too_many_parts",
        )
