"""Agents on the real engine and a real Redis: the clients of OpenAI and Anthropic use a tool while the weights change,
and the stream has what the engine was given and sampled, token by token."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import anthropic
import numpy as np
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessage

from markov_agent import LETTERS, MarkovAgent
from one_environment import alone
from penstock.producers.loop import Producer
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.context import ProducerContext
from penstock.schemas.config import (
    EndpointConfig,
    EngineConfig,
    EnvironmentConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
)
from penstock.schemas.keys import Field, Keys, Kind
from penstock.schemas.rollout import RolloutGroup, decode_group, unpack_floats, unpack_ids
from producer_run import Numbers
from waiting import until
from weight_writer import WeightWriter

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.redis,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
GROUP_SIZE = 4
NUM_GROUPS = 3
NUM_TURNS = 6


class RecordingEngine:
    """An engine that records what it was given and sampled."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_token_ids: list[int], *arguments: Any) -> Any:
        completions = await self._engine.generate(prompt_token_ids, *arguments)
        self.seen += [(tuple(prompt_token_ids), tuple(unpack_ids(one.token_ids))) for one in completions]
        return completions


class EndpointRun(NamedTuple):
    producer: Producer
    engine: RecordingEngine
    agent: MarkovAgent
    client: Any
    keys: Keys
    metrics: ProducerMetrics
    log: WeightWriter

    def announce(self, version: int) -> None:
        weights = self.agent.weights(version)
        self.log.whole(version, {name: tensor.numpy().view(np.uint32) for name, tensor in weights.items()})

    def groups(self) -> list[RolloutGroup]:
        entries = self.client.xrange(self.keys.rollouts)
        assert all(fields[Field.KIND] == Kind.GROUP for _, fields in entries), entries
        return [decode_group(fields[Field.PAYLOAD]) for _, fields in entries]

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> MarkovAgent:
    return MarkovAgent(tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="module")
def config(agent: MarkovAgent) -> RunConfig:
    return RunConfig(
        name="agents",
        group_size=GROUP_SIZE,
        max_lag=10,
        model=ModelConfig(path=str(agent.folder)),
        environment=EnvironmentConfig(path="nobody:Needed"),
        engine=EngineConfig(kv_cache_gib=0.25, max_num_seqs=32, max_model_len=4096),
        sampling=SamplingConfig(max_tokens=300),
        endpoint=EndpointConfig(port=0, tool_parser="hermes"),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(vllm_engine, config: RunConfig) -> AsyncIterator[Any]:
    engine = await vllm_engine.start(config)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def run(
    agent: MarkovAgent, config: RunConfig, engine, redis_client, redis_url, tmp_path
) -> AsyncIterator[EndpointRun]:
    from penstock.producers.engines.answer_parser import VllmAnswerParser

    engine = RecordingEngine(engine)
    metrics, environment = ProducerMetrics(), Numbers()
    connection = ProducerConnection.open(redis_url, outage_s=30.0, metrics=metrics)
    context = ProducerContext(config, runs=tmp_path, producer_id="a", connection=connection, metrics=metrics)
    parser = VllmAnswerParser(agent.tokenizer, config.endpoint, {})
    producer = Producer(context, engine, alone(config, environment), agent.tokenizer, answer_parser=parser)
    await producer.open()
    log = WeightWriter(redis_client, "agents")
    one = EndpointRun(producer, engine, agent, redis_client, Keys("agents"), metrics, log)
    task = asyncio.create_task(producer.serve())
    one.announce(0)
    await until(lambda: task.done() or producer.weights.loaded)
    yield one
    producer.stop.set()
    await asyncio.gather(task, return_exceptions=True)
    await connection.close()


async def streamed(client: openai.AsyncOpenAI, messages: list) -> ChatCompletionMessage:
    """Returns an answer as its client puts it together from a stream."""
    content, calls = "", []
    stream = await client.chat.completions.create(model="any", messages=messages, tools=[ADD], stream=True)
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        calls += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or ()]
    return ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": content or None, "tool_calls": calls or None}
    )


