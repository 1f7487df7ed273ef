"""Checks a run that is resumed, before an engine boots. Imports no torch."""

import math
from collections.abc import Iterator
from pathlib import Path

from penstock.consumers.checkpoints.checkpoints import CHECKPOINTS
from penstock.consumers.learning.model.schedule import learning_rate
from penstock.deploy.launch.run_folder import RUN_FILE
from penstock.deploy.operate.saved_ledger import UnreadableError, read_saved_ledger
from penstock.schemas.adapter import check_identity, identity_of, saved_identity
from penstock.schemas.config import ConfigError, RunConfig, load_config

ADAMW = "torch.optim:AdamW"
"""The optimizer of a run that names none."""


def check_resumed(config: RunConfig, runs: Path) -> list[str]:
    """Returns warnings about a run that continues with other settings.

    Raises:
        ConfigError: the newest checkpoint holds an adapter of another base or other settings than the run's, or all
            weights where the run trains an adapter, or another optimizer's state; or groups that wait to be trained
            would be refused, since they lack what is asked for now.
    """
    run_file = config.folder(runs) / RUN_FILE
    before = load_config(run_file) if run_file.is_file() else config
    _check_waiting(config, before)
    try:
        saved = read_saved_ledger(config.folder(runs), None)
    except UnreadableError:
        return []  # the trainer reports what is wrong with the checkpoints
    if saved.name is None:
        return []
    learner, num_batches = saved.state.learner, saved.state.num_batches
    if config.warm_start != before.warm_start and num_batches:
        raise ConfigError(
            f"warm_start: it comes before the first update, and the run has made {num_batches}; expected it unchanged"
        )
    optimizers = [each.trainer.optimizer.path if each.trainer.optimizer else ADAMW for each in (before, config)]
    if optimizers[0] != optimizers[1] and learner["num_steps"]:
        raise ConfigError(
            f"trainer.optimizer: {optimizers[1]}, and the checkpoint has the state of {optimizers[0]}; expected it "
            "unchanged, or a new run of the model of this one"
        )
    check_identity(saved_identity(learner), identity_of(config), str(config.folder(runs) / CHECKPOINTS / saved.name))
    return list(_rate_changes(before, config, learner["num_steps"]))


def _rate_changes(before: RunConfig, after: RunConfig, step: int) -> Iterator[str]:
    """Says how the learning rate jumps where the schedule has another length; one that was set anew is meant."""
    rates = learning_rate(before, step), learning_rate(after, step)
    if before.trainer.learning_rate == after.trainer.learning_rate and not math.isclose(*rates, rel_tol=0.01):
        yield (
            f"trainer.decay = {after.trainer.decay!r} falls over {after.num_steps_planned} optimizer steps now, over "
            f"{before.num_steps_planned} before: the learning rate of the next one, {step + 1}, is {rates[1]:.2g} in "
            f"place of {rates[0]:.2g}; a lower trainer.learning_rate, or decay = 'constant', avoids a jump"
        )


def _check_waiting(config: RunConfig, before: RunConfig) -> None:
    """Raises ConfigError for settings by which groups of the run so far, which wait to be trained, would be refused."""
    if config.teacher_url is not None and before.teacher_url is None:
        raise ConfigError(
            f"teacher.url = {config.teacher_url!r}: the run began without a teacher's server, and groups that wait to "
            "be trained lack its logprobs; expected teacher.model, or a new run"
        )
    asked, had = config.sampling.top_logprobs, before.sampling.top_logprobs
    for name, now, was, is_refused in (
        ("group_size", config.group_size, before.group_size, config.group_size < before.group_size),
        ("sampling.top_logprobs", asked, had, asked not in (0, had)),
        ("model.replay_routes", True, False, config.model.replay_routes and not before.model.replay_routes),
    ):
        if is_refused:
            raise ConfigError(
                f"{name} = {now}: the run had {was} so far, and groups that wait to be trained have no other; expected "
                "it unchanged, or a new run"
            )
