"""Environments of the library verifiers, unchanged, inside a producer."""

import json
import re
import signal
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from agent_client import ANSWER, CALL, spelled, tool_user
from chat_templates import decode
from penstock.producers.environments.verifiers import VerifiersEnvironment
from penstock.producers.interfaces import Environment
from penstock.schemas.config import EnvironmentConfig
from penstock.schemas.keys import Field, Kind
from penstock.schemas.process.plugins import construct
from penstock.schemas.rollout import decode_group, unpack_ids
from producer_run import KEYS
from scripted_conversation import ScriptedConversation
from scripted_engine import ScriptedEngine
from waiting import until

LAB = """
import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b


def load_environment(failing=False, grouped=False, advantages=False, endless=False, held_out=2, max_turns=10):
    def answered(completion, answer):
        return 0.5 * any(message.content == answer for message in completion)

    def best(completions):
        return [0.0 for _ in completions]

    class Advantages(vf.Rubric):
        has_advantages = True

    class Adder(vf.ToolEnv):
        async def setup_state(self, state):
            if failing and state["answer"] == "2":
                raise vf.InfraError("no sandbox")
            return state

        @vf.stop
        async def no_tools_called(self, state):
            return not endless and await super().no_tools_called(state)

        async def env_response(self, messages, state):
            calls = messages[-1].tool_calls
            return await super().env_response(messages, state) if calls else [vf.UserMessage(content="Go on.")]

    def tasks(name, count):
        answers = ["0", "ANSWER", "2"][:count]
        return Dataset.from_list([{"question": f"{name} {n}", "answer": each} for n, each in enumerate(answers)])

    return Adder(
        tools=[add],
        dataset=tasks("task", 3),
        eval_dataset=tasks("held out", held_out) if held_out else None,
        rubric=(Advantages if advantages else vf.Rubric)(funcs=[best if grouped else answered]),
        max_turns=max_turns,
    )
"""
"""An environment as its authors publish it."""


@pytest.fixture(scope="module", autouse=True)
def lab(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("lab")
    (folder / "published_adder.py").write_text(LAB.replace("ANSWER", ANSWER))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("HF_HOME", str(folder))
        yield folder


def opened(**settings: Any) -> VerifiersEnvironment:
    return VerifiersEnvironment(seed=3, id="published-adder", args=settings)


def test_an_epoch_has_every_row_once_and_held_out_are_those_of_the_evaluation_set_alone() -> None:
    environment = opened()
    epochs = [[environment.prompt(3 * epoch + n).messages[0].content for n in (1, 2, 3)] for epoch in range(8)]
    assert all(sorted(epoch) == ["task 0", "task 1", "task 2"] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    assert environment.prompt(5) == opened().prompt(5)
    assert environment.num_tasks == 3 and environment.num_evaluation_prompts == 2
    assert environment.evaluation_prompt(2).messages[0].content == "held out 1"
    assert opened(held_out=0).num_evaluation_prompts == 0, "verifiers takes training rows in their place"


def test_the_process_keeps_its_own_signal_handlers() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    opened()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"id": "no-such-environment"}, "Could not import 'no-such-environment' environment"),
        ({"id": "published-adder", "args": {"sandboxes": 4}}, "sandboxes"),
        ({"id": "published-adder", "args": {"grouped": True}}, "scores whole groups; expected rewards of one rollout"),
        ({"id": "published-adder", "args": {"advantages": True}}, "scores whole groups; expected rewards of one"),
        ({"id": "published-adder", "num_evaluation_prompts": 9}, "num_evaluation_prompts is 9, expected 0 to 2"),
    ],
)
def test_what_cannot_be_used_is_an_error_of_the_run_file(kwargs: dict, message: str) -> None:
    plug = EnvironmentConfig(path="penstock.producers.environments.verifiers:VerifiersEnvironment", kwargs=kwargs)
    with pytest.raises(ValueError, match=re.escape(message)):
        construct(plug, "environment", Environment, seed=0)


@pytest.mark.parametrize("release", ["0.1.14", "0.5.0", None])
def test_another_release_is_named_with_those_that_serve(monkeypatch: pytest.MonkeyPatch, release: str | None) -> None:
    def installed(name: str) -> str:
        if release is None:
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr("penstock.producers.environments.verifiers.version", installed)
    message = f"verifiers {release} is installed, expected 0.2, 0.3 or 0.4" if release else "verifiers is not installed"
    with pytest.raises(ImportError, match=f"{message}: pip install 'penstock\\[verifiers\\]'"):
        opened()


