"""`make bench`: measures Penstock beside what it is built on; tables here, JSON under `deploy/bench/results`."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.bench.pipeline import QUICK, ROWS, RUN_FILE, PipelineSettings, check_run_file, measure_pipeline
from deploy.bench.result import RESULTS, BenchError, Result, print_result, write_result
from deploy.bench.stream import STREAM_ROWS, measure_stream
from deploy.bench.stream_setup import QUICK_STREAM, StreamSettings
from deploy.producer_pool import PartDied
from deploy.redis_server import ServerError
from schemas.config import ConfigError

SECTIONS: dict[str, tuple[Callable[..., Result], tuple[str, ...]]] = {
    "pipeline": (measure_pipeline, tuple(ROWS)),
    "stream": (measure_stream, tuple(STREAM_ROWS)),
}
"""Name of a section to the function that measures it and its rows."""
SETTINGS = {"pipeline": (PipelineSettings(), QUICK), "stream": (StreamSettings(), QUICK_STREAM)}
"""Name of a section to its settings and those of `--quick`."""
WORK = Path("runs") / "bench"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures each section in turn. Exit status 0, goals reached or not; 1 or 2 where nothing was found."""
    arguments = _parser().parse_args(argv)
    # Every row starts a server of its own: a user's Redis is no place for a benchmark.
    os.environ.pop("REDIS_URL", None)
    try:
        check_run_file(arguments.run_file)
        for section in arguments.sections or _sections_of(arguments.only):
            measure, all_rows = SECTIONS[section]
            rows = _chosen_rows(section, all_rows, arguments.only)
            result = measure(rows, SETTINGS[section][arguments.quick], arguments.run_file, WORK)
            print_result(result)
            if not arguments.quick or arguments.output is not None:
                part = () if rows == all_rows else rows
                print(f"\nresult  {write_result(result, arguments.output or RESULTS, rows=part)}")
    except ConfigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except (BenchError, PartDied, ServerError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.bench", description="Measure Penstock beside what it is built on."
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} (default: all)")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="ROW",
        help="measure this row only; repeatable: "
        + "; ".join(f"of {section} {', '.join(rows)}" for section, (_, rows) in SECTIONS.items()),
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds a row: shows that it runs, writes no result"
    )
    parser.add_argument("--run-file", type=Path, default=RUN_FILE, metavar="RUN.toml", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"folder of the results (default: {RESULTS.name})")
    return parser


def _sections_of(only: Sequence[str]) -> list[str]:
    """The sections that have one of these rows; all of them where none has, or where none is asked for."""
    return [section for section, (_, rows) in SECTIONS.items() if set(only) & set(rows)] or list(SECTIONS)


def _chosen_rows(section: str, rows: tuple[str, ...], only: Sequence[str]) -> tuple[str, ...]:
    unknown = set(only) - set(rows)
    if unknown:
        raise ConfigError(f"--only {sorted(unknown)[0]}: no row of {section}; expected one of {', '.join(rows)}")
    return tuple(row for row in rows if not only or row in only)


if __name__ == "__main__":
    sys.exit(main())
