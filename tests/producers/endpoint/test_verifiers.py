"""Tasksets of the library verifiers, unchanged, inside a producer."""

import asyncio
import json
import os
import re
import signal
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from agent_client import ANSWER, CALL, spelled, tool_user
from chat_templates import decode
from penstock.producers.endpoint.chat.errors import too_long
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

LAB = r'''
import json
import sys

import verifiers.v1 as vf
from openai import AsyncOpenAI, BadRequestError

PROGRAM = """
import json, sys, urllib.request
base, key, prompt = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
for turn in range(2):
    body = json.dumps({"model": "m", "messages": messages, "stream": True}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    reply = urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, headers)).read().decode()
    events = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith("data: {")]
    content = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
"""
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class AgentConfig(vf.HarnessConfig):
    program: bool = False
    image: bool = False


class Agent(vf.Harness[AgentConfig]):
    """An agent in this process, or a program of its own that streams."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        if self.config.program:
            return await runtime.run([sys.executable, "-c", PROGRAM, endpoint, secret, data.prompt], {})
        asked = [{"type": "image_url", "image_url": {"url": "data:,"}}] if self.config.image else data.prompt
        messages = [{"role": "user", "content": asked}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while messages[-1]["role"] != "assistant":
                try:
                    reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[ADD])
                except BadRequestError as error:
                    if "maximum context length" in str(error):
                        break
                    raise
                messages.append(reply.choices[0].message.model_dump(exclude_none=True))
                for call in reply.choices[0].message.tool_calls or ():
                    numbers = json.loads(call.function.arguments).values()
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(sum(numbers))})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class Data(vf.TaskData):
    answer: str


class Adder(vf.Task[Data]):
    async def setup(self, trace, runtime):
        if self.data.answer == "2":
            raise vf.SandboxError("no sandbox")

    @vf.reward(weight=0.5)
    async def exact(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def turns(self, trace) -> float:
        return trace.num_turns


class Unrewarded(vf.Task[Data]):
    pass


class LabConfig(vf.TasksetConfig):
    answers: list[str] = ["0", "ANSWER", "0", "ANSWER", "7"]


class Lab(vf.Taskset[Adder, LabConfig]):
    def load(self):
        for n, each in enumerate(self.config.answers):
            yield TASK(Data(prompt=f"task {n}", answer=each))


__all__ = ["Lab", "Agent"]
'''
"""A taskset and an agent as their authors publish them."""
AGENT = {"harness": {"id": "published_adder"}, "runtime": {"type": "subprocess"}}


@pytest.fixture(scope="module", autouse=True)
def lab(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("lab")
    lab = LAB.replace("ANSWER", ANSWER)
    (folder / "published_adder.py").write_text(lab.replace("TASK(", "Adder("))
    (folder / "endless_adder.py").write_text(
        lab.replace("TASK(", "Adder(").replace("    def load", "    INFINITE = True\n\n    def load")
    )
    (folder / "unrewarded_adder.py").write_text(
        lab.replace("Taskset[Adder", "Taskset[Unrewarded").replace("TASK(", "Unrewarded(")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def opened(*answers: str, num_evaluation_prompts: int = 2, **harness: Any) -> VerifiersEnvironment:
    agent = {**AGENT, "harness": {**AGENT["harness"], **harness}}
    args = {"answers": list(answers)} if answers else {}
    return VerifiersEnvironment(
        seed=3, id="published-adder", args=args, env={"agent": agent}, num_evaluation_prompts=num_evaluation_prompts
    )


def test_an_epoch_has_every_task_once_and_the_first_are_held_out() -> None:
    environment = opened()
    epochs = [[environment.prompt(3 * epoch + n).messages[0].content for n in (1, 2, 3)] for epoch in range(8)]
    assert all(sorted(epoch) == ["task 2", "task 3", "task 4"] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    assert environment.prompt(5) == opened().prompt(5)
    assert environment.num_tasks == 3 and environment.num_evaluation_prompts == 2
    assert environment.evaluation_prompt(2).messages[0].content == "task 1"


def test_the_process_keeps_its_own_signal_handlers() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    opened()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"id": "no-such-taskset"}, "id = 'no-such-taskset': ModuleNotFoundError"),
        ({"id": "published-adder", "args": {"sandboxes": 4}}, "sandboxes"),
        ({"id": "unrewarded-adder"}, "the tasks of 'unrewarded-adder' have no reward"),
        ({"id": "endless-adder"}, "its taskset is infinite; expected a finite one"),
        ({"id": "published-adder", "num_evaluation_prompts": 5}, "expected 0 or more, and fewer than the 5 tasks"),
    ],
)
def test_what_cannot_be_used_is_an_error_of_the_run_file(kwargs: dict, message: str) -> None:
    plug = EnvironmentConfig(path="penstock.producers.environments.verifiers:VerifiersEnvironment", kwargs=kwargs)
    with pytest.raises(ValueError, match=re.escape(message)):
        construct(plug, "environment", Environment, seed=0)


@pytest.mark.parametrize("release", ["0.2.0", "0.5.0", None])
def test_another_release_is_named_with_the_one_that_serves(
    monkeypatch: pytest.MonkeyPatch, release: str | None
) -> None:
    def installed(name: str) -> str:
        if release is None:
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr("penstock.producers.environments.verifiers.version", installed)
    message = f"verifiers {release} is installed, expected 0.4" if release else "verifiers is not installed"
    with pytest.raises(ImportError, match=f"{message}: pip install 'penstock\\[verifiers\\]'"):
        opened()


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerifiersEnvironment:
    """The example with verifiers' own program. A stand-in for `uv`, which would install the program's packages: those
    of this process are the same."""
    folder = str(Path(__file__).parents[3] / "docs/examples")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder)
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\ncase "$*" in *--help) echo --script ;; "python find"*) echo {sys.executable} ;; esac\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    env = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 4}}
    args = {"num_problems": 6}
    return VerifiersEnvironment(seed=1, id="calculator-environment", args=args, env=env, num_evaluation_prompts=2)


