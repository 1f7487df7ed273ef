"""`penstock dead`: lists, shows and requeues dead letters."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import redis
from msgspec.structs import replace

from penstock.consumers.checkpoints.state import LedgerState
from penstock.consumers.stream.scripts import REQUEUE_DEAD
from penstock.deploy.launch.command_line import DEFAULT_RUNS
from penstock.deploy.operate.run_access import OpenRun, open_run
from penstock.deploy.operate.saved_ledger import UnreadableError, read_saved_ledger
from penstock.schemas.config import ConfigError
from penstock.schemas.keys import Commit, Field, number_in
from penstock.schemas.rollout import RecordError, Rollout, RolloutGroup, decode_group, unpack_ids

_LETTERS = 16
"""Letters read at once: each may hold a whole group."""
_PREVIEW_BYTES = 256
_PAIRS = 500

State = Literal["dead", "requeued", "released again", "settled since", "older", "no index", "rollout"]


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """The dead letter of an index, or of one agent's rollout (state `rollout`), which settles no index.

    index: None for a record that named none.
    environment: of its task; None if neither the run's checkpoint nor Redis or the payload says.
    producer: None if neither letter nor payload names one.
    rollout: its id; None for the letter of an index.
    """

    entry_id: str
    index: int | None
    reason: str
    time_s: float
    state: State
    environment: str | None
    producer: str | None
    payload_bytes: int
    rollout: str | None = None

    @property
    def kind(self) -> str:
        """The part of the reason before its first colon: `poison`, `reward`, ..."""
        return self.reason.partition(":")[0]


class Sibling(msgspec.Struct, frozen=True, kw_only=True):
    completion: str | None
    """Its sampled tokens as text; None if the model's tokenizer cannot be loaded."""
    reward: float | None
    """None if it was never scored."""
    reward_parts: dict[str, float]
    num_tokens: int
    num_sampled_tokens: int
    versions: tuple[int, ...]
    """Policies that sampled it."""
    finish_reasons: tuple[str, ...]
    """One per segment."""


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """A letter with its payload, as far as it can be read.

    problem: why the payload cannot be read or trained on. traceback: of the error in the user's code that killed it;
    empty without one.
    """

    letter: Letter
    traceback: str = ""
    problem: str | None = None
    prompt: str | None = None
    answer: str | None = None
    siblings: tuple[Sibling, ...] | None = None
    hex_preview: str | None = None
    """The first bytes of a payload that is no record."""


class RequeueResult(msgspec.Struct, frozen=True, kw_only=True):
    """indexes: those the trainer will release again. without_index: number of letters that name no index."""

    indexes: tuple[int, ...]
    without_index: int


