"""Common prefixes of sequences."""

from typing import TypeVar

_ID_BYTES = 4
S = TypeVar("S", str, bytes, list[int])


def num_shared(left: S, right: S) -> int:
    """Returns the length of the longest common prefix, by comparing slices: as fast as a few copies."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    # The first `low` items are equal, the first `high` are not.
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PrefixTrie:
    """Maps sequences of int32 ids, as bytes, to values. An edge holds as many ids as possible and is compared at once,
    so that a look-up takes time proportional to the length of its argument, regardless of the number of sequences."""

    def __init__(self) -> None:
        self._root = _Node(b"")

    def longest_prefix(self, ids: bytes) -> int | None:
        """Returns the value of the longest sequence that is a prefix of `ids`, or None."""
        node, position, found = self._root, 0, None
        while (child := node.children.get(ids[position : position + _ID_BYTES])) is not None:
            if not ids.startswith(child.edge, position):
                break
            node, position = child, position + len(child.edge)
            if node.value is not None:
                found = node.value
        return found

    def insert(self, ids: bytes, value: int) -> None:
        """Adds a sequence of at least one id; replaces an equal one."""
        node, position = self._root, 0
        while position < len(ids):
            first = ids[position : position + _ID_BYTES]
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = _Node(ids[position:])
            shared = num_shared(child.edge, ids[position : position + len(child.edge)])
            shared -= shared % _ID_BYTES
            if shared < len(child.edge):
                child = node.children[first] = child.split(shared)
            node, position = child, position + shared
        node.value = value


class _Node:
    """The end of a sequence, or a branch; `edge` holds the ids since the parent."""

    __slots__ = ("children", "edge", "value")

    def __init__(self, edge: bytes) -> None:
        self.edge = edge
        self.value: int | None = None
        self.children: dict[bytes, _Node] = {}
        """By the first id of their edges."""

    def split(self, num_bytes: int) -> "_Node":
        """Splits the edge: returns a node for its first part, with this one below it for the rest."""
        upper = _Node(self.edge[:num_bytes])
        self.edge = self.edge[num_bytes:]
        upper.children[self.edge[:_ID_BYTES]] = self
        return upper
