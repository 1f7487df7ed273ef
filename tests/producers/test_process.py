"""A whole producer process against a real server, with the engine scripted and the trainer played by the test."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from forked_programs import PYTHONPATH
from penstock.schemas.config import EnvironmentConfig, ModelConfig, ProducersConfig
from penstock.schemas.heartbeat import decode_heartbeat
from penstock.schemas.keys import PRODUCERS_GROUP, Field, Kind
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import decode_group
from producer_run import Numbers
from waiting import wait_for

pytestmark = pytest.mark.redis


def test_released_prompts_become_groups_and_sigterm_ends_with_status_0(begin, tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    run = begin(64)
    process, client, keys = run.start(), run.server.client, run.trainer.keys
    entries = run.trainer.read(64)
    assert sorted(int(fields[Field.INDEX]) for fields in entries) == list(range(1, 65))
    for fields in entries:
        assert fields[Field.KIND] == Kind.GROUP
        group = decode_group(fields[Field.PAYLOAD])
        assert len(group.rollouts) == run.config.group_size and group.producer_id == "producer-0"
    assert client.xlen(keys.prompts) == client.xpending(keys.prompts, PRODUCERS_GROUP)["pending"] == 0
    assert decode_heartbeat(client.get(keys.producer("producer-0"))).pid == process.pid
    run.stop(process)
    assert client.get(keys.producer("producer-0")) is None
    events = [json.loads(line) for line in (tmp_path / "test/producers/producer-0.jsonl").read_text().splitlines()]
    assert {"start", "weights"} <= {event["event"] for event in events}


def test_a_server_that_is_down_at_start_is_waited_for_and_a_signal_ends_the_wait(begin) -> None:
    run = begin(4)
    run.server.stop()
    waiting, stopped = run.start("producer-0"), run.start("producer-1")
    for name in ("producer-0", "producer-1"):
        wait_for(lambda name=name: "is away" in run.log(name))
    run.stop(stopped)
    run.server.start()
    assert len(run.trainer.read(4)) == 4 and "is back after" in run.log()
    run.stop(waiting)


def test_what_cannot_start_ends_with_its_status_and_one_line(begin) -> None:
    run = begin()
    first = run.start("twin")
    wait_for(lambda: run.server.client.exists(run.trainer.keys.producer("twin")) == 1)
    missing = msgspec.structs.replace(run.config, model=ModelConfig(path="no/such/model"))
    for process, name, status, message in [
        (run.start("twin", log="again"), "again", 1, "stop that one or choose another --id"),
        (run._replace(config=missing).start("missing"), "missing", 2, "model.path = 'no/such/model': no such folder"),
    ]:
        assert process.wait(timeout=90) == status
        assert message in run.log(name) and "Traceback" not in run.log(name)
    run.stop(first)


def test_an_engine_that_dies_ends_the_process_with_status_1_and_one_line(begin) -> None:
    run = begin(1)
    assert run.start(die_after=0).wait(timeout=90) == 1
    assert "producer producer-0 ends: the scripted engine has died" in run.log() and "Traceback" not in run.log()
    assert run.server.client.xlen(run.trainer.keys.prompts) == 1


HERE = {"PYTHONPATH": os.pathsep.join([PYTHONPATH, str(Path(__file__).parent)])}
"""Lets a producer import this file."""


class RunsPrograms(Numbers):
    """Its reward runs a program that does not end, and writes down its process."""

    def __init__(self, *, seed: int, folder: str) -> None:
        self._folder = Path(folder)

    def reward(self, prompt: Prompt, completion: str) -> float:
        while True:
            program = subprocess.Popen(["/bin/sh", "-c", "sleep 3600 & wait"], start_new_session=True)
            (self._folder / str(program.pid)).touch()
            program.wait()


class Leaves(Numbers):
    """Its reward starts a task that ends the process as `how` says."""

    def __init__(self, *, seed: int, how: str) -> None:
        self.how = how

    async def reward(self, prompt: Prompt, completion: str) -> float:
        async def leave() -> None:
            if self.how == "segfault":
                ctypes.string_at(0)
            raise SystemExit(0) if self.how == "exit" else KeyboardInterrupt

        await asyncio.create_task(leave())
        return 1.0


class Blocks(Numbers):
    """Its reward of task 1 blocks the event loop for longer than a group may take."""

    def __init__(self, *, seed: int) -> None: ...

    async def reward(self, prompt: Prompt, completion: str) -> float:
        if prompt.text == "1" and completion:
            time.sleep(2.0)  # noqa: ASYNC251
        return 1.0


@pytest.mark.slow
def test_a_reward_that_blocks_the_event_loop_is_named_and_costs_no_other_group(begin) -> None:
    environment = EnvironmentConfig(path=f"{__name__}:Blocks")
    run = begin(8, environment=environment, producers=ProducersConfig(generation_deadline_s=4.0))
    process = run.start(environment=HERE, token_s=0.05)
    assert {fields[Field.KIND] for fields in run.trainer.read(8)} == {Kind.GROUP}
    assert f"blocked ({__file__}:" in run.log() and "is away" not in run.log()
    run.stop(process)


def test_the_programs_of_a_reward_end_with_the_producer(begin, tmp_path: Path) -> None:
    (programs := tmp_path / "programs").mkdir()
    plug = EnvironmentConfig(path=f"{__name__}:RunsPrograms", kwargs={"folder": str(programs)})
    run = begin(1, environment=plug)
    process = run.start(environment=HERE)
    wait_for(lambda: len(list(programs.iterdir())) == run.config.group_size)
    run.stop(process)
    wait_for(lambda: not any(is_running(int(program.name)) for program in programs.iterdir()))


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("exit", 1, "producer producer-0 ends: the user's code raised SystemExit: 0"),
        ("interrupt", 1, "producer producer-0 ends: the user's code raised KeyboardInterrupt"),
        ("segfault", -signal.SIGSEGV, 'test_process.py", line '),
    ],
)
def test_an_environment_that_ends_the_process_leaves_a_status_and_a_line(
    begin, how: str, status: int, said: str
) -> None:
    run = begin(1, environment=EnvironmentConfig(path=f"{__name__}:Leaves", kwargs={"how": how}))
    assert run.start(environment=HERE).wait(timeout=90) == status
    assert said in run.log()


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
