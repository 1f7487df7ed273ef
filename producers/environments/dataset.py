"""Tasks from a data set (JSON lines, Parquet or Hugging Face) with a column mapping, read from disk row by row."""

import hashlib
import math
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from penstock.producers.environments.rows import DataRows, Row, open_rows
from penstock.schemas.prompt import Message, Prompt, Reward

_ROUNDS = 6
_DEFAULT = {"prompt": "prompt", "answer": "answer"}
IMAGE_PART = {"type": "image"}
"""The place of an image that the column of images has."""


class Dataset:
    """One task per row. The data may be larger than memory; the index decides the order, which each epoch changes.

    training, evaluation: a `.jsonl` or `.parquet` file, a folder of such files, a folder that `datasets` has saved, or
        the name of a data set on the Hugging Face Hub. An environment of weight 0 needs no `training`.
    columns: maps names to this data set's columns. `prompt`: a string, which becomes a user's message, or a list of
        messages with `role` and `content`. `text` instead of it: a string that goes through no chat template. `images`:
        an image or a list of them (bytes, paths within the data's folder, `datasets.Image`), which take the places of
        `<image>` in the prompt's text or of parts without an image of their own; without such places they come first.
        `answer`: a string, a number or a boolean; empty if it is not named. Any other name: a column that goes into the
        prompt's metadata under that name.
    split, evaluation_split, subset: of a Hugging Face dataset. revision: its branch, tag or commit on the Hub.
    system_prompt: a message before every prompt.
    num_evaluation_prompts: how many rows of `evaluation` to use, from the first on; None means all.
    shuffle: False poses rows in their order, in every epoch.

    The reward is 1 for a completion that equals the answer, apart from white space at both ends. `[reward]` names
    others, for mathematics `penstock.producers.environments.math_jsonl:math_verified`.
    """

    def __init__(
        self,
        *,
        seed: int,
        training: str | None = None,
        evaluation: str | None = None,
        columns: Mapping[str, str] = _DEFAULT,
        split: str = "train",
        evaluation_split: str = "test",
        subset: str | None = None,
        revision: str | None = None,
        system_prompt: str | None = None,
        num_evaluation_prompts: int | None = None,
        shuffle: bool = True,
    ) -> None:
        self._name = type(self).__name__
        if ("prompt" in columns) == ("text" in columns):
            raise ValueError(
                f"{self._name}: columns = {dict(columns)}, expected one of prompt and text among the names"
            )
        if "source" in columns:
            raise ValueError(
                f"{self._name}: columns = {dict(columns)}, expected another name than source: of a task's metadata "
                "that is the file and the line it is from"
            )
        self._columns = columns
        self._seed, self._shuffle = seed, shuffle
        self._system = () if system_prompt is None else (Message(role="system", content=system_prompt),)
        self._training: DataRows | None = None
        self.num_tasks: int | None = None
        if training is not None:
            self._training = self._open("training", training, split, subset, revision)
            self.num_tasks = len(self._training)
        self._evaluation: DataRows | None = None
        available = 0
        if evaluation is not None:
            self._evaluation = self._open("evaluation", evaluation, evaluation_split, subset, revision)
            available = len(self._evaluation)
        wanted = available if num_evaluation_prompts is None else num_evaluation_prompts
        if not 0 <= wanted <= available:
            raise ValueError(
                f"{self._name}: num_evaluation_prompts is {wanted}, expected 0 to {available}, the rows of evaluation"
            )
        self.num_evaluation_prompts = wanted

    def prompt(self, index: int) -> Prompt:
        size = len(self._rows)
        return self._pose(self._rows, task_of(index, size, self._seed) if self._shuffle else (index - 1) % size)

    def evaluation_prompt(self, n: int) -> Prompt:
        if self._evaluation is None or not 1 <= n <= self.num_evaluation_prompts:
            raise ValueError(f"{self._name}: held-out row {n} asked for, expected 1 to {self.num_evaluation_prompts}")
        return self._pose(self._evaluation, n - 1)

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        exact = float(completion.strip() == prompt.answer.strip())
        return Reward(value=exact, parts={"exact": exact})

    @property
    def _rows(self) -> DataRows:
        """The training rows."""
        if self._training is None:
            raise ValueError("Dataset: training is not set, expected it of an environment whose weight is above 0")
        return self._training

    def _open(self, field: str, source: str, split: str, subset: str | None, revision: str | None) -> DataRows:
        try:
            rows = open_rows(source, split=split, subset=subset, revision=revision, columns=self._read())
            self._pose(rows, 0)  # raises for a column that is missing or of another type, before anything is sampled
            return rows
        except ValueError as error:
            raise ValueError(f"{self._name}: {field}: {error}") from error

    def _read(self) -> list[str]:
        """Returns the columns that are read; none means all."""
        return list(self._columns.values())

    def _pose(self, rows: DataRows, number: int) -> Prompt:
        row, place = rows[number], rows.place(number)
        metadata = {
            name: str(_value(row, column, place))
            for name, column in self._columns.items()
            if name not in ("prompt", "text", "answer", "images")
        }
        asked: dict[str, Any] = {"answer": self._answer(row, place), "metadata": {"source": place, **metadata}}
        if "text" in self._columns:
            return Prompt(text=_text(row, self._columns["text"], place), **asked)
        images = self._images(row, place, rows.folder)
        return Prompt(messages=(*self._system, *_messages(row, self._columns["prompt"], place, images)), **asked)

    def _images(self, row: Row, place: str, folder: Path) -> list[Any]:
        if "images" not in self._columns:
            return []
        value = _value(row, self._columns["images"], place)
        found = value if isinstance(value, list) else [value]
        found = [each["path"] if isinstance(each, dict) and not each.get("bytes") else each for each in found]
        is_path = [isinstance(each, str) and "://" not in each and not each.startswith("data:") for each in found]
        return [folder / each if within else each for each, within in zip(found, is_path, strict=True)]

    def _answer(self, row: Row, place: str) -> str:
        if "answer" not in self._columns:
            return ""
        value = _value(row, self._columns["answer"], place)
        if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise unlike(value, self._columns["answer"], place, "a string, a number or a boolean")
        return format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)  # 0.00005, not 5e-05


