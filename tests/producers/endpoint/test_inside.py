"""An environment of several turns inside the producer goes the way of an agent outside."""

import asyncio
import itertools
import math
import sys
import time

import pytest

from agent_client import spelled, tool_user
from chat_templates import decode
from crashed_producer import kill
from penstock.producers.endpoint.chat.errors import ApiError
from penstock.producers.interfaces import EngineError, RolloutFacts
from penstock.producers.rollout.sampling import request_seed
from penstock.schemas.config import ConfigError, EndpointConfig, EvaluationConfig, ProducersConfig
from penstock.schemas.keys import Field, Kind
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import decode_group, unpack_ids
from producer_run import KEYS, Numbers
from scripted_engine import ScriptedEngine
from tool_caller import ToolCaller
from waiting import until

pytestmark = pytest.mark.redis


async def test_an_environment_s_conversations_become_groups_seeded_by_their_place_in_the_run(serve) -> None:
    known: dict[int, RolloutFacts] = {}

    class Knowing(ToolCaller):
        async def converse(self, prompt, conversation):
            with pytest.raises(LookupError, match="without an answered call"):
                _ = conversation.facts
            reward = await super().converse(prompt, conversation)
            known[conversation.facts.num_tokens] = conversation.facts
            return reward

    one = await serve(environment=Knowing(), group_size=4, mode="synchronous", seed=3)
    one.trainer.release(1, 12)
    groups = await one.groups(12)
    assert sorted(group.index for group in groups) == list(range(1, 13))
    for group in groups:
        assert len(group.rollouts) == 4 and group.prompt.text == str(group.index)
        for rollout in group.rollouts:
            (segment,) = rollout.segments
            assert len(segment.loss_mask) == 3 and rollout.reward.parts == {"calls": 2.0}
            facts = known[rollout.num_sampled_tokens]
            assert (facts.max_tokens, facts.finish_reason, facts.num_turns) == (200, "stop", 3)
    places = itertools.product(range(1, 13), (1,), range(4), range(3))  # index, attempt, sibling, call
    config = one.producer.context.config
    assert sorted(one.engine.seeds) == sorted(request_seed(config, *place) for place in places)
    await until(lambda: one.server.client.xlen(KEYS.prompts) == 0)
    one.trainer.release(13, 13)
    assert (await one.groups(1))[0].index == 13


async def test_answers_of_an_opponent_are_sampled_and_not_trained_whoever_ends_the_group(serve) -> None:
    ended, go_on = [], asyncio.Event()

    class SelfPlay(ToolCaller):
        async def converse(self, prompt, conversation):
            ours, theirs = ([{"role": "user", "content": text}] for text in (prompt.text, "You play against it."))
            for _ in range(2):
                ours.append(await conversation.chat(ours))
                theirs.append({"role": "user", "content": "well?"})
                theirs.append(await conversation.chat(theirs, is_trained=False))
                ours.append({"role": "user", "content": "and now?"})
            assert (conversation.facts.num_turns, conversation.facts.finish_reason) == (2, "stop")
            if ended:
                await go_on.wait()
            ended.append(conversation.facts.num_tokens)
            return Reward(value=1.0)

    one = await serve(environment=SelfPlay(), group_size=2)
    one.trainer.release(1, 1)
    await until(lambda: ended)
    await one.producer.endpoint.agents.save_all()
    await until(lambda: one.producer.endpoint.agents._groups[0].journal.num_written)
    await kill(one)
    go_on.set()
    two = await serve(producer_id="b", beside=one, environment=SelfPlay(), group_size=2)
    (group,) = await two.groups(1)
    assert group.sampled_by, "the first rollout is the earlier holder's"
    for rollout, num_tokens in zip(group.rollouts, ended, strict=True):
        (segment,) = rollout.segments
        assert len(segment.loss_mask) == 2 and rollout.num_sampled_tokens == num_tokens
        assert "against" not in decode("chatml", list(unpack_ids(segment.token_ids)))


