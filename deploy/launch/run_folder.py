"""The folder of one run: claimed by one launcher at a time, with the resolved run file in it."""

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from penstock.deploy.launch.start_checks import resolved_toml
from penstock.schemas.config import ConfigError, RunConfig, load_config

RUN_FILE = "run.toml"
_LOCK_WAIT_S = 10.0


class RunFolder:
    """`runs/<name>/`, locked while in use.

    The run's own Redis holds the lock too: it may outlive a killed launcher by the moment it needs to write its file
    out, and a second server must not read that file before.

    Raises:
        ConfigError: the run exists and is not to be resumed, does not exist and is, or is in use.
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
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._take_lock()
        except BaseException:
            os.close(self.lock)
            raise

    def _take_lock(self) -> None:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"{self.path}: in use by another `penstock run` of this name") from None
                time.sleep(0.05)

    def save(self, config: RunConfig) -> list[str]:
        """Writes `run.toml`; returns what differs from the one that was there, one `field: old -> new` each."""
        file = self.path / RUN_FILE
        differences = list(_differences(load_config(file), config)) if file.is_file() else []
        save_run_file(config, self.path)
        return differences

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.lock)


def save_run_file(config: RunConfig, run_folder: Path) -> None:
    """Writes the resolved configuration to `run.toml`, whole or not at all."""
    run_folder.mkdir(parents=True, exist_ok=True)
    partial = run_folder / (RUN_FILE + ".partial")
    partial.write_text(resolved_toml(config))
    partial.replace(run_folder / RUN_FILE)


def _differences(old: object, new: object, path: str = "") -> list[str]:
    found: list[str] = []
    for name in getattr(type(new), "__struct_fields__", ()):
        before, after = getattr(old, name), getattr(new, name)
        where = f"{path}{name}"
        if before == after:
            continue
        if type(before) is type(after) and hasattr(type(after), "__struct_fields__"):
            found += _differences(before, after, where + ".")
        else:
            found.append(f"{where}: {before!r} -> {after!r}")
    return found
