"""`penstock record export RUN FILE`: the record of rollouts for pandas, polars or DuckDB."""

import argparse
import importlib.util
from pathlib import Path

from penstock.deploy.launch.command_line import Command, add_run
from penstock.schemas.config import ConfigError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "name of a run with record = true, or its folder")
    parser.add_argument("file", type=Path, metavar="FILE.parquet", help="a row per segment of a rollout; overwritten")


def _export(arguments: argparse.Namespace) -> int:
    from penstock.deploy.launch.run_folder import find_run_folder
    from penstock.schemas.record import RecordReadError
    from penstock.schemas.record_reader import Record

    if arguments.file.suffix != ".parquet":
        raise ConfigError(f"{arguments.file}: expected a file name that ends in .parquet")
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            "record export: pyarrow is not installed; expected the extra: pip install 'penstock[parquet]'"
        )
    from penstock.deploy.record.parquet import write_parquet

    try:
        record = Record(find_run_folder(arguments.run, arguments.runs))
        num_rows = write_parquet(record, arguments.file)
    except RecordReadError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{arguments.file}: cannot be written: {error}") from None
    for note in record.notes:
        print(f"record: {note}")
    print(f"{arguments.file}: {num_rows:,} rows")
    return 0


COMMAND = Command("record export", "write a run's recorded rollouts to a Parquet file", _add_arguments, _export)
