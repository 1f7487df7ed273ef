"""What several commands share: arguments with their help, the way to a run file, output, threads."""

import os
import sys
import threading
from collections.abc import Callable, Coroutine
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from cyclopts import Parameter

from penstock.schemas.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
DEFAULT_RUNS = Path("runs")
MODULES_PATH = "PENSTOCK_MODULES_PATH"
"""Environment variable of a run's parts: the module search path of the program that started them."""
_UNBOUNDED = 100_000


Run = Annotated[str, Parameter(help="name of a run, or its folder")]
Runs = Annotated[Path, Parameter(name="--runs", help="folder of all runs")]
RunFile = Annotated[Path, Parameter(help="a run file, the name of one that is shipped, or recipe:NAME")]
RECIPE = "recipe:"
Set = Annotated[
    tuple[str, ...],
    Parameter(name="--set", help="override a field, as in trainer.learning_rate=1e-5; may be repeated"),
]
Json = Annotated[bool, Parameter(name="--json", help="print JSON for a machine")]


def print_result(result: Any, print_text: Callable[[Any], object], as_json: bool) -> None:
    """Prints the result of a command, as JSON if that is asked for."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
    else:
        print_text(result)


def find_run_file(given: Path) -> Path:
    """Returns `given`, or the run file that ships with Penstock under this name, as `demo` or `recipe:gsm8k`. Raises
    ConfigError for a bare name that is neither a file nor a shipped run file."""
    if given.is_file() or given.suffix or len(given.parts) != 1:
        return given
    shipped = recipes() if given.name.startswith(RECIPE) else shipped_run_files()
    if given.name not in shipped:
        raise ConfigError(f"{given}: no such file; expected a run file or one of those shipped: {', '.join(shipped)}")
    return shipped[given.name]


def shipped_run_files() -> dict[str, Path]:
    """Finds the run files that are installed with Penstock, by name."""
    return {file.stem: file for file in _run_files("runs/*.toml")}


def recipes() -> dict[str, Path]:
    """Finds the run files of the installed recipes, by name, as `recipe:gsm8k`."""
    return {RECIPE + file.parent.name: file for file in _run_files("recipes/*/run.toml")}


def _run_files(pattern: str) -> list[Path]:
    return sorted(Path(str(resources.files("penstock.deploy"))).glob(pattern))


def standard_output() -> "Console":
    """Makes a console on standard output. If that is no terminal and COLUMNS is unset, lines are not wrapped: names and
    paths stay whole."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=_UNBOUNDED)


def check_environment() -> None:
    """Raises ConfigError for a folder of prometheus_client that does not exist: making the first metric would fail."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"PROMETHEUS_MULTIPROC_DIR = {folder!r}: no such folder; expected it to be unset")


def num_ranks_started() -> int:
    """Returns the number of ranks that torchrun has started, of which this process is one; 1 without torchrun. Raises
    ConfigError for a WORLD_SIZE that is left over from something else."""
    size = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if size != "1" and (missing or not size.isdecimal()):
        told = f" without {', '.join(missing)}" if missing else ""
        raise ConfigError(
            f"WORLD_SIZE = {size!r}{told}: expected it to be unset, or all that torchrun sets; trainer.num_processes "
            "starts several ranks without it"
        )
    return int(size)


def limit_threads(count: int) -> None:
    """Bounds the thread pools of numeric libraries, which read these variables when they are first imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ[name] = str(count)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def run_as_ranks(num_processes: int, hand_to: Callable[[Callable[[], None]], None] = lambda stop: None) -> int:
    """Runs this command line as `num_processes` ranks on this machine; returns their exit status."""
    from penstock.consumers.distributed.start import launch

    return launch(num_processes, [sys.executable, "-m", "penstock.deploy.cli", *sys.argv[1:]], hand_to)


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in a new event loop, in another thread if this one runs a loop already, as in a
    notebook. Ctrl-C cancels it."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor, wait

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    cancel: list[Callable[[], object]] = []
    is_interrupted = threading.Event()

    async def cancellable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        cancel.append(lambda: task and loop.call_soon_threadsafe(task.cancel))
        if is_interrupted.is_set() and task:
            task.cancel()
        return await coroutine

    with ThreadPoolExecutor(1) as thread:
        thread.submit(int).result()  # starts the thread: Ctrl-C during its start would leave it running unwatched
        try:
            running = thread.submit(asyncio.run, cancellable())
            while not wait([running], 1.0).done:  # with a timeout: a signal just before a wait does not interrupt it
                pass
            return running.result()
        except KeyboardInterrupt:
            is_interrupted.set()
            for each in cancel:
                each()
            raise
