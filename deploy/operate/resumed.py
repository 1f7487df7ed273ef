"""Checks a run that is resumed, before an engine boots. Imports no torch."""

import json
from pathlib import Path

from penstock.deploy.launch.run_folder import RUN_FILE
from penstock.deploy.operate.saved_ledger import CHECKPOINTS, STATE, UnreadableError, read_saved_ledger
from penstock.schemas.adapter import check_identity, identity_of, saved_identity
from penstock.schemas.config import ConfigError, RunConfig, load_config


def check_resumed(config: RunConfig, runs: Path) -> None:
    """Raises ConfigError if the newest checkpoint of a run holds an adapter of another base or other settings than the
    run's, or all weights where the run trains an adapter; or if a teacher's server is new to the run."""
    _check_teacher(config, config.folder(runs) / RUN_FILE)
    try:
        name = read_saved_ledger(config.folder(runs), None).name
        if name is None:
            return
        checkpoint = config.folder(runs) / CHECKPOINTS / name
        state = json.loads((checkpoint / STATE).read_text())
    except (UnreadableError, OSError):
        return  # the trainer reports what is wrong with the checkpoints
    check_identity(saved_identity(state["learner"]), identity_of(config), str(checkpoint))


def _check_teacher(config: RunConfig, run_file: Path) -> None:
    if config.teacher_url is None or not run_file.is_file() or load_config(run_file).teacher_url is not None:
        return
    raise ConfigError(
        f"teacher.url = {config.teacher_url!r}: the run began without a teacher's server, and groups that wait to be "
        "trained lack its logprobs; expected teacher.model, or a new run"
    )
