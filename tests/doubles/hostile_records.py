"""Payloads that no honest producer writes: values of wrong types at every place of a record."""

from collections.abc import Iterator
from typing import Any

import msgspec

import wire_examples

encode = msgspec.msgpack.encode
_EXAMPLE = encode(wire_examples.group())
Path = tuple[str | int, ...]


def builtins() -> dict[str, Any]:
    """Returns the example group as maps and lists that can be changed and encoded."""
    group: dict[str, Any] = msgspec.msgpack.decode(_EXAMPLE)
    return group


def places(node: Any, path: Path = ()) -> Iterator[Path]:
    """Yields the paths to the values in `node`, the outermost first."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def with_value(path: Path, value: Any) -> bytes:
    """Returns the example group, encoded, with `value` at `path`; bytes that are msgpack go in as msgspec.Raw."""
    if not path:
        return encode(value)
    group = node = builtins()
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return encode(group)


def header(kind: int, count: int) -> bytes:
    """Returns a msgpack header with a length of four bytes."""
    return bytes([kind]) + count.to_bytes(4, "big")


ARRAY, MAP, BYTES, TEXT, EXTENSION = 0xDD, 0xDF, 0xC6, 0xDB, 0xC9
CLAIMS = {
    "array": header(ARRAY, 2**31),
    "map": header(MAP, 2**31),
    "bytes": header(BYTES, 2**32 - 1),
    "text": header(TEXT, 2**31),
    "extension": header(EXTENSION, 2**31) + b"\x01",
}
"""Headers that announce more content than follows."""
