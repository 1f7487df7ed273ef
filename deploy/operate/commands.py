"""`penstock list`, `audit`, `dead`, `producers`, `weights` and `export`."""

import argparse
import sys
from pathlib import Path

import msgspec

from penstock.deploy.launch.command_line import Command, add_json, add_run, add_runs, print_found


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_json(parser)


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    add_json(parser)


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser)
    parser.add_argument("index", metavar="INDEX", type=int, help="the task index that died (`dead list` shows them)")


def _add_requeue_arguments(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser)
    parser.add_argument(
        "indexes", metavar="INDEX", type=int, nargs="*", help="dead task indexes, in place of --reason and --all"
    )
    parser.add_argument(
        "--reason", metavar="R", help="all indexes that died of R: a reason, or its part before the colon"
    )
    parser.add_argument("--all", dest="every", action="store_true", help="all dead indexes")


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or an empty folder")
    parser.add_argument(
        "--checkpoint", metavar="N", help="its policy version, its name, or `best` (default: the one that is committed)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights: float32, as they are trained (the default), or rounded to half the size",
    )
    parser.add_argument(
        "--merged", action="store_true", help="of an adapter: the whole model, with the adapter added to its base"
    )
    parser.add_argument("--base", type=Path, metavar="DIR", help="with --merged: the base model, if it has moved")


def _list(arguments: argparse.Namespace) -> int:
    from penstock.deploy.operate.run_list import list_runs
    from penstock.deploy.operate.tables import print_runs

    if not (found := list_runs(arguments.runs)):
        print(f"penstock: no run in {arguments.runs}", file=sys.stderr)
    return print_found(arguments, found, print_runs)


def _audit(arguments: argparse.Namespace) -> int:
    """Status 0 if the ledger balances, 1 if it does not, 2 if the run cannot be audited."""
    import redis

    from penstock.deploy.launch.redis_server import ServerError
    from penstock.deploy.operate.audit import audit
    from penstock.deploy.operate.saved_ledger import UnreadableError
    from penstock.deploy.operate.tables import print_audit

    try:
        found = audit(arguments.run, runs=arguments.runs)
    except (UnreadableError, ServerError, redis.RedisError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    shown = {**msgspec.to_builtins(found), "balanced": found.balanced} if arguments.json else found
    print_found(arguments, shown, print_audit)
    return 0 if found.balanced else 1


def _list_dead(arguments: argparse.Namespace) -> int:
    import penstock
    from penstock.deploy.operate.tables import print_letters

    return print_found(arguments, penstock.list_dead(arguments.run, runs=arguments.runs), print_letters)


def _show_dead(arguments: argparse.Namespace) -> int:
    import penstock
    from penstock.deploy.operate.tables import print_contents

    return print_found(
        arguments, penstock.show_dead(arguments.run, arguments.index, runs=arguments.runs), print_contents
    )


def _requeue_dead(arguments: argparse.Namespace) -> int:
    import penstock
    from penstock.deploy.operate.tables import print_requeued

    options = {option: getattr(arguments, option) for option in ("indexes", "reason", "every", "runs")}
    return print_found(arguments, penstock.requeue_dead(arguments.run, **options), print_requeued)


def _list_producers(arguments: argparse.Namespace) -> int:
    import penstock
    from penstock.deploy.operate.tables import print_producers

    return print_found(arguments, penstock.list_producers(arguments.run, runs=arguments.runs), print_producers)


def _list_weights(arguments: argparse.Namespace) -> int:
    import penstock
    from penstock.deploy.operate.tables import print_weights

    return print_found(arguments, penstock.list_weights(arguments.run, runs=arguments.runs), print_weights)


def _export(arguments: argparse.Namespace) -> int:
    """Status 1 if a file cannot be read or written."""
    from penstock.deploy.operate.export import export

    fields = ("folder", "checkpoint", "dtype", "merged", "base", "runs")
    try:
        name = export(arguments.run, **{field: getattr(arguments, field) for field in fields})
    except OSError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    print(f"model    {arguments.folder} ({name}, {arguments.dtype})")
    return 0


COMMANDS = (
    Command("list", "list the runs on this machine, the latest first", _add_list_arguments, _list),
    Command("audit", "show where each released index of a run is; status 1 when one is not", _add_arguments, _audit),
    Command("dead list", "list the dead letters of a run", _add_arguments, _list_dead),
    Command("dead show", "show the letters of one index with their content", _add_show_arguments, _show_dead),
    Command("dead requeue", "release dead indexes again", _add_requeue_arguments, _requeue_dead),
    Command(
        "export",
        "make a Hugging Face folder of a checkpoint's model, or peft's of its adapter",
        _add_export_arguments,
        _export,
    ),
    Command("producers", "list a run's producers, and claims whose producer is gone", _add_arguments, _list_producers),
    Command("weights", "list the policies in a run's weight log, and who holds which", _add_arguments, _list_weights),
)
