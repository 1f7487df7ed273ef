"""`penstock replay`: trains variants on a run's record, writes their numbers, prints the comparison."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.deploy.launch.command_line import Command, add_runs, limit_threads, standard_output
from penstock.deploy.launch.run_folder import find_run_folder
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.record import RecordReadError
from penstock.schemas.record_reader import Record

if TYPE_CHECKING:
    from penstock.deploy.replay.player import Played, Start
    from penstock.deploy.replay.variants import ReplayVariant
    from penstock.schemas.record_reader import BatchAt

FOLDER = "replay"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of a run with record = true, or its folder")
    parser.add_argument(
        "--objective",
        action="append",
        default=[],
        metavar="PATH",
        help="a variant with this objective, as in penstock.consumers.learning.objectives.gspo:Gspo; may be repeated",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="another setting for every variant, as in correction.mode=token_mask",
    )
    parser.add_argument(
        "--variant",
        action="append",
        nargs="+",
        default=[],
        metavar=("NAME", "FIELD=VALUE"),
        help="a variant with settings of its own; may be repeated",
    )
    parser.add_argument("--from", dest="start", metavar="CHECKPOINT", help="begin there (default: the base model)")
    parser.add_argument("--updates", type=int, metavar="N", help="at most N updates (default: all)")
    parser.add_argument("--name", help=f"results go to <run>/{FOLDER}/NAME (default: the next free number)")
    add_runs(parser)


def _replay(arguments: argparse.Namespace) -> int:
    """Status 0; 1 if the run's own settings do not reproduce its recorded losses."""
    from penstock.deploy.replay.variants import variants_of

    if arguments.updates is not None and arguments.updates < 1:
        raise ConfigError(f"--updates {arguments.updates}: expected 1 or more")
    variants = variants_of(arguments.objective, arguments.set, arguments.variant)
    run_folder = find_run_folder(arguments.run, arguments.runs)
    results = _results_folder(run_folder, arguments.name)
    try:
        record = Record(run_folder)
        configs = {variant: variant.config(record.header.config, record.folder) for variant in variants}
        # Before torch is imported: equal thread counts make equal sums.
        limit_threads(next(iter(configs.values())).trainer.num_threads)
        return _play_all(arguments, run_folder, results, record, configs)
    except RecordReadError as error:
        raise ConfigError(str(error)) from None


def _play_all(
    arguments: argparse.Namespace,
    run_folder: Path,
    results: Path,
    record: Record,
    configs: "dict[ReplayVariant, RunConfig]",
) -> int:
    from rich.console import Console
    from rich.progress import track

    from penstock.deploy.launch.start_checks import check_objective
    from penstock.deploy.replay.player import batches_from, check_model, find_start, play, recorded_updates
    from penstock.deploy.replay.results import append_lines, print_table, write_comparison

    console = standard_output()
    for config in configs.values():
        check_model(record, config)
        check_objective(config)
    start = find_start(record, run_folder, arguments.start)
    batches = batches_from(record, start, arguments.updates)
    for note in record.notes:
        console.print(f"record: {note}", markup=False, soft_wrap=True)
    played = recorded_updates(record, batches)
    progress = Console(stderr=True)
    is_quiet = not progress.is_terminal
    num_written = 0
    for variant in configs:
        steps = play(record, batches, start, variant)
        try:
            shown = track(steps, variant.name, len(batches), console=progress, transient=True, disable=is_quiet)
            played += list(shown)
        except (ConfigError, RecordReadError) as error:
            kept = f"; what was played before it is in {results / 'updates.jsonl'}" if num_written else ""
            raise ConfigError(f"variant {variant.name!r}: {error}{kept}") from None
        append_lines(results, played[num_written:])  # at once: a later variant may fail
        num_written = len(played)
    write_comparison(results, _about(record, batches, start, configs), played)
    print_table(played, console)
    different = _differing_own(played, configs)
    if different is not None:
        said = f"differ at {len(different)} of {len(batches)} updates, first at {different[0]}" if different else (
            f"are those of the run, bit for bit, at all {len(batches)} updates"
        )  # fmt: skip
        console.print(f"with the run's own settings, loss and gradient norm {said}", soft_wrap=True)
    console.print(f"results  {results}", markup=False, soft_wrap=True)
    return 1 if different else 0


def _differing_own(played: "list[Played]", configs: "dict[ReplayVariant, RunConfig]") -> list[int] | None:
    """The updates at which the variant without own settings differs from the record; None without that variant."""
    from penstock.deploy.replay.results import differing
    from penstock.deploy.replay.variants import RECORDED

    own = next((variant.name for variant in configs if not variant.settings), None)
    if own is None:
        return None
    return differing(
        (line for line in played if line.variant == own), (line for line in played if line.variant == RECORDED)
    )


def _about(
    record: Record, batches: "list[BatchAt]", start: "Start", configs: "dict[ReplayVariant, RunConfig]"
) -> dict[str, Any]:
    import torch

    return {
        "run": record.header.run,
        "from": start.checkpoint.name if start.checkpoint is not None else "base model",
        "updates": [batches[0].update, batches[-1].update],
        "model_digest": record.header.model_digest,
        "torch": str(torch.__version__),
        "notes": record.notes,
        "variants": {variant.name: list(variant.settings) for variant in configs},
    }


def _results_folder(run_folder: Path, name: str | None) -> Path:
    """Raises ConfigError for a name that is unusable, or taken."""
    folder = run_folder / FOLDER
    if name is None:
        number = 1
        while (folder / str(number)).exists():
            number += 1
        return folder / str(number)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"--name {name!r}: expected letters, digits, '.', '_' and '-'")
    if (folder / name).exists():
        raise ConfigError(f"--name {name}: {folder / name} exists already; choose another name")
    return folder / name


COMMAND = Command(
    "replay", "train on a run's recorded rollouts again, to compare other settings", _add_arguments, _replay
)
