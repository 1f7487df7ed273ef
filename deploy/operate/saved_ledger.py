"""The ledger in a run's checkpoints, read from the files."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.consumers.checkpoints.checkpoints import CHECKPOINTS, STATE, names_from, problem_of
from penstock.consumers.checkpoints.state import CheckpointState

NOTHING_SAVED = CheckpointState(policy_version=-1)
"""The state of a run before its first checkpoint."""


class UnreadableError(RuntimeError):
    """The ledger of a run cannot be read; the message says why."""


class SavedLedger(NamedTuple):
    """name: of the checkpoint; None before the first. warnings: one line each."""

    name: str | None
    state: CheckpointState
    warnings: tuple[str, ...]


def read_saved_ledger(run_folder: Path, pointer: str | None) -> SavedLedger:
    """Reads the ledger of the checkpoint that `pointer` names, or of the newest before it if that is missing or torn.

    Checks the checksum of the state, not those of the weights.

    Raises:
        UnreadableError: there are checkpoints, and none can be read.
    """
    folder = run_folder / CHECKPOINTS
    names, warnings = names_from(folder, pointer), []
    if pointer is not None and pointer not in names:
        warnings.append(f"checkpoint {pointer}, to which Redis points, is not in {folder}")
    for name in names:
        problem = problem_of(folder / name, state_only=True)
        if problem is None:
            try:
                state = msgspec.json.decode((folder / name / STATE).read_bytes(), type=CheckpointState)
                return SavedLedger(name, state, tuple(warnings))
            except (OSError, ValueError) as error:  # deleted meanwhile, or of another version
                problem = str(error)
        warnings.append(f"checkpoint {name} cannot be read: {problem}")
    if warnings:
        raise UnreadableError("; ".join(warnings))
    return SavedLedger(None, NOTHING_SAVED, ())
