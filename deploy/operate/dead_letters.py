"""`penstock dead`: lists, shows and requeues dead letters."""

import functools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal

import msgspec
import redis
from msgspec.structs import replace

from penstock.deploy.operate.run_access import OpenRun
from penstock.deploy.operate.saved_ledger import LedgerState, UnreadableError, read_saved_ledger
from penstock.producers.rollout.episode import load_tokenizer
from penstock.schemas.config import ConfigError
from penstock.schemas.keys import Commit, Field, number_in
from penstock.schemas.rollout import RecordError, Rollout, RolloutGroup, decode_group, unpack_ids

_LETTERS = 16
"""Letters read at once: each may hold a whole group."""
_PREVIEW_BYTES = 256
_PAIRS = 500

State = Literal["dead", "requeued", "released again", "settled since", "older", "no index", "rollout"]

# KEYS: commit, dead_index, requeued; ARGV: index, letter, index, letter... A letter is taken only if it is the current
# one of its index, which it is until the trainer releases the index again.
_REQUEUE = """#!lua flags=allow-oom
if redis.call('HGET', KEYS[1], 'finished') == '1' then return redis.error_reply('FINISHED') end
local taken = {}
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[2], ARGV[i]) == ARGV[i + 1] then
    redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1])
    taken[#taken + 1] = ARGV[i]
  end
end
return taken
"""


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """The dead letter of an index, or of one agent's rollout (state `rollout`), which settles no index.

    index: None for a record that named none.
    producer: None if the payload names none.
    rollout: its id; None for the letter of an index.
    """

    entry_id: str
    index: int | None
    reason: str
    time_s: float
    state: State
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

    problem: why the payload cannot be read, or not be trained on. traceback: of the error of the user's code that it
    died of; empty without one.
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
    """indexes: to be released again by the trainer. without_index: number of letters that name none."""

    indexes: tuple[int, ...]
    without_index: int


def list_letters(run: OpenRun) -> list[Letter]:
    """Every letter of a run, oldest first; of one millisecond, those of indexes before those of rollouts."""
    return sorted((*_dead_indexes(run), *_dead_rollouts(run)), key=lambda letter: letter.time_s)


def _dead_indexes(run: OpenRun) -> list[Letter]:
    state_of = _states(run)
    return [_letter(entry_id, fields, state_of) for entry_id, fields in _entries(run, run.keys.dead)]


def _dead_rollouts(run: OpenRun) -> list[Letter]:
    """Reads each once: a producer that missed the answer to an append repeats it."""
    letters = [_rollout_letter(entry_id, fields) for entry_id, fields in _entries(run, run.keys.dead_rollouts)]
    return list({(letter.index, letter.rollout): letter for letter in reversed(letters)}.values())[::-1]


def show_letters(run: OpenRun, index: int) -> list[Content]:
    """The letters of one index, oldest first.

    Raises:
        ConfigError: the index has none.
    """
    state_of, decode = _states(run), _decoder(run)
    wanted = str(index).encode()
    found = [
        _content(_letter(entry_id, fields, state_of), fields, decode)
        for entry_id, fields in _entries(run, run.keys.dead)
        if fields.get(Field.INDEX) == wanted
    ]
    for entry_id, fields in _entries(run, run.keys.dead_rollouts):
        if fields.get(Field.INDEX) == wanted:
            found.append(Content(letter=_rollout_letter(entry_id, fields), traceback=_text(fields, Field.TRACEBACK)))
    found = list({content.letter.rollout or content.letter.entry_id: content for content in found}.values())
    found.sort(key=lambda content: content.letter.time_s)
    if not found:
        raise ConfigError(
            f"INDEX = {index}: no dead letter of run {run.name!r} names it; `penstock dead list` shows all"
        )
    return found


def requeue(
    run: OpenRun, *, indexes: Collection[int] = (), reason: str | None = None, every: bool = False
) -> RequeueResult:
    """Requests the release of dead indexes: by number, by reason (or its part before the colon), or all of them.

    The trainer takes the request at its next reconcile (at its start and each checkpoint) and releases them when there
    is credit.

    Raises:
        ConfigError: the run is finished, or an index is not dead.
    """
    if run.redis.hget(run.keys.commit, Commit.FINISHED) == b"1":
        raise _finished(run)
    letters = _dead_indexes(run)
    standing = {letter.index: letter for letter in letters if letter.state == "dead" and letter.index is not None}
    if indexes:
        _check_indexes(run, indexes, letters, standing)
    chosen = {
        index: letter.entry_id
        for index, letter in standing.items()
        if every or index in indexes or (reason is not None and reason in (letter.reason, letter.kind))
    }
    if reason is not None and not chosen:
        kinds = ", ".join(sorted({letter.kind for letter in standing.values()})) or "none"
        raise ConfigError(f"--reason {reason}: no index of run {run.name!r} died of it; expected one of: {kinds}")
    without_index = sum(
        letter.index is None and (every or (reason is not None and reason in (letter.reason, letter.kind)))
        for letter in letters
    )
    return RequeueResult(indexes=tuple(_send(run, chosen)), without_index=without_index)


