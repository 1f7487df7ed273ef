"""Rows of a data set on disk, read one at a time: JSON lines, Parquet files, Hugging Face datasets."""

import codecs
import functools
import itertools
import os
import re
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from penstock.schemas.rollout import one_line

Row = dict[str, Any]

ROW_GROUPS_KEPT = 8
"""Decoded row groups held in memory, of all Parquet files together."""
SCAN_BYTES = 1 << 24
"""Bytes read at once in the search for line ends."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FILES = (".jsonl", ".parquet", ".json", ".csv")
"""Suffixes that mark a name as that of a file, even of one that does not exist."""


class DataRows(Protocol):
    """A data set of `len(rows)` rows, from 0; reading one takes the memory of a few rows at most.

    folder: where paths in rows begin.
    """

    folder: Path

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Row:
        """Raises ValueError, which names the place, for a row that cannot be read."""
        ...

    def place(self, number: int) -> str:
        """Returns where a row is, for messages."""
        ...


def open_rows(
    source: str, *, split: str, subset: str | None = None, revision: str | None = None, columns: Sequence[str] = ()
) -> DataRows:
    """Opens a `.jsonl` or `.parquet` file, a folder of such files or one that `datasets` has saved, or a data set on
    the Hugging Face Hub.

    split, subset, revision: of a Hugging Face dataset. columns: read from Parquet files and Hugging Face datasets; all
    of theirs if none is named, or one is missing.

    Raises:
        ValueError: it cannot be read, or has no row; the message names it and what was expected.
    """
    path = Path(source)
    kinds = [sorted(path.glob(pattern)) for pattern in ("*.jsonl", "*.parquet")] if path.is_dir() else [[path]]
    if all(kinds) and len(kinds) > 1:
        raise ValueError(f"{source!r} holds .jsonl and .parquet files, expected one kind")
    files = next(filter(None, kinds), [])
    if files and files[0].is_file():
        parts = [_open_file(file, columns) for file in files]
        rows: DataRows = parts[0] if len(parts) == 1 else _Joined(parts)
    elif path.is_dir() or (_HUB_NAME.fullmatch(source) and path.suffix not in _FILES):
        rows = _HuggingFace(source, split, subset, revision, columns)
    else:
        raise ValueError(
            f"{source!r}: no such file; expected a .jsonl or .parquet file, a folder, or a name on the Hub"
        )
    if not len(rows):
        raise ValueError(f"{source!r} holds no row, expected at least one")
    return rows


def _open_file(file: Path, columns: Sequence[str]) -> DataRows:
    if file.suffix == ".jsonl":
        return _JsonLines(file)
    if file.suffix == ".parquet":
        return _Parquet(file, columns)
    raise ValueError(f"{str(file)!r}: expected a .jsonl or .parquet file, a folder, or a name on the Hub")


class _JsonLines:
    """One JSON object per line. The file is scanned once for its lines, which take 16 bytes of memory each."""

    def __init__(self, file: Path) -> None:
        self._name, self.folder = str(file), file.parent
        try:
            self._file = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise ValueError(f"{self._name}: {error.strerror}; expected a file that can be read") from error
        weakref.finalize(self, os.close, self._file)
        ends: list[np.ndarray] = []
        size = os.fstat(self._file).st_size
        for start in range(0, size, SCAN_BYTES):
            block = np.frombuffer(os.pread(self._file, SCAN_BYTES, start), np.uint8)
            ends.append(np.flatnonzero(block == ord("\n")) + start)
        self._bounds = np.concatenate([[-1], *ends, [size]])
        """The position before the first byte of each line: the end of the line before it."""
        self._lines = np.flatnonzero(np.diff(self._bounds) > 1)
        """Numbers, from 0, of the lines that are not empty."""
        if len(self):
            self[len(self) - 1]  # raises for a truncated file

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> Row:
        start, end = self._bounds[self._lines[number]] + 1, self._bounds[self._lines[number] + 1]
        line = os.pread(self._file, int(end - start), int(start))
        line = line.removeprefix(codecs.BOM_UTF8) if start == 0 else line
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{self.place(number)}: {line[:80]!r} is no JSON in UTF-8, expected an object: {error}"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(f"{self.place(number)}: {line[:80]!r}, expected an object")
        return row

    def place(self, number: int) -> str:
        return f"{self._name}:{self._lines[number] + 1}"


class _Parquet:
    """A Parquet file; a row is read with its row group."""

    def __init__(self, file: Path, columns: Sequence[str]) -> None:
        parquet = _import("pyarrow.parquet", "parquet")
        self._name, self.folder = str(file), file.parent
        try:
            self._file = parquet.ParquetFile(file, memory_map=True)
        except (ValueError, OSError) as error:  # pyarrow's ArrowInvalid is a ValueError
            raise ValueError(f"{self._name}: {error}; expected a whole Parquet file") from error
        metadata = self._file.metadata
        sizes = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        self._starts = [0, *itertools.accumulate(sizes)]
        # If one is missing, rows have all columns, which the message lists.
        names = set(self._file.schema_arrow.names)
        self._columns = tuple(columns) if columns and set(columns) <= names else None

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> Row:
        group = bisect_right(self._starts, number) - 1
        try:
            return _row_group(self._file, group, self._columns).slice(number - self._starts[group], 1).to_pylist()[0]
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.place(number)}: {error}; expected a whole Parquet file") from error

    def place(self, number: int) -> str:
        return f"{self._name}: row {number}"


@functools.lru_cache(ROW_GROUPS_KEPT)
def _row_group(file: Any, number: int, columns: tuple[str, ...] | None) -> Any:
    return file.read_row_group(number, columns=columns)


class _HuggingFace:
    """A memory-mapped data set of the library `datasets`: a folder that `save_to_disk` has written, or one by name."""

    def __init__(
        self, source: str, split: str, subset: str | None, revision: str | None, columns: Sequence[str]
    ) -> None:
        datasets = _import("datasets", "datasets")
        try:
            if (found := Path(source)).is_dir() and any(found.glob("**/dataset_info.json")):
                loaded = datasets.load_from_disk(source)
                loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
            else:
                loaded = datasets.load_dataset(source, subset, split=split, revision=revision)
        except Exception as error:  # the library's own, the Hub's, the system's
            asked = {"subset": subset, "split": split, "revision": revision}
            said = ", ".join(f"{name} = {value!r}" for name, value in asked.items() if value is not None)
            raise ValueError(
                f"{source!r} with {said}: {one_line(f'{type(error).__name__}: {error}')}; expected a folder of .jsonl "
                "or .parquet files, one that `datasets` has saved, or a name on the Hugging Face Hub"
            ) from error
        named = columns and set(columns) <= set(loaded.column_names)
        self._rows = loaded.select_columns(list(columns)) if named else loaded
        self._name, self.folder = f"{source}/{split}", Path(source)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        return self._rows[number]

    def place(self, number: int) -> str:
        return f"{self._name}: row {number}"


class _Joined:
    """Several files, one after another."""

    def __init__(self, parts: Sequence[DataRows]) -> None:
        self._parts, self.folder = parts, parts[0].folder
        self._starts = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> Row:
        part, number = self._found(number)
        return part[number]

    def place(self, number: int) -> str:
        part, number = self._found(number)
        return part.place(number)

    def _found(self, number: int) -> tuple[DataRows, int]:
        part = bisect_right(self._starts, number) - 1
        return self._parts[part], number - self._starts[part]


def _import(module: str, extra: str) -> Any:
    try:
        return __import__(module, fromlist=["_"])
    except ImportError as error:
        raise ValueError(f"{module} cannot be imported ({error}): pip install 'penstock[{extra}]'") from error
