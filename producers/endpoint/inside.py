"""Agents inside the producer: a conversing environment calls the model as an outside agent does."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from penstock.producers.endpoint.agents import Agents
from penstock.producers.endpoint.beside import beside
from penstock.producers.endpoint.call_ledger import digest
from penstock.producers.endpoint.calls import Calls
from penstock.producers.endpoint.chat.errors import ApiError
from penstock.producers.endpoint.chat.requests import ChatRequest, parse_chat, without_files
from penstock.producers.endpoint.groups import AgentGroup, AgentRollout
from penstock.producers.interfaces import MOST_STATE_BYTES, RolloutFacts, State
from penstock.producers.rollout.rewards import checked
from penstock.producers.rollout.run_environments import RunEnvironments, pose
from penstock.producers.stream.in_flight import Claim, Dead
from penstock.schemas.config import EndpointConfig
from penstock.schemas.images import file_of
from penstock.schemas.process.cancellation import gather_or_cancel
from penstock.schemas.process.plugins import ends_caller
from penstock.schemas.prompt import Reward
from penstock.schemas.rollout import NOT_FINISHED, EngineFingerprint, RolloutGroup, SamplingSettings, shown_error

Json = dict[str, Any]
T = TypeVar("T")
Save = Callable[[AgentGroup], Awaitable[None]]

ENDING_S = 10.0
"""For an overdue conversation to give back what it holds, before another takes its place."""
CREDIT_S = 0.2
"""Pause after an opening that found no prompt."""


class RolloutConversation:
    """The `Conversation` of one rollout.

    sampling: what requests may ask for, even if the rollout's differs. save: saves its group's progress; None for a
        group that nobody continues.
    """

    def __init__(
        self, rollout: AgentRollout, calls: Calls, sampling: SamplingSettings, save: Save | None, *, ignore: bool
    ) -> None:
        self._ignore = ignore
        self._save = save
        self._acting = asyncio.Lock()
        self._rollout = rollout
        self._calls = calls
        self._sampling = sampling

    async def chat(self, messages: list[Json], *, is_trained: bool = True, **fields: Any) -> Json:
        """See `Conversation.chat`."""
        document = {"messages": messages, **fields}
        num_bytes, identity = _identity(document)
        request = await beside(num_bytes, lambda: self._parsed(document, num_bytes))
        number = self._rollout.begin_call()
        answered = await self._calls.answer(self._rollout, request, number, identity)
        answered.call.delivered, answered.call.is_trained = True, is_trained
        return answered.message

    def _parsed(self, document: Json, num_bytes: int) -> ChatRequest:
        files: dict[str, bytes] = {}
        if self._calls.takes_images:
            document, files = without_files(document, file_of)
        return parse_chat(document, self._sampling, ignore=self._ignore, num_bytes=num_bytes, images=files)

    async def act(self, action: Callable[[], Awaitable[T]], state: State | None = None) -> T:
        """See `Conversation.act`."""
        rollout = self._rollout
        async with self._acting:
            if (done := rollout.take_earlier_act()) is not None:
                if not rollout.earlier_acts and state is not None and rollout.state is not None:
                    await state.restore(rollout.state)
                return msgspec.msgpack.decode(done.result)
            returned = await action()
            try:
                result = msgspec.msgpack.encode(returned)
            except (TypeError, ValueError, OverflowError) as error:
                raise TypeError(f"an action returned {repr(returned)[:80]}, expected what MessagePack holds") from error
            if self._save is not None:
                saved = None if state is None else await state.save(MOST_STATE_BYTES)
                if state is not None and saved is None:
                    rollout.group.give_up_journal(f"a conversation's state is more than {MOST_STATE_BYTES:,} bytes")
                rollout.enter_act(result, saved)
                await self._save(rollout.group)
            return msgspec.msgpack.decode(result)

    @property
    def facts(self) -> RolloutFacts:
        """See `Conversation.facts`."""
        calls = [call for call in self._rollout.ledger.calls if call.is_trained]
        if not calls:
            raise LookupError("facts of a conversation without an answered call that is trained")
        return RolloutFacts(
            num_prompt_tokens=len(calls[0].prompt) // 4,
            num_tokens=sum(call.num_sampled for call in calls),
            max_tokens=self._rollout.group.sampling.max_tokens,
            finish_reason=calls[-1].completion.finish_reason,
            num_turns=len(calls),
        )


def _identity(document: Json) -> tuple[int, bytes]:
    """Returns the length of a request as JSON, and what identifies it in a conversation that repeats it. One that JSON
    cannot hold counts as long, and nothing identifies it."""
    try:
        encoded = msgspec.json.encode(document, order="deterministic")
    except (TypeError, ValueError, RecursionError):
        return sys.maxsize, b""
    return len(encoded), digest(encoded)


@dataclass(frozen=True)
class Conversations:
    """Holds the conversations of conversing environments."""

    environments: RunEnvironments
    calls: Calls
    endpoint: EndpointConfig
    producer_id: str
    fingerprint: EngineFingerprint

    async def evaluate(self, claim: Claim) -> RolloutGroup | Dead:
        """Holds the conversations about one held-out prompt, sampled as its evaluation is.

        Raises:
            EngineError: the engine serves no longer.
        """
        try:
            source = self.environments.named(claim.environment)
            prompt = pose(source.environment, claim.task, held_out=True)
        except BaseException as error:  # the environment is the user's
            if ends_caller(error):
                raise
            return Dead.of("prompt", error)
        group = AgentGroup(
            claim=claim,
            prompt=prompt,
            size=source.num_samples,
            deadline_s=self.endpoint.group_deadline_s,
            sampling=source.evaluation_sampling,
            producer_id=self.producer_id,
            fingerprint=self.fingerprint,
        )
        rollouts = [group.open() for _ in range(group.size)]
        await gather_or_cancel(self._evaluate(rollout, source.room) for rollout in rollouts)
        return group.outcome()

    async def _evaluate(self, rollout: AgentRollout, room: AbstractAsyncContextManager[Any]) -> None:
        """Holds one conversation about a held-out prompt, and ends its rollout."""
        deadline_s = self.endpoint.group_deadline_s
        async with room:
            holding = asyncio.create_task(self.hold(rollout))
            try:
                await asyncio.wait({holding}, timeout=deadline_s)
            finally:
                holding.cancel()
            if not holding.done():  # an environment that ignores its cancellation gets no more answers
                rollout.die(f"{NOT_FINISHED} {deadline_s:g} s (endpoint.group_deadline_s)")
                await asyncio.wait({holding}, timeout=ENDING_S)
                return
        outcome = holding.result()
        if isinstance(outcome, Reward):
            rollout.finish(outcome)
        else:
            rollout.die(outcome)

    async def hold(self, rollout: AgentRollout, save: Save | None = None) -> Reward | str:
        """Holds one conversation; returns its reward, or the reason for having none. save: see `RolloutConversation`.

        Raises:
            EngineError: the engine serves no longer, even if the environment caught the error.
        """
        outcome: Reward | str = ""
        try:
            (outcome,) = await gather_or_cancel([self._hold(rollout, save)])  # a task of its own, which it may cancel
        except asyncio.CancelledError as error:
            if ends_caller(error):
                raise
            rollout.error = error
        if rollout.error is not None:
            outcome = f"environment: {shown_error(rollout.error)}"
        if self.calls.failed.done():
            self.calls.failed.result()
        return outcome

    async def _hold(self, rollout: AgentRollout, save: Save | None) -> Reward | str:
        """Returns the reward of one conversation; without one, `rollout.error` says why."""
        try:
            source = self.environments.named(rollout.group.claim.environment)
            environment: Any = source.environment  # a ConversingEnvironment
            ignore = self.endpoint.unsupported == "ignore"
            conversation = RolloutConversation(rollout, self.calls, source.sampling, save, ignore=ignore)
            return checked(await environment.converse(rollout.group.prompt, conversation), "a conversation")
        except BaseException as error:  # the environment is the user's, and one rollout never ends the others
            if ends_caller(error):
                raise
            rollout.error = error
            return ""

    async def run(self, agents: Agents) -> None:
        """Holds the conversations about training prompts, as many at once as the producer has room for.

        Waits for room, which an append unblocks, and for a prompt, which a release unblocks. Runs until the producer
        takes no more openings, or until cancelled.

        Raises:
            EngineError: the engine serves no longer.
        """
        async with asyncio.TaskGroup() as conversations:
            while True:
                try:
                    rollout = await agents.open()
                except ApiError as refused:
                    if refused.status != 429:
                        return
                    await (asyncio.sleep(CREDIT_S) if agents.has_room else agents.wait_for_room())
                    continue
                rollout.running.add(conversations.create_task(self._converse(agents, rollout)))

    async def _converse(self, agents: Agents, rollout: AgentRollout) -> None:
        async with self.environments.named(rollout.group.claim.environment).room:
            rollout.group.start()
            outcome = await self.hold(rollout, agents.save)
        # An environment may ignore its cancellation: at a deadline, or when another producer continues the rollout.
        if rollout.is_open and not rollout.group.journal.has_moved:
            rollout.running.discard(asyncio.current_task())  # this task must not cancel itself
            if rollout.earlier or rollout.earlier_acts:
                agents.restart(rollout.group)
            elif isinstance(outcome, Reward):
                agents.finish(rollout, outcome)
            else:
                agents.give_up(rollout, outcome)
