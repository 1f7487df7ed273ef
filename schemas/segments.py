"""Converts the recorded calls of a rollout to the segments that are trained.

A call whose prompt begins with the prompt and completion of an earlier call continues it, and one segment holds both.
Any other prompt (the harness edited, summarised or stripped its history, or a second agent made the call) opens a new
segment. Every sampled token is trained in exactly one segment, preceded there by exactly the ids that the engine was
given; a segment that shares its beginning with an earlier one has that beginning as context.
"""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import msgspec

from penstock.schemas.images import ImagePlace
from penstock.schemas.prefixes import PrefixTrie
from penstock.schemas.rollout import FinishReason, RecordError, Segment, TopLogprobs, VersionSpan
from penstock.schemas.routes import Routes, joined_routes

_ID_BYTES = 4


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the model: its prompt and its completion.

    t: the call's position in the order in which the rollout's calls began; a call continues only earlier ones.
    prompt_token_ids: int32 bytes, `[num_prompt_tokens]`, exactly as given to the engine.
    generation_token_ids: int32 bytes, `[num_sampled]`, the stop token included if it was sampled.
    behavior_logprobs: float32 bytes, `[num_sampled]`.
    version_spans: tile `[0, num_sampled)`.
    delivered: whether the answer reached the client; None if unknown.
    sampling_mask: see `Segment`.
    routes: of the prompt and the sampled tokens, without the last one.
    top_logprobs: of the sampled tokens.
    images: their places in the prompt.
    """

    call_id: str
    t: int
    prompt_token_ids: bytes
    generation_token_ids: bytes
    behavior_logprobs: bytes
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason = "stop"
    delivered: bool | None = None
    sampling_mask: tuple[bytes, ...] | None = None
    routes: Routes | None = None
    top_logprobs: TopLogprobs | None = None
    images: tuple[ImagePlace, ...] = ()

    @property
    def seen(self) -> bytes:
        """What tells the prompt from others: its ids, of which those of images are parts of their digests."""
        ids = bytearray(self.prompt_token_ids)
        for place in self.images:
            size = _ID_BYTES * (place.end - place.start)
            ids[_ID_BYTES * place.start : _ID_BYTES * place.end] = (place.digest.encode() * size)[-size:]
        return bytes(ids)


class Chain(NamedTuple):
    """Calls that each continue the previous one, and their segment. A call that is also in an earlier chain is trained
    there and is context here."""

    call_ids: tuple[str, ...]
    segment: Segment


class DroppedCall(NamedTuple):
    """A call whose tokens are not trained, and the reason: `nothing_sampled`, `not_delivered` (the client never
    received the answer), `retry_superseded` (the client asked again with the same prompt and continued from the second
    answer)."""

    call_id: str
    reason: str


class CallError(RecordError):
    """A recorded call that contradicts itself or another. `code` is `invalid_token_ids`, `logprob_length_mismatch`,
    `version_spans_mismatch` or `duplicate_call_id`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def segments(calls: Iterable[RecordedCall]) -> tuple[list[Chain], list[DroppedCall]]:
    """Returns the segments of one rollout, whose calls may be in any order.

    An answer that the client received, or that a later call continues, is never dropped.

    Returns:
        The chains, sorted by their last call's `t`, and the dropped calls, sorted by theirs. There may be no chain, if
        nothing was sampled or nothing reached the client.

    Raises:
        CallError: a call contradicts itself, or two have the same id.
    """
    ordered = sorted(calls, key=lambda call: (call.t, call.call_id))
    known: set[str] = set()
    for call in ordered:
        _check_call(call)
        if call.call_id in known:
            raise CallError("duplicate_call_id", f"calls: two have call_id {call.call_id!r}, expected one each")
        known.add(call.call_id)
    sampled = [call for call in ordered if call.generation_token_ids]
    parents = _parents(sampled)
    reasons = {call.call_id: "nothing_sampled" for call in ordered if not call.generation_token_ids}
    reasons |= _unused(sampled, parents)
    dropped = [DroppedCall(call.call_id, reasons[call.call_id]) for call in ordered if call.call_id in reasons]

    kept = [n for n, call in enumerate(sampled) if call.call_id not in reasons]
    continued = {parents[n] for n in kept}
    trained: set[int] = set()
    chains = []
    for leaf in kept:
        if leaf in continued:
            continue
        path: list[int] = []
        n: int | None = leaf
        while n is not None:
            path.append(n)
            n = parents[n]
        path.reverse()
        chains.append(
            Chain(
                tuple(sampled[n].call_id for n in path),
                _segment([sampled[n] for n in path], [n not in trained for n in path]),
            )
        )
        trained.update(path)
    return chains, dropped


