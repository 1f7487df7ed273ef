"""The endpoint section: the cost of a call at a producer's endpoint, against the same call at vLLM's own server.

Both servers hold the same conversations, call by call in turns; only what they sample differs.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.endpoint.chat_model import Topics, make_chat_model
from bench.endpoint.servers import Answer, ChatServer, penstock_server, vllm_server
from bench.result import BenchError, Figure, Goal
from bench.section import Bench, BenchSection
from penstock.producers.rollout.episode import load_tokenizer
from penstock.schemas.config import (
    EndpointConfig,
    EngineConfig,
    EnvironmentConfig,
    MetricsConfig,
    ModelConfig,
    ProducersConfig,
    RunConfig,
    SamplingConfig,
)

Json = dict[str, Any]

LARGEST_RATIO = {2000: 1.1, 30000: 1.25}
"""Goals, by tokens of context."""
MAX_ANSWER_TOKENS = 4
FRAME_TOKENS = 17
"""Tokens of a turn besides the user's text: the answer, and the template's own around both."""
HISTORY_TURN_TOKENS = 1000
"""Length of the turns that precede the timed calls of a conversation, frame included."""
SPARE_TOKENS = 2048
"""Room beyond the longest context for the template's own tokens, answers, and turns that encode to more tokens."""
BATCHED_TOKENS = 2048
"""Tokens that one step of the engine may compute; vLLM's own default depends on the caller."""


REFERENCE_IS = "vLLM's own /v1/chat/completions in a process of its own: same model, engine settings and messages"


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults take about three minutes on two quiet cores.

    contexts: tokens in the middle of the calls that are timed. rounds: conversations per context. calls: of a
    conversation that are timed. turn_tokens: length of the user's message before each of them.
    """

    contexts: tuple[int, ...] = (2000, 30000)
    rounds: int = 5
    calls: int = 20
    turn_tokens: int = 100


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One call at both servers."""

    ours: Answer
    theirs: Answer

    @property
    def ratio(self) -> float:
        return self.ours.seconds / self.theirs.seconds

    @property
    def is_even(self) -> bool:
        """True if both servers sampled equally many tokens."""
        return self.ours.num_sampled_tokens == self.theirs.num_sampled_tokens


def gateway_figures(bench: Bench) -> list[Figure]:
    """Boots both servers on a model made for it, one after the other, and times calls at each context.

    Raises:
        BenchError, ServerError: a server does not come up, or does not answer.
    """
    settings, folder = bench.settings, bench.folder
    config = gateway_config(folder / "model", max(settings.contexts) + SPARE_TOKENS)
    make_chat_model(Path(config.model.path), max(settings.contexts) + SPARE_TOKENS)
    topics = Topics(load_tokenizer(config))
    with penstock_server(config, folder / "penstock") as ours, vllm_server(config, folder / "vllm") as theirs:
        pair = SideBySide(ours, theirs, topics)
        pair.hold(settings, min(settings.contexts))  # warms up
        figures: list[Figure] = []
        for context in settings.contexts:
            for sends_ids in (False, True):
                held = [pair.hold(settings, context, sends_ids=sends_ids) for _ in range(settings.rounds)]
                what = f"{context:,} tokens of context" + sends_ids * ", ids sent back"
                goal = Goal(at_most=LARGEST_RATIO[context]) if context in LARGEST_RATIO else None
                figures.append(time_figure(what, held, goal))
        return figures


def gateway_config(model: Path, max_model_len: int) -> RunConfig:
    """Returns a run whose producers do nothing but serve agents."""
    return RunConfig(
        name="bench-endpoint",
        groups_per_batch=4,
        model=ModelConfig(path=str(model)),
        environment=EnvironmentConfig(path="penstock.producers.environments.arithmetic:Arithmetic"),
        sampling=SamplingConfig(max_tokens=MAX_ANSWER_TOKENS),
        engine=EngineConfig(
            prefix_caching=True, max_model_len=max_model_len, args={"max_num_batched_tokens": BATCHED_TOKENS}
        ),
        producers=ProducersConfig(count=1),
        endpoint=EndpointConfig(port=0),
        metrics=MetricsConfig(port=0),
    )


