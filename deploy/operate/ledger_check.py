"""Checks a ledger: where each released index is, and what is wrong. No Redis, no files."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from penstock.consumers.checkpoints.state import CheckpointState, LedgerState, Range
from penstock.consumers.stream.ledger import IndexRanges

_NAMED = 20
"""Most ranges of indexes that a line spells out."""


@dataclass(frozen=True)
class OpenPrompt:
    """An entry of the prompts stream. version: the policy at which the trainer expects to take its group."""

    entry_id: str
    index: int
    version: int
    claimed: bool


@dataclass(frozen=True)
class StreamEntry:
    """An entry of the rollout stream. index: 0 if it names none."""

    entry_id: str
    index: int


class Reading(NamedTuple):
    """A run at one moment, read in this order: `released`, the prompts, the stream, `saved`."""

    saved: CheckpointState
    released: int
    prompts: list[OpenPrompt]
    stream: list[StreamEntry]
    requested: dict[int, str]
    """By index, the dead letter that an operator has requeued."""
    letters: set[int]
    """The indexes that have a dead letter."""
    finished: bool


class LedgerProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A violation of the ledger. indexes: ascending; empty if the problem is not about single indexes."""

    what: str
    indexes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}: {name_indexes(self.indexes)}" if self.indexes else self.what


class LedgerCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Each released index counts once: settled in the checkpoint, else on the stream or a prompt, else cancelled."""

    released: int
    trained: int
    skipped: int
    dead: int
    dead_reasons: dict[str, int]
    on_stream: int
    """Generated and not settled in the checkpoint, whether the trainer has read them or not."""
    claimed: int
    queued: int
    postponed: int
    """To be released again when there is credit."""
    cancelled: int
    """Open when the run ended."""

    duplicates_dropped: int
    tokens_masked_lag: int
    released_again: dict[str, int]
    requeued_waiting: int
    """Dead and requeued by an operator."""
    settled_on_stream: int | None
    """Entries of settled indexes, which the next commit trims or the trainer drops. This field and the next two are
    None if Redis cannot be reached."""
    settled_prompts: int | None
    """Prompts of settled indexes, left behind by a fault; their groups are dropped."""
    never_released: int | None
    """Entries that name no released index."""
    dead_without_letter: int
    problems: tuple[LedgerProblem, ...]

    @property
    def num_open(self) -> int:
        return self.on_stream + self.claimed + self.queued + self.postponed + self.cancelled

    @property
    def balanced(self) -> bool:
        return not self.problems


def check_ledger(reading: Reading) -> LedgerCheck:
    """Counts the indexes of one reading by place, and finds every problem in it."""
    ledger, released = reading.saved.ledger, max(reading.released, reading.saved.ledger.num_released)
    trained, skipped, dead = (set(_members(runs)) for runs in (ledger.trained, ledger.skipped, ledger.dead))
    settled = trained | skipped | dead
    in_release = range(1, released + 1)
    places = _places(reading, [index for index in in_release if index not in settled])
    waiting = {index for index in dead if _is_requested(index, reading.requested, ledger)}
    may_not_be_open = settled - waiting
    problems = [
        *_settled_twice(ledger),
        *_named("settled, but never released", settled - set(in_release)),
        *_named("settled, and released again", _released_again(reading, trained, may_not_be_open)),
        *_named("dead without exactly one reason, or with one and not dead", _wrong_reasons(ledger, dead)),
    ]
    if not reading.finished:
        problems += _named("lost: neither settled, nor on the stream, nor a prompt", places["lost"])
    num_open = Counter({name: len(indexes) for name, indexes in places.items()})
    shown = Counter() if reading.finished else num_open
    entries = [entry.index for entry in reading.stream] + [prompt.index for prompt in reading.prompts]
    return LedgerCheck(
        released=released,
        trained=len(trained),
        skipped=len(skipped),
        dead=len(dead),
        dead_reasons={reason: len(list(_members(runs))) for reason, runs in sorted(ledger.dead_by_reason.items())},
        on_stream=shown["on_stream"],
        claimed=shown["claimed"],
        queued=shown["queued"],
        postponed=shown["postponed"],
        cancelled=num_open.total() if reading.finished else 0,
        duplicates_dropped=ledger.num_duplicates_dropped,
        tokens_masked_lag=int(reading.saved.counters.get("num_tokens_masked_lag", 0)),
        released_again=dict(ledger.released_again),
        requeued_waiting=len(waiting),
        settled_on_stream=sum(entry.index in settled for entry in reading.stream),
        settled_prompts=sum(prompt.index in may_not_be_open for prompt in reading.prompts),
        never_released=sum(index not in in_release for index in entries),
        dead_without_letter=len(dead - reading.letters - waiting),
        problems=tuple(problems),
    )


def _places(reading: Reading, unsettled: Iterable[int]) -> dict[str, set[int]]:
    """Locates each unsettled index: `on_stream`, `claimed`, `queued`, `postponed` or `lost`."""
    prompts = {prompt.index: prompt for prompt in sorted(reading.prompts, key=lambda prompt: _id_key(prompt.entry_id))}
    entries = {entry.index: entry.entry_id for entry in reading.stream}
    postponed = set(reading.saved.ledger.postponed)
    places: dict[str, set[int]] = {name: set() for name in ("on_stream", "claimed", "queued", "postponed", "lost")}
    for index in unsettled:
        prompt, entry_id = prompts.get(index), entries.get(index)
        # A stale group leaves its entry on the stream and its index among the prompts: the newer of the two counts.
        if entry_id is not None and (prompt is None or _id_key(entry_id) > _id_key(prompt.entry_id)):
            places["on_stream"].add(index)
        elif prompt is not None:
            places["claimed" if prompt.claimed else "queued"].add(index)
        else:
            places["postponed" if index in postponed else "lost"].add(index)
    return places


def _settled_twice(ledger: LedgerState) -> Iterator[LedgerProblem]:
    """Finds indexes that are in two sets, or twice in one."""
    found: dict[int, list[str]] = {}
    for outcome in ("trained", "skipped", "dead"):
        for index in _members(getattr(ledger, outcome)):
            found.setdefault(index, []).append(outcome)
    twice: dict[str, list[int]] = {}
    for index, outcomes in found.items():
        if len(outcomes) > 1:
            twice.setdefault(" and ".join(outcomes), []).append(index)
    for outcomes_named, indexes in sorted(twice.items()):
        yield LedgerProblem(what=f"settled twice ({outcomes_named})", indexes=tuple(sorted(indexes)))


def _released_again(reading: Reading, trained: set[int], may_not_be_open: set[int]) -> set[int]:
    """Returns the indexes that the trainer has released although the checkpoint holds them as settled.

    A fault may leave a prompt whose group is settled: a power loss brings it back, a repeated command stores it twice.
    Such a prompt was released before its index was settled, by a policy older than the checkpoint's (or by the
    checkpoint's own, for dead and skipped indexes, which make no policy), and is harmless.
    """
    policy = reading.saved.policy_version
    return {
        prompt.index
        for prompt in reading.prompts
        if prompt.index in may_not_be_open
        and (prompt.version > policy or (prompt.version == policy and prompt.index in trained))
    }


def _is_requested(index: int, requested: dict[int, str], ledger: LedgerState) -> bool:
    """Returns whether an operator's request is not in the checkpoint yet. The trainer may have taken it already."""
    letter = requested.get(index)
    return letter is not None and ledger.requeued.get(index, ("", ""))[0] != letter


def _wrong_reasons(ledger: LedgerState, dead: set[int]) -> set[int]:
    by_reason = Counter(index for runs in ledger.dead_by_reason.values() for index in _members(runs))
    return {index for index in dead | set(by_reason) if by_reason[index] != (index in dead)}


def _named(what: str, indexes: Iterable[int]) -> list[LedgerProblem]:
    named = tuple(sorted(indexes))
    return [LedgerProblem(what=what, indexes=named)] if named else []


def _members(runs: Iterable[Range]) -> Iterator[int]:
    for start, end in runs:
        yield from range(start, end)


def _id_key(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence)


def name_indexes(indexes: Iterable[int]) -> str:
    """Returns `3, 7-9, 12`; of many, the first ranges and the total number."""
    found = IndexRanges()
    for index in indexes:
        found.add(index)
    runs = found.ranges()
    shown = [str(start) if end == start + 1 else f"{start}-{end - 1}" for start, end in runs[:_NAMED]]
    return ", ".join(shown) + (f", … ({len(found)} in all)" if len(runs) > _NAMED else "")
