"""Environments that are stepped: each answer of the model is an action, which is worth something and gets a reply."""

import contextlib
import hashlib
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

from penstock.producers.interfaces import Conversation, RolloutFacts, State
from penstock.schemas.prompt import Message, Prompt, Reward

Json = dict[str, Any]
T = TypeVar("T")

TOO_LONG = ("context_length_exceeded", "rollout_too_large")
"""Codes of calls for which no room is left."""
MAX_TURNS = 64


class Step(NamedTuple):
    """What an action has led to.

    messages: what the model is told next. reward: adds to that of the episode. is_done: the episode has ended.
    """

    messages: Sequence[Json]
    reward: float
    is_done: bool


class Episode(ABC):
    """One episode, begun."""

    @abstractmethod
    async def step(self, action: str) -> Step: ...

    async def give_up(self) -> float:
        """Returns what adds to the reward of an episode that is not played to its end."""
        return 0.0

    def parts(self) -> Mapping[str, float]:
        """Returns further figures of the episode, for the parts of its reward."""
        return {}

    async def close(self) -> None:  # noqa: B027
        """Gives back what the episode holds. Called once, at its end or after an error."""


async def play(episode: Episode, begun: Sequence[Json], conversation: Conversation, max_turns: int) -> Reward:
    """Plays an episode to its end, for `max_turns` answers, or until the context has no room for another.

    begun: the messages that it begins with.

    Returns the sum of its rewards, with the part `finished`: 1 for an episode that has ended by itself, else 0.

    Raises:
        ApiError: the conversation refuses a request; the first one also for want of room.
        ValueError: a reward is no finite number.
    """
    messages, total, is_done = list(begun), 0.0, False
    try:
        for turn in range(max_turns):
            try:
                reply = await conversation.chat(messages)
            except Exception as error:
                if turn == 0 or getattr(error, "code", None) not in TOO_LONG:
                    raise
                break
            said, reward, is_done = await episode.step(reply.get("content") or "")
            total += _finite(reward)
            if is_done:
                break
            messages += [reply, *said]
        if not is_done:
            total += _finite(await episode.give_up())
        return Reward(value=total, parts={"finished": float(is_done), **episode.parts()})
    finally:
        await episode.close()


class SeededTasks(ABC):
    """Tasks that a seed makes, without end; each index has a seed of its own.

    Held-out tasks have other seeds, the same for all runs. A game with few beginnings has the same ones in both.
    """

    def __init__(self, *, seed: int, num_evaluation_prompts: int, max_turns: int) -> None:
        for name, value, least in (("num_evaluation_prompts", num_evaluation_prompts, 0), ("max_turns", max_turns, 1)):
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        self.num_evaluation_prompts = num_evaluation_prompts
        self._seed = seed
        self._max_turns = max_turns

    @abstractmethod
    def pose(self, seed: int) -> str:
        """Returns what an episode begins with."""

    @abstractmethod
    async def begin(self, seed: int) -> Episode: ...

    def prompt(self, index: int) -> Prompt:
        return self._pose(seed_of("training", self._seed, index))

    def evaluation_prompt(self, n: int) -> Prompt:
        return self._pose(seed_of("evaluation", n))

    async def reward(self, prompt: Prompt, completion: str) -> Reward:
        """Returns the reward of an episode with this answer alone."""
        return await self.converse(prompt, OneAnswer(completion))

    async def converse(self, prompt: Prompt, conversation: Conversation) -> Reward:
        begun = as_dicts(prompt)
        return await play(await self.begin(int(prompt.metadata["seed"])), begun, conversation, self._max_turns)

    def _pose(self, seed: int) -> Prompt:
        return Prompt(messages=(Message(role="user", content=self.pose(seed)),), metadata={"seed": str(seed)})


class ContextFullError(Exception):
    """There is no room for another turn."""

    code = TOO_LONG[0]


class OneAnswer:
    """A `Conversation` with one given answer."""

    facts = RolloutFacts(num_prompt_tokens=0, num_tokens=0, max_tokens=0, finish_reason="stop")

    def __init__(self, text: str) -> None:
        self._left = [text]

    async def chat(self, messages: list[Json], *, is_trained: bool = True, **fields: Any) -> Json:
        if not self._left or not is_trained:
            raise ContextFullError("there is one answer; this model's maximum context length is reached")
        return {"role": "assistant", "content": self._left.pop()}

    async def act(self, action: Callable[[], Awaitable[T]], state: State | None = None) -> T:
        return await action()


def as_dicts(prompt: Prompt) -> list[Json]:
    """Returns the messages of a prompt as a request has them."""
    return [message.openai for message in prompt.messages or ()]


def seed_of(*key: str | int) -> int:
    """Returns the seed that `key` names, from 0 to 2^31 - 1; the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest()) >> 1


def text_of(said: Any, what: str) -> str:
    """Returns an observation that is text.

    Raises:
        TypeError: it is something else, such as an image.
    """
    if not isinstance(said, str):
        raise TypeError(f"{what} is of type {type(said).__name__}, expected text")
    return said


def library(module: str, extra: str, then: str = "") -> Any:
    """Returns a module of an optional package.

    then: follows the command that installs the extra, which does not install the package itself.

    Raises:
        ImportError: it cannot be imported; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}): pip install 'penstock[{extra}]'{then}") from error


def unknown(id: str, known: Iterable[str]) -> ValueError:
    """Returns the error for an environment that a library does not have; it lists the nearest or the first."""
    names = sorted(known)
    shown = get_close_matches(id, names, 5, 0.4) or names[:5]
    return ValueError(f"id = {id!r}: no such environment, expected one of {len(names)} such as {', '.join(shown)}")


def _finite(reward: Any) -> float:
    value = math.nan
    if not isinstance(reward, str | bytes):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the environment's reward is {reward!r}, expected a finite number")
    return value
