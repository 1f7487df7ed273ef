"""Task folders of Harbor, with real commands and tests."""

import asyncio
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from harbor_task import TASK_TOML, make_task
from penstock.producers.environments import container
from penstock.producers.environments.harbor import HarborTasks
from penstock.producers.environments.sandbox import Sandboxes
from penstock.schemas.prompt import Reward
from scripted_conversation import ScriptedConversation


@pytest.fixture(autouse=True)
def without_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := Sandboxes().why_not:
        pytest.skip(f"no namespaces: {why}")
    monkeypatch.setattr(container, "runtime", lambda: None)


def calls(*commands: str) -> dict[str, Any]:
    """Returns an answer that calls the shell."""
    made = [
        {"id": f"call-{n}", "function": {"name": "shell", "arguments": json.dumps({"command": command})}}
        for n, command in enumerate(commands)
    ]
    return {"tool_calls": made}


async def played(folder: Path, *answers: Any, **settings: Any) -> tuple[Reward, ScriptedConversation]:
    environment = HarborTasks(seed=0, training=str(folder), **settings)
    conversation = ScriptedConversation(*answers)
    return await environment.converse(environment.prompt(1), conversation), conversation


async def test_an_agent_works_in_a_shell_and_the_tests_reward_it(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "hello")
    look = calls("pwd; cat names.txt more.txt /srv/all/names.txt; ls /tests", "exit 3")
    reward, conversation = await played(folder, look, calls("echo $GREETING > hello.txt"), "Done.")
    assert reward == Reward(value=1.0, parts={"finished": 1.0})
    assert conversation.asked[0][-1] == {"role": "user", "content": "Write $GREETING to hello.txt in /app."}
    assert conversation.fields[0]["tools"][0]["function"]["name"] == "shell"
    seen = [message["content"] for message in conversation.asked[-1] if message["role"] == "tool"]
    assert seen[0].startswith("/app\nAda\nGrace\nAda\n") and "cannot access '/tests'" in seen[0]
    assert seen[1:] == ["[exit status 3]", "(no output)"]


@pytest.mark.parametrize(
    ("answers", "value", "finished"),
    [
        (["I would write it."], 0.0, 1.0),
        ([calls("echo Hello, world! > hello.txt")] * 3, 1.0, 0.0),
        ([calls("sleep 99"), calls("echo Hello, world! > hello.txt"), "Done."], 1.0, 1.0),
        ([calls("rm -rf / 2>/dev/null"), "Done."], 0.0, 1.0),
        ([{"tool_calls": [{"id": "1", "function": {"name": "python", "arguments": "{}"}}]}, "Done."], 0.0, 1.0),
        ([{"tool_calls": [{"id": "1", "function": {"name": "shell", "arguments": "[]"}}]}, "Done."], 0.0, 1.0),
        ([calls("mkdir -p /logs/verifier; echo 7 > /logs/verifier/reward.txt; mkdir /tests"), "Done."], 0.0, 1.0),
    ],
)
async def test_whatever_the_agent_does_is_rewarded(
    tmp_path: Path, answers: list[Any], value: float, finished: float
) -> None:
    reward, _ = await played(make_task(tmp_path / "hello"), *answers, max_turns=3, command_timeout_s=0.5)
    assert (reward.value, reward.parts["finished"]) == (value, finished)


