"""Checkpoints: the only acknowledgement there is. Written whole, fsynced, checked by checksum when read."""

import hashlib
import json
import logging
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import msgspec
import torch

log = logging.getLogger(__name__)

_SUMS = "checksums.json"
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
)


class CheckpointError(RuntimeError):
    """No checkpoint can be used; the message says what was found wrong with each."""


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer must know, beside model and optimizer, to continue."""

    policy_version: int
    num_batches: int
    ledger: dict[str, Any]
    forks: dict[int, int]
    announced: dict[int, int]
    counters: dict[str, int | float]
    """Running totals of the whole run: tokens, seconds."""


class Checkpoints:
    """The checkpoint folder of a run: `<version>-<unique>/` each, and one `epoch-<n>` file per trainer.

    The tokenizer of `base_model` goes into each checkpoint, so that its `model/` can be served as it is.
    """

    def __init__(self, folder: Path, keep: int, base_model: Path | None = None) -> None:
        self._folder = folder
        self._base_model = base_model
        self._keep = keep
        self._committed: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def claim_epoch(self, at_least: int) -> int:
        """Creates the file of a new epoch, above every epoch that the disk or Redis (`at_least`) knows."""
        epoch = max([at_least, *(int(file.name[6:]) + 1 for file in self._folder.glob("epoch-*"))])
        while True:
            try:
                os.close(os.open(self._folder / f"epoch-{epoch}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                epoch += 1
                continue
            _fsync(self._folder)
            return epoch

    def write(self, learner: Any, state: CheckpointState) -> str:
        """Writes and fsyncs a checkpoint under a unique name, which is returned. Nothing points to it yet."""
        name = f"{state.policy_version}-{uuid.uuid4().hex[:8]}"
        partial = self._folder / f"partial-{name}"
        partial.mkdir()
        learner.save_model(partial / "model")
        self._copy_tokenizer(partial / "model")
        torch.save(learner.state_dict(), partial / "learner.pt")
        (partial / "state.json").write_bytes(msgspec.json.encode(state))
        sums = {}
        for file in sorted(path for path in partial.rglob("*") if path.is_file()):
            sums[str(file.relative_to(partial))] = _digest(file)
            _fsync(file)
        (partial / _SUMS).write_text(json.dumps(sums))
        _fsync(partial / _SUMS)
        for folder in [*(path for path in partial.rglob("*") if path.is_dir()), partial]:
            _fsync(folder)
        partial.rename(self._folder / name)
        _fsync(self._folder)
        return name

    def _copy_tokenizer(self, folder: Path) -> None:
        if self._base_model is None:
            return
        for pattern in _TOKENIZER_FILES:
            for file in self._base_model.glob(pattern):
                shutil.copyfile(file, folder / file.name)

    def committed(self, name: str) -> None:
        """Notes that Redis points to `name`, and deletes all but the last committed ones."""
        self._committed.append(name)
        self._committed = self._committed[-self._keep :]
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder.name not in self._committed:
                shutil.rmtree(folder, ignore_errors=True)

    def load(self, pointer: str | None, learner: Any) -> CheckpointState | None:
        """Loads the checkpoint that `pointer` names, or its newest valid predecessor; None where there is none at all.

        Raises:
            CheckpointError: there are checkpoints, and none is whole.
        """
        names = sorted(
            (folder.name for folder in self._folder.iterdir() if folder.is_dir() and folder.name[0].isdigit()),
            key=lambda name: (name == pointer, int(name.partition("-")[0])),
            reverse=True,
        )
        if pointer in names:
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
            state = msgspec.json.decode((folder / "state.json").read_bytes(), type=CheckpointState)
            learner.load_model(folder / "model")
            learner.load_state_dict(torch.load(folder / "learner.pt", weights_only=True))
            older = [other for other in reversed(names) if other != name]
            self._committed = [*older[1 - self._keep :], name]
            return state
        if problems:
            raise CheckpointError(f"{self._folder}: no checkpoint is whole: {'; '.join(problems)}")
        return None


def _problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        sums = json.loads((folder / _SUMS).read_text())
    except (OSError, ValueError) as error:
        return f"{_SUMS}: {error}"
    for name, expected in sums.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if _digest(file) != expected:
            return f"{name}: checksum differs"
    return None if "state.json" in sums else "state.json is not listed"


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
