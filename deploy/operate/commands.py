"""`penstock audit`, `penstock dead` and `penstock producers`."""

import argparse
import sys
from typing import Any

import msgspec
from penstock.deploy.launch.command_line import Command, add_run


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print JSON for a machine")


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
    parser.add_argument("--all", action="store_true", help="all dead indexes")


def _audit(arguments: argparse.Namespace) -> int:
    """Status 0 if the ledger balances, 1 if it does not, 2 if the run cannot be audited."""
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
        print(f"{done.without_index} letters name no index, so there is nothing to release for them")
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


COMMANDS = (
    Command("audit", "show where each released index of a run is; status 1 when one is not", _add_arguments, _audit),
    Command("dead list", "list the dead letters of a run", _add_arguments, _dead_list),
    Command("dead show", "show the letters of one index with their content", _add_show_arguments, _dead_show),
    Command("dead requeue", "release dead indexes again", _add_requeue_arguments, _dead_requeue),
    Command("producers", "list a run's producers, and claims whose producer is gone", _add_arguments, _producers),
)
