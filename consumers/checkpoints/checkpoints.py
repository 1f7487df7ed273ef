"""Checkpoints, the only acknowledgement: written whole, fsynced, verified by checksum when read."""

import json
import logging
import math
import random
import re
import shutil
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError

from penstock.consumers.checkpoints.model_folder import (
    MODEL_FOLDER,
    TENSORS_FOLDER,
    Export,
    copy_model_files,
    export_checkpoint,
)
from penstock.consumers.checkpoints.state import CheckpointState
from penstock.schemas.process.files import digest, fsync, make_private

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Their folder in a run's."""
STATE = "state.json"
_SUMS = "checksums.json"
_NAME = re.compile(r"\d+-[0-9a-f]+")


class CheckpointError(RuntimeError):
    """No checkpoint can be used; the message says why, for each."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written. It was removed; earlier ones remain."""


class Checkpoints:
    """The checkpoint folder of a run: `<version>-<unique>/` each, and one `epoch-<n>` file per trainer, which holds the
    run's id.

    Configuration and tokenizer of `base_model` are copied into each checkpoint, so that it is a complete model. The
    first trainer that claims an epoch creates the folder: a standby trainer alone leaves no trace of a run.
    """

    def __init__(self, folder: Path, keep: int, base_model: Path | None = None) -> None:
        self._folder = folder
        self._base_model = base_model
        self._keep = keep
        self._committed: list[str] = []
        self._obsolete: set[str] = set()
        """Folders that existed when the last checkpoint was written."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._abandoned = threading.Event()

    def claim_epoch(self, at_least: int, run_id: str = "") -> int:
        """Creates the file of a new epoch, above every epoch on disk or in Redis (`at_least`); returns the epoch."""
        make_private(self._folder.parent)
        self._folder.mkdir(exist_ok=True)
        epoch = max(at_least, self.newest_epoch() + 1)
        while True:
            try:
                with (self._folder / f"epoch-{epoch}").open("x", encoding="utf-8") as file:
                    file.write(run_id)
            except FileExistsError:
                epoch += 1
                continue
            fsync(self._folder / f"epoch-{epoch}")
            fsync(self._folder)
            return epoch

    def run_id(self) -> str:
        """Returns the id of the run whose trainers have claimed epochs here; empty if none has."""
        return max((file.read_text("utf-8") for file in self._folder.glob("epoch-*")), key=len, default="")

    def newest_epoch(self) -> int:
        """Returns the newest epoch that any trainer has claimed here; -1 if none has."""
        return max((int(file.name[6:]) for file in self._folder.glob("epoch-*")), default=-1)

    @property
    def pointer(self) -> str | None:
        """The newest committed checkpoint that this trainer knows."""
        return self._committed[-1] if self._committed else None

    def begin(self, learner: Any, state: CheckpointState) -> Future[str]:
        """Takes a snapshot of the learner and writes it with `state`, in a thread, under a unique name: the future's
        result once everything is on disk. Nothing points to it yet. One checkpoint at a time.

        Raises:
            CheckpointWriteError: for example, the disk is full; raised here or by the future.
        """
        name = f"{state.policy_version}-{uuid.uuid4().hex[:8]}"
        try:
            (self._folder / f"partial-{name}").mkdir()
        except OSError as error:
            raise self._write_error(name, error) from error
        content = msgspec.json.encode(state)  # now: the counts move on
        tensors = learner.begin_checkpoint(self._folder / f"partial-{name}" / TENSORS_FOLDER)
        return self._thread.submit(self._write, name, content, tensors)

    def abandon(self) -> None:
        """Discards the checkpoint that is being written, unless it is already whole. For a trainer that ends and can no
        longer commit it. Waits for the write to end; the disk unblocks it."""
        self._abandoned.set()
        self._thread.shutdown()

    def _write(self, name: str, content: bytes, tensors: Future[dict[str, str]]) -> str:
        partial = self._folder / f"partial-{name}"
        try:
            sums = {f"{TENSORS_FOLDER}/{file}": found for file, found in tensors.result().items()}
            (partial / STATE).write_bytes(content)
            (partial / MODEL_FOLDER).mkdir()
            if self._base_model is not None:
                copy_model_files(self._base_model, partial / MODEL_FOLDER)
            for file in (partial / STATE, *(partial / MODEL_FOLDER).iterdir()):
                sums[str(file.relative_to(partial))] = digest(file)
                fsync(file)
            (partial / _SUMS).write_text(json.dumps(sums), encoding="utf-8")
            for path in (partial / _SUMS, *(path for path in partial.iterdir() if path.is_dir()), partial):
                fsync(path)
            if self._abandoned.is_set():
                raise OSError("the trainer ends and cannot commit it")
            partial.rename(self._folder / name)
            fsync(self._folder)
        except (OSError, SafetensorError) as error:
            for folder in (partial, self._folder / name):
                shutil.rmtree(folder, ignore_errors=True)
            raise self._write_error(name, error) from error
        # Listed before the commit: what a newer trainer writes once this one is fenced is never deleted here.
        self._obsolete = {folder.name for folder in self._folder.iterdir() if folder.is_dir()}
        return name

    def _write_error(self, name: str, error: Exception) -> CheckpointWriteError:
        return CheckpointWriteError(f"checkpoint {self._folder / name} cannot be written: {error}")

    def committed(self, name: str) -> None:
        """Notes that Redis points to `name`. Of the checkpoints that existed when it was written, deletes all but the
        last `keep` committed ones."""
        self._committed.append(name)
        self._committed = self._committed[-self._keep :]
        for obsolete in self._obsolete.difference(self._committed):
            shutil.rmtree(self._folder / obsolete, ignore_errors=True)

    def hand_out_model(self, export: Export) -> Path:
        """Exports the model of the newest committed checkpoint to the run's folder, in place of an earlier one; returns
        its path.

        Raises:
            OSError: for example, the disk is full.
        """
        folder = self._folder.parent / MODEL_FOLDER
        export_checkpoint(self._folder / self._committed[-1], folder, "float32", export)
        return folder

    def load(self, pointer: str | None, learner: Any) -> CheckpointState | None:
        """Loads the checkpoint that `pointer` names, or its newest valid predecessor; returns None if there never was
        one.

        Raises:
            CheckpointError: a checkpoint was committed, and neither it nor a predecessor is present and whole.
        """
        names = names_from(self._folder, pointer)
        if pointer is not None and pointer not in names:
            if not names:
                # Another machine, or the wrong folder: starting over would silently lose the run.
                raise CheckpointError(
                    f"{self._folder}: holds no checkpoint, but {pointer} was committed; expected the folder that the "
                    "run's trainers share"
                )
            log.warning("checkpoint %s was committed and is missing", self._folder / pointer)
        problems = []
        for name in names:
            folder = self._folder / name
            problem = problem_of(folder)
            if problem:
                log.warning("checkpoint %s cannot be used: %s", folder, problem)
                problems.append(f"{name}: {problem}")
                continue
            state = _state(folder)
            learner.load_checkpoint(folder / TENSORS_FOLDER, state.learner)
            older = [other for other in reversed(names) if other != name]
            self._committed = [*older[1 - self._keep :], name]
            return state
        if problems:
            raise CheckpointError(f"{self._folder}: no checkpoint is whole: {'; '.join(problems)}")
        return None


def load_checkpoint(folder: Path, learner: Any) -> CheckpointState:
    """Loads one checkpoint, whether or not Redis points to it.

    Raises:
        CheckpointError: there is none in `folder`, or it is not whole.
    """
    state = read_state(folder)
    learner.load_checkpoint(folder / TENSORS_FOLDER, state.learner)
    return state


def read_state(folder: Path) -> CheckpointState:
    """Reads a checkpoint's state without its model. Raises CheckpointError as `load_checkpoint` does."""
    problem = problem_of(folder)
    if problem:
        raise CheckpointError(f"{folder}: no whole checkpoint: {problem}")
    return _state(folder)


