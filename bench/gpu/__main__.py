"""`make gpu-check`: checks a GPU machine against what is expected of it; prints a table, writes JSON under
`bench/results`."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from bench.gpu.section import GPU
from bench.result import RESULTS, print_result, write_result
from bench.section import measure
from penstock.deploy.launch.machine import read_machine
from penstock.schemas.config import ConfigError

RUN_FILE = Path(__file__).parents[2] / "deploy" / "runs" / "demo.toml"
WORK = Path("runs") / "bench"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if every figure that was measured reaches its goal, 1 if one misses it or a row fails,
    2 without a GPU. The only goal of `--toy` is that no row fails."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Measure Penstock on one GPU.")
    parser.add_argument("--only", action="append", choices=list(GPU.rows), help="measure this row only; repeatable")
    parser.add_argument(
        "--toy", action="store_true", help="tiny sizes on the CPU: shows that it runs, writes no result"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    os.environ.pop("REDIS_URL", None)  # every row starts a server of its own
    rows = [name for name in GPU.rows if name in (arguments.only or GPU.rows)]
    try:
        device = "cpu" if arguments.toy else _device()
        settings = GPU.quick if arguments.toy else GPU.settings
        result = measure(GPU, rows, settings, RUN_FILE, WORK)
    except ConfigError as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 2
    result = replace(result, machine=result.machine | {"gpu": device})
    print_result(result)
    if not arguments.toy:
        named = () if rows == list(GPU.rows) else tuple(rows)
        print(f"\nresult  {write_result(result, arguments.output, rows=named, device=short_name(device))}")
    missed = [figure for figure in result.figures if figure.reached is False]
    return int(any(not arguments.toy or figure.measured is None for figure in missed))


def _device() -> str:
    """Describes the first GPU that torch uses. Raises ConfigError: there is none."""
    gpus = read_machine().gpus
    if not gpus or not torch.cuda.is_available():
        raise ConfigError("torch finds no CUDA device; expected an NVIDIA GPU, or --toy")
    return f"{gpus[0].name}, {gpus[0].total_bytes / 1e9:.0f} GB, driver {gpus[0].driver}"


def short_name(device: str) -> str:
    """Returns `h100-80gb-hbm3` for `NVIDIA H100 80GB HBM3, 86 GB, driver 580.65`, for a file's name."""
    name = device.partition(",")[0].lower().removeprefix("nvidia ")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


if __name__ == "__main__":
    sys.exit(main())
