"""Sections of the benchmark: their rows, how they are measured, and the processes that measure for them."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import redis

import penstock.consumers.stream.connection
import penstock.producers.stream.connection
from bench.result import BenchError, Figure, Result, describe_machine, now
from penstock.deploy.launch.child import Child, describe_status
from penstock.deploy.launch.redis_server import RedisServer
from penstock.producers.weights.host_folder import default_folder

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


WORK = Path("runs") / "bench"


class Bench(NamedTuple):
    """One run of a section, the argument of its rows. folder: scratch."""

    settings: Any
    folder: Path


class BenchSection(NamedTuple):
    """A part of the benchmark with a table and a result file of its own.

    rows: by name, each makes its figures. settings: sizes and repetitions; quick: the smallest that show that it runs,
        and whose figures mean nothing.
    """

    name: str
    rows: Mapping[str, Callable[[Bench], Iterable[Figure]]]
    settings: Any
    quick: Any


def measure(section: BenchSection, rows: Sequence[str], settings: Any, work: Path = WORK) -> Result:
    """Measures the named rows in order; scratch goes to a folder under `work` that is removed.

    Raises:
        BenchError, ConfigError, PartDied, ServerError: a row could not be measured.
    """
    machine, date, began = describe_machine(), now(), time.monotonic()
    figures: list[Figure] = []
    with _scratch(work) as folder:
        for row in rows:
            print(f"{section.name}: {row} ...", flush=True)
            try:
                figures += section.rows[row](Bench(settings, folder))
            except REDIS_ERRORS as error:
                raise BenchError(f"{row}: {error}") from error
    return Result(
        section=section.name,
        date=date,
        machine=machine,
        settings=msgspec.to_builtins(settings),
        wall_s=time.monotonic() - began,
        figures=tuple(figures),
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
    limit_s: float = PART_LIMIT_S,
) -> Any:
    """Returns what `function` (see `bench.part`) measures in a process of its own: leftovers of one measurement cannot
    slow down the next. The process ends with this call, however that ends.

    Raises:
        BenchError: it failed, or took longer than `limit_s`.
    """
    wait_for([start_apart(name, function, job, folder, python=python, environment=environment)], limit_s)
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


def wait_for(children: Sequence[Child], limit_s: float = PART_LIMIT_S) -> None:
    """Waits until all have ended well; all of them end with this call, however that ends.

    Raises:
        BenchError: one failed, or took longer than `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    try:
        while None in (statuses := [child.poll() for child in children]) and not any(statuses):
            if time.monotonic() > deadline:
                late = children[statuses.index(None)]
                raise BenchError(f"{late.name}: not done after {limit_s:g} s; log:\n{late.last_lines()}")
            time.sleep(0.05)
        for child in children:
            if child.returncode:
                raise ended_early(child)
    finally:
        for child in children:
            child.end()


def ended_early(child: Child) -> BenchError:
    """Returns the error for a process that has ended and should not have."""
    return BenchError(f"{child.name} {describe_status(child.returncode or 0)}; its log ends:\n{child.last_lines()}")


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