def _value(row: Row, column: str, place: str) -> Any:
    if column not in row:
        raise ValueError(f"{place}: column {column!r} is missing, found {sorted(row)}; name it in environment.kwargs")
    return row[column]


def _text(row: Row, column: str, place: str) -> str:
    value = _value(row, column, place)
    if not isinstance(value, str) or not value:
        raise unlike(value, column, place, "a string that is not empty")
    return value


def _messages(row: Row, column: str, place: str, images: list[Any]) -> tuple[Message, ...]:
    value = _value(row, column, place)
    if not isinstance(value, list):
        value = [{"role": "user", "content": _text(row, column, place)}]
    try:
        roles, contents = [each["role"] for each in value], [each["content"] for each in value]
    except (TypeError, KeyError):
        roles, contents = [], []
    if not contents or not all(isinstance(each, str | list) for each in (*roles, *contents)):
        raise unlike(value, column, place, "a string, or messages with role and content")
    if images:
        contents = [_marked(each) if isinstance(each, str) else each for each in contents]
        left = sum(part == IMAGE_PART for each in contents for part in each)
        if not left and (asked := [n for n, role in enumerate(roles) if role == "user"]):
            contents[asked[0]], left = [IMAGE_PART] * len(images) + contents[asked[0]], len(images)
        if left != len(images):
            raise ValueError(f"{place}: {len(images)} images for {left} places in column {column!r}, expected one each")
        files = iter(images)
        contents = [
            [{"type": "image", "image": next(files)} if part == IMAGE_PART else part for part in each]
            for each in contents
        ]
    try:
        return tuple(Message(role=role, content=content) for role, content in zip(roles, contents, strict=True))
    except ValueError as error:
        raise ValueError(f"{place}: column {column!r}: {error}") from error


def _marked(text: str) -> list[Any]:
    """Returns the parts of a text in which `<image>` stands for images."""
    said = [{"type": "text", "text": each} for each in text.split("<image>")]
    parts = [part for each in said for part in (IMAGE_PART, each)][1:]
    return [part for part in parts if part.get("text") != ""]


def unlike(value: Any, column: str, place: str, expected: str) -> ValueError:
    """Returns the error for a value that a column should not hold."""
    return ValueError(f"{place}: column {column!r} is {repr(value)[:80]}, expected {expected}")


def task_of(index: int, num_tasks: int, seed: int) -> int:
    """Returns the task, from 0, of the run's `index`, from 1: each task once per epoch, in an order of that epoch's."""
    epoch, place = divmod(index - 1, num_tasks)
    return permuted(place, num_tasks, seed, epoch)


def permuted(place: int, size: int, *key: str | int) -> int:
    """Returns where `place` of `size` goes under the permutation that `key` names; the same on every machine.

    A Feistel network over the smallest domain of an even number of bits that holds `size`, whose round function is
    BLAKE2b (Luby and Rackoff, 1988), walked until it falls below `size` (cycle walking: Black and Rogaway, Ciphers with
    Arbitrary Finite Domains, 2002). The domain is less than four times as large: the mean walk takes at most 4 steps.

    Raises:
        ValueError: place is not from 0 to size - 1.
    """
    if not 0 <= place < size:
        raise ValueError(f"place = {place}, expected 0 to {size - 1}")
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    name, mask = repr(key).encode(), (1 << bits) - 1
    while True:
        left, right = place >> bits, place & mask
        for number in range(_ROUNDS):
            digest = hashlib.blake2b(b"%d:%d:" % (number, right) + name, digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(digest) & mask
        place = left << bits | right
        if place < size:
            return place
