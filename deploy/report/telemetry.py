"""Reads a run folder: its configuration and the JSON lines of trainer and producers."""

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec

from penstock.schemas.attrition import Attrition, Counts
from penstock.schemas.config import RunConfig, load_config
from penstock.schemas.metrics import REWARD, figures_of, lag_key
from penstock.schemas.policy import make_version, split_version
from penstock.schemas.process.clock import TOLERATED_S
from penstock.schemas.rollout import EngineFingerprint

PHASES = ("wait", "step", "publish")
"""Parts of the trainer's time; an update has the seconds of each."""


class TelemetryError(ValueError):
    """A telemetry file cannot be read; the message names the file, the line and what was expected."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One batch of `updates.jsonl`. Times are wall-clock seconds since the epoch."""

    update: int
    policy_version: int
    time_s: float
    lag_histogram: dict[int, int]
    """Tokens by lag in optimizer steps."""
    num_tokens_trained: int
    num_tokens_masked_lag: int
    num_groups_trained: int
    num_groups_skipped: int
    num_tokens_rejected: int = 0
    """Tokens within the lag bound that the correction rejected."""
    steps_skipped: dict[str, int] = {}
    """Optimizer steps not taken, by reason."""
    skipped_reason: str | None = None
    """Why the batch made no optimizer step."""
    queue_depth: int | None = None
    wait_s: float | None = None
    step_s: float | None = None
    publish_s: float | None = None
    clock_ahead_s: float | None = None
    """How far the trainer's clock is ahead of Redis'."""
    rollouts: Counts = {}
    """Counted since the previous update."""
    environments: dict[str, dict[str, float]] = {}
    """By name: reward, its parts, and the other measurements of an environment's groups."""
    metrics: dict[str, float] = {}
    """Every other number of the line by its key, such as `reward` or `kl/lag_2-3`; null values are left out."""


class EvaluationPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `evaluations.jsonl`: what one policy reached on the held-out prompts."""

    policy_version: int
    update: int
    reward: float
    num_prompts: int
    time_s: float
    num_failed: int = 0
    """Prompts without an answer or a reward: each counts as 0."""
    environments: dict[str, dict[str, float]] = {}
    """The figures by environment."""
    metrics: dict[str, float] = {}
    """Every other number of the line by its key, such as `reward/exact`, `pass@8` or `reward_se`."""

    @property
    def figures(self) -> dict[str, float]:
        """`reward`, `reward/<part>` of each part, and `pass@<k>`."""
        return {REWARD: self.reward, **figures_of(self.metrics)}


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `trainer.json` that says whether the run is over."""

    finished: bool = False
    num_updates: int = 0

    def is_over(self, updates: Sequence[Update]) -> bool:
        """Returns whether the run is finished. A resumed run has updates beyond an old ledger that says so."""
        return self.finished and (updates[-1].update if updates else 0) <= self.num_updates


class TrainerLedger(RunEnd, frozen=True, kw_only=True):
    """`trainer.json`: what became of every released group, as of the last checkpoint."""

    num_updates: int
    num_groups_released: int
    num_groups_trained: int
    num_groups_skipped: int
    num_groups_dead: int
    num_groups_cancelled: int
    num_groups_open: int = 0
    dead_reasons: dict[str, int] = {}
    num_groups_released_again: dict[str, int] = {}
    num_duplicates_dropped: int = 0
    num_steps_skipped: int = 0
    attrition: Attrition = msgspec.field(default_factory=Attrition)
    first_prompt_s: float | None = None
    """None or 0 before the first batch, as is `last_update_s`."""
    last_update_s: float | None = None


class Started(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="start"):
    """An engine is up; its token counter begins at 0."""

    fingerprint: EngineFingerprint
    time_s: float


class WeightsLoaded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="weights"):
    time_s: float
    policy_version: int
    pause_s: float
    """Time during which no token was sampled."""


class Rate(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="rate"):
    time_s: float
    num_tokens: int
    """Tokens sampled since the producer started."""
    clock_ahead_s: float | None = None
    """How far the producer's clock is ahead of Redis'."""


class ShortGroup(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="short_group"):
    """An agents' group was appended with fewer siblings than the run asks for; `missing` says why."""

    time_s: float
    index: int
    finished: int
    missing: str


ProducerEvent = Started | WeightsLoaded | Rate | ShortGroup


class RunTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a run folder; fields of missing files are empty or None.

    updates: ascending by number, only those that led to the latest policy (none that a rollback undid).
    evaluations: ascending by update, one per update, of those same policies.
    producers: by producer id, events in the order written, in the trainer's time.
    clocks: by producer id, the seconds that its clock was ahead of the trainer's (below 0: behind), if they differed by
        more than `TOLERATED_S`; the times of its events are corrected.
    missing: the expected files that do not exist.
    num_torn_lines: lines left out because they were cut short by a kill, or were being written.
    read_s: when the folder was read, in seconds since the epoch.
    """

    name: str
    config: RunConfig | None
    updates: tuple[Update, ...]
    evaluations: tuple[EvaluationPoint, ...]
    ledger: TrainerLedger | None
    producers: dict[str, tuple[ProducerEvent, ...]]
    missing: tuple[str, ...]
    num_torn_lines: int
    read_s: float = 0.0
    clocks: dict[str, float] = {}

    def clock_notes(self) -> list[str]:
        """Returns a sentence on each producer of `clocks`."""
        return [
            f"{name}'s clock was {abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the trainer's: its "
            "times are moved by as much."
            for name, ahead_s in self.clocks.items()
        ]

    @property
    def is_over(self) -> bool:
        return self.ledger is not None and self.ledger.is_over(self.updates)

    @property
    def start_s(self) -> float | None:
        """When the first prompt was claimed; without the trainer's ledger, the earliest time in its lines."""
        if self.ledger is not None and self.ledger.first_prompt_s:
            return self.ledger.first_prompt_s
        times = [line.time_s for line in self.updates] + [point.time_s for point in self.evaluations]
        return min(times, default=None)

    @property
    def end_s(self) -> float | None:
        """When the last update was done: the later of the times in the trainer's lines and in its ledger."""
        times = [self.updates[-1].time_s] if self.updates else []
        if self.ledger is not None and self.ledger.last_update_s:
            times.append(self.ledger.last_update_s)
        return max(times, default=None)


def read_telemetry(run_folder: Path) -> RunTelemetry:
    """Reads a run folder. Missing files are listed and no error.

    Raises:
        TelemetryError: no such folder, or a malformed line (named with its file and number).
        ConfigError: `run.toml` is no run file.
    """
    if not run_folder.is_dir():
        raise TelemetryError(f"{run_folder}: no such run folder")
    missing: list[str] = []
    read_s = time.time()

    def lines(name: str, kind: Any) -> tuple[list[Any], int]:
        file = run_folder / name
        if file.is_file():
            return read_lines(file, kind)
        missing.append(name)
        return [], 0

    config = load_config(run_folder / "run.toml") if (run_folder / "run.toml").is_file() else None
    if config is None:
        missing.append("run.toml")
    updates, torn_updates = lines("updates.jsonl", Update)
    evaluations, torn_evaluations = lines("evaluations.jsonl", EvaluationPoint)
    ledger = read_ledger(run_folder / "trainer.json")
    if ledger is None:
        missing.append("trainer.json")
    producer_files = sorted((run_folder / "producers").glob("*.jsonl"), key=_natural_order)
    if not producer_files:
        missing.append("producers/*.jsonl")
    producers: dict[str, tuple[list[ProducerEvent], int]] = {
        file.stem: read_lines(file, ProducerEvent) for file in producer_files
    }
    kept = current_line(updates)
    clocks = _clocks(updates, {name: events for name, (events, _) in producers.items()})
    return RunTelemetry(
        name=config.name if config else run_folder.resolve().name,
        config=config,
        updates=tuple(kept),
        evaluations=tuple(place_evaluations(evaluations, kept)),
        ledger=ledger,
        producers={name: _moved(events, clocks.get(name, 0.0)) for name, (events, _) in producers.items()},
        missing=tuple(missing),
        num_torn_lines=torn_updates + torn_evaluations + sum(torn for _, torn in producers.values()),
        read_s=read_s,
        clocks=clocks,
    )


def _clocks(updates: Sequence[Update], producers: Mapping[str, Sequence[ProducerEvent]]) -> dict[str, float]:
    of_trainer = [update.clock_ahead_s for update in updates if update.clock_ahead_s is not None]
    found: dict[str, float] = {}
    for name, events in producers.items():
        rates = [event for event in events if isinstance(event, Rate)]
        own = [event.clock_ahead_s for event in rates if event.clock_ahead_s is not None]
        if own and of_trainer and abs(ahead_s := median(own) - median(of_trainer)) > TOLERATED_S:
            found[name] = ahead_s
    return found


def _moved(events: Sequence[ProducerEvent], ahead_s: float) -> tuple[ProducerEvent, ...]:
    """Corrects the times of events from a clock that was ahead."""
    return tuple(msgspec.structs.replace(event, time_s=event.time_s - ahead_s) for event in events)


Line = TypeVar("Line")


def read_lines(file: Path, kind: type[Line] | Any) -> tuple[list[Line], int]:
    """Reads the records of a JSON-lines file, and counts its torn lines.

    A killed process leaves a torn line: the file's last line without its newline, or an earlier one without its closing
    brace. NaN and infinities are read as None.

    Raises:
        TelemetryError: any other line that is no record of `kind`.
    """
    records: list[Line] = []
    num_torn = 0
    rows = file.read_text(errors="replace").split("\n")
    for number, row in enumerate(rows, start=1):
        if not row.strip():
            continue
        try:
            records.append(to_record(_parse(row), kind))
        except (json.JSONDecodeError, msgspec.ValidationError) as error:
            is_unfinished = isinstance(error, json.JSONDecodeError) and row.startswith("{")
            if is_unfinished and (number == len(rows) or not row.rstrip().endswith("}")):
                num_torn += 1
                continue
            raise TelemetryError(f"{file}: line {number}: {error}; got {_shorten(row)}") from None
    return records, num_torn