def names_from(folder: Path, pointer: str | None = None) -> list[str]:
    """Returns the names of a folder's checkpoints, the newest first: `pointer`, and its predecessors by their version
    (one of a higher version was never committed). All if it is None or missing."""
    names = [path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    newest = version_of(pointer) if pointer is not None and pointer in names else math.inf
    kept = (name for name in names if version_of(name) <= newest)
    return sorted(kept, key=lambda name: (name == pointer, version_of(name)), reverse=True)


def version_of(name: str) -> int:
    """Returns the policy version in a checkpoint's name."""
    return int(name.partition("-")[0])


def _state(folder: Path) -> CheckpointState:
    return msgspec.json.decode((folder / STATE).read_bytes(), type=CheckpointState)


def rng_state() -> dict[str, Any]:
    """Returns the state of Python's and NumPy's global generators, as JSON-compatible values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": [name, np.asarray(keys).tolist(), *rest]}


def restore_rng(state: dict[str, Any]) -> None:
    """Sets the generators to a state of `rng_state`, which may have been converted to JSON and back."""
    if state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def problem_of(folder: Path, *, state_only: bool = False) -> str | None:
    """Returns the reason why a checkpoint cannot be used, or None. state_only: other files need only be there."""
    try:
        sums = dict(json.loads((folder / _SUMS).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        return f"{_SUMS}: {error}"
    for name, expected in sums.items():
        file = folder / name
        try:
            if state_only and name != STATE:
                file.stat()
            elif digest(file) != expected:
                return f"{name}: checksum differs"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name}: {error}"
    if STATE not in sums:
        return f"{STATE} is not listed"
    if not state_only and not any(name.startswith(f"{TENSORS_FOLDER}/") for name in sums):
        return f"it has no {TENSORS_FOLDER}/: another version of penstock wrote it, in a form that is not read any more"
    return None
