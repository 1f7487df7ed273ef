"""`penstock replay`: trains variants on a run's record, writes their numbers, prints the comparison."""

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.deploy.launch.command_line import (
    DEFAULT_RUNS,
    Runs,
    limit_threads,
    run_as_ranks,
    standard_output,
)
from penstock.deploy.launch.run_folder import find_run_folder
from penstock.deploy.operate.printing import print_table
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.record import RecordReadError
from penstock.schemas.record_reader import Record

if TYPE_CHECKING:
    from penstock.consumers.learning.ranks import Ranks
    from penstock.deploy.replay.player import Start
    from penstock.deploy.replay.variants import ReplayVariant
    from penstock.schemas.record_reader import BatchAt

FOLDER = "replay"


def command(
    run: Annotated[str, Parameter(help="name of a run, or its folder")],
    /,
    *,
    objective: tuple[str, ...] = (),
    set: tuple[str, ...] = (),
    variant: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    checkpoint: Annotated[str | None, Parameter(name="--from")] = None,
    updates: int | None = None,
    name: str | None = None,
    runs: Runs = DEFAULT_RUNS,
) -> int:
    """Train on a run's recorded rollouts again, to compare other settings. Status 1 if the run's own settings do not
    reproduce its recorded losses.

    Args:
        objective: a variant with this objective, as in penstock.consumers.learning.objectives.gspo:Gspo; may be
            repeated
        set: another setting for every variant, as in correction.mode=token_mask; may be repeated
        variant: NAME FIELD=VALUE ...: a variant with settings of its own; may be repeated
        checkpoint: start there (default: the base model)
        updates: at most so many updates (default: all)
        name: results go to <run>/replay/NAME (default: the next free number)
    """
    from penstock.deploy.replay.variants import variants_of

    if updates is not None and updates < 1:
        raise ConfigError(f"--updates {updates}: expected 1 or more")
    variants = variants_of(objective, set, _named(variant))
    run_folder = find_run_folder(run, runs)
    try:
        record = Record(run_folder)
        configs = {each: each.config(record.header.config, record.folder) for each in variants}
        # Before torch is imported: equal thread counts make equal sums.
        limit_threads(next(iter(configs.values())).trainer.num_threads)
        return _start(run_folder, record, configs, checkpoint, updates, name)
    except RecordReadError as error:
        raise ConfigError(str(error)) from None


def _named(words: Sequence[str]) -> list[list[str]]:
    """Returns name and settings of each variant: a word without `=` is a name, and begins one.

    Raises:
        ConfigError: a field without a value.
    """
    variants: list[list[str]] = []
    for word in words:
        if "." in word and "=" not in word:
            raise ConfigError(f"--variant {word}: expected FIELD=VALUE, or a name without dots")
        if "=" not in word or not variants:
            variants.append([])
        variants[-1].append(word)
    return variants


def _start(
    run_folder: Path,
    record: Record,
    configs: "dict[ReplayVariant, RunConfig]",
    checkpoint: str | None,
    updates: int | None,
    name: str | None,
) -> int:
    """Replays on as many ranks as the run had; this process is one of them if torchrun has started it."""
    from penstock.consumers.learning.ranks import Ranks
    from penstock.deploy.replay.player import batches_from, find_start, num_ranks, ranks_of
    from penstock.deploy.replay.variants import RANKS

    start = find_start(record, run_folder, checkpoint)
    batches = batches_from(record, start, updates)
    size, started = num_ranks(record, batches, configs), int(os.environ.get("WORLD_SIZE", 1))
    if started != size and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"{started} ranks started, to be played on {size}: expected {size}, or --set {RANKS}={started}"
        )
    if started == 1:
        results = _results_folder(run_folder, name)
        if size == 1:
            return _play_all(results, record, batches, start, configs, Ranks())
        if ranks_of(batches) == {size}:
            said = f"on {size} ranks, as the run; --set {RANKS}=1 needs one only, and compares within a tolerance"
            print(f"penstock: {said}", file=sys.stderr)
        return run_as_ranks(size)
    from penstock.consumers.distributed.led_rank import follow
    from penstock.consumers.distributed.start import check_alike, join

    config = next(iter(configs.values()))
    ranks, watch = join(config, "the replay ends")
    if not ranks.is_lead:
        return follow(config, ranks, watch)
    status = 2
    try:
        check_alike(config, ranks)
        status = _play_all(_results_folder(run_folder, name), record, batches, start, configs, ranks)
    except (ConfigError, RecordReadError):
        raise
    except Exception as error:
        watch.leave(error)
        status = 1
    finally:
        watch.ended(status)
    return status