def _check_indexes(
    run: OpenRun, indexes: Collection[int], letters: list[Letter], standing: Collection[int | None]
) -> None:
    for index in sorted(set(indexes)):
        if index in standing:
            continue
        states = [letter.state for letter in (*_dead_rollouts(run), *letters) if letter.index == index]
        why = f"its last letter is marked {states[-1]!r}" if states else "no dead letter names it"
        raise ConfigError(f"INDEX = {index}: not dead in run {run.name!r}: {why}; nothing was requeued")


def _send(run: OpenRun, chosen: dict[int, str]) -> list[int]:
    keys = [run.keys.commit, run.keys.dead_index, run.keys.requeued]
    script = run.redis.register_script(_REQUEUE)
    pairs = sorted(chosen.items())
    taken: list[int] = []
    for start in range(0, len(pairs), _PAIRS):
        arguments = [part for pair in pairs[start : start + _PAIRS] for part in pair]
        try:
            taken += [int(index) for index in script(keys=keys, args=arguments)]
        except redis.ResponseError as error:
            if "FINISHED" not in str(error):
                raise
            raise _finished(run) from None
    return taken


def _finished(run: OpenRun) -> ConfigError:
    return ConfigError(
        f"run {run.name!r} is finished and releases nothing more; continue it first, with --resume and more updates"
    )


def _entries(run: OpenRun, stream: str) -> Iterator[tuple[str, dict[bytes, bytes]]]:
    start = "-"
    while True:
        entries: Any = run.redis.xrange(stream, min=start, count=_LETTERS)
        for entry_id, fields in entries:
            yield entry_id.decode(), fields
        if len(entries) < _LETTERS:
            return
        start = "(" + entries[-1][0].decode()


def _states(run: OpenRun) -> Callable[[int | None, str], State]:
    """Makes a function that gives a letter's state, by Redis and by the last committed checkpoint."""
    standing: Any = run.redis.hgetall(run.keys.dead_index)
    requested: Any = run.redis.hgetall(run.keys.requeued)
    ledger = _saved_ledger(run)

    def state_of(index: int | None, entry_id: str) -> State:
        if index is None:
            return "no index"
        name, letter = str(index).encode(), entry_id.encode()
        if requested.get(name) == letter:
            return "released again" if ledger.requeued.get(index, ("", ""))[0] == entry_id else "requeued"
        if standing.get(name) != letter:
            return "older"
        settled = any(start <= index < end for start, end in (*ledger.trained, *ledger.skipped))
        return "settled since" if settled else "dead"

    return state_of


def _saved_ledger(run: OpenRun) -> LedgerState:
    if run.folder is None:
        return LedgerState()
    pointer: Any = run.redis.hget(run.keys.commit, Commit.CHECKPOINT)
    try:
        return read_saved_ledger(run.folder, pointer.decode() if pointer is not None else None).saved.ledger
    except UnreadableError:
        return LedgerState()  # the audit says what is wrong with the checkpoints


def _letter(entry_id: str, fields: dict[bytes, bytes], state_of: Callable[[int | None, str], State]) -> Letter:
    index, payload = number_in(fields.get(Field.INDEX)), fields.get(Field.PAYLOAD, b"")
    return Letter(
        entry_id=entry_id,
        index=index,
        reason=_text(fields, Field.REASON),
        time_s=_time_s(entry_id),
        state=state_of(index, entry_id),
        producer=_text(fields, Field.PRODUCER) or _producer(payload),
        payload_bytes=len(payload),
    )


def _rollout_letter(entry_id: str, fields: dict[bytes, bytes]) -> Letter:
    return Letter(
        entry_id=entry_id,
        index=number_in(fields.get(Field.INDEX)),
        reason=_text(fields, Field.REASON),
        time_s=_time_s(entry_id),
        state="rollout",
        producer=_text(fields, Field.PRODUCER) or None,
        payload_bytes=0,
        rollout=_text(fields, Field.ROLLOUT),
    )


def _text(fields: dict[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode(errors="replace")


def _time_s(entry_id: str) -> float:
    return int(entry_id.partition("-")[0]) / 1000


class _Named(msgspec.Struct):
    producer_id: str


def _producer(payload: bytes) -> str | None:
    """The producer that a record names, even if the record is invalid."""
    try:
        return msgspec.msgpack.decode(payload, type=_Named).producer_id
    except (ValueError, RecursionError):
        return None


Decode = Callable[[bytes], str | None]
"""Text of token ids (packed)."""


def _decoder(run: OpenRun) -> Decode:
    """Makes a function that loads the model's tokenizer when it is called first."""

    @functools.cache
    def tokenizer() -> Any:
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
    turns = "\n".join(f"{message.role}: {message.content}" for message in prompt.messages or ())
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