async def test_a_conversation_that_fails_ends_alone(serve) -> None:
    async def cancelled() -> None:
        background = asyncio.create_task(asyncio.Event().wait())
        background.cancel()
        await background

    class Fragile(ToolCaller):
        num_begun = 0

        def prompt(self, index):
            if index == 3:
                asyncio.current_task().cancel()
            return super().prompt(index)

        async def converse(self, prompt, conversation):
            self.num_begun += 1
            n = self.num_begun if prompt.text == "1" else 1
            if n == 1:
                raise LookupError("no such tool")
            if n == 2:
                await cancelled()
            if n == 7:
                sys.exit(0)
            if n == 8:
                asyncio.current_task().cancel()
            reward = await super().converse(prompt, conversation)
            if n == 3:
                return float("nan")
            return Reward(
                value=0.5, parts={4: {str(n): 0.0 for n in range(33)}, 5: {"\ud800": 1.0}}.get(n, reward.parts)
            )

    one = await serve(environment=Fragile(), group_size=8)
    one.trainer.release(1, 3)
    entries = {int(fields[Field.INDEX]): fields for fields in await one.entries(3)}
    assert entries[1][Field.KIND] == Kind.GROUP and entries[2][Field.KIND] == Kind.DEAD
    assert b"8 environment: LookupError: no such tool" in entries[2][Field.REASON]
    assert entries[3][Field.REASON] == b"prompt: CancelledError"
    missing = decode_group(entries[1][Field.PAYLOAD]).missing
    for reason in (
        "SystemExit: 0", "LookupError: no such tool", "RewardError: nan for a conversation",
        "RewardError: parts has 33 names, expected at most 32, in the reward of a conversation",
    ):  # fmt: skip
        assert f"1 environment: {reason}" in missing
    assert "2 environment: CancelledError" in missing
    assert one.count("penstock_agent_rollouts_total", outcome="finished") == 1
    assert one.count("penstock_agent_rollouts_total", outcome="dead") == 15 and not one.task.done()


async def test_a_request_that_cannot_be_answered_is_the_environment_s_to_handle(serve) -> None:
    class Curious(ToolCaller):
        async def converse(self, prompt, conversation):
            with pytest.raises(ApiError, match="n is 2, expected 1"):
                await conversation.chat([{"role": "user", "content": "x"}], n=2)
            with pytest.raises(ApiError, match="maximum context length"):
                await conversation.chat([{"role": "user", "content": "x" * 5000}])
            return await super().converse(prompt, conversation)

    one = await serve(environment=Curious(), group_size=2)
    one.trainer.release(1, 1)
    assert len((await one.groups(1))[0].rollouts) == 2


async def test_a_held_out_prompt_has_as_many_conversations_as_samples(serve) -> None:
    limits = []

    class Evaluated(ToolCaller):
        num_evaluation_prompts = 3

        def evaluation_prompt(self, n: int) -> Prompt:
            if n == 3:
                raise LookupError("no task 3")
            return Prompt(text=f"e{n}")

        async def converse(self, prompt, conversation):
            if prompt.text == "e2":
                raise LookupError("no such tool")
            reward = await super().converse(prompt, conversation)
            limits.append(conversation.facts.max_tokens)
            return reward

    how = EvaluationConfig(max_tokens=190, num_samples=2, temperature=0.5)
    one = await serve(environment=Evaluated(), group_size=4, evaluation=how)
    one.trainer.evaluate(0, 3)
    await until(lambda: one.server.client.xlen(KEYS.evaluation_results) == 3)
    results = {fields[Field.EVALUATION]: fields for _, fields in one.server.client.xrange(KEYS.evaluation_results)}
    group = decode_group(results[b"0-1"][Field.PAYLOAD])
    assert (group.evaluation_id, group.index, group.prompt.text) == ("0-1", 0, "e1")
    assert (group.sampling.temperature, group.sampling.max_tokens) == (0.5, 190)
    for rollout in group.rollouts:
        assert len(rollout.segments[0].loss_mask) == 3 and rollout.reward.parts == {"calls": 2.0}
    assert {(sampling.temperature, sampling.max_tokens) for sampling in one.engine.samplings} == {(0.5, 190)}
    assert limits == [190, 190]
    assert b"environment: LookupError: no such tool" in results[b"0-2"][Field.REASON]
    assert b"prompt: LookupError: no task 3" in results[b"0-3"][Field.REASON]
    one.trainer.release(1, 1)
    assert (await one.groups(1))[0].sampling.temperature == 1.0
    assert one.count("penstock_agent_rollouts_total", outcome="finished") == 4