def _play_all(
    results: Path,
    record: Record,
    batches: "list[BatchAt]",
    start: "Start",
    configs: "dict[ReplayVariant, RunConfig]",
    ranks: "Ranks",
) -> int:
    from rich.console import Console
    from rich.progress import track

    from penstock.deploy.launch.start_checks import check_objective
    from penstock.deploy.replay.player import check_model, play, ranks_of, recorded_updates
    from penstock.deploy.replay.results import ALLOWED, append_lines, differing, means_table, write_comparison
    from penstock.deploy.replay.variants import RECORDED

    console = standard_output()
    for config in configs.values():
        check_model(record, config)
        check_objective(config)
    for note in record.notes:
        console.print(f"record: {note}", markup=False, soft_wrap=True)
    played = recorded_updates(record, batches)
    progress = Console(stderr=True)
    is_quiet = not progress.is_terminal
    num_written = 0
    for variant in configs:
        steps = play(record, batches, start, variant, ranks)
        try:
            shown = track(steps, variant.name, len(batches), console=progress, transient=True, disable=is_quiet)
            played += list(shown)
        except (ConfigError, RecordReadError) as error:
            kept = f"; what was played before it is in {results / 'updates.jsonl'}" if num_written else ""
            raise ConfigError(f"variant {variant.name!r}: {error}{kept}") from None
        append_lines(results, played[num_written:])  # at once: a later variant may fail
        num_written = len(played)
    write_comparison(results, _about(record, batches, start, configs, ranks.size), played)
    print_table(means_table(played))
    own = next((variant for variant in configs if variant.changes_sums_alone), None)
    different: list[int] = []
    if own is not None:
        allowed = 0.0 if ranks_of(batches) == {ranks.size} else ALLOWED[configs[own].model.dtype]
        found, recorded = ([line for line in played if line.variant == name] for name in (own.name, RECORDED))
        different = differing(found, recorded, allowed)
        how = f"within {allowed:g}" if allowed else "bit for bit"
        said = f"differ at {len(different)} of {len(batches)} updates, first at {different[0]}" if different else (
            f"are those of the run, {how}, at all {len(batches)} updates"
        )  # fmt: skip
        console.print(f"with the run's own settings, loss and gradient norm {said}", soft_wrap=True)
    console.print(f"results  {results}", markup=False, soft_wrap=True)
    return 1 if different else 0


def _about(
    record: Record,
    batches: "list[BatchAt]",
    start: "Start",
    configs: "dict[ReplayVariant, RunConfig]",
    num_ranks: int,
) -> dict[str, Any]:
    import torch

    return {
        "run": record.header.run,
        "from": start.checkpoint.name if start.checkpoint is not None else "base model",
        "updates": [batches[0].update, batches[-1].update],
        "ranks": num_ranks,
        "model_digest": record.header.model_digest,
        "torch": str(torch.__version__),
        "notes": record.notes,
        "variants": {variant.name: list(variant.settings) for variant in configs},
    }


def _results_folder(run_folder: Path, name: str | None) -> Path:
    """Returns the folder of the results. Raises ConfigError for a name that is unusable, or taken."""
    folder = run_folder / FOLDER
    if name is None:
        return next(free for number in itertools.count(1) if not (free := folder / str(number)).exists())
    from penstock.deploy.replay.variants import NAME

    if not NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: expected letters, digits, '.', '_' and '-'")
    if (folder / name).exists():
        raise ConfigError(f"--name {name}: {folder / name} exists already; choose another name")
    return folder / name
