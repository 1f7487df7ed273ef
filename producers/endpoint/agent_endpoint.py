"""The endpoint of one producer, put together: what agents reach, and what becomes of their rollouts."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

from penstock.producers.endpoint.agents import Agents
from penstock.producers.endpoint.calls import Calls, FreshWeights
from penstock.producers.endpoint.chat.answers import AnswerParser, Answers, PlainText
from penstock.producers.endpoint.inside import Conversations
from penstock.producers.endpoint.prompts import Prompts
from penstock.producers.endpoint.server import EndpointServer
from penstock.producers.interfaces import Engine
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.rollout.run_environments import RunEnvironments
from penstock.producers.stream.context import ProducerContext
from penstock.producers.stream.in_flight import Claim, Dead, InFlightTable
from penstock.producers.stream.rollout_progress import RolloutProgress
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
) -> Calls:
    """Returns what answers the calls of a run with an endpoint; for the arguments see `Calls` and `AgentEndpoint`.

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
    )


class AgentEndpoint:
    """Serves agents between `start` and `close`; `run` runs in between.

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
        assert endpoint is not None
        self._calls = open_calls(config, engine, weights, tokenizer, parser, metrics=context.metrics)
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
        self._any_converse = environments.any_converse
        self._conversations = Conversations(
            environments, self._calls, endpoint, producer_id=context.producer_id, fingerprint=engine.fingerprint
        )
        self._server = EndpointServer(
            context,
            endpoint,
            agents=self.agents,
            calls=self._calls,
            sampling=next(iter(environments)).sampling,  # all have the same, apart from max_tokens
            max_model_len=engine.max_model_len,
        )

    @property
    def url(self) -> str:
        """Where agents reach this producer; empty before `start`."""
        return self._server.url

    @property
    def num_tokens(self) -> int:
        """Tokens sampled for agents since the start."""
        return self._calls.num_tokens

    async def evaluate(self, claim: Claim) -> RolloutGroup | Dead:
        """See `Conversations.evaluate`, of an environment that converses."""
        return await self._conversations.evaluate(claim)

    async def start(self) -> None:
        """Raises ConfigError if it cannot listen."""
        await self._server.start()

    async def run(self) -> None:
        """Holds the conversations of conversing environments; ends idle rollouts and overdue groups. Runs until
        cancelled, or until a call raises an error that ends this producer (see `EndpointServer.run`)."""
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._server.run())
            if self._any_converse:
                parts.create_task(self._conversations.run(self.agents))

    async def close(self, *, append: bool) -> None:
        """Ends what is open and closes every connection. append: see `Agents.close`."""
        await self.agents.close(append=append)
        await self._server.close()
