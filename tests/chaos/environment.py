"""The suite's environment: it decides the outcome of each index and records the indexes that it poses."""

import os
from collections import Counter
from enum import StrEnum
from pathlib import Path

from penstock.schemas.prompt import Prompt


class Fate(StrEnum):
    """The only correct outcome of an index, whatever is killed."""

    TRAINED = "trained"
    SKIPPED = "skipped"
    """Every completion gets the same reward."""
    DEAD = "dead"
    """The reward, or the prompt itself, raises."""


def fate(index: int) -> Fate:
    """Returns the correct outcome of an index."""
    if index % 29 == 11 or index % 31 == 7:
        return Fate.DEAD
    return Fate.SKIPPED if index % 7 == 3 else Fate.TRAINED


END = "="
MEANT_TO_FAIL = "is meant to fail"
"""The end of each message of an error that this environment raises on purpose."""


def text_of(index: int) -> str:
    """Returns the prompt's text of an index."""
    return f"#{index}{END}"


def index_of(text: str) -> int:
    """Returns the index of a text of `text_of`. Held-out prompts have negative ones."""
    return int(text.removeprefix("#").removesuffix(END))


class ChaosEnvironment:
    """Poses `#<index>=`. Writes `posed <index>` and `scored <index>` to `notes`, one write per line, before it returns.

    A prompt's completions get 0, 1, 0, 1, ... in the order in which they are scored, a group at a time on one thread:
    every group of even size has variance, whatever was sampled, unless its fate is to have none.
    """

    num_evaluation_prompts = 4
    reward_threads = 1

    def __init__(self, *, notes: str, seed: int = 0) -> None:
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._num_scored: Counter[int] = Counter()

    def prompt(self, index: int) -> Prompt:
        self._note("posed", index)
        if index % 31 == 7:
            raise ValueError(f"this prompt {MEANT_TO_FAIL}")
        return Prompt(text=text_of(index), answer=str(index))

    def evaluation_prompt(self, n: int) -> Prompt:
        return Prompt(text=text_of(-n), answer=str(-n))

    def reward(self, prompt: Prompt, completion: str) -> float:
        index = int(prompt.answer)
        if index <= 0:
            return 1.0
        self._note("scored", index)
        if fate(index) is Fate.DEAD:
            raise ValueError(f"this reward {MEANT_TO_FAIL}")
        if fate(index) is Fate.SKIPPED:
            return 1.0
        self._num_scored[index] += 1
        return float(self._num_scored[index] % 2)

    def _note(self, what: str, index: int) -> None:
        os.write(self._notes, f"{what} {index}\n".encode())


class Notes:
    """The notes of the environments of all producers."""

    def __init__(self, file: Path) -> None:
        self.posed: Counter[int] = Counter()
        self.scored: Counter[int] = Counter()
        for line in file.read_text().splitlines() if file.exists() else []:
            what, index = line.split(" ")
            (self.posed if what == "posed" else self.scored)[int(index)] += 1

    @property
    def last_index(self) -> int:
        return max(self.posed, default=0)
