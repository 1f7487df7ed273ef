"""The ledger in a run's checkpoints, read from the files."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.consumers.checkpoints.state import LedgerState

CHECKPOINTS = "checkpoints"
STATE = "state.json"
SUMS = "checksums.json"


class UnreadableError(RuntimeError):
    """The ledger of a run cannot be read; the message says why."""


class SavedLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one checkpoint; by default, of a run before its first."""

    policy_version: int = -1
    num_batches: int = 0
    ledger: LedgerState = LedgerState()
    counters: dict[str, int | float] = {}


class FoundLedger(NamedTuple):
    """name: of the checkpoint; None before the first. warnings: one line each."""

    name: str | None
    saved: SavedLedger
    warnings: tuple[str, ...]


def read_saved_ledger(run_folder: Path, pointer: str | None) -> FoundLedger:
    """Reads the ledger of the checkpoint that `pointer` names, or of the newest before it if that is missing or torn.

    Checks the checksum of the state, not those of the weights.

    Raises:
        UnreadableError: there are checkpoints, and none can be read.
    """
    folder = run_folder / CHECKPOINTS
    names = [path.name for path in folder.iterdir() if _version(path.name) is not None] if folder.is_dir() else []
    # A checkpoint with a higher version than the pointer's was never committed.
    names.sort(key=lambda name: (name == pointer, _version(name)), reverse=True)
    warnings = []
    if pointer is not None and pointer in names:
        names = [name for name in names if (_version(name) or 0) <= (_version(pointer) or 0)]
    elif pointer is not None:
        warnings.append(f"checkpoint {pointer}, to which Redis points, is not in {folder}")
    for name in names:
        try:
            return FoundLedger(name, _read(folder / name), tuple(warnings))
        except (OSError, ValueError) as error:
            warnings.append(f"checkpoint {name} cannot be read: {error}")
    if warnings:
        raise UnreadableError("; ".join(warnings))
    return FoundLedger(None, SavedLedger(), ())


def _read(checkpoint: Path) -> SavedLedger:
    """Reads and checks a checkpoint's state. Raises OSError or ValueError (as msgspec's errors are) if it fails."""
    sums = json.loads((checkpoint / SUMS).read_text("utf-8"))
    data = (checkpoint / STATE).read_bytes()
    if not isinstance(sums, dict) or STATE not in sums:
        raise ValueError(f"{SUMS} does not list {STATE}")
    if hashlib.blake2b(data, digest_size=16).hexdigest() != sums[STATE]:
        raise ValueError(f"{STATE}: checksum differs")
    for name in sums:
        if not (checkpoint / name).is_file():
            raise ValueError(f"{name} is missing")
    return msgspec.json.decode(data, type=SavedLedger)


def _version(name: str) -> int | None:
    """Returns the policy version that a checkpoint's name begins with; None if it is no checkpoint."""
    version = name.partition("-")[0]
    return int(version) if version.isdigit() and "-" in name else None
