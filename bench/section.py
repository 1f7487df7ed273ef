"""Sections of the benchmark: their rows, how they are measured, and the processes that measure for them."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import redis

import penstock.consumers.stream.connection
import penstock.producers.stream.connection
from bench.part import TOLD
from bench.result import BenchError, Breakdown, Figure, Result, describe_machine, now
from penstock.deploy.launch.child import Child, describe_status
from penstock.deploy.launch.redis_server import RedisServer
from penstock.producers.weights.host_folder import default_folder
from penstock.schemas.config import load_config

PART_LIMIT_S = 900.0
PART_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
REDIS_ERRORS = (
    redis.RedisError,
    penstock.consumers.stream.connection.RedisGoneError,
    penstock.producers.stream.connection.RedisGoneError,
)


class Bench(NamedTuple):
    """One run of a section, the argument of its rows. folder: scratch."""

    settings: Any
    run_file: Path
    folder: Path


class BenchSection(NamedTuple):
    """A part of the benchmark with tables and a result file of its own.

    rows: by name, each makes its figures and breakdowns. settings: sizes and repetitions; quick: the smallest that show
        that everything runs. uses_run_file: whether a row trains.
    """

    name: str
    rows: Mapping[str, Callable[[Bench], Sequence[Figure | Breakdown]]]
    settings: Any
    quick: Any
    uses_run_file: bool = False


def measure(section: BenchSection, rows: Sequence[str], settings: Any, run_file: Path, work: Path) -> Result:
    """Measures the named rows in order; scratch goes to a folder under `work` that is removed.

    Raises:
        BenchError, ConfigError, PartDied, ServerError: a row could not be measured.
    """
    machine, date, began = describe_machine(), now(), time.monotonic()
    found: list[Figure | Breakdown] = []
    with _scratch(work) as folder:
        for row in rows:
            print(f"{section.name}: {row} ...", flush=True)
            try:
                found += section.rows[row](Bench(settings, run_file, folder))
            except REDIS_ERRORS as error:
                raise BenchError(f"{row}: {error}") from error
    used = {"run_file": os.path.relpath(run_file)} if section.uses_run_file else {}
    return Result(
        section=section.name,
        date=date,
        machine=machine,
        settings={**used, **msgspec.to_builtins(settings)},
        wall_s=time.monotonic() - began,
        figures=tuple(each for each in found if isinstance(each, Figure)),
        breakdowns=tuple(each for each in found if isinstance(each, Breakdown)),
    )


@contextmanager
def _scratch(work: Path) -> Iterator[Path]:
    """Makes a folder under `work`, removed at the end; kept and named if something failed."""
    work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=work)).absolute()
    try:
        yield folder
    except Exception:
        print(f"bench: logs of what failed are in {folder}", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


@contextmanager
def host_folder(name: str) -> Iterator[Path]:
    """Makes a folder where a run keeps the host's copies, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-", dir=default_folder()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def redis_server(folder: Path, *, maxmemory_mb: int = 512) -> Iterator[RedisServer]:
    """Starts a server for one row, its data in `folder`."""
    server = RedisServer(folder, maxmemory_mb=maxmemory_mb)
    try:
        yield server
    finally:
        server.stop()


def measure_apart(
    name: str,
    function: str,
    job: Any,
    result_type: Any,
    folder: Path,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Returns what `function` (see `bench.part`) measures in a process of its own: leftovers of one measurement cannot
    slow down the next. The process ends with this call, however that ends.

    Raises:
        BenchError: it failed, or took longer than `PART_LIMIT_S`.
    """
    wait_for([start_apart(name, function, job, folder, python=python, environment=environment)])
    return found_apart(name, result_type, folder)


class NoPeersError(BenchError):
    """There is no environment of the peers."""


def peers_python() -> str:
    """Returns the interpreter of the environment that `make bench` creates for the peers.

    Raises:
        NoPeersError: it is not there.
    """
    python = f"{os.environ.get('VENV', '.venv')}-peers/bin/python"
    if not Path(python).is_file():
        raise NoPeersError(f"{python} is not there; make bench makes it")
    # Not resolved: the interpreter of an environment is a link, and finds its packages by where the link lies.
    return os.path.abspath(python)


def start_apart(
    name: str,
    function: str,
    job: Any,
    folder: Path,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Starts what `measure_apart` runs; `wait_for` must follow, and then `found_apart` gives what it found."""
    job_file = folder / f"{name}-job.json"
    job_file.write_bytes(msgspec.json.encode(job))
    command = [python, "-m", "bench.part", function, str(job_file), str(folder / f"{name}-result.json")]
    return Child(name, command, log=folder / f"{name}.log", environment=PART_ENVIRONMENT | dict(environment or {}))


def found_apart(name: str, result_type: Any, folder: Path) -> Any:
    return msgspec.json.decode((folder / f"{name}-result.json").read_bytes(), type=result_type)


def wait_for(children: Sequence[Child]) -> None:
    """Waits until all have ended well; all of them end with this call, however that ends.

    Raises:
        BenchError: one failed, or took longer than `PART_LIMIT_S`.
    """
    deadline = time.monotonic() + PART_LIMIT_S
    told = dict.fromkeys(children, 0)
    try:
        while None in (found := [child.poll() for child in children]) and not any(found):
            for child in children:
                told[child] += _tell(child.log, told[child])
            if time.monotonic() > deadline:
                late = children[found.index(None)]
                raise BenchError(f"{late.name}: not done after {PART_LIMIT_S:g} s; {_end_of_log(late)}")
            time.sleep(0.05)
        for child in children:
            _tell(child.log, told[child])
        for child in children:
            if child.returncode:
                raise ended_early(child)
    finally:
        for child in children:
            child.end()


def ended_early(child: Child) -> BenchError:
    """Returns the error for a process that has ended and should not have."""
    return BenchError(f"{child.name} {describe_status(child.returncode or 0)}; {_end_of_log(child)}")


@contextmanager
def started(
    commands: Mapping[str, Sequence[str]], folder: Path, environment: Mapping[str, str]
) -> Iterator[list[Child]]:
    """Runs `python -m COMMAND` for each name, its log in `folder`; all of them end with the block."""
    children: list[Child] = []
    try:
        for name, command in commands.items():
            log = folder / f"{name}.log"
            children.append(Child(name, [sys.executable, "-m", *command], log=log, environment=environment))
        yield children
    finally:
        for child in children:
            child.end()


def _tell(log: Path, start: int) -> int:
    """Prints the lines from `start` on that report a part's progress; returns the bytes of all whole lines there."""
    with log.open("rb") as file:
        file.seek(start)
        lines, _, _ = file.read().rpartition(b"\n")
    for line in lines.splitlines():
        if line.startswith(TOLD.encode()):
            print(line.decode(errors="replace"), flush=True)
    return len(lines) + bool(lines)


def _end_of_log(child: Child) -> str:
    return f"its log ends:\n{child.last_lines()}"


def make_model(folder: Path, **recipe: Any) -> None:
    """Makes the demo's model, or one of another `recipe`, if there is none in `folder`. Raises BenchError."""
    from penstock.deploy.demo import make_model as models

    try:
        models.make_model(folder, models.ModelRecipe(**recipe), progress=lambda line: None)
    except (models.WarmStartError, FileExistsError) as error:
        raise BenchError(f"{folder}: {error}") from error


def run_file_model(bench: Bench) -> Path:
    """Returns the run file's model; makes it if there is none."""
    model = Path(load_config(bench.run_file).model.path)
    if not model.is_dir():
        make_model(model)
    return model
