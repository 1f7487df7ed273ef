"""The command `penstock plan`."""

import argparse
from typing import TYPE_CHECKING

from penstock.deploy.launch.command_line import Command, add_json, add_runs, add_set, print_found, standard_output

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.deploy.plan.planning import Plan

_BAR = 24
_NUMBERS = {
    "--producers": (int, "N", "number of producers (default: that of the run file, or of the run)"),
    "--tokens-per-s": (float, "X", "sampled by one producer with all its seats taken"),
    "--alone-per-s": (float, "X", "sampled by one producer with a single sequence (default: 4 times a seat's share)"),
    "--trainer-tokens-per-s": (float, "X", "sampled tokens of a batch divided by the seconds that its update takes"),
    "--update-s": (float, "S", "further seconds of every update, whatever its batch (default: 0)"),
    "--weights-s": (float, "S", "from the end of an update until engines sample with its policy (default: 1)"),
    "--flat": (float, "SHARE", "share of tasks whose rewards do not differ (default: 0)"),
}
_NEEDED = (
    "A run file needs --tokens-per-s, --trainer-tokens-per-s and --lengths; a past run supplies them. A seat is "
    "for one sequence: a producer has as many as producers.groups_in_flight groups have, engine.max_num_seqs at most."
)
_ROWS = (
    ("updates/s", "updates_per_s"),
    ("tokens/s trained", "tokens_per_s"),
    ("trainer waits", "trainer_waits"),
    ("seats taken", "seats_taken"),
    ("engines paused", "engines_paused"),
    ("groups ready", "groups_ready"),
    ("read and left", "queue"),
    ("credit", "credit"),
    ("lag, mean", "lag_mean"),
    ("tokens masked for lag", "masked"),
    ("groups stale", "stale"),
    ("groups skipped", "skipped"),
    ("groups dead", "dead"),
)
_SHARES = {"trainer_waits", "seats_taken", "engines_paused", "masked", "stale", "skipped", "dead"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _NEEDED
    parser.add_argument(
        "run",
        metavar="RUN.toml|RUN",
        help="a run file, or a past run (its name or folder), whose pace is used and whose figures are shown too",
    )
    for option, (kind, metavar, help) in _NUMBERS.items():
        parser.add_argument(option, type=kind, metavar=metavar, help=help)
    parser.add_argument(
        "--lengths",
        metavar="FILE|NAME",
        help="of completions: a file with a number of tokens in each line or row (.parquet), a distribution such as "
        "log-normal:800:1.2, or a run",
    )
    add_runs(parser)
    add_json(parser)
    add_set(parser, "override a field, as in max_lag=4")


def _plan(arguments: argparse.Namespace) -> int:
    """Returns status 1 if the planned run would fail."""
    from penstock.deploy.plan.planning import plan

    numbers = {option.strip("-").replace("-", "_") for option in _NUMBERS}
    given = {name: getattr(arguments, name) for name in (*numbers, "lengths", "set", "runs")}
    found = plan(arguments.run, **given)
    print_found(arguments, found, _print)
    return 1 if found.planned["failure"] else 0


def _print(found: "Plan") -> None:
    from penstock.deploy.watch.text import bar, percent

    console, pace = standard_output(), found.pace
    weights_s, rate, update_s = pace["announce_s"] + pace["load_s"], pace["trainer_tokens_per_s"], pace["update_s"]
    takes = ([f"{rate:,.0f} tokens/s"] if rate else []) + ([f"{update_s:.2g} s an update"] if update_s else [])
    console.print(
        f"{found.name}: {found.num_producers} x {pace['tokens_per_s']:,.0f} tokens/s with all {pace['seats']:,.0f} "
        f"seats taken, {pace['alone_per_s']:,.0f} with one; the trainer takes {' and '.join(takes)}; a policy is in "
        f"the engines after {weights_s:.2g} s"
    )
    for note in found.notes:
        console.print(note, markup=False)
    console.print(_table(found))
    console.print(f"lag of {found.planned['num_updates']:,} planned updates' tokens, in optimizer steps")
    for lag, share in found.planned["lags"].items():
        console.print(f"  {lag:>3}  {percent(share):>6}  {bar(share, _BAR)}")
    if found.planned["failure"]:
        console.print(f"the run fails: {found.planned['failure']}", markup=False)
    else:
        console.print(f"waited for: {found.planned['waited_for']}: {found.planned['why']}")


def _table(found: "Plan") -> "Table":
    from rich import box
    from rich.table import Table

    from penstock.deploy.watch.text import number, percent

    columns = {"recorded": found.recorded, "simulated": found.as_recorded, "planned": found.planned}
    shown = {name: figures for name, figures in columns.items() if figures is not None}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for label, key in _ROWS:
        cell = percent if key in _SHARES else number
        table.add_row(label, *(cell(figures[key]) for figures in shown.values()))
    return table


COMMAND = Command("plan", "predict a run's speed, lag and bottleneck", _add_arguments, _plan)