async def converse_by_chat(url: str, messages: list, stream: bool) -> int:
    """Converses with OpenAI's client; returns the number of tool calls."""
    num_calls = 0
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        for _ in range(NUM_TURNS):
            if stream:
                message = await streamed(client, messages)
            else:
                reply = await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
                message = reply.choices[0].message
            messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            if message.tool_calls:
                num_calls += 1
                arguments = json.loads(message.tool_calls[0].function.arguments)
                result = str(arguments["a"] + arguments["b"])
                messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result})
            else:
                messages.append({"role": "user", "content": "and plus three"})
    return num_calls


async def converse_by_messages(url: str, messages: list, stream: bool) -> int:
    """Converses with Anthropic's client; returns the number of tool calls."""
    num_calls = 0
    tool = {"name": "add", "description": "Adds two numbers.", "input_schema": ADD["function"]["parameters"]}
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none") as client:
        for _ in range(NUM_TURNS):
            asked: dict = {"model": "any", "max_tokens": 300, "messages": messages, "tools": [tool]}
            if stream:
                async with client.messages.stream(**asked) as events:
                    message: Any = await events.get_final_message()
            else:
                message = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": message.content})
            said: list = [{"type": "text", "text": "and plus three"}]
            for block in message.content:
                if block.type == "tool_use":
                    num_calls += 1
                    result = str(block.input["a"] + block.input["b"])
                    said = [{"type": "tool_result", "tool_use_id": block.id, "content": result}]
            messages.append({"role": "user", "content": said})
    return num_calls


async def converse(base: str, n: int) -> int:
    """Runs an agent that knows three URLs of Penstock and nothing else, every second one streamed and rewarded; returns
    its number of tool calls."""
    hold = converse_by_messages if n % 4 >= 2 else converse_by_chat
    reward = n % 2
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=50) as server:
        rollout: Any = await server.post("/r", cast_to=object)
        messages = [{"role": "user", "content": f"what is {rollout['prompt']['text']} plus four"}]
        num_calls = await hold(rollout["base_url"], messages, bool(reward))
        body = {"reward": reward, "metrics": {"calls": num_calls}}
        await server.post(f"/r/{rollout['id']}/finish", body=body, cast_to=object)
    return num_calls


async def test_rollouts_of_both_clients_are_what_the_engine_saw_and_sampled_while_weights_change(
    run: EndpointRun,
) -> None:
    for index in range(1, NUM_GROUPS + 1):
        run.client.xadd(run.keys.prompts, {Field.INDEX: index, Field.VERSION: 0})

    async def change_weights() -> None:
        for version in range(1, 40):
            await asyncio.sleep(0.25)
            run.announce(version)

    changing = asyncio.create_task(change_weights())
    base = run.producer.endpoint.url
    calls = await asyncio.gather(*(converse(base, n) for n in range(GROUP_SIZE * NUM_GROUPS)))
    changing.cancel()
    await until(lambda: run.client.xlen(run.keys.rollouts) == NUM_GROUPS)

    groups = run.groups()
    assert sorted(group.index for group in groups) == list(range(1, NUM_GROUPS + 1))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == GROUP_SIZE * NUM_GROUPS and sum(calls) > NUM_TURNS
    assert sum(rollout.reward.parts["calls"] for rollout in rollouts) == sum(calls)
    # Every call's tokens, trained once, after exactly the ids that the engine was given.
    trained = []
    for rollout in rollouts:
        (segment,) = rollout.segments
        ids = tuple(unpack_ids(segment.token_ids))
        trained += [(ids[:start], ids[start:end]) for start, end in segment.loss_mask]
    assert sorted(trained) == sorted(run.engine.seen) and len(trained) == GROUP_SIZE * NUM_GROUPS * NUM_TURNS
    # Each letter identifies the policy that sampled it, and that policy's logprob is known.
    versions = check_versions_and_logprobs(run.agent, rollouts)
    assert len(versions) > 2
    assert run.count("penstock_agent_calls_total", prompt="first") == len(rollouts)
    assert run.count("penstock_agent_calls_total", prompt="drifted") > NUM_TURNS
    assert run.count("penstock_agent_calls_total", prompt="as_sent") == 0
    assert run.count("penstock_agent_tokens_total") == run.count("penstock_agent_tokens_delivered_total") > 0
    assert run.client.xlen(run.keys.prompts) == 0


