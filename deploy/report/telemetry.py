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
from penstock.schemas.metrics import LAG_LABELS, REWARD, figures_of, lag_key, lag_label
from penstock.schemas.policy import make_version, split_version
from penstock.schemas.process.clock import TOLERATED_S
from penstock.schemas.rollout import EngineFingerprint

PHASES = ("wait", "step", "publish")
"""Parts of the trainer's time; an update has the seconds of each."""
MASKED = "masked_frac"


class TelemetryError(ValueError):
    """A telemetry file cannot be read; the message names the file, the line and what was expected."""


class Stamped(msgspec.Struct, frozen=True, kw_only=True):
    """A line with the times of its writing (`penstock.schemas.process.clock.stamp`)."""

    time_s: float
    """Seconds since the epoch. The clock may have been set; `steady_times` makes durations right."""
    started_s: float = 0.0
    """The same in all lines of one process."""
    uptime_s: float | None = None
    """Of that process, by a clock that nothing sets."""


class Update(Stamped, frozen=True, kw_only=True):
    """One batch of `updates.jsonl`."""

    update: int
    policy_version: int
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

    @property
    def num_tokens_sampled(self) -> int:
        """Tokens of the batch's groups, masked ones included."""
        return sum(self.lag_histogram.values())


class EvaluationPoint(Stamped, frozen=True, kw_only=True):
    """One line of `evaluations.jsonl`: what one policy reached on the held-out prompts."""

    policy_version: int
    update: int
    reward: float
    num_prompts: int
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
    """None or 0 before the first batch."""


class Started(Stamped, frozen=True, kw_only=True, tag_field="event", tag="start"):
    """An engine is up; its token counter begins at 0."""

    fingerprint: EngineFingerprint


class WeightsLoaded(Stamped, frozen=True, kw_only=True, tag_field="event", tag="weights"):
    policy_version: int
    pause_s: float
    """Time during which no token was sampled."""


class Rate(Stamped, frozen=True, kw_only=True, tag_field="event", tag="rate"):
    num_tokens: int
    """Tokens sampled since the producer started."""
    clock_ahead_s: float | None = None
    """How far the producer's clock is ahead of Redis'."""


class ShortGroup(Stamped, frozen=True, kw_only=True, tag_field="event", tag="short_group"):
    """An agents' group was appended with fewer siblings than the run asks for; `missing` says why."""

    index: int
    finished: int
    missing: str


ProducerEvent = Started | WeightsLoaded | Rate | ShortGroup


class RunTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a run folder; fields of missing files are empty or None.

    Times of lines are those of `steady_times`: the newest is as it was written.

    start_s: when the first prompt was claimed; without the trainer's ledger, the earliest time in its lines.
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
    start_s: float | None
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
    def end_s(self) -> float | None:
        """When the last update was done."""
        return self.updates[-1].time_s if self.updates else None


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
    written = current_line(updates)
    kept = steady_times(written)
    placed = _beside(kept, written, place_evaluations(evaluations, kept))
    start_s = min((line.time_s for line in (*kept, *placed)), default=None)
    if ledger is not None and ledger.first_prompt_s:
        start_s = min(
            ledger.first_prompt_s + (kept[0].time_s - written[0].time_s if kept else 0.0), start_s or math.inf
        )
    clocks = _clocks(updates, {name: events for name, (events, _) in producers.items()})
    return RunTelemetry(
        name=config.name if config else run_folder.resolve().name,
        config=config,
        updates=tuple(kept),
        evaluations=tuple(placed),
        ledger=ledger,
        start_s=start_s,
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
    return tuple(msgspec.structs.replace(event, time_s=event.time_s - ahead_s) for event in steady_times(events))


StampedLine = TypeVar("StampedLine", bound=Stamped)


def steady_times(lines: Sequence[StampedLine]) -> list[StampedLine]:
    """Returns lines, in the order written, with times that no step of the clock has moved.

    Between lines of one process the uptime tells the time that passed, elsewhere the clock does, and never less than
    none. The last line keeps its time.
    """
    found: list[StampedLine] = []
    later_s = math.inf
    for line, after in zip(reversed(lines), [None, *reversed(lines)], strict=False):
        if after is None:
            later_s = line.time_s
        elif line.started_s == after.started_s and line.uptime_s is not None and after.uptime_s is not None:
            later_s -= max(0.0, after.uptime_s - line.uptime_s)
        else:
            later_s -= max(0.0, after.time_s - line.time_s)
        found.append(msgspec.structs.replace(line, time_s=later_s))
    return found[::-1]


def _beside(
    steady: Sequence[Update], written: Sequence[Update], points: Sequence[EvaluationPoint]
) -> list[EvaluationPoint]:
    """Moves evaluations as `steady_times` has moved the updates of their process, else the update of their policy."""
    of_process = {line.started_s: line.time_s - line.uptime_s for line in steady if line.uptime_s is not None}
    moved_s = {after.update: after.time_s - before.time_s for after, before in zip(steady, written, strict=True)}
    return [
        msgspec.structs.replace(
            point,
            time_s=of_process[point.started_s] + point.uptime_s
            if point.uptime_s is not None and point.started_s in of_process
            else point.time_s + moved_s.get(point.update, 0.0),
        )
        for point in points
    ]


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
    rows = file.read_text("utf-8", errors="replace").split("\n")
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


def tokens_by_lag(update: Update) -> dict[str, int]:
    """Returns the sampled tokens of a batch by lag bucket, masked ones included."""
    counts = dict.fromkeys(LAG_LABELS, 0)
    for lag, num_tokens in update.lag_histogram.items():
        counts[lag_label(lag)] += num_tokens
    mixed = min(round(update.metrics.get(lag_key("num_tokens", "0-mixed"), 0)), counts["0"])
    return counts | {"0": counts["0"] - mixed, "0-mixed": mixed}


def mean_by_lag(updates: Sequence[Update], name: str, label: str) -> float | None:
    """Returns the mean of a metric over the tokens of one lag bucket: `masked_frac` over all that were sampled, others
    over those within the lag bound. None if no batch has it."""
    within = lag_key("num_tokens", label)
    return _weighted(
        (
            update.metrics.get(lag_key(name, label)),
            tokens_by_lag(update)[label] if name == MASKED else update.metrics.get(within, 0.0),
        )
        for update in updates
    )


def mean_in_environment(updates: Sequence[Update], name: str, environment: str) -> float | None:
    """Returns the same over the tokens of one environment; also of `lag_mean`, over all that were sampled."""
    own = [update.environments[environment] for update in updates if environment in update.environments]
    of = "num_tokens_sampled" if name in (MASKED, "lag_mean") else "num_tokens"
    return _weighted((measured.get(name), measured.get(of, 0.0)) for measured in own)


def masked_frac(updates: Sequence[Update]) -> float | None:
    """Returns the share of sampled tokens that were masked, for their lag or by the correction; None if no batch has
    it."""
    return _weighted((update.metrics.get(MASKED), update.num_tokens_sampled) for update in updates)


def masked_lag_frac(updates: Sequence[Update]) -> float | None:
    """Returns the share of sampled tokens that were masked for their lag; None without tokens."""
    total = sum(update.num_tokens_sampled for update in updates)
    return sum(update.num_tokens_masked_lag for update in updates) / total if total else None


def _weighted(values: Iterable[tuple[float | None, float]]) -> float | None:
    """Returns the mean of values by their weights, without those that are None; None without weight."""
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


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
        text = file.read_text("utf-8")
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
