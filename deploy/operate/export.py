"""`penstock export`: a checkpoint of a run as a Hugging Face folder, or an adapter as peft's."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from penstock.consumers.checkpoints.checkpoints import (
    CHECKPOINTS,
    CheckpointError,
    names_from,
    read_state,
    version_of,
)
from penstock.consumers.checkpoints.model_folder import Export, export_checkpoint
from penstock.consumers.learning.model.export import export_adapter, export_kept, export_merged, export_model
from penstock.deploy.launch.command_line import DEFAULT_RUNS
from penstock.deploy.operate.run_access import OpenRun, open_run
from penstock.deploy.operate.saved_ledger import UnreadableError, read_saved_ledger
from penstock.schemas.adapter import saved_identity
from penstock.schemas.best import BEST_FOLDER, read_best
from penstock.schemas.config import ConfigError, Dtype
from penstock.schemas.keys import Commit


def export(
    run: str | Path,
    folder: str | Path,
    *,
    checkpoint: str | int | None = None,
    dtype: Dtype | None = None,
    merged: bool = False,
    base: str | Path | None = None,
    runs: str | Path = DEFAULT_RUNS,
) -> str:
    """Exports a checkpoint to `folder`, which is new or empty: as a Hugging Face model, or as peft's adapter of a run
    with `[lora]`. Prints its progress. Returns the checkpoint's name.

    checkpoint: its policy version or name, or "best" for the model of the best evaluation; by default the newest that
        is committed.
    dtype: by default float32, as checkpoints hold the weights, and for "best" the run's `model.dtype`.
    merged: exports the whole model in place of an adapter, added to the base model in `base`, by default where the run
        had it.

    Raises:
        ConfigError: `folder` is not empty; the checkpoint does not exist or is incomplete; `merged` or `base` does not
            fit it.
        OSError: a file cannot be read or written.
    """
    wanted, model = None if checkpoint is None else str(checkpoint), None if base is None else Path(base)
    with open_run(run, runs) as opened:
        return export_from(opened, wanted, Path(folder), dtype, partial(print, flush=True), merged=merged, base=model)


def export_from(
    run: OpenRun,
    wanted: str | None,
    folder: Path,
    dtype: str | None,
    progress: Callable[[str], None],
    *,
    merged: bool = False,
    base: Path | None = None,
) -> str:
    """Exports the checkpoint `wanted` of an opened run; see `export`."""
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        raise ConfigError(f"{folder}: exists already; expected a new or an empty folder")
    if run.folder is None:
        raise ConfigError(f"{run.name}: its folder is not on this machine, and its checkpoints are in it")
    make: Export = partial(export_model, progress=progress)
    if wanted == BEST_FOLDER:
        checkpoint, make = run.folder / BEST_FOLDER, partial(export_kept, progress=progress)
        best = read_best(checkpoint)
        if best is None:
            raise ConfigError(f"--checkpoint best: {checkpoint} is not there; expected a run that has checkpoint.best")
        adapter, dtype = best.adapter, dtype or best.dtype
    else:
        checkpoint = _find(run, run.folder, wanted)
        progress(f"checking {checkpoint}")
        try:
            adapter = saved_identity(read_state(checkpoint).learner)
        except CheckpointError as error:
            raise ConfigError(f"{error}; expected another one: {_there(run.folder)}") from None
    if adapter is None and (merged or base is not None):
        raise ConfigError(f"{'--merged' if merged else '--base'}: {checkpoint} holds all weights; expected no option")
    if base is not None and not merged:
        raise ConfigError(f"--base {base}: an adapter is exported without its base; expected --merged with it")
    if adapter is not None:
        make = partial(export_adapter, adapter, progress=progress)
        if merged:
            make = partial(export_merged, adapter, base or Path(adapter.base), progress=progress)
    export_checkpoint(checkpoint, folder, dtype or "float32", make)
    return checkpoint.name


def _find(run: OpenRun, run_folder: Path, wanted: str | None) -> Path:
    checkpoints = run_folder / CHECKPOINTS
    pointer: Any = None if run.client is None else run.client.hget(run.keys.commit, Commit.CHECKPOINT)
    committed = None if pointer is None else pointer.decode()
    if wanted is None:
        try:
            name = read_saved_ledger(run_folder, committed).name
        except UnreadableError as error:
            raise ConfigError(f"{checkpoints}: no checkpoint is whole: {error}") from None
        if name is None:
            raise ConfigError(f"{checkpoints}: run {run.name} has no checkpoint yet")
        return checkpoints / name
    names = [name for name in names_from(checkpoints) if wanted in (name, str(version_of(name)))]
    if committed in names:
        return checkpoints / committed
    if len(names) != 1:
        found = f"is {' and '.join(names)}" if names else "is not there"
        raise ConfigError(f"--checkpoint {wanted}: {found}; expected a policy version or a name: {_there(run_folder)}")
    return checkpoints / names[0]


def _there(run_folder: Path) -> str:
    return ", ".join(reversed(names_from(run_folder / CHECKPOINTS))) or "there is none"