def list_dead(run: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> list[Letter]:
    """Lists the dead letters of a run, oldest first: what died, when and of what."""
    with open_run(run, runs) as opened:
        return sorted((letter for letter, _ in _letters(opened)), key=_age)


def show_dead(run: str | Path, index: int, *, runs: str | Path = DEFAULT_RUNS) -> list[Content]:
    """Reads the letters of one task index with prompt, completions and traceback, oldest first. Raises ConfigError if
    it has none."""
    with open_run(run, runs) as opened:
        decode = _decoder(opened)
        found = [_content(letter, fields, decode) for letter, fields in _letters(opened) if letter.index == index]
    if not found:
        raise ConfigError(
            f"INDEX = {index}: no dead letter of run {opened.name!r} names it; `penstock dead list` shows all"
        )
    return sorted(found, key=lambda content: _age(content.letter))


def _age(letter: Letter) -> tuple[float, bool]:
    """Returns a sort key: oldest first; of one millisecond, letters of indexes before those of rollouts."""
    return letter.time_s, letter.rollout is not None


def requeue_dead(
    run: str | Path,
    indexes: Sequence[int] = (),
    *,
    reason: str | None = None,
    every: bool = False,
    runs: str | Path = DEFAULT_RUNS,
) -> RequeueResult:
    """Requests another release of dead task indexes: these, those that died of `reason` (or of that part before the
    colon), or every one.

    The trainer takes the request at its next reconcile (at its start and each checkpoint) and releases them when there
    is credit.

    Raises:
        ConfigError: not one of the three is given, an index is not dead, or the run is finished.
    """
    if sum((bool(indexes), reason is not None, every)) != 1:
        raise ConfigError("dead requeue: expected one of INDEX..., --reason R and --all")
    with open_run(run, runs) as opened:
        return _requeue(opened, indexes, reason, every)


def _requeue(run: OpenRun, indexes: Sequence[int], reason: str | None, every: bool) -> RequeueResult:
    if run.redis.hget(run.keys.commit, Commit.FINISHED) == b"1":
        raise _finished(run)
    letters = [letter for letter, _ in _letters(run)]
    dead = [letter for letter in letters if letter.state == "dead"]
    for index in sorted(set(indexes).difference(letter.index for letter in dead)):
        states = [letter.state for letter in letters if letter.index == index]
        why = f"its last letter is marked {states[-1]!r}" if states else "no dead letter names it"
        raise ConfigError(f"INDEX = {index}: not dead in run {run.name!r}: {why}; nothing was requeued")
    asked = [letter for letter in letters if every or letter.index in indexes or reason in (letter.reason, letter.kind)]
    chosen = [(str(letter.index), letter.entry_id) for letter in asked if letter.state == "dead"]
    if reason is not None and not chosen:
        kinds = ", ".join(sorted({letter.kind for letter in dead})) or "none"
        raise ConfigError(f"--reason {reason}: no index of run {run.name!r} died of it; expected one of: {kinds}")
    without_index = sum(letter.state == "no index" for letter in asked)
    return RequeueResult(indexes=tuple(sorted(_send(run, chosen))), without_index=without_index)


def _send(run: OpenRun, chosen: list[tuple[str, str]]) -> Iterator[int]:
    """Requests the release of (index, letter) pairs; yields the indexes taken."""
    keys = [run.keys.commit, run.keys.dead_index, run.keys.requeued]
    script = run.redis.register_script(REQUEUE_DEAD)
    for start in range(0, len(chosen), _PAIRS):
        try:
            taken: Any = script(keys=keys, args=list(chain(*chosen[start : start + _PAIRS])))
        except redis.ResponseError as error:
            if "FINISHED" not in str(error):
                raise
            raise _finished(run) from None
        yield from map(int, taken)


def _finished(run: OpenRun) -> ConfigError:
    return ConfigError(
        f"run {run.name!r} is finished and releases nothing more; continue it first, with --resume and more updates"
    )


def _letters(run: OpenRun) -> Iterator[tuple[Letter, dict[bytes, bytes]]]:
    """Yields every letter with the fields of its entry, those of rollouts first. Of one rollout it yields one letter:
    a producer that missed the answer to an append repeats it."""
    seen = set()
    ledger = _saved_ledger(run)
    environments = _environments(run, ledger)
    for entry_id, fields in _entries(run, run.keys.dead_rollouts):
        letter = _letter(entry_id, fields, "rollout", environments)
        if (letter.index, letter.rollout) not in seen:
            seen.add((letter.index, letter.rollout))
            yield letter, fields
    state_of = _states(run, ledger)
    for entry_id, fields in _entries(run, run.keys.dead):
        state = state_of(number_in(fields.get(Field.INDEX)), entry_id)
        yield _letter(entry_id, fields, state, environments), fields


def _entries(run: OpenRun, stream: str) -> Iterator[tuple[str, dict[bytes, bytes]]]:
    start = "-"
    while True:
        entries: Any = run.redis.xrange(stream, min=start, count=_LETTERS)
        for entry_id, fields in entries:
            yield entry_id.decode(), fields
        if len(entries) < _LETTERS:
            return
        start = "(" + entries[-1][0].decode()


def _environments(run: OpenRun, ledger: LedgerState) -> dict[int, str]:
    """Returns the environment of each index whose task is known: open or dead in the checkpoint, or released since."""
    released: Any = run.redis.hgetall(run.keys.tasks)
    names = {number_in(index): task.partition(b" ")[2].decode(errors="replace") for index, task in released.items()}
    return {index: name for index, name in names.items() if index is not None} | {
        index: task.environment for index, task in ledger.tasks.items()
    }


def _states(run: OpenRun, ledger: LedgerState) -> Callable[[int | None, str], State]:
    """Makes a function that returns a letter's state, by Redis and the last committed checkpoint."""
    current: Any = run.redis.hgetall(run.keys.dead_index)
    requested: Any = run.redis.hgetall(run.keys.requeued)

    def state_of(index: int | None, entry_id: str) -> State:
        if index is None:
            return "no index"
        name, letter = str(index).encode(), entry_id.encode()
        if requested.get(name) == letter:
            return "released again" if ledger.requeued.get(index, ("", ""))[0] == entry_id else "requeued"
        if current.get(name) != letter:
            return "older"
        settled = any(start <= index < end for start, end in (*ledger.trained, *ledger.skipped))
        return "settled since" if settled else "dead"

    return state_of


def _saved_ledger(run: OpenRun) -> LedgerState:
    if run.folder is None:
        return LedgerState()
    pointer: Any = run.redis.hget(run.keys.commit, Commit.CHECKPOINT)
    try:
        return read_saved_ledger(run.folder, pointer.decode() if pointer is not None else None).state.ledger
    except UnreadableError:
        return LedgerState()  # the audit says what is wrong with the checkpoints


def _letter(entry_id: str, fields: dict[bytes, bytes], state: State, environments: Mapping[int, str]) -> Letter:
    payload, index = fields.get(Field.PAYLOAD, b""), number_in(fields.get(Field.INDEX))
    named = _named(payload)
    return Letter(
        entry_id=entry_id,
        index=index,
        reason=_text(fields, Field.REASON),
        time_s=int(entry_id.partition("-")[0]) / 1000,
        state=state,
        environment=(None if index is None else environments.get(index)) or named.environment or None,
        producer=_text(fields, Field.PRODUCER) or named.producer_id,
        payload_bytes=len(payload),
        rollout=_text(fields, Field.ROLLOUT) if state == "rollout" else None,
    )


def _text(fields: dict[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode(errors="replace")


class _Named(msgspec.Struct):
    producer_id: str | None = None
    environment: str | None = None


def _named(payload: bytes) -> _Named:
    """Returns the producer and the environment that a record names, even if the record is invalid."""
    try:
        return msgspec.msgpack.decode(payload, type=_Named)
    except (ValueError, RecursionError):
        return _Named()


Decode = Callable[[bytes], str | None]
"""Text of token ids (packed)."""


def _decoder(run: OpenRun) -> Decode:
    """Makes a function that loads the model's tokenizer when it is called first."""

    @functools.cache
    def tokenizer() -> Any:
        from penstock.producers.rollout.episode import load_tokenizer  # imports aiohttp

        try:
            return load_tokenizer(run.config) if run.config is not None else None
        except ConfigError:
            return None

    return lambda ids: tokenizer().decode(unpack_ids(ids)) if tokenizer() is not None else None


def _content(letter: Letter, fields: dict[bytes, bytes], decode: Decode) -> Content:
    payload = fields.get(Field.PAYLOAD, b"")
    content = Content(letter=letter, traceback=_text(fields, Field.TRACEBACK))
    if not payload:
        return content
    problem = None
    try:
        group = decode_group(payload, dead=True)
    except RecordError as error:
        problem = str(error)
        try:
            group = msgspec.msgpack.decode(payload, type=RolloutGroup)
        except (ValueError, RecursionError):
            return replace(content, problem=problem, hex_preview=payload[:_PREVIEW_BYTES].hex(" ", 4))
    prompt = group.prompt
    turns = "\n".join(f"{message.role}: {message.text}" for message in prompt.messages or ())
    return replace(
        content,
        problem=problem,
        prompt=prompt.text if prompt.text is not None else turns,
        answer=prompt.answer,
        siblings=tuple(_sibling(rollout, decode if problem is None else None) for rollout in group.rollouts),
    )


def _sibling(rollout: Rollout, decode: Decode | None) -> Sibling:
    said: list[str | None] = []
    if decode is not None:
        for segment in rollout.segments:
            said += [decode(segment.token_ids[4 * start : 4 * end]) for start, end in segment.loss_mask]
    return Sibling(
        completion="\n".join(each for each in said if each is not None) if None not in said else None,
        reward=rollout.reward.value if math.isfinite(rollout.reward.value) else None,
        reward_parts=rollout.reward.parts,
        num_tokens=sum(segment.num_tokens for segment in rollout.segments),
        num_sampled_tokens=rollout.num_sampled_tokens,
        versions=tuple(sorted({span.version for part in rollout.segments for span in part.version_spans})),
        finish_reasons=tuple(segment.finish_reason for segment in rollout.segments),
    )
