"""`make bench`, `make gpu-check`: measures Penstock against what it is built on; prints tables, writes JSON under
`bench/results`."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.endpoint.section import ENDPOINT
from bench.gpu.section import GPU
from bench.head.section import HEAD
from bench.pipeline.section import PIPELINE
from bench.result import RESULTS, BenchError, print_result, write_result
from bench.section import WORK, measure
from bench.stream.section import STREAM
from bench.trainer.section import TRAINER
from bench.weights.section import WEIGHTS
from penstock.deploy.launch.producer_pool import PartDied
from penstock.deploy.launch.redis_server import ServerError
from penstock.schemas.config import ConfigError

SECTIONS = {section.name: section for section in (PIPELINE, WEIGHTS, STREAM, HEAD, ENDPOINT, TRAINER, GPU)}
BY_DEFAULT = [name for name in SECTIONS if name != GPU.name]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures each section in turn. Exit status 0, also if goals are missed unless `--check`; 1 for a failure, 2 for
    unusable input."""
    arguments = _parser().parse_args(argv)
    # Every row starts a server of its own: a benchmark never writes into a user's Redis.
    os.environ.pop("REDIS_URL", None)
    missed = []
    try:
        for name, rows in choose_rows(arguments.sections, arguments.only).items():
            section = SECTIONS[name]
            settings = section.quick if arguments.quick else section.settings
            if section is TRAINER and arguments.seeds is not None:
                real = msgspec.structs.replace(settings.real, seeds=tuple(range(1, arguments.seeds + 1)))
                settings = msgspec.structs.replace(settings, real=real)
            result = measure(section, rows, settings, WORK)
            print_result(result)
            missed += [figure.name for figure in result.figures if figure.reached is False]
            if not arguments.quick or arguments.output is not None:
                named = () if rows == tuple(section.rows) else rows
                device = short_name(result.machine["gpu"]) if section is GPU else ""
                print(f"\nresult  {write_result(result, arguments.output or RESULTS, rows=named, device=device)}")
    except ConfigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except (BenchError, PartDied, ServerError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return int(arguments.check and bool(missed))


def short_name(device: str) -> str:
    """Returns `h100-80gb-hbm3` for `NVIDIA H100 80GB HBM3, 86 GB, driver 580.65`, for a file's name."""
    name = device.partition(",")[0].lower().removeprefix("nvidia ")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure Penstock against what it is built on."
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} (default: all but {GPU.name})"
    )
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
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds of the row real (default: 3)")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a figure misses its goal")
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"folder of the results (default: {RESULTS.name})")
    return parser


def choose_rows(sections: Sequence[str], only: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the rows to measure by section; if rows are named, sections without one are left out."""
    for name in sections:
        if name not in SECTIONS:
            raise ConfigError(f"{name}: no section; expected {', '.join(SECTIONS)}")
    names = list(dict.fromkeys(sections)) or BY_DEFAULT
    known = [row for name in names for row in SECTIONS[name].rows]
    for row in only:
        if row not in known:
            raise ConfigError(f"--only {row}: no row of {', '.join(names)}; expected one of {', '.join(known)}")
    rows = {name: tuple(row for row in SECTIONS[name].rows if not only or row in only) for name in names}
    return {name: chosen for name, chosen in rows.items() if chosen}


if __name__ == "__main__":
    sys.exit(main())
