"""Predicts a run's speed, lag and bottleneck before anyone rents a machine, from a run file or another run."""

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.deploy.launch.command_line import DEFAULT_RUNS, find_run_file, shipped_run_files
from penstock.deploy.launch.run_folder import RUN_FILE, find_run_folder
from penstock.deploy.plan.producer import ALONE, EngineSpeed, RunPace, seats
from penstock.deploy.plan.recorded import PacedRun, read_run
from penstock.deploy.plan.simulation import Course, Simulation
from penstock.deploy.plan.workload import Lengths, lengths_of
from penstock.deploy.report.telemetry import TelemetryError, mean_lag
from penstock.deploy.watch.flow import waited_for
from penstock.schemas.config import ConfigError, Overrides, RunConfig, load_config

MOST_UPDATES = 200
"""The most that are simulated; rates and shares change little after that."""
MOST_PRODUCERS = 4096
"""The most that are simulated: every event visits each of them."""
WEIGHTS_S = 1.0
_NEEDED = ("tokens-per-s", "trainer-tokens-per-s")
"""Options that a run file needs, along with the lengths."""
_ABOVE_ZERO = (*_NEEDED, "alone-per-s")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a planned run by name (`figures_of`).

    pace: by the names of `plan`'s arguments; also the seats of one producer, and the parts of `weights_s`. The
        trainer's rate is None if an update takes the same time for every batch.
    recorded: the figures of the run that gave the pace. as_recorded: those of that run in simulated time, if the plan
        differs from it.
    notes: remarks on the recorded run.
    """

    name: str
    num_producers: int
    pace: dict[str, Any]
    planned: dict[str, Any]
    recorded: dict[str, Any] | None = None
    as_recorded: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def plan(
    run: str | Path,
    *,
    producers: int | None = None,
    tokens_per_s: float | None = None,
    alone_per_s: float | None = None,
    lengths: str | Path | None = None,
    trainer_tokens_per_s: float | None = None,
    update_s: float | None = None,
    weights_s: float | None = None,
    flat: float | None = None,
    set: Overrides = (),
    runs: str | Path = DEFAULT_RUNS,
) -> Plan:
    """Simulates a run by the rules of the real one: release, credit, claims, lag, staleness, batches.

    run: a run file, the name of a shipped one, or a run. A run supplies the speeds and the lengths of completions that
        the arguments do not, from its record of rollouts, or in less detail from its logs. A name of both means the
        run, unless the arguments are all that a run file needs.
    producers: their number; by default that of the run file, or of the recorded run.
    tokens_per_s: sampled by one producer with all its seats taken; a seat is for one sequence, and there are
        `engine.max_num_seqs` of them, or as many as `producers.groups_in_flight` groups have, if these are fewer.
    alone_per_s: sampled by one producer with a single sequence; by default 4 times a seat's share of `tokens_per_s`.
    lengths: a file whose lines or rows (`.parquet`) are each a number of tokens, or an array of those of siblings; a
        distribution such as `log-normal:800:1.2`; or a run.
    trainer_tokens_per_s: sampled tokens of a batch divided by the seconds that its update takes.
    update_s: further seconds of every update, whatever its batch; by default 0 if the rate is given.
    weights_s: from the end of an update until engines sample with its policy; by default 1.
    flat: share of tasks whose rewards do not differ.
    set: fields of the run file to change.

    Raises:
        ConfigError: something is missing or wrong; the message names it, its value and what was expected.
        TelemetryError: a run's file cannot be read.
    """
    runs = Path(runs)
    numbers = {
        "tokens-per-s": tokens_per_s,
        "alone-per-s": alone_per_s,
        "trainer-tokens-per-s": trainer_tokens_per_s,
        "update-s": update_s,
        "weights-s": weights_s,
        "flat": flat,
    }
    _check(producers, numbers)
    needs_no_run = lengths is not None and None not in (numbers[name] for name in _NEEDED)
    found = None if needs_no_run and str(run) in shipped_run_files() else _recorded(run, runs)
    if found is not None and (parts := -(-found.course.num_updates // MOST_UPDATES)) > 1:
        found = found.thinned(parts)
    config = load_config(find_run_folder(run, runs) / RUN_FILE if found else find_run_file(Path(run)), set)
    pace = _pace(config, found, numbers)
    if lengths is not None:
        draw = _lengths(str(lengths), runs)
    elif found is not None:
        draw = found.lengths
    else:
        raise ConfigError(f"--lengths is not given: expected it with {run}, which has no record of completions")
    num_producers = producers or (found.num_producers if found else config.producers.count)
    if num_producers > MOST_PRODUCERS:
        raise ConfigError(f"producers.count = {num_producers}: a plan has {MOST_PRODUCERS} producers at most")
    is_as_long = found is not None and config.num_updates == found.config.num_updates
    num_updates = min(MOST_UPDATES, found.course.num_updates if found and is_as_long else config.num_updates)
    if found is not None and num_producers != found.num_producers:
        pace = msgspec.structs.replace(pace, joins_s=())
    planned = Simulation(config, num_producers, pace, draw, num_updates).run()
    recorded = as_recorded = None
    if found is not None:
        recorded = figures_of(found.course, found.config)
        if (config, num_producers, pace) != (found.config, found.num_producers, found.pace) or lengths is not None:
            num_recorded = min(MOST_UPDATES, found.course.num_updates)
            own = Simulation(found.config, found.num_producers, found.pace, found.lengths, num_recorded)
            as_recorded = figures_of(own.run(), found.config)
    return Plan(
        name=config.name,
        num_producers=num_producers,
        pace=_shown(pace, seats(config)),
        planned=figures_of(planned, config),
        recorded=recorded,
        as_recorded=as_recorded,
        notes=found.clock_notes if found else (),
    )


def figures_of(course: Course, config: RunConfig) -> dict[str, Any]:
    """Returns a course's figures by name: rates per second, shares from 0 to 1, means over tokens, updates or time; an
    unknown figure is None."""
    num_lags = sum(course.lags.values())
    num_taken = course.num_trained + course.num_skipped
    num_arrived = num_taken + course.num_stale + course.num_dead
    rate = 1 / course.seconds if course.seconds else 0.0
    ready = course.num_ready if course.num_ready is not None else course.queue
    part, why = waited_for(
        course.waits, course.paused or 0.0, ready, course.credit, in_turns=config.mode == "synchronous"
    )
    return {
        "num_updates": course.num_updates,
        "updates_per_s": course.num_intervals * rate,
        "tokens_per_s": course.num_tokens * rate,
        "trainer_waits": course.waits,
        "engines_paused": course.paused,
        "seats_taken": course.seats_taken,
        "groups_ready": course.num_ready,
        "queue": course.queue,
        "credit": course.credit,
        "lag_mean": mean_lag(course.lags),
        "lags": {lag: num / num_lags for lag, num in sorted(course.lags.items())},
        "masked": course.num_masked / num_lags if num_lags else None,
        "stale": course.num_stale / num_arrived if num_arrived else None,
        "skipped": course.num_skipped / num_taken if num_taken else None,
        "dead": course.num_dead / num_arrived if num_arrived else None,
        "waited_for": part,
        "why": why,
        "failure": course.failure,
    }


def _shown(pace: RunPace, num_seats: int) -> dict[str, Any]:
    speed = pace.speed.tokens_per_s
    own = {
        "seats": num_seats,
        "tokens_per_s": num_seats * speed(num_seats),
        "alone_per_s": speed(1),
        "trainer_tokens_per_s": 1 / pace.token_s if pace.token_s else None,
    }
    return own | {name: getattr(pace, name) for name in ("update_s", "announce_s", "load_s", "pause_s", "flat")}


def _recorded(run: str | Path, runs: Path) -> PacedRun | None:
    """Reads the run of this name; None if the name is that of a run file."""
    if not str(run):
        raise ConfigError("RUN is '': expected a run file, the name of a shipped one, or a run")
    given, shipped = Path(run), shipped_run_files()
    if given.is_dir() or (runs / given).is_dir():
        try:
            return read_run(find_run_folder(run, runs))
        except (ConfigError, TelemetryError) as error:
            if (file := shipped.get(str(run))) is None:
                raise
            raise type(error)(f"{error}; to plan the shipped run file, give its path: {file}") from None
    names = [*shipped, *(folder.name for folder in runs.glob("*") if folder.is_dir())]
    if given.is_file() or given.suffix == ".toml" or str(run) in names:
        return None
    similar = difflib.get_close_matches(str(run), names, n=1)
    meant = f"; did you mean {similar[0]}?" if similar else ""
    raise ConfigError(f"{run}: neither a run file, nor the name of a shipped one, nor a run in {runs}{meant}")


def _lengths(given: str, runs: Path) -> Lengths:
    if given and not Path(given).is_file() and (Path(given).is_dir() or (runs / given).is_dir()):
        return read_run(find_run_folder(given, runs)).lengths
    return lengths_of(given)


def _check(producers: int | None, numbers: Mapping[str, float | None]) -> None:
    if producers is not None and not 1 <= producers <= MOST_PRODUCERS:
        raise ConfigError(f"--producers {producers}: expected 1 to {MOST_PRODUCERS}")
    for name, value in numbers.items():
        if value is None:
            continue
        if not 0 <= value < math.inf or (name == "flat" and value > 1) or (name in _ABOVE_ZERO and not value):
            expected = "a share from 0 to 1" if name == "flat" else "a number of 0 or more"
            expected = "a number above 0" if name in _ABOVE_ZERO else expected
            raise ConfigError(f"--{name} {value:g}: expected {expected}")


def _pace(config: RunConfig, found: PacedRun | None, numbers: Mapping[str, float | None]) -> RunPace:
    given = {name.replace("-", "_"): value for name, value in numbers.items() if value is not None}
    needed = _NEEDED if found is None else ()
    if missing := [f"--{name}" for name in needed if numbers[name] is None]:
        raise ConfigError(f"{', '.join(missing)}: missing; a run file does not say how fast the parts of a run are")
    full, alone = given.pop("tokens_per_s", None), given.pop("alone_per_s", None)
    fields: dict[str, Any] = given
    if (rate := given.pop("trainer_tokens_per_s", None)) is not None:
        fields = {"update_s": 0.0, "token_s": 1 / rate} | given
    if full or alone:
        fields["speed"] = _speed(seats(config), full, alone, found)
    if (weights_s := fields.pop("weights_s", None if found else WEIGHTS_S)) is not None:
        fields |= {"announce_s": 0.0, "load_s": weights_s}
    return RunPace(**fields) if found is None else msgspec.structs.replace(found.pace, **fields)


def _speed(num_seats: int, full: float | None, alone: float | None, found: PacedRun | None) -> EngineSpeed:
    """Returns the speed. An omitted one of the two keeps its ratio to the other: the recorded run's, or `ALONE`."""
    ratio = ALONE / num_seats
    if found is not None:
        own = found.pace.speed.tokens_per_s
        ratio = own(1) / (num_seats * own(num_seats))
        full = full or num_seats * own(num_seats)
    assert full is not None
    alone = alone or full * min(1.0, ratio)
    if not full / num_seats <= alone <= full:
        raise ConfigError(
            f"--alone-per-s {alone:g}: expected {full / num_seats:g} to {full:g}: a sequence is as fast by itself as "
            f"among {num_seats} or faster, and no faster than all of them together (--tokens-per-s)"
        )
    return EngineSpeed.of(full, alone, num_seats)
