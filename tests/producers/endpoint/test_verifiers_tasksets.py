"""Tasksets of verifiers 0.4, where that release is installed: programs that call the model over HTTP."""

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.producers.endpoint.chat.errors import too_long
from penstock.producers.environments.verifiers import VerifiersEnvironment

pytestmark = pytest.mark.skipif(not version("verifiers").startswith("0.4."), reason="verifiers 0.4 is not installed")

MODULE = r'''
import sys

import verifiers.v1 as vf

PROGRAM = """
import json, sys, urllib.request
base, key, prompt, stream = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
for turn in range(2):
    body = json.dumps({"model": "m", "messages": messages, "stream": bool(int(stream))}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    reply = urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, headers)).read().decode()
    if int(stream):
        events = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith("data: {")]
        content = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    else:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
"""


class PlainConfig(vf.HarnessConfig):
    stream: int = 0


class Plain(vf.Harness[PlainConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        arguments = [endpoint, secret, data.prompt, str(self.config.stream)]
        return await runtime.run([sys.executable, "-c", PROGRAM, *arguments], {})


class Adder(vf.Task):
    @vf.reward
    async def both(self, trace) -> float:
        return 0.5 * trace.num_turns

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Sums(vf.Taskset[Adder, vf.TasksetConfig]):
    def load(self):
        for n in range(5):
            yield Adder(vf.TaskData(prompt=f"what is {n} plus four"))


__all__ = ["Sums", "Plain"]
'''


class Echo:
    """A conversation that answers with the number of messages it was sent; too many are too long."""

    facts = SimpleNamespace(finish_reason="stop")

    def __init__(self, most: int = 9) -> None:
        self.most = most

    async def chat(self, messages: list[Any], **fields: Any) -> dict[str, Any]:
        if len(messages) > self.most:
            raise too_long(10, 20)
        return {"role": "assistant", "content": str(len(messages))}


@pytest.mark.parametrize("stream", [0, 1])
async def test_a_taskset_s_program_and_rewards_are_its_own(tmp_path: Path, monkeypatch, stream: int) -> None:
    (tmp_path / "adder_v1.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    agent = {"harness": {"id": "adder_v1", "stream": stream}, "runtime": {"type": "subprocess"}}
    environment = VerifiersEnvironment(seed=0, id="adder_v1", env={"agent": agent}, num_evaluation_prompts=2)
    assert (environment.num_tasks, environment.num_evaluation_prompts) == (3, 2)
    assert environment.evaluation_prompt(1).messages[0].content == "what is 0 plus four"
    asked = {environment.prompt(index).messages[0].content for index in (1, 2, 3)}
    assert asked == {f"what is {n} plus four" for n in (2, 3, 4)}
    reward = await environment.converse(environment.prompt(1), Echo())
    assert (reward.value, reward.parts) == (1.0, {"both": 1.0, "turns": 2.0})
    with pytest.raises(RuntimeError, match=r"verifiers: ProviderError: .*context_length_exceeded"):
        await environment.converse(environment.prompt(1), Echo(most=1))
