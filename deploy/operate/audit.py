"""`penstock audit`: checks the ledger of a run against Redis and the checkpoints."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import redis

from penstock.consumers.stream.scripts import INDEXES_ON_STREAM
from penstock.deploy.launch.command_line import DEFAULT_RUNS
from penstock.deploy.operate.ledger_check import (
    LedgerCheck,
    LedgerProblem,
    OpenPrompt,
    Reading,
    StreamEntry,
    check_ledger,
)
from penstock.deploy.operate.run_access import OpenRun, open_run
from penstock.deploy.operate.saved_ledger import SavedLedger, UnreadableError, read_saved_ledger
from penstock.deploy.report.attrition import AttritionWindow, windows_of
from penstock.deploy.report.lines import EvaluationPoint, Update, read_end, read_lines
from penstock.deploy.report.telemetry import current_line
from penstock.schemas.attrition import Attrition
from penstock.schemas.keys import PRODUCERS_GROUP, Commit, Field, Keys, number_in

MAX_READINGS = 8
"""Most readings of a moving run. A problem counts if every reading shows it."""
_PAUSE_S = 0.25
_ENTRIES = 256
_PAYLOADS = 16
"""Entries that the script reads at once, payloads included."""


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `penstock audit`. checkpoint: None before the first commit."""

    run: str
    finished: bool
    checkpoint: str | None
    update: int
    policy_version: int
    ledger: LedgerCheck
    num_evaluations: int
    """Completed."""
    num_evaluation_prompts_open: int | None
    """None without Redis, as is `num_letters`."""
    num_letters: int | None
    num_readings: int
    warnings: tuple[str, ...]
    attrition: Attrition
    """What became of the rollouts, as of the checkpoint."""
    windows: tuple[AttritionWindow, ...]
    """The same by part of the run; empty without its `updates.jsonl`."""

    @property
    def balanced(self) -> bool:
        return self.ledger.balanced


class ObservedRun(NamedTuple):
    """One reading with its checkpoint. moved: anything changed in Redis meanwhile."""

    reading: Reading
    saved: SavedLedger
    moved: bool