class ParallelCalls(ToolCaller):
    """Two calls at once, whose exceptions come as a group."""

    async def converse(self, prompt, conversation):
        async with asyncio.TaskGroup() as calls:
            for n in range(2):
                calls.create_task(conversation.chat([{"role": "user", "content": f"{prompt.text} {n}"}]))
        return 1.0


class Careless(ToolCaller):
    """Takes whatever happens for an answer that is worth nothing."""

    async def converse(self, prompt, conversation):
        try:
            return await super().converse(prompt, conversation)
        except Exception:
            return Reward(value=0.0)


@pytest.mark.parametrize(("environment", "held_out"), [(ParallelCalls, False), (Careless, True)])
async def test_an_engine_that_dies_ends_the_producer_whatever_the_environment_makes_of_it(
    serve, environment, held_out: bool
) -> None:
    engine = ScriptedEngine(script=tool_user(), max_model_len=4096, die_after=1)
    one = await serve(engine, environment=environment(), group_size=2)
    if held_out:
        one.trainer.evaluate(0, 1)
    else:
        one.trainer.release(1, 1)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(one.task, 60)
    assert caught.group_contains(EngineError)
    assert one.server.client.xlen(KEYS.rollouts) == one.server.client.xlen(KEYS.evaluation_results) == 0


async def test_an_environment_that_makes_something_else_of_its_end_ends_alone(serve, caplog) -> None:
    """Each sibling of a group past its deadline in another way."""

    class Stubborn(ToolCaller):
        num_begun = num_waiting = 0

        async def converse(self, prompt, conversation):
            if prompt.text == "2":
                return await super().converse(prompt, conversation)
            self.num_begun += 1
            n = self.num_begun
            try:
                self.num_waiting += 1
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.num_waiting -= 1
                if n == 1:
                    raise
                if n == 2:
                    raise ValueError("was cancelled") from None
                if n == 3:
                    with pytest.raises(ApiError) as caught:
                        await conversation.chat([{"role": "user", "content": "x"}])
                    assert caught.value.status == 410
            return Reward(value=1.0)

    environment = Stubborn()
    one = await serve(environment=environment, group_size=4)
    one.trainer.release(1, 1)
    await until(lambda: environment.num_waiting == 4)
    one.producer.endpoint.agents.end_overdue(math.inf)
    await until(lambda: environment.num_waiting == 0)
    one.trainer.release(2, 2)
    dead, group = await one.entries(2)
    assert (dead[Field.INDEX], dead[Field.KIND]) == (b"1", Kind.DEAD)
    assert (group[Field.INDEX], group[Field.KIND]) == (b"2", Kind.GROUP)
    assert "cannot be finished" not in caplog.text and not one.task.done()


async def test_an_environment_of_prompts_is_answered_in_one_turn_beside_one_that_converses(serve) -> None:
    class Talker(ToolCaller):
        num_evaluation_prompts = 1

    conversing = tool_user()

    def script(ids: list[int], sibling: int) -> list[int]:
        return conversing(ids, sibling) if "<|im_start|>" in decode("chatml", ids) else spelled("ok")

    engine = ScriptedEngine(script=script, max_model_len=4096)
    one = await serve(engine, environment={"talk": Talker(), "ask": Numbers()}, group_size=2)
    for index in range(1, 21):
        one.trainer.release(index, index, environment="ask" if index % 4 else "talk")
    one.trainer.evaluate(0, 1, environment="talk")
    one.trainer.evaluate(0, 2, first=2, environment="ask")
    entries = {int(fields[Field.INDEX]): fields for fields in await one.entries(20)}
    assert sorted(entries) == list(range(1, 21))
    assert {index for index, fields in entries.items() if fields[Field.KIND] == Kind.DEAD} == {13, 14}
    assert entries[13][Field.REASON] == b"prompt: LookupError: task 13 is missing"
    assert entries[14][Field.REASON].startswith(b"reward: ")  # by the environment's own reward
    for index in entries.keys() - {13, 14}:
        group, talks = decode_group(entries[index][Field.PAYLOAD]), index % 4 == 0
        assert group.prompt.text == str(index) and group.environment == ("talk" if talks else "ask")
        for rollout in group.rollouts:
            (segment,) = rollout.segments
            assert len(segment.loss_mask) == (3 if talks else 1)
            assert rollout.reward.parts == ({"calls": 2.0} if talks else {})
    await until(lambda: one.server.client.xlen(KEYS.evaluation_results) == 2)
    for _, fields in one.server.client.xrange(KEYS.evaluation_results):
        group = decode_group(fields[Field.PAYLOAD])
        assert len(group.rollouts[0].segments[0].loss_mask) == {"0-1": 3, "0-2": 1}[group.evaluation_id]
    await until(lambda: one.server.client.xlen(KEYS.prompts) == 0 and not one.producer.table)


