"""A whole producer process against a real server, with the engine scripted and the trainer played by the test."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
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


def test_released_prompts_become_groups_and_sigterm_ends_with_status_0(
    redis_server, make_config, hand_trainer, start_producer, tmp_path: Path
) -> None:
    server, config = redis_server(), make_config()
    config.folder(tmp_path).mkdir()
    trainer = hand_trainer(server.client, config, tmp_path)
    process = start_producer(config, server.url)
    trainer.announce(0)
    trainer.release(1, 64)
    entries = trainer.read(64)
    assert sorted(int(fields[Field.INDEX]) for fields in entries) == list(range(1, 65))
    for fields in entries:
        assert fields[Field.KIND] == Kind.GROUP
        group = decode_group(fields[Field.PAYLOAD])
        assert len(group.rollouts) == config.group_size
        assert group.producer_id == "producer-0"
    assert server.client.xlen(trainer.keys.prompts) == 0
    assert server.client.xpending(trainer.keys.prompts, PRODUCERS_GROUP)["pending"] == 0
    heartbeat = decode_heartbeat(server.client.get(trainer.keys.producer("producer-0")))
    assert heartbeat.pid == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=90) == 0
    assert server.client.get(trainer.keys.producer("producer-0")) is None
    events = [json.loads(line) for line in (tmp_path / "test/producers/producer-0.jsonl").read_text().splitlines()]
    assert {"start", "weights"} <= {event["event"] for event in events}


def test_a_server_that_is_down_at_start_is_waited_for_and_a_signal_ends_the_wait(
    redis_server, make_config, hand_trainer, start_producer, tmp_path: Path
) -> None:
    server, config = redis_server(), make_config()
    trainer = hand_trainer(server.client, config, tmp_path)
    trainer.announce(0)
    trainer.release(1, 4)
    server.stop()
    waiting, stopped = (
        start_producer(config, server.url, "producer-0"),
        start_producer(config, server.url, "producer-1"),
    )
    for name in ("producer-0", "producer-1"):
        wait_for(lambda name=name: "is away" in start_producer.log(name))
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(timeout=90) == 0
    server.start()
    assert len(trainer.read(4)) == 4
    assert "is back after" in start_producer.log()
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(timeout=90) == 0


def test_what_cannot_start_ends_with_its_status_and_one_line(
    redis_server, make_config, hand_trainer, start_producer, tmp_path: Path
) -> None:
    server, config = redis_server(), make_config()
    trainer = hand_trainer(server.client, config, tmp_path)
    trainer.announce(0)
    first = start_producer(config, server.url, "twin")
    wait_for(lambda: server.client.exists(trainer.keys.producer("twin")) == 1)
    missing = msgspec.structs.replace(config, model=ModelConfig(path="no/such/model"))
    cases = {
        "twin-again": (
            start_producer(config, server.url, "twin", log="twin-again"),
            1,
            "stop that one or choose another --id",
        ),
        "missing": (start_producer(missing, server.url, "missing"), 2, "model.path = 'no/such/model': no such folder"),
    }
    for name, (process, status, message) in cases.items():
        assert process.wait(timeout=90) == status
        assert message in start_producer.log(name) and "Traceback" not in start_producer.log(name)
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=90) == 0


def test_an_engine_that_dies_ends_the_process_with_status_1_and_one_line(
    redis_server, make_config, hand_trainer, start_producer, tmp_path: Path
) -> None:
    server, config = redis_server(), make_config()
    trainer = hand_trainer(server.client, config, tmp_path)
    trainer.announce(0)
    trainer.release(1, 1)
    process = start_producer(config, server.url, die_after=0)
    assert process.wait(timeout=90) == 1
    assert "producer producer-0 ends: the scripted engine has died" in start_producer.log()
    assert "Traceback" not in start_producer.log()
    assert server.client.xlen(trainer.keys.prompts) == 1


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
    """Its reward starts a task that ends the process."""

    def __init__(self, *, seed: int) -> None: ...

    async def reward(self, prompt: Prompt, completion: str) -> float:
        async def leave() -> None:
            sys.exit(0)

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
def test_a_reward_that_blocks_the_event_loop_is_named_and_costs_no_other_group(
    redis_server, make_config, hand_trainer, start_producer, tmp_path: Path
) -> None:
    environment = EnvironmentConfig(path=f"{__name__}:Blocks")
    producers = ProducersConfig(generation_deadline_s=4.0)
    server, config = redis_server(), make_config(environment=environment, producers=producers)
    trainer = hand_trainer(server.client, config, tmp_path)
    trainer.announce(0)
    trainer.release(1, 8)
    process = start_producer(config, server.url, environment=HERE, token_s=0.05)
    assert {fields[Field.KIND] for fields in trainer.read(8)} == {Kind.GROUP}
    assert f"blocked ({__file__}:" in start_producer.log() and "is away" not in start_producer.log()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=90) == 0


def test_the_programs_of_a_reward_end_with_the_producer(
    redis_server, make_config, hand_trainer, start_producer, tmp_path: Path
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    plug = EnvironmentConfig(path=f"{__name__}:RunsPrograms", kwargs={"folder": str(programs)})
    server, config = redis_server(), make_config(environment=plug)
    trainer = hand_trainer(server.client, config, tmp_path)
    trainer.announce(0)
    trainer.release(1, 1)
    process = start_producer(
        config, server.url, environment={"PYTHONPATH": PYTHONPATH + ":" + str(Path(__file__).parent)}
    )
    wait_for(lambda: len(list(programs.iterdir())) == config.group_size)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=90) == 0
    wait_for(lambda: not any(is_running(int(program.name)) for program in programs.iterdir()))


def test_an_environment_that_ends_the_process_leaves_a_status_and_a_line(
    redis_server, make_config, hand_trainer, start_producer, tmp_path: Path
) -> None:
    server, config = redis_server(), make_config(environment=EnvironmentConfig(path=f"{__name__}:Leaves"))
    trainer = hand_trainer(server.client, config, tmp_path)
    trainer.announce(0)
    trainer.release(1, 1)
    process = start_producer(
        config, server.url, environment={"PYTHONPATH": PYTHONPATH + ":" + str(Path(__file__).parent)}
    )
    assert process.wait(timeout=90) == 1
    assert "producer producer-0 ends: the user's code called sys.exit(0)" in start_producer.log()


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_a_frozen_server_and_a_signal_meanwhile_still_end_with_status_0(
    redis_server, make_config, hand_trainer, start_producer, tmp_path: Path
) -> None:
    server, config = redis_server(), make_config()
    trainer = hand_trainer(server.client, config, tmp_path)
    trainer.announce(0)
    trainer.release(1, 2)
    process = start_producer(config, server.url, token_s=60)

    def in_flight() -> int:
        # By its own account: what the server has delivered may not have reached the producer yet.
        heartbeat = server.client.get(trainer.keys.producer("producer-0"))
        return len(decode_heartbeat(heartbeat).in_flight) if heartbeat else 0

    wait_for(lambda: in_flight() == 2)
    server.freeze()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=90) == 0
    assert "stopped without Redis: 2 claims are free for others in 30 s" in start_producer.log()
    server.thaw()
