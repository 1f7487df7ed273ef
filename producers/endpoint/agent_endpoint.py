"""The endpoint of one producer, put together: what agents reach, and what becomes of their rollouts."""

import asyncio
import copy
from pathlib import Path
from typing import Any

from penstock.producers.endpoint.access import api_key
from penstock.producers.endpoint.agents import Agents
from penstock.producers.endpoint.answers import AnswerParser, Answers, PlainText
from penstock.producers.endpoint.calls import Calls
from penstock.producers.endpoint.inside import InsideAgents
from penstock.producers.endpoint.prompts import Prompts
from penstock.producers.endpoint.server import EndpointServer
from penstock.producers.interfaces import Engine, Environment
from penstock.producers.observe.event_log import EventLog
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.rollout.sampling import evaluation_sampling, training_sampling
from penstock.producers.stream.claims import Claims
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.in_flight import Claim, Dead, InFlightTable
from penstock.producers.stream.writer import Writer
from penstock.producers.weights.follower import WeightFollower
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.keys import Keys
from penstock.schemas.rollout import RolloutGroup


class AgentEndpoint:
    """Serves agents between `start` and `close`; `run` goes on in between.

    tokenizer: a transformers tokenizer with a chat template.
    parser: of reasoning and tool calls; None leaves both in the text.
    claims: of the prompts stream alone, one at a time.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        producer_id: str,
        keys: Keys,
        connection: ProducerConnection,
        claims: Claims,
        table: InFlightTable,
        weights: WeightFollower,
        writer: Writer,
        engine: Engine,
        environment: Environment,
        tokenizer: Any,
        parser: AnswerParser | None,
        metrics: ProducerMetrics,
        telemetry: EventLog,
    ) -> None:
        """
        Raises:
            ConfigError: a tokenizer without a chat template, or see `api_key`.
        """
        if config.endpoint is None:
            raise ValueError("a run without [endpoint] has none")
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(
                f"model.path = {config.model.path!r}: its tokenizer has no chat template, which [endpoint] needs"
            )
        sampling = training_sampling(config)
        own = copy.deepcopy(tokenizer)  # used in a thread of its own
        exact = config.endpoint.history == "token_exact"
        self.num_tokens = 0
        """Tokens sampled for agents since the start."""
        self._metrics = metrics
        self._calls = Calls(
            engine=engine,
            weights=weights,
            prompts=Prompts(own, exact=exact, stop_token_ids=sampling.stop_token_ids),
            answers=Answers(own, parser or PlainText()),
            lag_bound=config.lag_bound,
            metrics=metrics,
            count=self._count,
        )
        self._agents = Agents(
            config,
            producer_id=producer_id,
            environment=environment,
            claims=claims,
            table=table,
            weights=weights,
            writer=writer,
            fingerprint=engine.fingerprint,
            sampling=sampling,
            metrics=metrics,
            telemetry=telemetry,
        )
        self._inside: InsideAgents | None = None
        if hasattr(environment, "converse"):
            conversing: Any = environment
            self._inside = InsideAgents(
                conversing,
                producer_id=producer_id,
                agents=self._agents,
                calls=self._calls,
                sampling=sampling,
                evaluation_sampling=evaluation_sampling(config),
                deadline_s=config.endpoint.group_deadline_s,
                fingerprint=engine.fingerprint,
            )
        self._server = EndpointServer(
            config.endpoint,
            key=api_key(config.endpoint),
            model=Path(config.model.path).name,
            agents=self._agents,
            calls=self._calls,
            sampling=sampling,
            max_model_len=engine.max_model_len,
            connection=connection,
            keys=keys,
            producer_id=producer_id,
        )

    @property
    def url(self) -> str:
        """Where agents reach this producer; empty before `start`."""
        return self._server.url

    @property
    def evaluates(self) -> bool:
        """Held-out prompts are conversations too."""
        return self._inside is not None

    async def evaluate(self, claim: Claim) -> RolloutGroup | Dead:
        """See `InsideAgents.evaluate`; only where the endpoint `evaluates`."""
        if self._inside is None:
            raise ValueError("the environment does not converse")
        return await self._inside.evaluate(claim)

    async def start(self) -> None:
        """Raises ConfigError where it cannot listen."""
        await self._server.start()

    async def run(self) -> None:
        """Converses where the environment does so itself; waits for what is over time, and for what ends this
        producer (see `EndpointServer.run`)."""
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._server.run())
            if self._inside is not None:
                parts.create_task(self._inside.run())

    async def drain(self) -> None:
        """Takes no more openings; waits until no rollout is open."""
        await self._agents.drain()

    async def close(self, *, append: bool) -> None:
        """Ends what is open and hangs up. append: groups with enough finished rollouts go onto the stream."""
        await self._agents.close(append=append)
        await self._server.close()

    def _count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._metrics.tokens_generated.inc(num_tokens)