def _unused(sampled: list[RecordedCall], parents: list[int | None]) -> dict[str, str]:
    """Returns the reasons, by id, of calls whose answers were lost or superseded."""
    built_on = {parent for parent in parents if parent is not None}
    prompts_built_on = {sampled[n].seen for n in built_on}
    reasons = {}
    for n, call in enumerate(sampled):
        if n in built_on or call.delivered:
            continue
        if call.delivered is False:
            reasons[call.call_id] = "not_delivered"
        elif call.seen in prompts_built_on:
            reasons[call.call_id] = "retry_superseded"
    return reasons


def _segment(calls: list[RecordedCall], trains: list[bool]) -> Segment:
    """Builds one segment of calls that continue each other; calls that it does not train are context."""
    pieces: list[bytes] = []
    logprobs: list[bytes] = []
    runs: list[tuple[int, int]] = []
    spans: list[VersionSpan] = []
    masks: list[tuple[bytes, ...] | None] = []
    routes: list[Routes | None] = []
    end = 0
    for call, trained in zip(calls, trains, strict=True):
        start = len(call.prompt_token_ids) // _ID_BYTES
        # A later call computes its context again, or finds it cached: the first choice is the one sampled by.
        routes.append(call.routes and call.routes.part(max(end - 1, 0)))
        pieces.append(call.prompt_token_ids[end * _ID_BYTES :])
        pieces.append(call.generation_token_ids)
        end = start + len(call.generation_token_ids) // _ID_BYTES
        if not trained:
            continue
        logprobs.append(call.behavior_logprobs)
        masks.append(call.sampling_mask)
        spans += (VersionSpan(span.version, start + span.start, start + span.end) for span in call.version_spans)
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, end))
    return Segment(
        token_ids=b"".join(pieces),
        behavior_logprobs=b"".join(logprobs),
        loss_mask=tuple(runs),
        version_spans=tuple(spans),
        finish_reason=calls[-1].finish_reason,
        sampling_mask=joined_masks(masks),
        routes=joined_routes(routes) or msgspec.UNSET,
        top_logprobs=joined_top(call.top_logprobs for call, trained in zip(calls, trains, strict=True) if trained)
        or msgspec.UNSET,
        images=calls[-1].images or msgspec.UNSET,
    )


def joined_masks(masks: Iterable[tuple[bytes, ...] | None]) -> tuple[bytes, ...] | None:
    """Joins the sampling masks of consecutive parts: either all parts have one or none has."""
    found = [mask for mask in masks if mask is not None]
    return tuple(chain.from_iterable(found)) if found else None


def joined_top(parts: Iterable[TopLogprobs | None]) -> TopLogprobs | None:
    """Joins those of consecutive tokens: either all parts have them or none has."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    ids, logprobs = (b"".join(getattr(part, name) for part in known) for name in ("ids", "logprobs"))
    return TopLogprobs(known[0].count, ids, logprobs)


def _parents(ordered: list[RecordedCall]) -> list[int | None]:
    """Returns, for each call, the earlier one that it continues: the longest, or the latest of equally long ones."""
    trie = PrefixTrie()
    parents: list[int | None] = []
    for n, call in enumerate(ordered):
        parents.append(trie.longest_prefix(call.seen))
        trie.insert(call.seen + call.generation_token_ids, n)
    return parents


def _check_call(call: RecordedCall) -> None:
    where = f"call {call.call_id!r}"
    for name in ("prompt_token_ids", "generation_token_ids"):
        ids = getattr(call, name)
        if len(ids) % _ID_BYTES or not ids[_ID_BYTES - 1 :: _ID_BYTES].isascii():
            raise CallError("invalid_token_ids", f"{where}: {name}, expected int32 values from 0 on")
    num_sampled = len(call.generation_token_ids) // _ID_BYTES
    if len(call.behavior_logprobs) != len(call.generation_token_ids):
        raise CallError(
            "logprob_length_mismatch",
            f"{where}: {len(call.behavior_logprobs) // _ID_BYTES} behavior_logprobs for {num_sampled} "
            "generation_token_ids; expected equal lengths",
        )
    ends = [0, *(span.end for span in call.version_spans)]
    starts = [*(span.start for span in call.version_spans), num_sampled]
    if ends != starts or any(span.start >= span.end for span in call.version_spans):
        raise CallError(
            "version_spans_mismatch",
            f"{where}: version_spans {tuple((span.start, span.end) for span in call.version_spans)}, "
            f"expected spans that tile 0 to {num_sampled}",
        )