def to_record(line: Any, kind: type[Line] | Any) -> Line:
    """Converts a decoded JSON line to a record of `kind`.

    Raises:
        msgspec.ValidationError: the line does not fit.
    """
    if kind in (Update, EvaluationPoint) and isinstance(line, dict):
        fields = {*kind.__struct_fields__} - {"metrics"}
        others = {key: value for key, value in line.items() if key not in fields}
        numbers = {key: float(value) for key, value in others.items() if type(value) in (int, float)}
        line = {key: value for key, value in line.items() if key in fields} | {"metrics": numbers}
    record: Line = msgspec.convert(line, kind, str_keys=True)
    return record


def current_line(lines: Iterable[Update]) -> list[Update]:
    """Returns the updates that led to the latest policy, ascending by number.

    After a rollback, numbers repeat from the checkpoint on: the later line counts, and updates beyond it are left out.
    A batch whose step was not finite made no update and is left out too: it repeats the previous number.
    """
    kept: list[Update] = []
    for line in lines:
        last = kept[-1].update if kept else 0
        if (
            line.skipped_reason is not None
            and line.update <= last
            and _epoch(line) == (_epoch(kept[-1]) if kept else 0)
        ):
            continue
        while kept and kept[-1].update >= line.update:
            kept.pop()
        kept.append(line)
    return kept


def place_evaluations(points: Iterable[EvaluationPoint], updates: Iterable[Update]) -> list[EvaluationPoint]:
    """Returns one point per update, ascending, each with the number of the update that made its policy.

    The line itself may name a later update, during which the last answer arrived. Policies that a rollback undid are
    left out; of two evaluations of one update, the later line counts.
    """
    made_by: dict[int, int] = {}
    for line in updates:
        made_by.setdefault(make_version(_epoch(line), 0), line.update - 1)
        made_by.setdefault(line.policy_version, line.update)
    if not made_by:
        return sorted(points, key=lambda point: point.update)
    placed: dict[int, EvaluationPoint] = {}
    for point in points:
        update = made_by.get(point.policy_version)
        if update is not None:
            placed[update] = msgspec.structs.replace(point, update=update)
    return [placed[update] for update in sorted(placed)]


def metric_values(updates: Iterable[Update], name: str) -> list[float]:
    """Returns a metric of the updates that have it."""
    return [line.metrics[name] for line in updates if name in line.metrics]


def phase_seconds(updates: Sequence[Update]) -> dict[str, float]:
    """Returns the trainer's seconds in each of `PHASES`."""
    return {phase: sum(getattr(line, f"{phase}_s") or 0.0 for line in updates) for phase in PHASES}


def lag_totals(updates: Iterable[Update]) -> Counter[int]:
    """Counts the tokens of all updates by lag."""
    totals: Counter[int] = Counter()
    for line in updates:
        totals.update(line.lag_histogram)
    return totals


def mean_lag(histogram: Mapping[int, int]) -> float | None:
    """Returns the mean over tokens, of their numbers by lag; None without tokens."""
    total = sum(histogram.values())
    return sum(lag * count for lag, count in histogram.items()) / total if total else None


def mean_by_lag(updates: Sequence[Update], name: str, label: str) -> float | None:
    """Returns the mean of a metric over the tokens of one lag bucket; None if no batch has it."""
    return token_mean(updates, lag_key(name, label), lag_key("num_tokens", label))


def token_mean(updates: Sequence[Update], name: str, num_tokens_name: str = "num_tokens") -> float | None:
    """Returns the mean of a metric over tokens, counted by `num_tokens_name` in each batch; None if no batch has it."""
    total = weight = 0.0
    for update in updates:
        value, num_tokens = update.metrics.get(name), update.metrics.get(num_tokens_name, 0.0)
        if value is not None:
            total, weight = total + num_tokens * value, weight + num_tokens
    return total / weight if weight else None


def _epoch(line: Update) -> int:
    return split_version(line.policy_version)[0]


def _parse(row: str) -> Any:
    return json.loads(row, parse_constant=lambda _: None, parse_float=_finite)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def read_ledger(file: Path) -> TrainerLedger | None:
    """Reads a run's ledger file; None if it does not exist yet. Raises TelemetryError if it is no ledger."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    try:
        return msgspec.convert(_parse(text), TrainerLedger)
    except (json.JSONDecodeError, msgspec.ValidationError) as error:
        raise TelemetryError(f"{file}: {error}") from None


def read_end(run_folder: Path) -> RunEnd:
    """Reads the part of a run's ledger file that says whether it is over; not finished if it cannot be read."""
    try:
        return msgspec.json.decode((run_folder / "trainer.json").read_bytes(), type=RunEnd)
    except (OSError, msgspec.DecodeError):
        return RunEnd()


def _natural_order(file: Path) -> tuple[int, str]:
    """Sorts producer-2 before producer-10."""
    return len(file.stem), file.stem


def _shorten(row: str) -> str:
    return repr(row if len(row) <= 80 else row[:77] + "...")
