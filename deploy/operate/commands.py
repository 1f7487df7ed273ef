"""`penstock audit`, `penstock dead` and `penstock producers`: what an operator asks of a run."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

Command = Callable[[argparse.Namespace], int]
AddCommand = Callable[
    ["argparse._SubParsersAction[argparse.ArgumentParser]", str, Command, str], argparse.ArgumentParser
]


def add_operator_commands(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", add: AddCommand, default_runs: Path
) -> None:
    """Adds the commands to the `penstock` parser; `add` makes one of them."""
    audit = add(commands, "audit", _audit, "show where each released index of a run is; status 1 when one is not")
    dead = commands.add_parser(
        "dead",
        help="list, show or requeue the dead letters of a run",
        description="Dead letters: what died in a run, why, and a way back for it.",
    )
    of_dead = dead.add_subparsers(required=True, metavar="list|show|requeue")
    listing = add(of_dead, "list", _dead_list, "list the dead letters of a run")
    show = add(of_dead, "show", _dead_show, "show the letters of one index with what they hold")
    requeue = add(of_dead, "requeue", _dead_requeue, "have dead indexes released again")
    producers = add(commands, "producers", _producers, "list who generates for a run, and claims nobody looks after")
    for parser in (audit, listing, show, requeue, producers):
        parser.add_argument("run", metavar="RUN", help="name of a run, or its folder")
    show.add_argument("index", metavar="INDEX", type=int, help="the task index that died (`dead list` shows them)")
    requeue.add_argument(
        "indexes", metavar="INDEX", type=int, nargs="*", help="dead task indexes, in place of --reason and --all"
    )
    requeue.add_argument("--reason", metavar="R", help="all that died of R: a reason, or its part before the colon")
    requeue.add_argument("--all", action="store_true", help="all that are dead")
    for parser in (audit, listing, show, requeue, producers):
        parser.add_argument(
            "--runs", type=Path, default=default_runs, metavar="DIR", help="folder of all runs (default: runs)"
        )
        parser.add_argument("--json", action="store_true", help="print JSON for a machine")


def _audit(arguments: argparse.Namespace) -> int:
    """Status 0 for books that balance, 1 for books that do not, 2 where it cannot be told."""
    import redis
    from penstock.deploy.launch.redis_server import ServerError
    from penstock.deploy.operate.audit import audit
    from penstock.deploy.operate.run_access import open_run
    from penstock.deploy.operate.saved_ledger import UnreadableError
    from penstock.deploy.operate.tables import print_audit

    try:
        with open_run(arguments.run, arguments.runs) as run:
            found = audit(run)
    except (UnreadableError, ServerError, redis.RedisError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        _print_json({**msgspec.to_builtins(found), "balanced": found.balanced})
    else:
        print_audit(found)
    return 0 if found.balanced else 1


def _dead_list(arguments: argparse.Namespace) -> int:
    from penstock.deploy.operate.dead_letters import list_letters
    from penstock.deploy.operate.run_access import open_run
    from penstock.deploy.operate.tables import print_letters

    with open_run(arguments.run, arguments.runs) as run:
        letters = list_letters(run)
    if arguments.json:
        _print_json(letters)
    else:
        print_letters(letters)
    return 0


def _dead_show(arguments: argparse.Namespace) -> int:
    from penstock.deploy.operate.dead_letters import show_letters
    from penstock.deploy.operate.run_access import open_run
    from penstock.deploy.operate.tables import print_content

    with open_run(arguments.run, arguments.runs) as run:
        contents = show_letters(run, arguments.index)
    if arguments.json:
        _print_json(contents)
    else:
        for content in contents:
            print_content(content)
    return 0


def _dead_requeue(arguments: argparse.Namespace) -> int:
    from penstock.deploy.operate.dead_letters import requeue
    from penstock.deploy.operate.ledger_check import name_indexes
    from penstock.deploy.operate.run_access import open_run
    from penstock.schemas.config import ConfigError

    ways = [bool(arguments.indexes), arguments.reason is not None, arguments.all]
    if sum(ways) != 1:
        raise ConfigError("dead requeue: expected one of INDEX..., --reason R and --all")
    with open_run(arguments.run, arguments.runs) as run:
        done = requeue(run, indexes=arguments.indexes, reason=arguments.reason, every=arguments.all)
    if arguments.json:
        _print_json(done)
        return 0
    if done.indexes:
        print(f"requeued {name_indexes(done.indexes)}: the trainer releases them from its next reconcile on")
    else:
        print("nothing to requeue")
    if done.without_index:
        print(f"{done.without_index} letters name no index: there is nothing to release again for them")
    return 0


def _producers(arguments: argparse.Namespace) -> int:
    from penstock.deploy.operate.producer_list import list_producers
    from penstock.deploy.operate.run_access import open_run
    from penstock.deploy.operate.tables import print_producers

    with open_run(arguments.run, arguments.runs) as run:
        found = list_producers(run)
    if arguments.json:
        _print_json(found)
    else:
        print_producers(found)
    return 0


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
