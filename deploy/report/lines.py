"""The lines of a run's files: what trainer and producers write, as records."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.schemas.attrition import Attrition, Counts
from penstock.schemas.metrics import REWARD, figures_of
from penstock.schemas.rollout import EngineFingerprint


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


class SlowGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One of a batch's slowest groups: the seconds from its release to its step, and those of each phase."""

    index: int
    total_s: float
    phases: dict[str, float]
    trace_id: str = ""
    """Empty in a run without traces."""


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
    group_s: dict[str, float] = {}
    """By phase, the mean seconds of the batch's groups; `publish` is of the policy before."""
    slowest_groups: tuple[SlowGroup, ...] = ()
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


class WarmStartLine(Stamped, frozen=True, kw_only=True):
    """One line of `warm_start.jsonl`: a step on demonstrations."""

    step: int
    num_steps: int
    num_tokens: int
    """Of the assistant's turns."""
    step_s: float
    loss: float | None = None
    """In nats a token, before the step; None if it was not finite."""


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


def row_of(line: Update | EvaluationPoint) -> dict[str, Any]:
    """Returns a line as a flat row: its fields and its `metrics` by their names."""
    row: dict[str, Any] = msgspec.to_builtins(line)
    return row | row.pop("metrics")


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
    ended_early: str = ""
    """Why the run ended before its last update."""


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


def _shorten(row: str) -> str:
    return repr(row if len(row) <= 80 else row[:77] + "...")