def audit(run: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> Audit:
    """Finds where each released index of a run is; `balanced` says whether all are accounted for. Raises
    UnreadableError if no checkpoint can be read, or if the run is not finished and Redis cannot be reached."""
    with open_run(run, runs) as opened:
        return _audit(opened)


def _audit(run: OpenRun) -> Audit:
    """Reads the run until a reading shows no problem or nothing moved during it, `MAX_READINGS` times at most.

    Keeps the problems that every reading shows: a moving run shows others in passing.
    """
    if run.folder is None:
        raise UnreadableError(f"{run.name}: its folder, with the checkpoints, is not on this machine")
    if run.client is None:
        return _audit_without_redis(run, run.folder)
    persistent: set[tuple[str, int]] | None = None
    for number in range(1, MAX_READINGS + 1):
        try:
            observed = read_ledger(run.client, run.keys, run.folder)
        except UnreadableError:
            if number == MAX_READINGS:
                raise
            time.sleep(_PAUSE_S)  # a checkpoint that was deleted while it was read
            continue
        checked = check_ledger(observed.reading)
        seen = {(problem.what, index) for problem in checked.problems for index in problem.indexes or (0,)}
        persistent = seen if persistent is None else persistent & seen
        undisturbed = not observed.moved and not observed.saved.warnings
        if not persistent or undisturbed or number == MAX_READINGS:
            break
        time.sleep(_PAUSE_S)
    checked = msgspec.structs.replace(checked, problems=_kept(checked.problems, persistent or set()))
    return _result(run, run.folder, observed.saved, observed.reading.finished, checked, number)


def _kept(problems: tuple[LedgerProblem, ...], persistent: set[tuple[str, int]]) -> tuple[LedgerProblem, ...]:
    kept = []
    for problem in problems:
        indexes = tuple(index for index in problem.indexes or (0,) if (problem.what, index) in persistent)
        if indexes:
            kept.append(msgspec.structs.replace(problem, indexes=indexes if problem.indexes else ()))
    return tuple(kept)


def read_ledger(client: redis.Redis, keys: Keys, folder: Path) -> ObservedRun:
    """Reads prompts, stream and checkpoint in the order in which a group passes them, so that a moving group is seen
    at least once. Reads the number of released indexes first: a later release is not counted as lost."""
    before = _moment(client, keys)
    commit: Any = client.hgetall(keys.commit)
    prompts = _read_prompts(client, keys)
    stream = [StreamEntry(entry_id, _number(index)) for entry_id, index in _read_indexes(client, keys.rollouts)]
    requested: Any = client.hgetall(keys.requeued)
    letters: Any = client.hkeys(keys.dead_index)
    committed: Any = client.hgetall(keys.commit)
    pointer = committed.get(Commit.CHECKPOINT)
    saved = read_saved_ledger(folder, pointer.decode() if pointer is not None else None)
    if not committed and saved.name is not None:
        saved = saved._replace(warnings=(*saved.warnings, "Redis holds nothing of this run"))
    reading = Reading(
        saved=saved.state,
        released=_released(commit),
        prompts=prompts,
        stream=stream,
        requested={_number(index): letter.decode(errors="replace") for index, letter in requested.items()},
        letters={_number(index) for index in letters},
        finished=commit.get(Commit.FINISHED) == b"1" if commit else read_end(folder).finished,
    )
    return ObservedRun(reading, saved, moved=_moment(client, keys) != before)


def _moment(client: redis.Redis, keys: Keys) -> list[Any]:
    """Returns a value that changes with every release, append, end of a claim and commit."""
    pipeline = client.pipeline(transaction=True)
    pipeline.hgetall(keys.commit)
    pipeline.xlen(keys.prompts)
    pipeline.xrevrange(keys.prompts, count=1)
    _add_indexes(pipeline, keys.rollouts, "-", 1)
    pipeline.xlen(keys.rollouts)
    return pipeline.execute()


def _read_prompts(client: redis.Redis, keys: Keys) -> list[OpenPrompt]:
    entries: Any = client.xrange(keys.prompts)
    claimed = {claim["message_id"] for claim in pending(client, keys.prompts)}
    return [
        OpenPrompt(
            entry_id.decode(),
            _number(fields.get(Field.INDEX)),
            _number(fields.get(Field.VERSION)),
            entry_id in claimed,
        )
        for entry_id, fields in entries
    ]


def pending(client: redis.Redis, stream: str) -> list[dict[str, Any]]:
    """Lists the claims on a prompt stream: `message_id`, `consumer`, `time_since_delivered` (ms), `times_delivered`."""
    found: list[dict[str, Any]] = []
    start = "-"
    while True:
        try:
            rows: Any = client.xpending_range(stream, PRODUCERS_GROUP, start, "+", _ENTRIES)
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            return found  # no producer has created the group yet
        found += rows
        if len(rows) < _ENTRIES:
            return found
        start = "(" + rows[-1]["message_id"].decode()


def _read_indexes(client: redis.Redis, stream: str) -> list[tuple[str, bytes]]:
    """Returns (entry id, its index field or nothing) of a whole stream."""
    found: list[tuple[str, bytes]] = []
    start = "-"
    while True:
        flat: Any = _add_indexes(client, stream, start, _PAYLOADS)
        found += [(entry_id.decode(), index) for entry_id, index in zip(flat[::2], flat[1::2], strict=True)]
        if len(flat) < 2 * _PAYLOADS:
            return found
        start = "(" + found[-1][0]


def _add_indexes(client: Any, stream: str, start: str, count: int) -> Any:
    """Runs the script on a client and returns its answer, or queues it on a pipeline."""
    return client.execute_command("EVAL_RO", INDEXES_ON_STREAM, 1, stream, start, count, Field.INDEX)


def _number(field: bytes | None) -> int:
    """Returns the number in a field; 0, which is no index, if there is none."""
    return number_in(field) or 0


def _released(commit: dict[bytes, bytes]) -> int:
    field = commit.get(Commit.RELEASED, b"0")
    released = number_in(field)
    if released is None:
        raise UnreadableError(f"the commit hash in Redis: released = {field[:50]!r}, expected a number")
    return released


def _audit_without_redis(run: OpenRun, folder: Path) -> Audit:
    if not read_end(folder).finished:  # the trainer's own file, for a Redis that is gone
        raise UnreadableError(
            f"{run.name}: not finished, and only Redis knows where its open indexes are; {run.without_redis}"
        )
    saved = read_saved_ledger(folder, None)
    dead = {index for start, end in saved.state.ledger.dead for index in range(start, end)}
    reading = Reading(saved.state, 0, [], [], {}, dead, finished=True)
    saved = saved._replace(warnings=(*saved.warnings, f"by its newest checkpoint alone: {run.without_redis}"))
    unknown: dict[str, Any] = dict.fromkeys(("settled_on_stream", "settled_prompts", "never_released"))
    return _result(run, folder, saved, True, msgspec.structs.replace(check_ledger(reading), **unknown), 1)


def _result(
    run: OpenRun, folder: Path, saved: SavedLedger, finished: bool, ledger: LedgerCheck, num_readings: int
) -> Audit:
    lines, of_updates = folder / "evaluations.jsonl", folder / "updates.jsonl"
    updates = current_line(read_lines(of_updates, Update)[0]) if of_updates.is_file() else []
    client = run.client
    return Audit(
        run=run.name,
        finished=finished,
        checkpoint=saved.name,
        update=saved.state.num_batches,
        policy_version=saved.state.policy_version,
        ledger=ledger,
        num_evaluations=len(read_lines(lines, EvaluationPoint)[0]) if lines.is_file() else 0,
        num_evaluation_prompts_open=int(client.xlen(run.keys.evaluations)) if client is not None else None,
        num_letters=int(client.xlen(run.keys.dead)) if client is not None else None,
        num_readings=num_readings,
        warnings=saved.warnings,
        attrition=saved.state.ledger.attrition,
        windows=tuple(windows_of([line for line in updates if line.update <= saved.state.num_batches])),
    )
