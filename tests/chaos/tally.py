"""Counts what each engine has sampled, where a SIGKILL does not lose it: the first side of the double-entry count.

The engine of a leg of long rollouts samples a single token id, its process's own, and counts each step in a file before
any product code sees it. The other side are the tokens in the tensors that are trained on (`witness.sampled_in`), whose
ids identify the process. What was sampled of a prompt and is not trained was lost, whatever the product says, saves or
counts.
"""

import os
import struct
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from penstock.deploy.demo.char_tokenizer import ALPHABET
from tests.chaos.environment import END, index_of
from tests.chaos.witness import FIRST_CHARACTER

NUM_MARKS = len(ALPHABET)
ENTRY = struct.Struct("<qqqq")


class Request(NamedTuple):
    """A request to an engine: the tokens sampled so far of each of its siblings, and how many each will have."""

    index: int
    num_siblings: int
    num_sampled: int
    num_wanted: int


class Tally:
    """The writing side: one process's requests. mark: the token id that this process samples."""

    def __init__(self, folder: Path, number: int) -> None:
        folder.mkdir(exist_ok=True)
        self.mark = mark_of(number)
        self._file = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._slots: dict[str, tuple[int, Request]] = {}

    def begin(self, request_id: str, index: int, num_siblings: int, num_wanted: int) -> None:
        self._slots[request_id] = len(self._slots), Request(index, num_siblings, 0, num_wanted)

    def step(self, request_id: str, num_sampled: int) -> None:
        slot, request = self._slots[request_id]
        os.pwrite(self._file, ENTRY.pack(*request._replace(num_sampled=num_sampled)), slot * ENTRY.size)


def mark_of(number: int) -> int:
    """Returns the token id of the process with this number."""
    return FIRST_CHARACTER + number % NUM_MARKS


def parts_of(prompt: list[int]) -> tuple[int, int]:
    """Returns the index that a prompt poses, and how many tokens follow its text."""
    text = "".join(ALPHABET[token - FIRST_CHARACTER] for token in prompt)
    posed = text[: text.index(END) + 1]
    return index_of(posed), len(text) - len(posed)


def requests_in(file: Path) -> list[Request]:
    """Returns the requests in a tally's file."""
    content = file.read_bytes() if file.exists() else b""
    return [Request(*entry) for entry in ENTRY.iter_unpack(content[: len(content) // ENTRY.size * ENTRY.size])]


def tokens_in(file: Path) -> Counter[int]:
    """Returns the tokens that a process has sampled for training prompts, by index."""
    found: Counter[int] = Counter()
    for request in requests_in(file):
        if request.index > 0:
            found[request.index] += request.num_siblings * request.num_sampled
    return found
