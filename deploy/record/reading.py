"""A run's record as a table in memory, or as a Parquet file."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.deploy.launch.command_line import DEFAULT_RUNS
from penstock.deploy.launch.run_folder import find_run_folder
from penstock.schemas.config import ConfigError
from penstock.schemas.record import RecordReadError
from penstock.schemas.record_reader import Record

if TYPE_CHECKING:
    import pyarrow as pa


def load_record(run: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> "pa.Table":
    """Loads the record of the run of this name in `runs`, or in the folder `run`, as a whole: a row per segment of a
    rollout, with the columns that docs/record.md lists. Prints what is missing or undone.

    Raises:
        ConfigError: no such run, it has no record or one that cannot be read, or pyarrow is not installed.
    """
    with _record(run, runs) as record:
        import pyarrow as pa

        from penstock.deploy.record.parquet import COLUMNS, tables

        return pa.concat_tables([COLUMNS.empty_table(), *tables(record)])


def export_record(run: str | Path, file: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> int:
    """Writes the record as a Parquet file, batch by batch; returns the number of rows. Otherwise as `load_record`.

    Raises:
        ConfigError: as `load_record`, or the file's name does not end in .parquet, or it cannot be written.
    """
    file = Path(file)
    if file.suffix != ".parquet":
        raise ConfigError(f"{file}: expected a file name that ends in .parquet")
    with _record(run, runs) as record:
        from penstock.deploy.record.parquet import write_parquet

        try:
            return write_parquet(record, file)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be written: {error}") from None


@contextmanager
def _record(run: str | Path, runs: str | Path) -> Iterator[Record]:
    """Opens a run's record; prints its notes at the end.

    Raises:
        ConfigError: see `load_record`.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            "record export: pyarrow is not installed; expected the extra: pip install 'penstock[parquet]'"
        )
    try:
        record = Record(find_run_folder(run, runs))
        yield record
    except RecordReadError as error:
        raise ConfigError(str(error)) from None
    for note in record.notes:
        print(f"record: {note}")