async def test_calls_that_the_engine_aborts_are_resumed_from_their_partial_ids(run: EndpointRun) -> None:
    async def abort() -> None:
        states = run.engine._llm.output_processor.request_states
        for n in range(1, 100_000):
            await asyncio.sleep(0.005)
            # Requests that are aborted again and again before their first token are given up, by design.
            begun = [name for name, state in states.items() if state.detokenizer.num_output_tokens() > 1]
            await run.engine._llm.abort(begun, internal=True)
            if n % 100 == 0:
                run.announce(n // 100)

    aborting = asyncio.create_task(abort())
    # An answer that ends before its abort is complete: tries as many groups as it takes.
    for index in range(1, 21):
        run.client.xadd(run.keys.prompts, {Field.INDEX: index, Field.VERSION: 0})
        await asyncio.gather(*(converse(run.producer.endpoint.url, n) for n in range(GROUP_SIZE)))
        num_parts = sum(bool(part) for _, part in run.engine.seen)
        if num_parts > index * GROUP_SIZE * NUM_TURNS + NUM_TURNS:
            break
    aborting.cancel()
    await until(lambda: run.client.xlen(run.keys.rollouts) == index)
    rollouts = [rollout for group in run.groups() for rollout in group.rollouts]
    check_versions_and_logprobs(run.agent, rollouts)
    trained = []
    for rollout in rollouts:
        (segment,) = rollout.segments
        assert segment.finish_reason != "abort" and len(segment.loss_mask) == NUM_TURNS
        ids = tuple(unpack_ids(segment.token_ids))
        trained += [(ids[:start], ids[start:end]) for start, end in segment.loss_mask]
    # The answers consist of the parts that the engine sampled, in order and without exception.
    parts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for context, part in run.engine.seen:
        parts.setdefault(context, []).append(part)

    def is_sampled(context: tuple[int, ...], answer: tuple[int, ...]) -> bool:
        return not answer or any(
            part and answer[: len(part)] == part and is_sampled(context + part, answer[len(part) :])
            for part in parts.get(context, ())
        )

    assert all(is_sampled(context, answer) for context, answer in trained)
    assert sum(len(answer) for _, answer in trained) == sum(len(part) for _, part in run.engine.seen)
    assert num_parts > len(trained) + NUM_TURNS
    assert run.count("penstock_agent_tokens_total") == run.count("penstock_agent_tokens_delivered_total") > 0


def check_versions_and_logprobs(agent: MarkovAgent, rollouts: list) -> set[int]:
    """Checks each token's version and logprob; returns the versions that sampled an answer's letters."""
    letters = {token: parity for parity in range(len(LETTERS)) for token in agent.letters(parity)}
    tables = {parity: agent.logprobs(parity) for parity in range(len(LETTERS))}
    versions = set()
    for rollout in rollouts:
        (segment,) = rollout.segments
        ids = unpack_ids(segment.token_ids)
        behavior = iter(unpack_floats(segment.behavior_logprobs))
        for span in segment.version_spans:
            for position in range(span.start, span.end):
                token, last = ids[position], ids[position - 1]
                if token in letters:
                    assert letters[token] == span.version % 2, f"token {position} is labelled {span.version}"
                    versions.add(span.version)
                expected = float(tables[span.version % 2][last, token])
                assert next(behavior) == pytest.approx(expected, abs=1e-4)
    return versions
