"""`make bench`: measures Penstock beside what it is built on; tables here, JSON under `bench/results`."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.deploy.launch.producer_pool import PartDied
from penstock.deploy.launch.redis_server import ServerError
from penstock.schemas.config import ConfigError

from bench.endpoint import ENDPOINT_ROWS, QUICK_ENDPOINT, EndpointSettings, measure_endpoint
from bench.head import HEAD_ROWS, QUICK_HEAD, HeadSettings, measure_head
from bench.head_chart import draw_head
from bench.pipeline import QUICK, ROWS, RUN_FILE, PipelineSettings, check_run_file, measure_pipeline
from bench.result import RESULTS, BenchError, Result, print_result, write_result
from bench.stream import STREAM_ROWS, measure_stream
from bench.stream_setup import QUICK_STREAM, StreamSettings

DOCS = Path(__file__).parent.parent / "docs"
WORK = Path("runs") / "bench"


class BenchSection(NamedTuple):
    """measure: called with (rows, settings, run file, folder for scratch). draw: makes the picture of a full result."""

    measure: Callable[[Sequence[str], Any, Path, Path], Result]
    rows: tuple[str, ...]
    settings: Any
    quick: Any
    draw: Callable[[Result, Path], None] | None = None


SECTIONS = {
    "pipeline": BenchSection(measure_pipeline, tuple(ROWS), PipelineSettings(), QUICK),
    "stream": BenchSection(measure_stream, tuple(STREAM_ROWS), StreamSettings(), QUICK_STREAM),
    "head": BenchSection(measure_head, tuple(HEAD_ROWS), HeadSettings(), QUICK_HEAD, draw_head),
    "endpoint": BenchSection(measure_endpoint, tuple(ENDPOINT_ROWS), EndpointSettings(), QUICK_ENDPOINT),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures each section in turn. Exit status 0, goals reached or not; 1 or 2 where nothing was found."""
    arguments = _parser().parse_args(argv)
    # Every row starts a server of its own: a user's Redis is no place for a benchmark.
    os.environ.pop("REDIS_URL", None)
    try:
        chosen = _chosen(arguments.sections, arguments.only)
        if {"pipeline", "stream"} & set(chosen):
            check_run_file(arguments.run_file)
        for name, rows in chosen.items():
            section = SECTIONS[name]
            settings = section.quick if arguments.quick else section.settings
            result = section.measure(rows, settings, arguments.run_file, WORK)
            print_result(result)
            if not arguments.quick or arguments.output is not None:
                _keep(section, result, rows, arguments.output)
    except ConfigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except (BenchError, PartDied, ServerError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _keep(section: BenchSection, result: Result, rows: tuple[str, ...], output: Path | None) -> None:
    """Writes the result file, and the picture where every row was measured."""
    is_full = rows == section.rows
    print(f"\nresult  {write_result(result, output or RESULTS, rows=() if is_full else rows)}")
    if section.draw is not None and is_full:
        picture = (output or DOCS) / f"{result.section}.svg"
        section.draw(result, picture)
        print(f"picture {picture}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Penstock beside what it is built on.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} (default: all)")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="ROW",
        help="measure this row only; repeatable: "
        + "; ".join(f"{', '.join(section.rows)} ({name})" for name, section in SECTIONS.items()),
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds a row: shows that it runs, writes no result"
    )
    parser.add_argument("--run-file", type=Path, default=RUN_FILE, metavar="RUN.toml", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"folder of the results (default: {RESULTS.name})")
    return parser


def _chosen(sections: Sequence[str], only: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The rows to measure, by section; a section without a row named is left out where rows are."""
    for name in sections:
        if name not in SECTIONS:
            raise ConfigError(f"{name}: no section; expected {', '.join(SECTIONS)}")
    names = list(dict.fromkeys(sections)) or list(SECTIONS)
    known = [row for name in names for row in SECTIONS[name].rows]
    for row in only:
        if row not in known:
            raise ConfigError(f"--only {row}: no row of {', '.join(names)}; expected one of {', '.join(known)}")
    rows = {name: tuple(row for row in SECTIONS[name].rows if not only or row in only) for name in names}
    return {name: chosen for name, chosen in rows.items() if chosen}


if __name__ == "__main__":
    sys.exit(main())
