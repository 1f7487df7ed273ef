"""Lists the runs in a folder by the files that each leaves there, without Redis."""

import os
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from penstock.deploy.launch.command_line import DEFAULT_RUNS
from penstock.deploy.launch.run_folder import RUN_FILE, try_lock

_TAIL_BYTES = 1 << 18
"""More than two lines of updates.jsonl."""


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. reward: mean of the last batch. time_s: of the last update, else of the run's start."""

    name: str
    state: str
    """`running`, `finished`, `stopped`; `parts` if it is not finished and `penstock run` has not started it; else why
    its folder cannot be read."""
    model: str = ""
    num_updates: int = 0
    num_updates_wanted: int = 0
    reward: float | None = None
    time_s: float | None = None


def list_runs(runs: str | Path = DEFAULT_RUNS) -> list[ListedRun]:
    """Lists the runs whose folders are in `runs`, the latest first."""
    found = [run for run in map(_listed, Path(runs).glob("*/")) if run is not None]
    return sorted(found, key=lambda run: (run.time_s or 0.0, run.name), reverse=True)


def _listed(folder: Path) -> ListedRun | None:
    try:
        file = folder / RUN_FILE
        if not file.is_file():
            return None
        settings = tomllib.loads(file.read_text("utf-8"))
        last = _last_line(folder / "updates.jsonl")
        return ListedRun(
            name=folder.name,
            state=_state(folder),
            model=str(settings["model"]["path"]),
            num_updates=int(last.get("update", 0)),
            num_updates_wanted=int(settings["num_updates"]),
            reward=last.get("reward"),
            time_s=float(last.get("time_s", file.stat().st_mtime)),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:  # a run file or a line of another release, say
        reason = error.strerror if isinstance(error, OSError) else None
        return ListedRun(name=folder.name, state=f"unreadable: {reason or repr(error)}")


def _state(folder: Path) -> str:
    has_launcher = (folder / "lock").exists()
    if has_launcher:
        lock = try_lock(folder)
        if lock is None:
            return "running"
        os.close(lock)
    ledger = folder / "trainer.json"
    if ledger.is_file() and msgspec.json.decode(ledger.read_bytes())["finished"]:
        return "finished"
    return "stopped" if has_launcher else "parts"


def _last_line(file: Path) -> dict[str, Any]:
    """Reads the last complete JSON line; returns an empty dict without one."""
    if not file.is_file():
        return {}
    with file.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = stream.read().rpartition(b"\n")[0].splitlines()
    for line in reversed(lines):
        try:
            found: dict[str, Any] = msgspec.json.decode(line, type=dict)
            return found
        except msgspec.DecodeError:  # torn by a kill
            continue
    return {}