async def test_an_environment_that_converses_needs_the_endpoint_s_table(serve) -> None:
    with pytest.raises(ConfigError, match=r"it converses, .* expected an \[endpoint\] table"):
        await serve(environment=ToolCaller(), endpoint=None)


async def test_an_environment_holds_no_more_conversations_at_once_than_it_can(serve) -> None:
    """Held-out ones included; a group's deadline counts from its first conversation, not from its place in the line."""

    class Crowded(ToolCaller):
        num_evaluation_prompts = 1
        num_open = most_open = 0

        def __init__(self) -> None:
            super().__init__()
            self.may_begin = asyncio.Event()

        async def converse(self, prompt, conversation):
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            try:
                await self.may_begin.wait()
                return await super().converse(prompt, conversation)
            finally:
                self.num_open -= 1

    environments = {"one": Crowded(), "two": Crowded(), "any": Crowded()}
    one = await serve(
        environment=environments,
        group_size=3,
        endpoint=EndpointConfig(port=0, group_deadline_s=100.0),
        producers=ProducersConfig(groups_in_flight=12),
        max_conversations={"one": 1, "two": 2},
    )
    for n, name in enumerate(environments):
        one.trainer.release(2 * n + 1, 2 * n + 2, environment=name)
        one.trainer.evaluate(0, 1 + n, first=1 + n, environment=name)
    one.trainer.release(7, 7, environment="one")
    agents = one.producer.endpoint.agents
    await until(lambda: environments["any"].num_open == 7 and one.count("penstock_agent_rollouts_open") == 21)
    agents.end_overdue(time.monotonic() + 150.0)
    for environment in environments.values():
        environment.may_begin.set()
    entries = {int(fields[Field.INDEX]): fields for fields in await one.entries(7)}
    assert [environments[name].most_open for name in environments] == [1, 2, 7]
    dead = {index for index, fields in entries.items() if fields[Field.KIND] == Kind.DEAD}
    assert dead.issuperset({5, 6}) and len(dead & {1, 2, 7}) <= 1 and len(dead & {3, 4}) <= 1
    await until(lambda: one.server.client.xlen(KEYS.evaluation_results) == 3)
    results = [fields[Field.KIND] for _, fields in one.server.client.xrange(KEYS.evaluation_results)]
    assert results == [Kind.GROUP] * 3


async def test_an_overdue_evaluation_has_given_back_what_it_holds_before_another_begins(serve) -> None:
    class OneSession(ToolCaller):
        num_evaluation_prompts = 2
        num_open = most_open = 0

        async def converse(self, prompt, conversation):
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            try:
                await asyncio.sleep(600.0)
            finally:
                await asyncio.sleep(0.3)
                self.num_open -= 1

    environment, endpoint = OneSession(), EndpointConfig(port=0, group_deadline_s=0.5)
    one = await serve(environment={"a": environment}, max_conversations={"a": 1}, endpoint=endpoint)
    one.trainer.evaluate(0, 2, environment="a")
    await until(lambda: one.server.client.xlen(KEYS.evaluation_results) == 2)
    assert environment.most_open == 1


async def test_a_limit_of_conversations_is_for_environments_that_hold_some(serve) -> None:
    with pytest.raises(ConfigError, match=r"max_conversations = 1 of .*: it does not converse"):
        await serve(environment={"ask": Numbers()}, max_conversations={"ask": 1})
