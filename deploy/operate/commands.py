"""`penstock list`, `audit`, `dead`, `producers`, `weights`, `export`, `push` and `record export`: each is a function of
the package, with its output printed."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from penstock.deploy.launch.command_line import DEFAULT_RUNS, Json, Run, Runs, print_result
from penstock.schemas.config import Dtype

DeadIndex = Annotated[int, Parameter(help="the task index that died (`dead list` shows them)")]

dead = App("dead", help="List, show or requeue the dead letters of a run.")
record = App("record", help="Export the record of a run's rollouts.")


def list_(*, runs: Runs = DEFAULT_RUNS, json: Json = False) -> None:
    """List the runs on this machine, the latest first."""
    from penstock.deploy.operate.run_list import list_runs
    from penstock.deploy.operate.tables import print_runs

    if not (listed := list_runs(runs)):
        print(f"penstock: no run in {runs}", file=sys.stderr)
    print_result(listed, print_runs, json)


def audit(run: Run, /, *, runs: Runs = DEFAULT_RUNS, json: Json = False) -> int:
    """Show where each released index of a run is. Status 1 when one is not, 2 if the run cannot be audited."""
    import redis

    from penstock.deploy.launch.redis_server import ServerError
    from penstock.deploy.operate.audit import audit
    from penstock.deploy.operate.saved_ledger import UnreadableError
    from penstock.deploy.operate.tables import print_audit

    try:
        result = audit(run, runs=runs)
    except (UnreadableError, ServerError, redis.RedisError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    shown = {**msgspec.to_builtins(result), "balanced": result.balanced} if json else result
    print_result(shown, print_audit, json)
    return 0 if result.balanced else 1


@dead.command(name="list")
def _list_dead(run: Run, /, *, runs: Runs = DEFAULT_RUNS, json: Json = False) -> None:
    """List the dead letters of a run."""
    from penstock.deploy.operate.dead_letters import list_dead
    from penstock.deploy.operate.tables import print_letters

    print_result(list_dead(run, runs=runs), print_letters, json)


@dead.command(name="show")
def _show_dead(run: Run, index: DeadIndex, /, *, runs: Runs = DEFAULT_RUNS, json: Json = False) -> None:
    """Show the letters of one index with their content."""
    from penstock.deploy.operate.dead_letters import show_dead
    from penstock.deploy.operate.tables import print_contents

    print_result(show_dead(run, index, runs=runs), print_contents, json)


@dead.command(name="requeue")
def _requeue_dead(
    run: Run,
    /,
    *indexes: Annotated[int, Parameter(help="dead task indexes, in place of --reason and --all")],
    reason: str | None = None,
    every: Annotated[bool, Parameter(name="--all")] = False,
    runs: Runs = DEFAULT_RUNS,
    json: Json = False,
) -> None:
    """Release dead indexes again.

    Args:
        reason: all indexes that died of it: a reason, or its part before the colon
        every: all dead indexes
    """
    from penstock.deploy.operate.dead_letters import requeue_dead
    from penstock.deploy.operate.tables import print_requeued

    print_result(requeue_dead(run, indexes, reason=reason, every=every, runs=runs), print_requeued, json)


def producers(run: Run, /, *, runs: Runs = DEFAULT_RUNS, json: Json = False) -> None:
    """List a run's producers, and claims whose producer is gone."""
    from penstock.deploy.operate.producer_list import list_producers
    from penstock.deploy.operate.tables import print_producers

    print_result(list_producers(run, runs=runs), print_producers, json)


def weights(run: Run, /, *, runs: Runs = DEFAULT_RUNS, json: Json = False) -> None:
    """List the policies in a run's weight log, and who holds which."""
    from penstock.deploy.operate.tables import print_weights
    from penstock.deploy.operate.weight_list import list_weights

    print_result(list_weights(run, runs=runs), print_weights, json)


def export(
    run: Run,
    folder: Path,
    /,
    *,
    checkpoint: str | None = None,
    dtype: Dtype | None = None,
    merged: bool = False,
    base: Path | None = None,
    runs: Runs = DEFAULT_RUNS,
) -> int:
    """Make a Hugging Face folder of a checkpoint's model, or peft's of its adapter.

    Args:
        folder: a new or an empty folder
        checkpoint: its policy version, its name, or `best` (default: the one that is committed)
        dtype: of the weights: float32, as they are trained, or rounded to half the size (default: float32; of `best`,
            the run's model.dtype)
        merged: of an adapter: the whole model, with the adapter added to its base
        base: with --merged: the base model, if it has moved
    """
    from penstock.deploy.operate.export import export

    try:
        name = export(run, folder, checkpoint=checkpoint, dtype=dtype, merged=merged, base=base, runs=runs)
    except OSError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    print(f"model    {folder} ({name})")
    return 0


@record.command(name="export")
def _export_record(
    run: Annotated[str, Parameter(help="name of a run, or its folder")],
    file: Path,
    /,
    *,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Write a run's recorded rollouts to a Parquet file.

    Args:
        file: a row per segment of a rollout; overwritten
    """
    from penstock.deploy.record.reading import export_record

    print(f"{file}: {export_record(run, file, runs=runs):,} rows")


def push(
    run: Run, repo: str, /, *, checkpoint: str | None = None, private: bool = False, runs: Runs = DEFAULT_RUNS
) -> int:
    """Upload a run's model to the Hugging Face Hub, with a card of its figures. Status 1 if the Hub refuses it.

    Args:
        repo: USER/NAME, created if it is not there; the token is that of `hf auth login` or in HF_TOKEN
        checkpoint: its policy version, or its name, or `best` (default: the model of a complete run, else the newest)
        private: if it is created, only you see it
    """
    from penstock.deploy.operate.hub import HubError, push_to_hub

    try:
        print(push_to_hub(run, repo, checkpoint=checkpoint, private=private, runs=runs))
    except HubError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    return 0
