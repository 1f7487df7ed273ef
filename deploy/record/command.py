"""`penstock record export RUN FILE`: the record of rollouts for pandas, polars or DuckDB."""

import argparse
from pathlib import Path

from penstock.deploy.launch.command_line import Command, add_run


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "name of a run with record = true, or its folder")
    parser.add_argument("file", type=Path, metavar="FILE.parquet", help="a row per segment of a rollout; overwritten")


def _export(arguments: argparse.Namespace) -> int:
    from penstock.deploy.record.reading import export_record

    num_rows = export_record(arguments.run, arguments.file, runs=arguments.runs)
    print(f"{arguments.file}: {num_rows:,} rows")
    return 0


COMMAND = Command("record export", "write a run's recorded rollouts to a Parquet file", _add_arguments, _export)
