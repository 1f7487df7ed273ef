"""Runs work on several ranks, each a process over gloo, as torchrun would start them."""

import os
import pickle
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forked_programs import PYTHONPATH, ForkedProgram, start_program

_PROGRAM = "import sys; from rank_processes import work; work(*sys.argv[1:])"


def on_ranks(
    size: int, function: Callable[..., Any], *arguments: Any, folder: Path, statuses: Sequence[int] | None = None
) -> list[Any]:
    """Returns the results of `function(ranks, watch, *arguments)`, one per rank. The function is looked up by name, so
    it must be in a module of doubles; arguments and results are pickled. statuses: expected of the ranks, default 0."""
    with ranks_running(size, function, *arguments, folder=folder) as processes:
        found = [process.wait(timeout=600) for process in processes]
    if found != list(statuses or [0] * size):
        raise AssertionError(f"statuses {found}\n" + "\n".join(log_of(folder, rank) for rank in range(size)))
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in _results(folder, size)]


def command_on_ranks(size: int, words: Sequence[str], folder: Path) -> list[int]:
    """Runs a `penstock` command as `size` ranks, as torchrun would; returns their statuses. `log_of` has the output."""
    folder.mkdir()
    program = "import sys; from penstock.deploy import cli; sys.exit(cli.main())"
    with _running(size, program, words, folder, {}) as processes:
        return [process.wait(timeout=600) for process in processes]


@contextmanager
def ranks_running(
    size: int, function: Callable[..., Any], *arguments: Any, folder: Path, timeout_s: float = 60.0
) -> Iterator[list[subprocess.Popen | ForkedProgram]]:
    """Starts ranks and yields their processes; kills them at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "work").write_bytes(pickle.dumps((function, arguments)))
    with _running(size, _PROGRAM, [str(folder)], folder, {"RANK_TIMEOUT_S": str(timeout_s)}) as processes:
        yield processes


@contextmanager
def _running(
    size: int, program: str, words: Sequence[str], folder: Path, settings: dict[str, str]
) -> Iterator[list[subprocess.Popen | ForkedProgram]]:
    """Runs ranks with a store in this process, as torchrun's agent does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        **settings,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PYTHONPATH,
    }
    processes = [
        start_program(
            program,
            list(words),
            {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            folder / f"rank-{rank}.log",
            fresh=False,
        )
        for rank in range(size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def log_of(folder: Path, rank: int) -> str:
    """Returns the output of a rank."""
    return (folder / f"rank-{rank}.log").read_text()


def work(folder: str) -> None:
    """Runs the pickled work; called in a rank's process."""
    import torch

    from penstock.consumers.distributed.watch import Watch, leave_process
    from penstock.consumers.distributed.world import World
    from penstock.consumers.learning.ranks import Ranks
    from penstock.schemas.process import logs

    torch.set_num_threads(1)
    logs.configure("trainer", run="test", id=os.environ["RANK"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    function, arguments = pickle.loads((Path(folder) / "work").read_bytes())
    ranks, watch = Ranks(), None
    if size > 1:
        timeout_s = float(os.environ["RANK_TIMEOUT_S"])
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
        ranks = World(store, rank, size, torch.device("cpu"), timeout_s)
        watch = Watch(ranks, store, timeout_s)
    try:
        result = function(ranks, watch, *arguments)
        _results(Path(folder), size)[rank].write_bytes(pickle.dumps(result))
    except Exception as error:
        if watch is None:
            raise
        watch.leave(error)
        leave_process(1)
    if watch is not None:
        leave_process(0)


def _results(folder: Path, size: int) -> list[Path]:
    return [folder / f"result-{rank}" for rank in range(size)]
