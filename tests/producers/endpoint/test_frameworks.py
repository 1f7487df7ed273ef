"""The recipes of docs/agents.md with the real frameworks, each in a process of its own as its user would run it."""

import asyncio
import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from agent_client import ADD, ANSWER, CALL, spelled
from chat_templates import decode
from penstock.schemas.config import EndpointConfig
from penstock.schemas.rollout import unpack_ids
from scripted_engine import ScriptedEngine
from tutorial import blocks as tutorial_blocks

pytestmark = [pytest.mark.redis, pytest.mark.parametrize("server_binary", ["valkey"], indirect=True)]

KEY = "secret"
VARIABLES = {
    "PENSTOCK_API_KEY": KEY,
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
FINAL_CALL = f'<tool_call>{{"arguments":{{"answer":"{ANSWER}"}},"name":"final_answer"}}</tool_call>'
"""How a smolagents agent ends."""
START = """
import os
from openai import OpenAI

KEY = os.environ["PENSTOCK_API_KEY"]


def score(answer):
    print(answer)
    return 0.5


"""


def blocks(heading: str) -> list[str]:
    """The Python blocks of one section of the page, without its subsections."""
    page = (Path(__file__).parents[3] / "docs/agents.md").read_text(encoding="utf-8")
    section = re.split(r"^##+ ", page.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    found = re.findall(r"^ *```python\n(.*?)^ *```", section, re.M | re.S)
    assert found, heading
    return [textwrap.dedent(block) for block in found]


def last_turn(prompt_ids: list[int]) -> str:
    return decode("chatml", prompt_ids).split("<|im_start|>")[-2]


@pytest.fixture
def rollout_of(serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`await rollout_of(program)` runs an agent's program against a producer, and returns what it printed and the one
    rollout that came of it: one segment of two answers, the second of them `final`, after a tool's turn."""
    monkeypatch.setenv("PENSTOCK_API_KEY", KEY)

    async def run(program: str, final: str = ANSWER, call: str = CALL, **changes: Any) -> Any:
        given: list[tuple[list[int], list[int]]] = []

        def script(ids: list[int], sibling: int) -> list[int]:
            has_result = "Observation:" in last_turn(ids) or last_turn(ids).startswith("tool")
            said = spelled(final if has_result else call)
            given.append((list(ids), said))
            return said

        engine = ScriptedEngine(script=script, max_model_len=16384)
        # A program that starts while others do may be silent for long.
        one = await serve(engine, group_size=1, key=KEY, **{"endpoint": EndpointConfig(port=0), **changes})
        one.trainer.release(1, 1)
        (tool,) = blocks("Recipes")
        (tmp_path / "agent.py").write_text(START + tool + program.replace("http://127.0.0.1:9500", one.url))
        variables = {**os.environ, **VARIABLES, "HF_HOME": str(tmp_path), "OPENAI_BASE_URL": "http://127.0.0.1:1"}
        agent = await asyncio.create_subprocess_exec(
            sys.executable, tmp_path / "agent.py", env=variables, cwd=tmp_path, stdout=-1, stderr=-1
        )
        try:
            out, errors = await agent.communicate()
        finally:
            if agent.returncode is None:
                agent.kill()
        assert agent.returncode == 0, errors.decode()
        ((rollout,),) = [group.rollouts for group in await one.groups(1)]
        (segment,) = rollout.segments
        ids = unpack_ids(segment.token_ids).tolist()
        assert [(ids[:start], ids[start:end]) for start, end in segment.loss_mask] == given
        assert [said for _, said in given] == [spelled(call), spelled(final)]
        assert "7" in last_turn(given[1][0])
        return out.decode(), rollout

    return run


@pytest.mark.parametrize("name", ["pydantic-ai", "LangChain", "smolagents"])
async def test_an_agent_of_the_framework_makes_one_exact_segment(rollout_of, name: str) -> None:
    (recipe,), (episode,) = blocks(name), blocks("From an unmodified agent to a run")
    out, rollout = await rollout_of(recipe + episode, FINAL_CALL if name == "smolagents" else ANSWER)
    assert out.rstrip().endswith(ANSWER) and rollout.reward.value == 0.5


ANTHROPIC = "Claude Code and other clients of Anthropic's API"


async def test_an_agent_of_anthropic_s_api_makes_one_exact_segment(rollout_of) -> None:
    (recipe, _), (episode,) = blocks(ANTHROPIC), blocks("From an unmodified agent to a run")
    out, rollout = await rollout_of(recipe + episode)
    assert out.strip() == ANSWER and rollout.reward.value == 0.5


async def test_claude_code_makes_one_exact_segment(rollout_of) -> None:
    pytest.importorskip("claude_agent_sdk", reason="its package of 178 MB is not part of the dev extra")
    (_, recipe), (episode,) = blocks(ANTHROPIC), blocks("From an unmodified agent to a run")
    endpoint = EndpointConfig(port=0, unsupported="ignore")
    call = CALL.replace('"add"', '"mcp__calculator__add"')
    out, rollout = await rollout_of(recipe + episode, call=call, endpoint=endpoint)
    assert out.strip() == ANSWER and rollout.reward.value == 0.5


async def test_the_agent_of_the_tutorial_makes_one_exact_segment(rollout_of) -> None:
    (_, agent) = tutorial_blocks("agent")
    out, rollout = await rollout_of(agent.replace("while True:", "for _ in range(1):"))
    assert out == f"{ANSWER} 0.0\n" and rollout.reward.value == 0.0


async def test_nemo_gym_s_agents_name_the_rollout_in_each_call(serve, tmp_path: Path, monkeypatch) -> None:
    """A stand-in for its servers, whose package needs Python 3.13.14 and Ray: the agent's loop over a model server that
    passes a row's metadata on."""
    monkeypatch.setenv("PENSTOCK_API_KEY", KEY)
    one = await serve(group_size=1, key=KEY)
    one.trainer.release(1, 1)

    async def run(request: web.Request) -> web.Response:
        row = await request.json()
        asked = row["responses_create_params"]
        messages = list(asked["input"])
        async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=KEY) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[ADD], metadata=asked["metadata"]
                )
                messages.append(reply.choices[0].message)
                calls = reply.choices[0].message.tool_calls or ()
                messages += [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in calls]
        return web.json_response({"reward": float(row["worth"]), "response": {}})

    app = web.Application()
    app.router.add_post("/run", run)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (recipe,) = blocks("NeMo Gym")
    rows = [{"responses_create_params": {"input": [{"role": "user", "content": f"x{n}"}]}, "worth": n} for n in (0, 1)]
    (tmp_path / "example.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    recipe = recipe.replace("http://127.0.0.1:8001", f"http://127.0.0.1:{runner.addresses[0][1]}")
    scope: dict[str, Any] = {"KEY": KEY}
    try:
        exec(recipe.replace("http://127.0.0.1:9500", one.url), scope)
        await asyncio.to_thread(scope["episode"])
    finally:
        await runner.cleanup()
    ((rollout,),) = [group.rollouts for group in await one.groups(1)]
    (segment,) = rollout.segments
    assert rollout.reward.value == 1.0 and len(segment.loss_mask) == 2
    assert "user\nx1" in decode("chatml", unpack_ids(segment.token_ids).tolist())


@pytest.mark.parametrize("model", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
async def test_an_agent_of_openai_agents_makes_one_exact_segment(rollout_of, model: str) -> None:
    (recipe,), (episode,) = blocks("openai-agents"), blocks("From an unmodified agent to a run")
    out, rollout = await rollout_of(recipe.replace("OpenAIResponsesModel", model) + episode)
    assert out.strip() == ANSWER and rollout.reward.value == 0.5