async def test_the_example_computes_scores_and_is_told_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "docs/examples"))
    small = {"num_problems": 4, "num_held_out": 2}
    environment = VerifiersEnvironment(seed=1, id="calculator-environment", args=small)
    prompt = environment.prompt(1)

    def call(expression: str) -> dict[str, Any]:
        function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
        return {"tool_calls": [{"id": "1", "type": "function", "function": function}]}

    asked = prompt.messages[0].content.removeprefix("What is ").removesuffix("?")
    conversation = ScriptedConversation(call("9**9"), call(asked), {"content": prompt.answer})
    reward = await environment.converse(prompt, conversation)
    assert reward.value == reward.parts["exact"] == 1.0
    assert reward.parts["calculator_calls"] == 2.0 and reward.parts["num_turns"] == 3.0
    tools = [message["content"] for message in conversation.asked[-1] if message["role"] == "tool"]
    assert tools == ["expected integers, + - * and parentheses", prompt.answer]
    assert (await environment.converse(prompt, ScriptedConversation({"content": "about 7"}))).value == 0.0


@pytest.mark.parametrize("endless", [False, True])
async def test_an_answer_alone_is_worth_what_its_rubric_says(endless: bool) -> None:
    environment = opened(endless=endless)
    prompt = next(each for each in map(environment.prompt, (1, 2, 3)) if each.answer == ANSWER)
    assert (await environment.reward(prompt, ANSWER)).value == 0.5
    assert (await environment.reward(prompt, "seven")).value == 0.0


@pytest.mark.redis
@pytest.mark.parametrize("server_binary", ["valkey"], indirect=True)
async def test_its_tools_turns_rewards_and_metrics_are_its_own_and_the_tokens_exact(serve) -> None:
    given: list[tuple[list[int], list[int]]] = []
    plain = tool_user()

    def script(ids: list[int], sibling: int) -> list[int]:
        said = plain(ids, sibling)
        if "task 0" in decode("chatml", ids):
            said = spelled("")  # an empty answer is scored too
        given.append((list(ids), said))
        return said

    one = await serve(ScriptedEngine(script=script, max_model_len=4096), environment=opened(), group_size=2)
    one.trainer.release(1, 3)
    one.trainer.evaluate(0, 2)
    groups = {group.prompt.messages[0].content: group for group in await one.groups(3)}
    assert {name: [rollout.reward.value for rollout in group.rollouts] for name, group in groups.items()} == {
        "task 0": [0.0, 0.0],
        "task 1": [0.5, 0.5],
        "task 2": [0.0, 0.0],
    }
    for name, group in groups.items():
        for rollout in group.rollouts:
            calls = 0.0 if name == "task 0" else 1.0
            assert rollout.reward.parts["add_calls"] == calls and rollout.reward.parts["num_turns"] == calls + 1
            (segment,) = rollout.segments
            ids = unpack_ids(segment.token_ids).tolist()
            assert all((ids[:start], ids[start:end]) in given for start, end in segment.loss_mask)
            if calls:
                assert [ids[start:end] for start, end in segment.loss_mask] == [spelled(CALL), spelled(ANSWER)]
                assert "tool\n7" in decode("chatml", ids)  # 3 + 4, by its own tool
    await until(lambda: one.server.client.xlen(KEYS.evaluation_results) == 2)
    results = [decode_group(fields[Field.PAYLOAD]) for _, fields in one.server.client.xrange(KEYS.evaluation_results)]
    rewards = {result.prompt.messages[0].content: result.rollouts[0].reward.value for result in results}
    assert rewards == {"held out 0": 0.0, "held out 1": 0.5}


@pytest.mark.redis
@pytest.mark.parametrize("server_binary", ["valkey"], indirect=True)
async def test_a_rollout_in_which_it_fails_is_dead_and_one_without_room_is_scored(serve) -> None:
    engine = ScriptedEngine(script=lambda ids, sibling: spelled(CALL), max_model_len=1000)
    one = await serve(engine, environment=opened(failing=True, max_turns=-1), group_size=2)
    one.trainer.release(1, 3)
    entries = await one.entries(3)
    (dead,) = [fields for fields in entries if fields[Field.KIND] == Kind.DEAD]
    assert b"InfraError" in dead[Field.REASON] and b"no sandbox" in dead[Field.REASON]
    for group in (decode_group(fields[Field.PAYLOAD]) for fields in entries if fields[Field.KIND] == Kind.GROUP):
        for rollout in group.rollouts:
            assert rollout.reward.value == 0.0 and rollout.reward.parts["num_turns"] > 3
            assert json.loads(CALL.partition(">")[2].partition("<")[0])["arguments"] == {"a": 3, "b": 4}
