"""The endpoint of one producer, put together: what agents reach, and what becomes of their rollouts."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

from penstock.producers.endpoint.agents import Agents
from penstock.producers.endpoint.calls import Calls, FreshWeights
from penstock.producers.endpoint.chat.answers import AnswerParser, Answers, PlainText
from penstock.producers.endpoint.inside import Conversations, InsideAgents
from penstock.producers.endpoint.prompts import Prompts
from penstock.producers.endpoint.server import EndpointServer
from penstock.producers.interfaces import Engine
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.rollout.run_environments import RunEnvironments
from penstock.producers.stream.context import ProducerContext
from penstock.producers.stream.in_flight import Claim, Dead, InFlightTable
from penstock.producers.stream.progress import RolloutProgress
from penstock.producers.stream.writer import Writer
from penstock.producers.weights.follower import WeightFollower
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.rollout import RolloutGroup


def open_calls(
    config: RunConfig,
    engine: Engine,
    weights: FreshWeights,
    tokenizer: Any,
    parser: AnswerParser | None,
    *,
    metrics: ProducerMetrics,
    count: Callable[[int], None],
) -> Calls:
    """What answers the calls of a run with an endpoint; the arguments as of `Calls` and `AgentEndpoint`.

    Raises:
        ConfigError: a tokenizer without a chat template.
    """
    assert config.endpoint is not None
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"model.path = {config.model.path!r}: its tokenizer has no chat template, which [endpoint] needs"
        )
    own, exact = copy.deepcopy(tokenizer), config.endpoint.history == "token_exact"  # used in a thread of its own
    return Calls(
        engine=engine,
        weights=weights,
        prompts=Prompts(own, exact=exact, stop_token_ids=config.sampling.stop_token_ids),
        answers=Answers(own, parser or PlainText()),
        config=config,
        metrics=metrics,
        count=count,
    )


class AgentEndpoint:
    """Serves agents between `start` and `close`; `run` goes on in between.

    tokenizer: a transformers tokenizer with a chat template.
    parser: of reasoning and tool calls; None leaves both in the text.
    pass_on: see `Agents`.
    """

    def __init__(
        self,
        context: ProducerContext,
        *,
        table: InFlightTable,
        weights: WeightFollower,
        writer: Writer,
        progress: RolloutProgress,
        engine: Engine,
        environments: RunEnvironments,
        tokenizer: Any,
        parser: AnswerParser | None,
        pass_on: Callable[[Claim], None],
    ) -> None:
        """
        Raises:
            ConfigError: a tokenizer without a chat template, or see `api_key`.
        """
        config, endpoint = context.config, context.config.endpoint
        if endpoint is None:
            raise ValueError("a run without [endpoint] has none")
        sampling = next(iter(environments)).sampling  # that of all but for max_tokens
        self.num_tokens = 0
        """Tokens sampled for agents since the start."""
        self._metrics = context.metrics
        self._calls = open_calls(config, engine, weights, tokenizer, parser, metrics=context.metrics, count=self._count)
        self.agents = Agents(
            context,
            endpoint,
            environments=environments,
            table=table,
            weights=weights,
            writer=writer,
            progress=progress,
            fingerprint=engine.fingerprint,
            pass_on=pass_on,
        )
        self._conversations: Conversations | None = None
        if environments.any_converse:
            self._conversations = Conversations(
                environments,
                self._calls,
                endpoint,
                producer_id=context.producer_id,
                fingerprint=engine.fingerprint,
            )
        self._server = EndpointServer(
            context,
            endpoint,
            agents=self.agents,
            calls=self._calls,
            sampling=sampling,
            max_model_len=engine.max_model_len,
        )

    @property
    def url(self) -> str:
        """Where agents reach this producer; empty before `start`."""
        return self._server.url

    async def evaluate(self, claim: Claim) -> RolloutGroup | Dead:
        """See `Conversations.evaluate`, of an environment that converses."""
        if self._conversations is None:
            raise ValueError("the environments do not converse")
        return await self._conversations.evaluate(claim)

    async def start(self) -> None:
        """Raises ConfigError if it cannot listen."""
        await self._server.start()

    async def run(self) -> None:
        """Holds the environment's own conversations, if it has any; ends idle rollouts and overdue groups. Runs until
        cancelled, or until a call meets what ends this producer (see `EndpointServer.run`)."""
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._server.run())
            if self._conversations is not None:
                parts.create_task(InsideAgents(self.agents, self._conversations).run())

    async def drain(self) -> None:
        """Takes no more openings; waits until no rollout is open."""
        await self.agents.drain()

    async def leave_idle(self) -> list[Claim]:
        """See `Agents.leave_idle`."""
        return await self.agents.leave_idle()

    async def close(self, *, append: bool) -> None:
        """Ends what is open and closes every connection. append: groups with enough finished rollouts go onto the
        stream."""
        await self.agents.close(append=append)
        await self._server.close()

    def _count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._metrics.tokens_generated.inc(num_tokens)
