"""Actions of conversations: each has its effect once, whatever becomes of its producer."""

import asyncio
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chat_templates import tokenizer_of
from crashed_producer import kill
from forked_programs import PYTHONPATH
from penstock.producers.endpoint import inside
from penstock.producers.environments.sandbox import Sandboxes
from penstock.schemas.config import EndpointConfig, EnvironmentConfig, ModelConfig, ProducersConfig
from penstock.schemas.keys import Field, Kind
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import decode_group
from tool_caller import ToolCaller
from waiting import until, wait_for

pytestmark = pytest.mark.redis

TURNS = 3
HERE = {"PYTHONPATH": os.pathsep.join([PYTHONPATH, str(Path(__file__).parent)])}
"""Lets a producer import this file."""


class Builds(ToolCaller):
    """Each turn adds a line to a file of the sandbox; the reward counts the lines, its parts tell what they are.

    folder: has a file for each action that was called, by its turn. Beyond the first turn, conversations wait until
    there is a file `go` in it.
    """

    num_evaluation_prompts = 0

    def __init__(self, *, seed: int = 0, folder: str, results: Any = None) -> None:
        super().__init__()
        self._folder, self._sandboxes, self._results = Path(folder), Sandboxes(), results

    async def converse(self, prompt: Prompt, conversation: Any) -> Reward:
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt.text}]
        async with self._sandboxes.open() as sandbox:
            for turn in range(TURNS):
                messages.append(await conversation.chat(messages))
                if turn:
                    await until((self._folder / "go").exists)
                done = await conversation.act(lambda turn=turn: self._add(sandbox, turn), sandbox)
                messages.append({"role": "user", "content": done})
            lines = (await sandbox.run(["cat", "lines"])).stdout.split()
        return Reward(value=float(len(lines)), parts={f"line {line.decode()}": 1.0 for line in lines})

    async def _add(self, sandbox: Any, turn: int) -> Any:
        (self._folder / f"{turn}-{os.urandom(8).hex()}").touch()
        if self._results is not None:
            return self._results[turn]
        return (await sandbox.run(["sh", "-c", f"echo {turn} >> lines; date +%N"])).text

    @staticmethod
    def called(folder: Path) -> Counter[str]:
        return Counter(file.name.partition("-")[0] for file in folder.glob("*-*"))


def test_a_tool_call_has_its_effect_once_though_its_producer_is_killed_between_two(
    begin, model_folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    tokenizer_of("chatml").save_pretrained(model)
    (folder := tmp_path / "acts").mkdir()
    run = begin(
        1,
        model=ModelConfig(path=str(model)),
        environment=EnvironmentConfig(path=f"{__name__}:Builds", kwargs={"folder": str(folder)}),
        endpoint=EndpointConfig(port=0),
        producers=ProducersConfig(claim_idle_s=2.0),
    )
    size = run.config.group_size
    first = run.start("a", environment=HERE, max_model_len=4096)
    wait_for(lambda: Builds.called(folder)["0"] == size, log=lambda: run.log("a"))
    key = run.trainer.keys.progress(1)
    wait_for(lambda: sum(b"Acted" in entry for entry in run.server.client.lrange(key, 0, -1)) == size)
    first.kill()
    (folder / "go").touch()
    run.start("b", environment=HERE, max_model_len=4096)
    (fields,) = run.trainer.read(1)
    group = decode_group(fields[Field.PAYLOAD])
    assert [rollout.reward.value for rollout in group.rollouts] == [TURNS] * size, run.log("b")
    assert {tuple(rollout.reward.parts) for rollout in group.rollouts} == {("line 0", "line 1", "line 2")}
    assert Builds.called(folder) == {str(turn): size for turn in range(TURNS)}
    assert group.sampled_by and "goes on from" in run.log("b")


async def test_a_state_that_is_too_large_is_not_kept_and_the_group_begins_anew(
    serve, caplog, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(inside, "MOST_STATE_BYTES", 10)
    one = await serve(environment=Builds(folder=str(tmp_path)), group_size=1)
    one.trainer.release(1, 1)
    await until(lambda: "progress of group 1 is not kept: a conversation's state is more than 10 bytes" in caplog.text)
    await kill(one)
    (tmp_path / "go").touch()
    two = await serve(producer_id="b", beside=one, environment=Builds(folder=str(tmp_path)), group_size=1)
    (group,) = await two.groups(1)
    assert [rollout.reward.value for rollout in group.rollouts] == [TURNS]
    assert Builds.called(tmp_path) == {"0": 2, "1": 1, "2": 1}


async def test_a_conversation_that_does_less_than_was_recorded_begins_its_group_anew(
    serve, caplog, tmp_path: Path
) -> None:
    one = await serve(environment=Builds(folder=str(tmp_path)), group_size=2)
    one.trainer.release(1, 1)
    await until(lambda: Builds.called(tmp_path)["0"] == 2)
    await one.producer.endpoint.agents.save_all()
    await until(lambda: one.producer.endpoint.agents._groups[0].journal.num_written)
    await kill(one)
    two = await serve(producer_id="b", beside=one, environment=ToolCaller(), group_size=2)
    (group,) = await two.groups(1)
    assert caplog.text.count("group 1 starts again: a repeated conversation has diverged") == 1
    assert group.num_tries_lost == 1 and len(group.rollouts) == 2


@pytest.mark.parametrize("result", [None, "text", b"\xff", 7, 0.5, [1, [2]], {"a": None}])
async def test_what_an_action_returns_is_what_it_returns_when_it_is_repeated(
    serve, tmp_path: Path, result: Any
) -> None:
    seen: list[Any] = []

    class Once(ToolCaller):
        async def converse(self, prompt: Prompt, conversation: Any) -> float:
            await conversation.chat([{"role": "user", "content": prompt.text}])
            seen.append(await conversation.act(self._result))
            if not (tmp_path / "go").exists():
                await asyncio.Event().wait()
            return 1.0

        async def _result(self) -> Any:
            assert not seen
            return result

    one = await serve(environment=Once(), group_size=1)
    one.trainer.release(1, 1)
    await until(lambda: seen)
    await kill(one)
    (tmp_path / "go").touch()
    two = await serve(producer_id="b", beside=one, environment=Once(), group_size=1)
    assert len((await two.groups(1))[0].rollouts) == 1
    assert seen == [result, result]


async def test_an_action_that_returns_what_cannot_be_kept_ends_its_rollout(serve, tmp_path: Path) -> None:
    one = await serve(environment=Builds(folder=str(tmp_path), results=[object()]), group_size=1)
    one.trainer.release(1, 1)
    await until(one.dead_rollouts)
    (dead,) = one.dead_rollouts()
    assert "TypeError: an action returned <object" in " ".join(dead)


async def test_a_group_whose_sandbox_dies_is_dead_with_the_reason_and_the_next_is_not(serve) -> None:
    class Lost(ToolCaller):
        async def converse(self, prompt: Prompt, conversation: Any) -> Any:
            if prompt.text == "1":
                async with Sandboxes().open() as sandbox:
                    sandbox._process.kill()
                    await conversation.act(lambda: sandbox.run(["true"]), sandbox)
            return await super().converse(prompt, conversation)

    one = await serve(environment=Lost(), group_size=2)
    one.trainer.release(1, 2)
    entries = {int(fields[Field.INDEX]): fields for fields in await one.entries(2)}
    assert b"2 environment: SandboxError: it has ended by itself: killed" in entries[1][Field.REASON]
    assert entries[2][Field.KIND] == Kind.GROUP and not one.task.done()
