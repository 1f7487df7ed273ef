"""What the server itself knows of a rollout: every call, with the tokens that the engine was given and sampled."""

import hashlib
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from producers.endpoint.errors import ApiError, bad_request
from producers.endpoint.messages import canonical_form, chain_keys, extend_chain
from producers.interfaces import Completion
from producers.suffix_encoding import Encoded
from producers.token_ids import TOKEN_FIELDS, TokenMetadataError, extract_model_prefix
from schemas.rollout import pack_ids
from schemas.segments import RecordedCall

Json = dict[str, Any]


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """One answered call.

    prompt: int32 bytes, `[num_prompt]`, exactly what the engine was given.
    spans: half-open, in prompt plus completion: everything that was sampled, in this call and those it continues.
    rendered: the template's rendering of the request, until a call continues this one.
    delivered: whether the answer went out to its client.
    answer: canonical form of the message that it was answered with, once it is recorded.
    """

    number: int
    prompt: bytes
    completion: Completion
    spans: tuple[tuple[int, int], ...]
    rendered: Encoded | None
    delivered: bool = False
    answer: bytes = b""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion."""
        return array("i", self.prompt + self.completion.token_ids).tolist()

    @property
    def num_sampled(self) -> int:
        return len(self.completion.token_ids) // 4


@dataclass(slots=True, eq=False)
class Ledger:
    """The calls of one rollout, and by the conversation that each has led to.

    A message that carries the token ids of an answer is that answer, whatever its text has become; any other is what
    it says.
    """

    calls: list[Call] = field(default_factory=list)
    _by_chain: dict[bytes, Call] = field(default_factory=dict)
    _tokens: set[bytes] = field(default_factory=set)
    _by_answer: dict[tuple[int, bytes], Call] = field(default_factory=dict)
    _num_begun: int = 0

    @property
    def num_sampled(self) -> int:
        return sum(call.num_sampled for call in self.calls)

    def next_number(self) -> int:
        """The place of a call that begins now among the calls of the rollout."""
        self._num_begun += 1
        return self._num_begun - 1

    def record(self, call: Call, messages: Sequence[Json], reply: Mapping[str, Any]) -> None:
        """Adds an answered call: `reply` is the message that answers `messages`."""
        self.calls.append(call)
        call.answer = canonical_form(reply)
        self._tokens.add(_digest(call.prompt + call.completion.token_ids))
        self._by_answer[len(call.prompt) // 4, call.completion.token_ids] = call
        self._by_chain[extend_chain(self._keys(messages)[-1], call.answer)] = call

    def parent(self, messages: Sequence[Json]) -> tuple[Call, int] | None:
        """The call that `messages` continue, and the index of the message that is its answer; None without one.

        It is the call whose conversation is the longest that `messages` begin with.

        Raises:
            ApiError: 400 for token fields that are broken, 409 for tokens that this rollout has not seen.
        """
        self._check_token_fields(messages)
        keys = self._keys(messages)
        for index in range(len(messages) - 1, -1, -1):
            if messages[index]["role"] == "assistant" and (found := self._by_chain.get(keys[index])) is not None:
                return found, index
        return None

    def recorded(self) -> list[RecordedCall]:
        """The calls as segments are made of them.

        An answer that never reached its client is left out where the client, asking again, got the very same tokens:
        what follows continues the one that it had.
        """
        delivered = {_digest(call.prompt + call.completion.token_ids) for call in self.calls if call.delivered}
        return [
            RecordedCall(
                call_id=str(call.number),
                t=call.number,
                prompt_token_ids=call.prompt,
                generation_token_ids=call.completion.token_ids,
                behavior_logprobs=call.completion.behavior_logprobs,
                version_spans=call.completion.version_spans,
                finish_reason=call.completion.finish_reason,
                delivered=call.delivered,
            )
            for call in self.calls
            if call.delivered or _digest(call.prompt + call.completion.token_ids) not in delivered
        ]

    def _keys(self, messages: Sequence[Json]) -> list[bytes]:
        return chain_keys(self._canonical(message) for message in messages)

    def _canonical(self, message: Json) -> bytes:
        prompt, sampled = message.get(TOKEN_FIELDS[0]), message.get(TOKEN_FIELDS[1])
        if isinstance(prompt, list) and isinstance(sampled, list):
            try:
                call = self._by_answer.get((len(prompt), pack_ids(sampled)))
            except struct.error:  # no ids
                call = None
            if call is not None:
                return call.answer
        return canonical_form(message)

    def _check_token_fields(self, messages: Sequence[Json]) -> None:
        """Those of the newest message that carries any must be those of an answer."""
        try:
            index, token_ids = extract_model_prefix(messages)
        except TokenMetadataError as error:
            raise bad_request(str(error), "messages", error.code) from None
        if index is not None and _digest(pack_ids(token_ids)) not in self._tokens:
            raise ApiError(
                409,
                f"messages[{index}] carries token ids that no answer of this rollout had; expected those of the "
                "answer, unchanged, or none",
                code="unknown_token_ids",
                param="messages",
            )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
