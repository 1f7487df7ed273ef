"""Agents inside the producer: an environment of several turns talks to the model as an agent outside does."""

import asyncio
import math
from typing import Any, Protocol

from producers.endpoint.agents import Agents
from producers.endpoint.calls import Calls
from producers.endpoint.errors import ApiError
from producers.endpoint.groups import AgentRollout
from producers.endpoint.requests import parse_chat
from producers.interfaces import EngineError
from schemas.prompt import Prompt, Reward
from schemas.rollout import MAX_REWARD, SamplingSettings, one_line

Json = dict[str, Any]

CREDIT_S = 0.2
"""Pause before another prompt is asked for where there was none."""


class Conversation:
    """What an environment talks to: one rollout, of as many calls as it likes, one after another or side by side."""

    def __init__(self, rollout: AgentRollout, calls: Calls, sampling: SamplingSettings) -> None:
        self._rollout = rollout
        self._calls = calls
        self._sampling = sampling

    async def chat(self, messages: list[Json], **fields: Any) -> Json:
        """The assistant's message, to be put behind `messages` as it is. fields: those of OpenAI's request (`tools`).

        Raises:
            ApiError: a request that cannot be answered; one past the context has the code `context_length_exceeded`,
                one of a rollout that has ended `rollout_ended`.
        """
        if not self._rollout.is_open:
            raise ApiError(410, f"rollout {self._rollout.id} has ended", code="rollout_ended")
        request = parse_chat({"messages": messages, **fields}, self._sampling)
        answered = await self._calls.answer(self._rollout, request)
        answered.call.delivered = True
        return answered.message


class ConversingEnvironment(Protocol):
    """An environment that holds its conversations itself, beside what `producers.interfaces.Environment` asks for."""

    async def converse(self, prompt: Prompt, conversation: Conversation) -> float | Reward:
        """One rollout of a training prompt, from its first call to its reward."""
        ...


class InsideAgents:
    """Runs an environment's conversations, as many at once as the producer has room for."""

    def __init__(
        self,
        environment: ConversingEnvironment,
        *,
        agents: Agents,
        calls: Calls,
        sampling: SamplingSettings,
    ) -> None:
        self._environment = environment
        self._agents = agents
        self._calls = calls
        self._sampling = sampling

    async def run(self) -> None:
        """Waits for room and credit, then converses; until the producer takes no more openings, or cancelled.

        Raises:
            EngineError: the engine serves no longer.
        """
        async with asyncio.TaskGroup() as conversations:
            while True:
                try:
                    rollout = await self._agents.open()
                except ApiError as refused:
                    if refused.status != 429:
                        return
                    await (asyncio.sleep(CREDIT_S) if self._agents.has_room else self._agents.wait_for_room())
                    continue
                rollout.running.add(conversations.create_task(self._converse(rollout)))

    async def _converse(self, rollout: AgentRollout) -> None:
        conversation = Conversation(rollout, self._calls, self._sampling)
        try:
            reward = _checked(await self._environment.converse(rollout.group.prompt, conversation))
            if rollout.is_open:  # a deadline may have ended it, and the environment made nothing of being cancelled
                rollout.running.clear()
                self._agents.finish(rollout, reward)
        except EngineError:
            raise
        except Exception as error:  # the environment is the user's, and one rollout never ends the others
            if rollout.is_open:
                rollout.running.clear()
                self._agents.give_up(rollout, one_line(f"environment: {type(error).__name__}: {error}"))


def _checked(reward: float | Reward) -> Reward:
    found = reward if isinstance(reward, Reward) else Reward(value=float(reward))
    if not abs(found.value) <= MAX_REWARD or not all(map(math.isfinite, found.parts.values())):
        raise ValueError(f"reward {found}, expected finite numbers of at most {MAX_REWARD:g}")
    return found
