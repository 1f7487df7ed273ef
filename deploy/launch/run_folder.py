"""The folder of one run, used by one launcher at a time, with the resolved run file."""

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from penstock.schemas.config import ConfigError, RunConfig, load_config
from penstock.schemas.process.files import make_private, write_whole
from penstock.schemas.record import FOLDER as RECORD_FOLDER

RUN_FILE = "run.toml"
LOCK_WAIT_S = 10.0


class RunFolder:
    """`runs/<name>/`, readable by its owner only, locked while in use.

    The run's own Redis holds the lock too: it may outlive a killed launcher while it writes its file, and a second
    server must not read that file before.

    Raises:
        ConfigError: `resume` is False and the run exists, `resume` is True and it does not, or it is in use.
    """

    def __init__(self, config: RunConfig, runs: Path, *, resume: bool) -> None:
        self.path = config.folder(runs)
        exists = self.path.exists() and any(self.path.iterdir())
        if exists and not resume:
            raise ConfigError(
                f"name = {config.name!r}: {self.path} exists already; continue that run with --resume, "
                "or choose another name with --name"
            )
        if resume and not (self.path / RUN_FILE).is_file():
            raise ConfigError(f"name = {config.name!r}: nothing to resume, {self.path / RUN_FILE} does not exist")
        make_private(self.path)
        self.lock = self._take_lock()

    def _take_lock(self) -> int:
        """Waits until no other launcher or server of this run holds the lock, `LOCK_WAIT_S` at most."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while (lock := try_lock(self.path)) is None:
            if time.monotonic() > deadline:
                raise ConfigError(f"{self.path}: in use by another `penstock run` of this name")
            time.sleep(0.05)
        return lock

    def save(self, config: RunConfig) -> list[str]:
        """Writes `run.toml` and returns its differences from the previous one, each as `field: old -> new`."""
        file = self.path / RUN_FILE
        differences = _differences(load_config(file), config) if file.is_file() else []
        save_run_file(config, self.path)
        return differences

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.lock)


def save_run_file(config: RunConfig, run_folder: Path) -> None:
    """Writes the resolved configuration to `run.toml`, whole or not at all."""
    make_private(run_folder)
    write_whole(run_folder / RUN_FILE, resolved_toml(config))


def resolved_toml(config: RunConfig) -> str:
    """Returns the configuration as TOML with every default; fields that are not set are comments at the end."""
    document = msgspec.to_builtins(config)
    comments = [f"\n# {path} is not set" for path in _pop_unset(document, "")]
    return tomli_w.dumps(document) + "".join([*comments, "\n"] if comments else [])


def _pop_unset(table: dict[str, Any], prefix: str) -> Iterator[str]:
    """Removes None, which TOML cannot express, and yields the fields' paths."""
    for name, value in list(table.items()):
        if value is None:
            del table[name]
            yield prefix + name
        elif isinstance(value, dict):
            yield from _pop_unset(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            for n, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _pop_unset(item, f"{prefix}{name}[{n}].")


def try_lock(run_folder: Path) -> int | None:
    """Takes the lock that the launcher and the server of a run hold while they live; None if it is taken."""
    lock = os.open(run_folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def find_run_folder(run: str | Path, runs: str | Path) -> Path:
    """Finds a run's folder by the run's name in `runs`, or by its path. Raises ConfigError if there is none."""
    folders = [folder for folder in places_of(run, runs) if folder.is_dir()]
    if not folders:
        raise ConfigError(f"{run}: neither a folder nor a run in {runs}")
    return next((f for f in folders if (f / RECORD_FOLDER).is_dir() or (f / RUN_FILE).is_file()), folders[0])


def places_of(run: str | Path, runs: str | Path) -> tuple[Path, Path]:
    """Returns where a run may be, the likelier place first: a bare name is a run's in `runs`, even if something else in
    the working directory is called the same."""
    named, path = Path(runs) / run, Path(run)
    return (named, path) if path.name == str(run) else (path, named)


def _differences(old: msgspec.Struct, new: msgspec.Struct, path: str = "") -> list[str]:
    """Compares two structs field by field; `path` is what to write before a field's name."""
    found: list[str] = []
    for name in new.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(after, msgspec.Struct) and type(before) is type(after):
            found += _differences(before, after, f"{path}{name}.")
        elif before != after:
            found.append(f"{path}{name}: {before!r} -> {after!r}")
    return found