async def test_the_example_computes_scores_and_is_told_what_is_wrong(example, monkeypatch) -> None:
    import verifiers.v1 as vf

    prompt, started = example.prompt(1), []
    serving = vf.Env.serving
    monkeypatch.setattr(vf.Env, "serving", lambda self: started.append(self) or serving(self))
    asked = prompt.messages[0].content.removeprefix("What is ").removesuffix("?")

    def call(expression: str) -> dict[str, Any]:
        function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
        return {"tool_calls": [{"id": "1", "type": "function", "function": function}]}

    right = str(eval(asked))
    one = ScriptedConversation(call("9**9"), call(asked), right)
    other = ScriptedConversation("about 7")
    rewards = await asyncio.gather(*(example.converse(prompt, each) for each in (one, other)))
    assert [(reward.value, reward.parts) for reward in rewards] == [
        (1.0, {"exact": 1.0, "turns": 3.0}),
        (0.0, {"exact": 0.0, "turns": 1.0}),
    ]
    tools = [message["content"] for message in one.asked[-1] if message["role"] == "tool"]
    assert "expected integers, + - * and parentheses" in tools[0] and tools[1] == right
    assert len(started) == 1, "conversations that run at once share the tool's server"


async def test_an_answer_alone_is_worth_what_its_rewards_say() -> None:
    environment = opened()
    prompt = environment.evaluation_prompt(2)
    assert (await environment.reward(prompt, ANSWER)).value == 0.5
    assert (await environment.reward(prompt, "seven")).value == 0.0


async def test_a_program_of_its_own_streams_and_dies_of_what_it_is_refused() -> None:
    environment = opened(program=True)
    conversation = ScriptedConversation("one", ANSWER)
    reward = await environment.converse(environment.evaluation_prompt(2), conversation)
    assert (reward.value, reward.parts) == (0.5, {"exact": 1.0, "turns": 2.0})
    assert [message["content"] for message in conversation.asked[-1]] == ["task 1", "one", "go on"]
    with pytest.raises(RuntimeError, match=r"verifiers: ProviderError: .*context_length_exceeded"):
        await environment.converse(environment.prompt(1), ScriptedConversation("one", too_long(10, 20)))


@pytest.mark.redis
@pytest.mark.parametrize("server_binary", ["valkey"], indirect=True)
async def test_its_tools_turns_rewards_and_metrics_are_its_own_and_the_tokens_exact(serve) -> None:
    given: list[tuple[list[int], list[int]]] = []
    plain = tool_user()

    def script(ids: list[int], sibling: int) -> list[int]:
        said = plain(ids, sibling)
        if "task 2" in decode("chatml", ids):
            said = spelled("")  # an empty answer is scored too
        given.append((list(ids), said))
        return said

    one = await serve(ScriptedEngine(script=script, max_model_len=4096), environment=opened(), group_size=2)
    one.trainer.release(1, 3)
    one.trainer.evaluate(0, 2)
    groups = {group.prompt.messages[0].content: group for group in await one.groups(3)}
    assert {name: [rollout.reward.value for rollout in group.rollouts] for name, group in groups.items()} == {
        "task 2": [0.0, 0.0],
        "task 3": [0.5, 0.5],
        "task 4": [0.0, 0.0],
    }
    for name, group in groups.items():
        for rollout in group.rollouts:
            num_turns = 1 if name == "task 2" else 2
            assert rollout.reward.parts["turns"] == num_turns
            (segment,) = rollout.segments
            ids = unpack_ids(segment.token_ids).tolist()
            assert all((ids[:start], ids[start:end]) in given for start, end in segment.loss_mask)
            if num_turns == 2:
                assert [ids[start:end] for start, end in segment.loss_mask] == [spelled(CALL), spelled(ANSWER)]
                assert "tool\n7" in decode("chatml", ids)  # 3 + 4, by its own tool
    await until(lambda: one.server.client.xlen(KEYS.evaluation_results) == 2)
    results = [decode_group(fields[Field.PAYLOAD]) for _, fields in one.server.client.xrange(KEYS.evaluation_results)]
    rewards = {result.prompt.messages[0].content: result.rollouts[0].reward.value for result in results}
    assert rewards == {"task 0": 0.0, "task 1": 0.5}


@pytest.mark.redis
@pytest.mark.parametrize("server_binary", ["valkey"], indirect=True)
@pytest.mark.parametrize(("image", "reason"), [(False, b"no sandbox"), (True, b"content[0] is an image")])
async def test_a_rollout_in_which_it_fails_is_dead_and_one_without_room_is_its_agent_s(serve, image, reason) -> None:
    engine = ScriptedEngine(script=lambda ids, sibling: spelled(CALL), max_model_len=1000)
    answers = ("7", "7") if image else ("7", "2")
    one = await serve(engine, environment=opened(*answers, num_evaluation_prompts=0, image=image), group_size=2)
    one.trainer.release(1, 2)
    entries = await one.entries(2)
    dead = [fields[Field.REASON] for fields in entries if fields[Field.KIND] == Kind.DEAD]
    assert len(dead) == (2 if image else 1) and all(reason in each for each in dead)
    for group in (decode_group(fields[Field.PAYLOAD]) for fields in entries if fields[Field.KIND] == Kind.GROUP):
        for rollout in group.rollouts:
            assert rollout.reward.value == 0.0 and rollout.reward.parts["turns"] > 3
