"""Checkpoints: the only acknowledgement there is. Written whole, fsynced, checked by checksum when read."""

import contextlib
import hashlib
import json
import logging
import os
import random
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError

from penstock.schemas.process.files import make_private

log = logging.getLogger(__name__)

_SUMS = "checksums.json"
_NAME = re.compile(r"\d+-[0-9a-f]+")
MODEL_FOLDER = "model"
"""In each checkpoint, and in the folder of a run that is complete."""
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
)


class CheckpointError(RuntimeError):
    """No checkpoint can be used; the message says why, for each."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written. Nothing of it is left, and those before it stay."""


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a trainer continues from, beside model and optimizer."""

    policy_version: int
    num_batches: int
    ledger: dict[str, Any]
    forks: dict[int, int]
    announced: dict[int, int]
    counters: dict[str, int | float]
    """Running totals of the whole run: tokens, seconds."""
    rng: dict[str, Any] = {}
    """Random generators beside the learner's own: Python's and NumPy's global ones."""
    taken: dict[int, int] = {}
    """By epoch of the trainers on the way here, the batches taken when it ended, those before it included: the
    places at which the record of rollouts is cut."""

    @classmethod
    def new(cls, policy_version: int) -> "CheckpointState":
        """The state of a run that has trained nothing yet. policy_version: the parent of the first policy."""
        return cls(policy_version=policy_version, num_batches=0, ledger={}, forks={}, announced={}, counters={})