class SideBySide:
    """Two servers that hold the same conversations, side by side."""

    def __init__(self, ours: ChatServer, theirs: ChatServer, topics: Topics) -> None:
        self._servers = (ours, theirs)
        self._topics = topics
        self._num_conversations = 0

    def hold(self, settings: EndpointSettings, context: int, *, sends_ids: bool = False) -> list[Pair]:
        """Holds a new conversation. Its last calls are the timed ones: `context` tokens is the mean length of their
        prompts.

        sends_ids: whether the client of ours sends each answer back whole, token ids included, or its text alone.
        """
        self._num_conversations += 1
        paths = [server.open() for server in self._servers]
        histories: list[list[Json]] = [[], []]
        greeting = f"Conversation {self._num_conversations}.\n"  # makes the conversation miss the prefix caches
        for num_tokens in history_turns(context - settings.calls * (settings.turn_tokens + FRAME_TOKENS) // 2):
            self._call(paths, histories, greeting + self._topics.turn(num_tokens), 0, sends_ids)
            greeting = ""
        pairs = []
        for n in range(settings.calls):
            asked = greeting + self._topics.turn(settings.turn_tokens)
            pairs.append(self._call(paths, histories, asked, n % 2, sends_ids))
            greeting = ""
        for server, path in zip(self._servers, paths, strict=True):
            server.finish(path)
        return pairs

    def _call(
        self, paths: Sequence[str], histories: Sequence[list[Json]], asked: str, first: int, sends_ids: bool
    ) -> Pair:
        """Makes one call at each server, `first` before the other."""
        answers: dict[int, Answer] = {}
        for n in (first, 1 - first):
            histories[n].append({"role": "user", "content": asked})
            request = {"messages": histories[n], "max_completion_tokens": MAX_ANSWER_TOKENS}
            answers[n] = self._servers[n].chat(paths[n], request)
            message = answers[n].message
            if n or not sends_ids:
                message = {name: message[name] for name in ("role", "content")}
            histories[n].append(message)
        return Pair(ours=answers[0], theirs=answers[1])


def history_turns(num_tokens: int) -> list[int]:
    """Returns the lengths of the user's texts in turns of `HISTORY_TURN_TOKENS` that total `num_tokens`, the last one
    shorter."""
    whole, rest = divmod(max(0, num_tokens), HISTORY_TURN_TOKENS)
    turns = [HISTORY_TURN_TOKENS] * whole + [rest] * (rest > FRAME_TOKENS)
    return [turn - FRAME_TOKENS for turn in turns]


def time_figure(what: str, held: Sequence[list[Pair]], goal: Goal | None) -> Figure:
    """Compares medians over the calls; the ratio is the median of the pairs' own.

    Raises:
        BenchError: in no pair did both servers sample equally many tokens.
    """
    pairs = [pair for conversation in held for pair in conversation]
    even = [pair for pair in pairs if pair.is_even]
    if not even:
        raise BenchError(f"{what}: in none of {len(pairs)} pairs of calls did both sample equally many tokens")
    by_round = [[pair.ratio for pair in conversation if pair.is_even] for conversation in held]
    return Figure(
        f"time per call, {what}",
        unit="ms",
        measured=median(pair.ours.seconds for pair in even) * 1000,
        reference=median(pair.theirs.seconds for pair in even) * 1000,
        reference_is=REFERENCE_IS,
        ratio=median(pair.ratio for pair in even),
        goal=goal,
        details={
            "num_pairs": len(even),
            "num_pairs_left_out": len(pairs) - len(even),
            "ratio_by_round": [round(median(ratios), 4) for ratios in by_round if ratios],
        },
    )


ENDPOINT = BenchSection(
    "endpoint",
    {"gateway": gateway_figures},
    EndpointSettings(),
    quick=EndpointSettings(contexts=(1500, 3000), rounds=1, calls=6),
)
