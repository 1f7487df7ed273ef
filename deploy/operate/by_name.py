"""The operator's commands as functions of a run: its name in `runs`, or its folder. A Redis of the run's own that is
down is started for the call.

All raise ConfigError if there is no such run, and ServerError if its Redis cannot be reached.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from penstock.deploy.launch.command_line import DEFAULT_RUNS
from penstock.deploy.operate import audit as auditing
from penstock.deploy.operate import dead_letters, producer_list, weight_list
from penstock.deploy.operate.run_access import open_run
from penstock.schemas.config import ConfigError


def audit(run: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> auditing.Audit:
    """Finds where each released index of a run is; `balanced` says whether all are accounted for. Raises
    UnreadableError if no checkpoint is whole."""
    with open_run(str(run), Path(runs)) as opened:
        return auditing.audit(opened)


def list_dead(run: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> list[dead_letters.Letter]:
    """Lists the dead letters of a run: what died, when and of what."""
    with open_run(str(run), Path(runs)) as opened:
        return dead_letters.list_letters(opened)


def show_dead(run: str | Path, index: int, *, runs: str | Path = DEFAULT_RUNS) -> list[dead_letters.Content]:
    """Reads the letters of one task index with prompt, completions and traceback. Raises ConfigError if it has none."""
    with open_run(str(run), Path(runs)) as opened:
        return dead_letters.show_letters(opened, index)


def requeue_dead(
    run: str | Path,
    indexes: Sequence[int] = (),
    *,
    reason: str | None = None,
    every: bool = False,
    runs: str | Path = DEFAULT_RUNS,
) -> dead_letters.RequeueResult:
    """Requests another release of dead task indexes: these, those that died of `reason`, or every one.

    Raises:
        ConfigError: not one of the three is given, an index did not die, or the run is finished.
    """
    if sum((bool(indexes), reason is not None, every)) != 1:
        raise ConfigError("dead requeue: expected one of INDEX..., --reason R and --all")
    with open_run(str(run), Path(runs)) as opened:
        return dead_letters.requeue(opened, indexes=indexes, reason=reason, every=every)


def list_producers(run: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> producer_list.Producers:
    """Lists the producers of a run with their policies and rates, and claims whose producer is gone."""
    with open_run(str(run), Path(runs)) as opened:
        return producer_list.list_producers(opened)


def list_weights(run: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> weight_list.LogContent:
    """Lists the policies in a run's weight log, and the producers that hold each."""
    with open_run(str(run), Path(runs)) as opened:
        return weight_list.list_weights(opened)


def export(
    run: str | Path,
    folder: str | Path,
    *,
    checkpoint: str | int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    merged: bool = False,
    base: str | Path | None = None,
    runs: str | Path = DEFAULT_RUNS,
) -> str:
    """Exports a checkpoint to `folder`, which is new or empty: as a Hugging Face model, or as peft's adapter of a run
    with `[lora]`. Prints its progress. Returns the checkpoint's name.

    checkpoint: its policy version or name, or "best" for the model of the best evaluation; by default the newest that
        is committed.
    merged: exports the whole model in place of an adapter, added to the base model in `base`, by default where the run
        had it.

    Raises:
        ConfigError: `folder` is not empty; the checkpoint does not exist or is incomplete; `merged` or `base` does not
            fit it.
        OSError: a file cannot be read or written.
    """
    from penstock.deploy.operate import export as exporting  # imports torch

    wanted, model = None if checkpoint is None else str(checkpoint), None if base is None else Path(base)
    with open_run(str(run), Path(runs)) as opened:
        return exporting.export(
            opened, wanted, Path(folder), dtype, lambda line: print(line, flush=True), merged=merged, base=model
        )
