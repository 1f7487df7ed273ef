"""The check of a run that is continued, before an engine boots. Imports no torch."""

import json
from pathlib import Path

from penstock.deploy.operate.saved_ledger import CHECKPOINTS, STATE, UnreadableError, read_saved_ledger
from penstock.schemas.adapter import check_identity, identity_of, saved_identity
from penstock.schemas.config import RunConfig


def check_resumed(config: RunConfig, runs: Path) -> None:
    """Raises ConfigError if the newest checkpoint of a run holds an adapter of another base or other settings than the
    run's, or all weights for an adapter."""
    try:
        name = read_saved_ledger(config.folder(runs), None).name
        if name is None:
            return
        checkpoint = config.folder(runs) / CHECKPOINTS / name
        state = json.loads((checkpoint / STATE).read_text())
    except (UnreadableError, OSError):
        return  # the trainer says what is wrong with them
    check_identity(saved_identity(state["learner"]), identity_of(config), str(checkpoint))