class Checkpoints:
    """The checkpoint folder of a run: `<version>-<unique>/` each, and one `epoch-<n>` file per trainer.

    The tokenizer of `base_model` goes into each checkpoint, so that its `model/` can be served as it is. The folder is
    made by the first trainer that claims an epoch: one that only stands by leaves no trace of a run.
    """

    def __init__(self, folder: Path, keep: int, base_model: Path | None = None) -> None:
        self._folder = folder
        self._base_model = base_model
        self._keep = keep
        self._committed: list[str] = []
        self._obsolete: set[str] = set()
        """Folders that were there when the last checkpoint was written."""

    def claim_epoch(self, at_least: int) -> int:
        """Creates the file of a new epoch, above every epoch that the disk or Redis (`at_least`) knows."""
        make_private(self._folder.parent)
        self._folder.mkdir(exist_ok=True)
        epoch = max(at_least, self.newest_epoch() + 1)
        while True:
            try:
                os.close(os.open(self._folder / f"epoch-{epoch}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                epoch += 1
                continue
            _fsync(self._folder)
            return epoch

    def newest_epoch(self) -> int:
        """The newest epoch that any trainer claimed here; -1 if none did."""
        return max((int(file.name[6:]) for file in self._folder.glob("epoch-*")), default=-1)

    @property
    def pointer(self) -> str | None:
        """The newest committed checkpoint that this trainer knows."""
        return self._committed[-1] if self._committed else None

    def write(self, learner: Any, state: CheckpointState) -> str:
        """Writes and fsyncs a checkpoint under a unique name, which is returned. Nothing points to it yet.

        Raises:
            CheckpointWriteError: the disk is full, say.
        """
        name = f"{state.policy_version}-{uuid.uuid4().hex[:8]}"
        partial = self._folder / f"partial-{name}"
        try:
            self._write(partial, learner, state)
            partial.rename(self._folder / name)
            _fsync(self._folder)
        except (OSError, SafetensorError) as error:
            for folder in (partial, self._folder / name):
                shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointWriteError(f"checkpoint {self._folder / name} cannot be written: {error}") from error
        # Listed before the commit: what a newer trainer writes once this one is fenced is never deleted here.
        self._obsolete = {folder.name for folder in self._folder.iterdir() if folder.is_dir()}
        return name

    def _write(self, partial: Path, learner: Any, state: CheckpointState) -> None:
        partial.mkdir()
        learner.save_model(partial / MODEL_FOLDER)
        self._copy_tokenizer(partial / MODEL_FOLDER)
        _save(learner.state_dict(), partial / "learner.pt")
        (partial / "state.json").write_bytes(msgspec.json.encode(state))
        sums = {}
        for file in sorted(path for path in partial.rglob("*") if path.is_file()):
            sums[str(file.relative_to(partial))] = _digest(file)
            _fsync(file)
        (partial / _SUMS).write_text(json.dumps(sums))
        _fsync(partial / _SUMS)
        for folder in [*(path for path in partial.rglob("*") if path.is_dir()), partial]:
            _fsync(folder)

    def _copy_tokenizer(self, folder: Path) -> None:
        if self._base_model is None:
            return
        for pattern in _TOKENIZER_FILES:
            for file in self._base_model.glob(pattern):
                shutil.copyfile(file, folder / file.name)

    def committed(self, name: str) -> None:
        """Notes that Redis points to `name`, and deletes all but the last committed of those that were there when it
        was written."""
        self._committed.append(name)
        self._committed = self._committed[-self._keep :]
        for obsolete in self._obsolete.difference(self._committed):
            shutil.rmtree(self._folder / obsolete, ignore_errors=True)

    def hand_out_model(self) -> Path:
        """Puts the model of the newest committed checkpoint into the run's folder, in place of an earlier one; returns
        where. Weights are links where the disk has them: they take no room, and outlive the checkpoint.

        Raises:
            OSError: the disk is full, say.
        """
        folder = self._folder.parent / MODEL_FOLDER
        partial = folder.with_name(f"partial-{MODEL_FOLDER}")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self._folder / self._committed[-1] / MODEL_FOLDER, partial, copy_function=_link_weights)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        return folder

    def load(self, pointer: str | None, learner: Any) -> CheckpointState | None:
        """Loads the checkpoint that `pointer` names, or its newest valid predecessor; None if there never was one.

        Raises:
            CheckpointError: a checkpoint was committed, and neither it nor a predecessor is here and whole.
        """
        names = sorted(
            (folder.name for folder in self._folder.iterdir() if _NAME.fullmatch(folder.name)),
            key=lambda name: (name == pointer, int(name.partition("-")[0])),
            reverse=True,
        )
        if pointer is not None and pointer not in names:
            if not names:
                # Another machine, or the wrong folder: to start anew would lose the run silently.
                raise CheckpointError(
                    f"{self._folder}: holds no checkpoint, but {pointer} was committed; expected the folder that the "
                    "run's trainers share"
                )
            log.warning("checkpoint %s was committed and is missing", self._folder / pointer)
        elif pointer is not None:
            newest = int(pointer.partition("-")[0])
            names = [name for name in names if int(name.partition("-")[0]) <= newest]
        problems = []
        for name in names:
            folder = self._folder / name
            problem = _problem(folder)
            if problem:
                log.warning("checkpoint %s cannot be used: %s", folder, problem)
                problems.append(f"{name}: {problem}")
                continue
            state = _restore(folder, learner)
            older = [other for other in reversed(names) if other != name]
            self._committed = [*older[1 - self._keep :], name]
            return state
        if problems:
            raise CheckpointError(f"{self._folder}: no checkpoint is whole: {'; '.join(problems)}")
        return None


def load_checkpoint(folder: Path, learner: Any) -> CheckpointState:
    """Loads one checkpoint, whoever points to it.

    Raises:
        CheckpointError: there is none in `folder`, or it is not whole.
    """
    read_state(folder)
    return _restore(folder, learner)


def read_state(folder: Path) -> CheckpointState:
    """The state in a checkpoint, whose model is left where it is. Raises CheckpointError as `load_checkpoint` does."""
    problem = _problem(folder)
    if problem:
        raise CheckpointError(f"{folder}: no whole checkpoint: {problem}")
    return _state(folder)


def _state(folder: Path) -> CheckpointState:
    return msgspec.json.decode((folder / "state.json").read_bytes(), type=CheckpointState)


def _restore(folder: Path, learner: Any) -> CheckpointState:
    state = _state(folder)
    learner.load_model(folder / MODEL_FOLDER)
    learner.load_state_dict(torch.load(folder / "learner.pt", map_location="cpu", weights_only=True))
    return state


def rng_state() -> dict[str, Any]:
    """The state of Python's and NumPy's global generators, as JSON takes it."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": [name, np.asarray(keys).tolist(), *rest]}


def restore_rng(state: dict[str, Any]) -> None:
    """Sets the generators to the result of `rng_state`, which may have been through JSON."""
    if state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _save(state: dict[str, Any], file: Path) -> None:
    try:
        with file.open("wb") as stream:
            torch.save(state, stream)
    except RuntimeError as error:
        # torch turns a full disk into this: it fails on the position at which the write stopped.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _problem(folder: Path) -> str | None:
    """The reason why a checkpoint cannot be used, or None."""
    try:
        sums = json.loads((folder / _SUMS).read_text())
    except (OSError, ValueError) as error:
        return f"{_SUMS}: {error}"
    for name, expected in sums.items():
        file = folder / name
        try:
            if _digest(file) != expected:
                return f"{name}: checksum differs"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name}: {error}"
    return None if "state.json" in sums else "state.json is not listed"


def _link_weights(source: str, target: str) -> None:
    """A hard link for weights, a copy of small files: whoever edits those must not change the checkpoint."""
    if source.endswith(".safetensors"):
        with contextlib.suppress(OSError):  # a file system without links
            return os.link(source, target)
    shutil.copyfile(source, target)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