@pytest.mark.parametrize(
    ("script", "rewarded"),
    [
        ('echo \'{"reward": 0.25, "tests": 3}\' > /logs/verifier/reward.json', (0.25, {"reward": 0.25, "tests": 3.0})),
        ("echo '{\"score\": 2}' > /logs/verifier/reward.json", (2.0, {"score": 2.0})),
        ("echo 0.5 > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", (0.5, {"reward": 0.5})),
        ("echo 0.5 > /logs/verifier/reward.txt; exit 1", (0.5, {})),
        ("while :; do :; done", (0.0, {"tests_timed_out": 1.0})),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json', "several rewards (a, b), expected one of them"),
        ("echo '[1]' > /logs/verifier/reward.json", "[1], expected a finite number"),
        ("echo nan > /logs/verifier/reward.txt", "nan, expected a finite number"),
        ("echo yes > /logs/verifier/reward.txt", "could not convert string to float"),
        (
            "echo oops; exit 3",
            "wrote neither reward.json nor reward.txt to /logs/verifier; they ended with exit status 3",
        ),
    ],
)
async def test_rewards_are_read_as_harbor_writes_them(tmp_path: Path, script: str, rewarded: Any) -> None:
    settings = TASK_TOML.replace("timeout_sec = 60.0", "timeout_sec = 2.0", 1)
    folder = make_task(tmp_path / "hello", tests__test_sh=f"#!/bin/bash\n{script}\n", task_toml=settings)
    if isinstance(rewarded, str):
        with pytest.raises(RuntimeError) as failed:
            await played(folder, "Done.")
        assert rewarded in str(failed.value) and str(folder) in str(failed.value)
    else:
        reward, _ = await played(folder, "Done.")
        assert (reward.value, reward.parts) == (rewarded[0], {**rewarded[1], "finished": 1.0})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"instruction_md": None}, "instruction.md is missing, expected a task of Harbor"),
        ({"instruction_md": "\n"}, "instruction.md is empty"),
        ({"tests__test_sh": None}, "tests/test.sh is missing, expected a task of Harbor"),
        ({"task_toml": None}, "task.toml is missing"),
        ({"task_toml": "[agent"}, "Expected"),
        ({"task_toml": "[agent]\ntimeout_sec = 0"}, "agent.timeout_sec is 0, expected seconds above 0"),
        ({"task_toml": "[environment]\nos = 'windows'"}, "environment.os is 'windows', expected linux"),
        ({"task_toml": "[verifier]\nenvironment_mode = 'separate'"}, "environment_mode is 'separate', expected shared"),
        ({"task_toml": "[[steps]]\nname = 'one'"}, "steps: tasks of several steps are not carried over"),
        ({"task_toml": "[environment]\nenv = { A = '${NOWHERE_SET}' }"}, "the variable NOWHERE_SET is not set"),
        (
            {"task_toml": "[environment]\ndocker_image = 'debian'"},
            "it is in the image debian, and neither docker nor podman",
        ),
        (
            {"environment__Dockerfile": "FROM debian\nRUN apt-get install git"},
            "has 'RUN apt-get install git', and neither",
        ),
        ({"environment__Dockerfile": "FROM debian\nCOPY ../x /app/"}, "has 'COPY ../x /app/', and neither"),
        ({"environment__Dockerfile": "FROM debian\nENV PATH=/opt:$PATH"}, "has 'ENV PATH=/opt:$PATH', and neither"),
        ({"environment__Dockerfile": "FROM debian\nWORKDIR $ROOT"}, "has 'WORKDIR $ROOT', and neither"),
        ({"environment__docker-compose_yaml": "services: {}"}, "several containers are not carried over"),
    ],
)
def test_a_folder_that_cannot_be_run_is_refused_by_name(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    make_task(tmp_path / "good")
    folder = make_task(tmp_path / "hello", **files)
    with pytest.raises(ValueError) as refused:
        HarborTasks(seed=0, training=str(tmp_path))
    assert message in str(refused.value) and str(refused.value).startswith(str(folder))


def test_an_archive_that_docker_would_unpack_is_refused(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "hello", environment__Dockerfile="FROM debian\nADD data.tar.gz /app/\n")
    with tarfile.open(folder / "environment" / "data.tar.gz", "w:gz"):
        pass
    with pytest.raises(ValueError, match=r"has 'ADD data.tar.gz /app/', and neither"):
        HarborTasks(seed=0, training=str(folder))


async def test_a_disk_that_the_agent_has_filled_is_worth_nothing(tmp_path: Path) -> None:
    reward, _ = await played(make_task(tmp_path / "hello"), calls("cat /dev/zero > big"), "Done.")
    assert (reward.value, reward.parts) == (0.0, {"disk_full": 1.0, "finished": 1.0})


@pytest.mark.parametrize(("made", "message"), [(False, "no such folder"), (True, "no folder in it")])
def test_a_folder_without_tasks_is_refused(tmp_path: Path, made: bool, message: str) -> None:
    folder = tmp_path / "tasks"
    if made:
        folder.mkdir()
    with pytest.raises(ValueError, match=message):
        HarborTasks(seed=0, training=str(folder))


async def test_the_task_of_the_page_is_solved_by_what_it_asks_for(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text("utf-8")
    (script,) = re.findall(r"^```\n(mkdir -p tasks/.*?)^```", page, re.M | re.S)
    await asyncio.to_thread(subprocess.run, ["bash", "-ec", script], cwd=tmp_path, check=True)
    for command, value in (("echo hello > word.txt", 1.0), ("echo bye > word.txt", 0.0), ("true", 0.0)):
        reward, _ = await played(tmp_path / "tasks" / "train", calls(command), "Done.")
        assert reward.value == value


def test_tasks_of_a_folder_are_posed_in_another_order_each_epoch(tmp_path: Path) -> None:
    for name in "abcdef":
        make_task(tmp_path / "train" / name)
    held_out = make_task(tmp_path / "test" / "g")
    environment = HarborTasks(seed=1, training=str(tmp_path / "train"), evaluation=str(held_out))
    orders = [[environment.prompt(6 * epoch + n).metadata["folder"] for n in range(1, 7)] for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    assert environment.evaluation_prompt(1).metadata == {"folder": str(held_out)}
    assert (environment.num_tasks, environment.num_evaluation_prompts) == (6, 1)
