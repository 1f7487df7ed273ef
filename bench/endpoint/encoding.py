"""Tokens encoded in a long conversation: by the endpoint, against encoding all of it at each call."""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.endpoint.chat_model import TURN_END, Topics, chat_tokenizer
from bench.result import Figure, Goal, compare
from penstock.producers.endpoint.call_ledger import CallLedger
from penstock.producers.endpoint.calls import Calls
from penstock.producers.endpoint.chat.answers import Answers, PlainText
from penstock.producers.endpoint.chat.requests import ChatRequest, parse_chat
from penstock.producers.endpoint.groups import AgentGroup
from penstock.producers.endpoint.prompts import Prompts, RenderedPrompt
from penstock.producers.interfaces import Completion
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.in_flight import Claim
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import SamplingSettings, VersionSpan, pack_floats, pack_ids

Json = dict[str, Any]

LARGEST_RATIO = 2.0


class EncodingSettings(msgspec.Struct, frozen=True, kw_only=True):
    calls: int = 50
    turn_tokens: int = 400
    """Length of the user's message before each call."""
    answer_tokens: int = 200
    """Length of the model's answer without its end token."""


class CountingTokenizer:
    """A tokenizer that counts the tokens it returns."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_tokens = 0

    def __call__(self, text: str, **options: Any) -> Any:
        found = self._tokenizer(text, **options)
        self.num_tokens += len(found["input_ids"])
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class TimedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """num_tokens: of the last prompt and its answer. num_encoded, encode_s: tokens encoded and time taken for
    its prompts, rendering included. num_encoded_whole, encode_whole_s: the same if each prompt is encoded whole."""

    num_tokens: int
    num_encoded: int
    encode_s: float
    num_encoded_whole: int
    encode_whole_s: float


def encoding_figures(settings: EncodingSettings) -> list[Figure]:
    """Holds one conversation."""
    found = asyncio.run(hold_conversation(settings))
    what = f"in a conversation of {settings.calls} calls"
    return [
        compare(
            f"tokens encoded {what}",
            unit="tokens",
            measured=found.num_encoded,
            reference=found.num_tokens,
            reference_is="tokens of the conversation, each counted once",
            goal=Goal(at_most=LARGEST_RATIO),
            details={"num_encoded_whole": found.num_encoded_whole},
        ),
        compare(
            f"time to render and encode {what}",
            unit="ms",
            measured=found.encode_s * 1000,
            reference=found.encode_whole_s * 1000,
            reference_is="each call's messages rendered and encoded from their beginning",
        ),
    ]


class _TimedPrompts(Prompts):
    seconds = 0.0

    def prompt(self, request: ChatRequest, ledger: CallLedger) -> RenderedPrompt:
        began = time.perf_counter()
        rendered = super().prompt(request, ledger)
        self.seconds += time.perf_counter() - began
        return rendered


class _ScriptedEngine:
    """Answers with the ids of a text, and the end of the turn."""

    def __init__(self, tokenizer: Any, topics: Topics, num_tokens: int, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._topics = topics
        self._num_tokens = num_tokens

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingSettings,
        num_siblings: int,
        request_id: str,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> list[Completion]:
        text = self._topics.turn(self._num_tokens) + TURN_END
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        completion = Completion(
            token_ids=pack_ids(ids),
            behavior_logprobs=pack_floats([-1.0] * len(ids)),
            version_spans=(VersionSpan(0, 0, len(ids)),),
            finish_reason="stop",
        )
        return [completion]


class _OldWeights:
    """Weights of which no newer version is ever announced."""

    async def wait_for(self, version: int, lag_bound: int) -> None:
        return


async def hold_conversation(settings: EncodingSettings) -> TimedConversation:
    """Holds a plain client's conversation through the endpoint's own parts, with a scripted engine."""
    max_tokens = 4 * settings.answer_tokens
    longest = 4 * settings.calls * (settings.turn_tokens + settings.answer_tokens)
    tokenizer: Any = chat_tokenizer(longest)
    topics = Topics(tokenizer)
    counting = CountingTokenizer(tokenizer)
    prompts = _TimedPrompts(counting, exact=True, stop_token_ids=())
    counting.num_tokens = 0  # reading the template has rendered some
    sampling = SamplingSettings(max_tokens=max_tokens)
    engine: Any = _ScriptedEngine(tokenizer, topics, settings.answer_tokens, longest)
    weights: Any = _OldWeights()
    fingerprint: Any = None  # no group is recorded
    calls = Calls(
        engine=engine,
        weights=weights,
        prompts=prompts,
        answers=Answers(tokenizer, PlainText()),
        config=RunConfig(name="encoding", model=ModelConfig(path=""), environment=EnvironmentConfig(path="")),
        metrics=ProducerMetrics(),
    )
    claim = Claim(stream="", entry_id=b"", index=1, version=0)
    rollout = AgentGroup(
        claim=claim,
        prompt=Prompt(text=""),
        size=1,
        deadline_s=math.inf,
        sampling=sampling,
        producer_id="bench",
        fingerprint=fingerprint,
    ).open()
    whole = CountingTokenizer(tokenizer)
    whole_s = 0.0
    messages: list[Json] = []
    for _ in range(settings.calls):
        messages.append({"role": "user", "content": topics.turn(settings.turn_tokens)})
        began = time.perf_counter()
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        whole(text, add_special_tokens=False, verbose=False)
        whole_s += time.perf_counter() - began
        answered = await calls.answer(rollout, parse_chat({"messages": messages}, sampling), rollout.ledger.begin())
        messages.append({name: answered.message[name] for name in ("role", "content")})
    calls.close()
    return TimedConversation(
        num_tokens=len(answered.call.token_ids),
        num_encoded=counting.num_tokens,
        encode_s=prompts.seconds,
        num_encoded_whole=whole.num_tokens,
        encode_whole_s=whole_s,
    )
