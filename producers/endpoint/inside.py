"""Agents inside the producer: an environment of several turns talks to the model as an agent outside does."""

import asyncio
import math
from typing import Any, Protocol

from producers.endpoint.agents import Agents
from producers.endpoint.calls import Calls
from producers.endpoint.errors import ApiError
from producers.endpoint.groups import AgentGroup, AgentRollout
from producers.endpoint.requests import parse_chat
from producers.episode import Dead
from producers.in_flight import Claim
from producers.interfaces import EngineError, Environment
from schemas.prompt import Prompt, Reward
from schemas.rollout import MAX_ITEMS, MAX_REWARD, EngineFingerprint, RolloutGroup, SamplingSettings, one_line

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


class ConversingEnvironment(Environment, Protocol):
    """An environment that holds its conversations itself."""

    async def converse(self, prompt: Prompt, conversation: Conversation) -> float | Reward:
        """One rollout, of a training prompt or of a held-out one, from its first call to its reward."""
        ...


class InsideAgents:
    """Runs an environment's conversations, as many at once as the producer has room for."""

    def __init__(
        self,
        environment: ConversingEnvironment,
        *,
        producer_id: str,
        agents: Agents,
        calls: Calls,
        sampling: SamplingSettings,
        evaluation_sampling: SamplingSettings,
        deadline_s: float,
        fingerprint: EngineFingerprint,
    ) -> None:
        self._environment = environment
        self._producer_id = producer_id
        self._evaluation_sampling = evaluation_sampling
        self._deadline_s = deadline_s
        self._fingerprint = fingerprint
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

    async def evaluate(self, claim: Claim) -> RolloutGroup | Dead:
        """One held-out prompt: a conversation of its own, each call of it answered greedily.

        Raises:
            EngineError: the engine serves no longer.
        """
        try:
            prompt = self._environment.evaluation_prompt(claim.index)
        except Exception as error:  # the environment is the user's
            return Dead(f"prompt: {type(error).__name__}: {error}")
        group = AgentGroup(claim, prompt, 1, self._deadline_s, self._evaluation_sampling)
        rollout = group.open(self._producer_id)
        conversation = Conversation(rollout, self._calls, self._sampling)
        deadline = asyncio.timeout(self._deadline_s)
        try:
            async with deadline:
                rollout.finish(_checked(await self._environment.converse(prompt, conversation)))
        except EngineError:
            raise
        except Exception as error:
            reason = f"environment: {type(error).__name__}: {error}"
            if deadline.expired():
                reason = f"not finished after {self._deadline_s:g} s (endpoint.group_deadline_s)"
            rollout.die(one_line(reason))
        return group.outcome(self._producer_id, self._fingerprint)

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
    if len(found.parts) > MAX_ITEMS:
        raise ValueError(f"reward of {len(found.parts):,} parts, expected at most {MAX_ITEMS:,}")
    return found
