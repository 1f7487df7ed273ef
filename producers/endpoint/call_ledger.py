"""The ledger of a rollout: every call, with the tokens that the engine was given and those it sampled."""

import asyncio
import hashlib
import struct
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.producers.endpoint.chat.errors import ApiError, bad_request
from penstock.producers.endpoint.chat.messages import CALL_ID, canonical_form, extend_chain, text_of
from penstock.producers.endpoint.splice.suffix_encoding import Encoded
from penstock.producers.endpoint.splice.token_ids import TOKEN_FIELDS, TokenMetadataError, extract_model_prefix
from penstock.producers.interfaces import Completion
from penstock.schemas.images import MAX_IMAGES_BYTES, ImagePlace
from penstock.schemas.rollout import MAX_ENTRY_BYTES, TOO_LARGE, SamplingSettings, pack_ids
from penstock.schemas.segments import RecordedCall

Json = dict[str, Any]

CALL_BYTES = 256
"""An upper bound for what a call adds to the encoded rollout in addition to its tokens."""
SPAN_BYTES = 20


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """One answered call.

    base: the call with whose prompt and completion this prompt begins; None if there is none.
    context: int32 bytes: the prompt without the prompt and completion of `base`.
    rendered: the template's rendering of the request, until a call continues this one.
    images: their places in the prompt. files: theirs, by digest.
    delivered: whether the answer was sent to its client.
    connection: the one that took the answer; None if it is not of this process.
    request: what identifies the request; empty if nothing does.
    chain: identifies the conversation with this answer, set by `record` like what follows.
    reply: the answer's message without the token fields.
    answer: canonical form of that message.
    digest: of prompt and completion.
    is_continued: whether another call has it as its base.
    is_trained: whether its tokens belong to the rollout that is trained.
    began_s, ended_s: seconds since the epoch; an answer of an earlier holder keeps its own.
    """

    number: int
    base: "Call | None"
    context: bytes
    completion: Completion
    rendered: Encoded | None
    images: tuple[ImagePlace, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    delivered: bool = False
    connection: asyncio.BaseTransport | None = None
    request: bytes = b""
    chain: bytes = b""
    reply: Json = field(default_factory=dict)
    answer: bytes = b""
    digest: bytes = b""
    is_continued: bool = False
    is_trained: bool = True
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def prompt(self) -> bytes:
        """int32 bytes, `[num_prompt]`, exactly what the engine was given."""
        pieces = [piece for call in self._bases for piece in (call.context, call.completion.token_ids)]
        return b"".join([*pieces, self.context])

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The sampled tokens of this call and those it continues, as half-open ranges of prompt plus completion."""
        spans, end = [], 0
        for call in (*self._bases, self):
            start = end + len(call.context) // 4
            end = start + call.num_sampled
            spans.append((start, end))
        return tuple(spans)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion."""
        return array("i", self.prompt + self.completion.token_ids).tolist()

    @property
    def _bases(self) -> list["Call"]:
        """The calls that this one continues, the oldest first."""
        bases, base = [], self.base
        while base is not None:
            bases.append(base)
            base = base.base
        return bases[::-1]

    @property
    def num_sampled(self) -> int:
        return self.completion.num_tokens


@dataclass(slots=True, eq=False)
class CallLedger:
    """The calls of one rollout, found by the conversation that each has led to.

    A message that carries the token ids of an answer is identified by them, even if its text was edited; one that
    spells out the calls of an answer as text, by their ids; any other message by its content.

    max_bytes: the rollout's share of its group's stream entry; also bounds the memory used here.
    max_image_bytes: its share of the bytes of a group's images.
    token_bytes, context_bytes: the encoded size of a sampled token, and of one of the context.
    num_bytes: an upper bound for what the calls take of it.
    num_begun: calls that have begun.
    unread: the numbers of calls whose answers count as unread.
    files: the image files of the prompt and of all calls, by digest.
    num_image_bytes: those of the calls.
    """

    max_bytes: int = MAX_ENTRY_BYTES
    token_bytes: int = SamplingSettings().token_bytes
    context_bytes: int = 4
    calls: list[Call] = field(default_factory=list)
    num_bytes: int = 0
    num_begun: int = 0
    unread: set[int] = field(default_factory=set)
    files: dict[str, bytes] = field(default_factory=dict)
    max_image_bytes: int = MAX_IMAGES_BYTES
    num_image_bytes: int = 0
    _latest: dict[bytes, int] = field(default_factory=dict)
    _by_chain: dict[bytes, Call] = field(default_factory=dict)
    _by_call_id: dict[str, Call] = field(default_factory=dict)
    _by_answer: dict[tuple[int, bytes], Call] = field(default_factory=dict)

    @property
    def num_sampled(self) -> int:
        return sum(call.num_sampled for call in self.calls)

    def begin(self, request: bytes = b"", *, is_retry: bool = False) -> int:
        """Returns the number of a call that begins now.

        An earlier answer to the same request counts as unread if this one is a retry by its client's own count, or if
        the connection that took the answer is closed. A client that reads answers keeps its connection open, and may
        repeat a request.

        request: what identifies it; empty for one that is never retried.
        """
        number = self.num_begun
        self.num_begun += 1
        if request:
            earlier = self._latest.get(request)
            if earlier is not None and (is_retry or self._is_closed(earlier)):
                self.unread.add(earlier)
            self._latest[request] = number
        return number

    def new_files(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Returns the image files that no call has had yet."""
        return {digest: data for digest, data in files.items() if digest not in self.files}

    def room(self, base: Call | None, num_prompt: int, files: Mapping[str, bytes]) -> int:
        """Returns the most tokens that the answer to a prompt with these image files may have.

        Raises:
            ApiError: 400, no token fits.
        """
        left = self.max_bytes - self.num_bytes - CALL_BYTES - SPAN_BYTES
        left -= self.context_bytes * self._num_context(base, num_prompt)
        self._image_bytes(files)
        if left < self.token_bytes:
            raise self._too_large()
        return left // self.token_bytes

    def conversation(self, messages: Sequence[Json]) -> bytes:
        """Returns what identifies a conversation; as `parent`, it may be called beside the event loop."""
        return self._keys(messages)[-1]

    def record(self, call: Call, messages: Sequence[Json], reply: Mapping[str, Any], conversation: bytes = b"") -> None:
        """Adds an answered call: `reply` is the message that answers `messages`. conversation: identifies them, if that
        is known.

        Raises:
            ApiError: 400, concurrent calls have left no room for it.
        """
        call.chain = extend_chain(conversation or self.conversation(messages), canonical_form(reply))
        call.reply = {name: value for name, value in reply.items() if name not in TOKEN_FIELDS}
        self._add(call)

    def restore(self, calls: Sequence[Call], unread: Collection[int]) -> None:
        """Takes the calls of an earlier holder of the rollout. Their answers count as read, but a repeated request was
        not answered: the connection that took its answer is closed.

        unread: the numbers of those that were known to be unread.

        Raises:
            ApiError: 400, there is no room for them.
        """
        for call in calls:
            call.delivered = True
            self._add(call)
            self.num_begun = max(self.num_begun, call.number + 1)
            if call.request:
                self._latest[call.request] = call.number
        self.unread.update(unread)

    def _add(self, call: Call) -> None:
        prompt = call.prompt
        num_bytes = self.context_bytes * self._num_context(call.base, len(prompt) // 4)
        num_bytes += self.token_bytes * call.num_sampled
        num_bytes += CALL_BYTES + SPAN_BYTES * len(call.completion.version_spans)
        if self.num_bytes + num_bytes > self.max_bytes:
            raise self._too_large()
        self.num_image_bytes = self._image_bytes(call.files)
        self.num_bytes += num_bytes
        self.files |= call.files
        self.calls.append(call)
        if call.base is not None:
            call.base.is_continued = True
        call.answer = canonical_form(call.reply)
        call.digest = digest(prompt + call.completion.token_ids)
        self._by_answer[len(prompt) // 4, call.completion.token_ids] = call
        self._by_call_id |= {made["id"]: call for made in call.reply.get("tool_calls") or ()}
        self._by_chain[call.chain] = call

    def parent(self, messages: Sequence[Json]) -> tuple[Call, int] | None:
        """Returns the call that `messages` continue, and the index of the message that is its answer; None without one.

        Of several calls, the one with the longest conversation that `messages` begin with.

        Raises:
            ApiError: 400 for invalid token fields, 409 for token ids that no answer of this rollout had.
        """
        self._check_token_fields(messages)
        keys = self._keys(messages)
        for index in range(len(messages) - 1, -1, -1):
            if messages[index]["role"] == "assistant" and (found := self._by_chain.get(keys[index])) is not None:
                return found, index
        return None

    def recorded(self) -> list[RecordedCall]:
        """Returns the calls from which segments are made.

        An answer that its client never read is left out if a repeated request got the same tokens: what follows
        continues the answer that was received.
        """
        read = {call.number for call in self.calls if call.delivered} - self.unread
        digests = {call.digest for call in self.calls if call.number in read}
        return [
            RecordedCall(
                call_id=str(call.number),
                t=call.number,
                prompt_token_ids=call.prompt,
                generation_token_ids=call.completion.token_ids,
                behavior_logprobs=call.completion.behavior_logprobs,
                version_spans=call.completion.version_spans,
                finish_reason=call.completion.finish_reason,
                delivered=call.number in read,
                sampling_mask=call.completion.sampling_mask,
                routes=call.completion.routes,
                top_logprobs=call.completion.top_logprobs,
                images=call.images,
            )
            for call in self.calls
            if call.is_trained and (call.number in read or call.digest not in digests)
        ]

    def _is_closed(self, number: int) -> bool:
        """Returns whether the answer of this number was sent over a connection that is closed now."""
        call = next((call for call in self.calls if call.number == number and call.delivered), None)
        return call is not None and (call.connection is None or call.connection.is_closing())

    def _num_context(self, base: Call | None, num_prompt: int) -> int:
        """Returns the tokens of a prompt that no segment holds yet: the first call that continues another extends its
        segment, any other opens a new one."""
        return num_prompt if base is None or base.is_continued else num_prompt - base.spans[-1][1]

    def _image_bytes(self, files: Mapping[str, bytes]) -> int:
        """Returns `num_image_bytes` with these files. Raises ApiError: 400, that is more than the rollout's share."""
        num_bytes = self.num_image_bytes + sum(map(len, self.new_files(files).values()))
        if num_bytes > self.max_image_bytes:
            raise bad_request(
                f"the rollout's images take {num_bytes:,} bytes with those of this call, expected at most "
                f"{self.max_image_bytes:,}, its share of a group's",
                code=TOO_LARGE,
            )
        return num_bytes

    def _too_large(self) -> ApiError:
        return bad_request(
            f"the rollout takes {self.num_bytes:,} of the {self.max_bytes:,} bytes that are its share of a stream "
            "entry, and this call does not fit; expected to be finished before",
            code=TOO_LARGE,
        )

    def _keys(self, messages: Sequence[Json]) -> list[bytes]:
        """Returns one key per message: equal keys mean equal conversations up to and including that message."""
        keys, key = [], b""
        for message in messages:
            key = extend_chain(key, self._identity(key, message))
            keys.append(key)
        return keys

    def _identity(self, key: bytes, message: Json) -> bytes:
        """Returns what identifies a message that follows the conversation of this key."""
        prompt, sampled = message.get(TOKEN_FIELDS[0]), message.get(TOKEN_FIELDS[1])
        if isinstance(prompt, list) and isinstance(sampled, list):
            try:
                call = self._by_answer.get((len(prompt), pack_ids(sampled)))
            except struct.error:  # not ids
                call = None
            if call is not None:
                return call.answer
        said = canonical_form(message)
        if message["role"] != "assistant" or message.get("tool_calls") or extend_chain(key, said) in self._by_chain:
            return said
        text = text_of(message.get("content")).strip()
        words = (match.group() for match in CALL_ID.finditer(text))
        found = next((self._by_call_id[word] for word in words if word in self._by_call_id), None)
        return found.answer if found is not None and _spells_out(text, found.reply) else said

    def _check_token_fields(self, messages: Sequence[Json]) -> None:
        """Checks that the newest token fields are those of an answer."""
        try:
            index, token_ids = extract_model_prefix(messages)
        except TokenMetadataError as error:
            raise bad_request(str(error), "messages", error.code) from None
        if index is not None and digest(pack_ids(token_ids)) not in {call.digest for call in self.calls}:
            raise ApiError(
                409,
                f"messages[{index}] carries token ids that no answer of this rollout had; expected those of the "
                "answer, unchanged, or none",
                code="unknown_token_ids",
                param="messages",
            )


def _spells_out(text: str, reply: Mapping[str, Any]) -> bool:
    """Returns whether a text is the answer `reply` of an agent that writes its calls into the text, as smolagents does:
    it begins with the answer's and holds the ids and names of all of its calls."""
    words = [word for made in reply["tool_calls"] for word in (made["id"], made["function"]["name"])]
    return text.startswith(text_of(reply["content"]).strip()) and all(word in text for word in words)


def digest(data: bytes) -> bytes:
    """Returns what identifies token ids or a request."""
    return hashlib.blake2b(data, digest_size=16).digest()
