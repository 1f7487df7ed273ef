"""Runs one cell: `penstock run` as a process of its own, then reads its run folder."""

import fcntl
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.ablation.plan import AblationCell, AblationPlan
from bench.ablation.results import CURVES, SOMETIMES, AblationResult
from bench.experiments.experiment import CellFailedError
from penstock.deploy.launch.child import Child, describe_status
from penstock.deploy.launch.progress import Progress
from penstock.deploy.report.telemetry import read_telemetry
from penstock.schemas.config import ConfigError

TICK_S = 0.2


def run_cell(
    plan: AblationPlan,
    cell: AblationCell,
    runs: Path,
    *,
    gpu: bool,
    on_update: Callable[[int], None] = lambda number: None,
) -> AblationResult:
    """Runs the cell from its beginning; an unfinished run of it is removed.

    Waits for `penstock run`, which ends by itself. A KeyboardInterrupt is passed on to it; it then stops in order.

    Args:
        runs: folder of the ablation's runs.
        on_update: called with the number of updates done.

    Raises:
        CellFailedError: the run ended before it was finished.
        ConfigError: another process runs this cell.
    """
    folder = runs / cell.name
    remove_run(folder)
    command = [sys.executable, "-m", "penstock.deploy.cli", "run", str(plan.run_file)]
    command += ["--name", cell.name, "--runs", str(runs)]
    for override in plan.overrides(cell, gpu=gpu):
        command += ["--set", override]
    log = runs / f"{cell.name}.log"
    log.unlink(missing_ok=True)
    environment = plan.arm(cell.arm).environment
    child = Child(cell.name, command, log=log, environment=environment, death_signal=signal.SIGTERM)
    progress = Progress(folder)
    try:
        while child.poll() is None:
            time.sleep(TICK_S)
            progress.poll()
            if progress.update is not None:
                on_update(progress.update.update)
    except KeyboardInterrupt:
        child.send(signal.SIGINT)
        while child.poll() is None:
            time.sleep(TICK_S)
        raise
    if child.returncode != 0:
        raise CellFailedError(
            f"cell {cell.name}: `penstock run` {describe_status(child.returncode or 0)}; the end of {log}:\n"
            f"{child.last_lines()}"
        )
    run = read_telemetry(folder)
    result = AblationResult.of_run(cell, plan.settings(cell, gpu=gpu), run)
    for name, curve in result.curves.items():
        if name not in SOMETIMES and all(value is None for value in curve):
            raise CellFailedError(
                f"cell {cell.name}: no update of {folder} has {CURVES[name]!r}; expected objective.path to be "
                "'bench.ablation.objective:GspoWithClipRate'"
            )
    return result


def remove_run(folder: Path) -> None:
    """Removes the folder of an earlier run of a cell.

    Raises:
        ConfigError: it is in use.
    """
    if not folder.exists():
        return
    lock_file = folder / "lock"
    if not lock_file.exists():
        raise ConfigError(f"{folder}: no folder of a run; expected one, or nothing there")
    with lock_file.open("r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: in use by another `penstock run`") from None
        shutil.rmtree(folder)
