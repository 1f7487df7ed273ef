"""A producer with an endpoint on a real Redis, and a client of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from agent_client import AgentClient, tool_user
from chat_templates import tokenizer_of
from one_environment import alone, several
from penstock.producers.loop import Producer
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.context import ProducerContext
from penstock.schemas.config import EndpointConfig, EnvironmentConfig, SamplingConfig
from penstock.schemas.heartbeat import decode_heartbeat
from penstock.schemas.keys import Field, Kind
from penstock.schemas.producer_parity import ProducerParity, encode_parity
from penstock.schemas.rollout import RolloutGroup, decode_group
from producer_run import QUICK, Numbers
from real_server import RealServer
from scripted_engine import ScriptedEngine
from tag_parser import TagParser
from waiting import until

QUICK_PRODUCERS = replace(QUICK, claim_idle_s=600.0)
"""A producer that stands still for a while is not considered dead."""
QUICK_ENDPOINT = EndpointConfig(port=0, idle_timeout_s=20.0, group_deadline_s=40.0)


class Served(NamedTuple):
    """One producer that serves agents."""

    producer: Producer
    task: asyncio.Task
    engine: ScriptedEngine
    client: AgentClient
    server: RealServer
    trainer: Any
    metrics: ProducerMetrics
    producer_id: str

    @property
    def url(self) -> str:
        assert self.producer.endpoint is not None
        return self.producer.endpoint.url

    async def entries(self, num_entries: int) -> list[dict[bytes, bytes]]:
        """Waits for the next entries of the rollout stream."""
        return await asyncio.to_thread(self.trainer.read, num_entries, 90.0)

    async def groups(self, num_groups: int) -> list[RolloutGroup]:
        """Waits for the next entries of the rollout stream, which must be groups."""
        entries = await self.entries(num_groups)
        assert [fields[Field.KIND] for fields in entries] == [Kind.GROUP] * num_groups, entries
        return [decode_group(fields[Field.PAYLOAD]) for fields in entries]

    def dead_rollouts(self) -> list[tuple[str, str, str]]:
        """Returns index, id and reason of each dead rollout."""
        letters = self.server.client.xrange(self.trainer.keys.dead_rollouts)
        names = (Field.INDEX, Field.ROLLOUT, Field.REASON)
        return [tuple(fields[name].decode() for name in names) for _, fields in letters]

    def quarantine(self) -> None:
        """Quarantines the producer, as the trainer does."""
        keys = self.trainer.keys
        heartbeat = decode_heartbeat(self.server.client.get(keys.producer(self.producer_id)))
        found = ProducerParity(producer_id=self.producer_id, quarantined_s=1.0, reason="raw logprobs")
        self.server.client.hset(keys.parity, heartbeat.instance, encode_parity(found))

    def count(self, metric: str, **labels: str) -> float:
        """Returns the value of a metric."""
        return self.metrics.registry.get_sample_value(metric, labels) or 0.0


@pytest.fixture
async def serve(redis_server, connect, make_config, hand_trainer, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await serve(engine, producer_id, beside=..., **changes)` starts a producer that serves agents; `beside` is
    another one of the same run. environment: one, or several by name."""
    started: list[Served] = []

    async def start(
        engine: ScriptedEngine | None = None,
        producer_id: str = "a",
        *,
        beside: Served | None = None,
        key: str | None = None,
        endpoint: EndpointConfig | None = QUICK_ENDPOINT,
        environment: Any = None,
        teacher: Any = None,
        tokenizer: Any = None,
        max_conversations: Mapping[str, int] | None = None,
        **changes: Any,
    ) -> Served:
        fields = {
            "producers": QUICK_PRODUCERS,
            "sampling": SamplingConfig(max_tokens=200),
            "endpoint": endpoint,
            **changes,
        }
        by_name = environment if isinstance(environment, dict) else {}
        if by_name:
            limits = max_conversations or {}
            named = tuple(
                EnvironmentConfig(name=name, path="tests:Own", max_conversations=limits.get(name)) for name in by_name
            )
            fields |= {"environment": None, "environments": named}
        config = make_config(**fields)
        server = beside.server if beside is not None else redis_server()
        trainer = beside.trainer if beside is not None else hand_trainer(server.client, config, tmp_path)
        if beside is None:
            trainer.announce(0)
        engine = engine or ScriptedEngine(script=tool_user(), max_model_len=4096)
        environment, metrics = environment or Numbers(), ProducerMetrics()
        context = ProducerContext(
            config,
            runs=tmp_path,
            producer_id=producer_id,
            connection=connect(server),
            metrics=metrics,
            teacher=teacher,
        )
        environments = several(config, by_name) if by_name else alone(config, environment)
        producer = Producer(
            context, engine, environments, tokenizer or tokenizer_of("chatml"), answer_parser=TagParser()
        )
        await producer.open()
        task = asyncio.create_task(producer.serve())
        await until(lambda: task.done() or (producer.weights.loaded and producer.endpoint.url != ""))
        if task.done():
            task.result()
        assert producer.endpoint is not None
        client = AgentClient(producer.endpoint.url, key)
        started.append(Served(producer, task, engine, client, server, trainer, metrics, producer_id))
        return started[-1]

    yield start
    for one in started:
        await one.client.close()
        one.task.cancel()
    await asyncio.gather(*(one.task for one in started), return_exceptions=True)


@pytest.fixture
def opened(serve) -> Callable[..., Any]:
    """`one, rollout = await opened(engine, **changes)` starts a producer as `serve` does, releases index 1 and opens a
    rollout of it."""

    async def start(*arguments: Any, **changes: Any) -> tuple[Served, dict[str, Any]]:
        one = await serve(*arguments, **changes)
        one.trainer.release(1, 1)
        return one, await one.client.open()

    return start
