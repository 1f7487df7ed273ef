"""Every named failure on the producer's side, one at a time: nothing is lost, and nothing escapes."""

import asyncio
import logging
import os

import msgspec
import pytest

from cutting_proxy import CuttingProxy
from forked_programs import PYTHONPATH
from penstock.producers.loop import OtherRunError
from penstock.producers.stream import claims as claims_module
from penstock.producers.stream import connection as connection_module
from penstock.producers.stream import heartbeat as heartbeat_module
from penstock.producers.stream.in_flight import Claim, DeadRollout
from penstock.schemas.config import ConfigError, EnvironmentConfig, ProducersConfig
from penstock.schemas.heartbeat import decode_heartbeat, encode_heartbeat
from penstock.schemas.keys import PRODUCERS_GROUP, Field, Kind
from penstock.schemas.rollout import decode_group
from producer_run import KEYS, ProducerRun, ids
from scripted_engine import ScriptedEngine
from waiting import until, wait_for

pytestmark = pytest.mark.redis

NUM_PROMPTS = 10


def all_appended(one: ProducerRun, last: int = NUM_PROMPTS) -> bool:
    return one.num_open() == 0 and set(one.appended()) == set(range(1, last + 1))


@pytest.mark.parametrize(
    ("command", "when"),
    [
        ("XGROUP", "reply"), ("XPENDING", "reply"), ("XREAD", "reply"), ("HGET", "within"), ("SET", "reply"),
        ("XREADGROUP", "reply"), ("XREADGROUP", "within"), ("MULTI", "reply"), ("EXEC", "before"), ("EXEC", "within"),
    ],
)  # fmt: skip
async def test_a_connection_cut_at_any_reply_costs_nothing(run, command: str, when: str) -> None:
    one = run()
    one.trainer.release(1, NUM_PROMPTS)
    with CuttingProxy(one.server.url) as proxy:
        first = proxy.cut(command, when=when)
        later = proxy.cut(command, 2, when=when)
        _, task = await one.producer(ScriptedEngine(token_s=0.005), via=proxy)
        await until(lambda: first.happened.is_set() and all_appended(one))
        if command in ("XREADGROUP", "EXEC", "MULTI"):
            one.trainer.release(NUM_PROMPTS + 1, NUM_PROMPTS + 2)
            await until(lambda: later.happened.is_set() and all_appended(one, NUM_PROMPTS + 2))
        assert not task.done() and one.num_claimed() == 0
        # Only an append that was executed and whose answer was lost is there twice: nobody could know.
        if command not in ("EXEC", "MULTI") or when == "before":
            assert set(one.appended().values()) == {1}


@pytest.mark.parametrize("appended", [False, True])
def test_a_producer_killed_between_generation_and_append_costs_one_attempt_at_most(
    begin, start_producer, appended: bool
) -> None:
    run = begin(producers=ProducersConfig(claim_idle_s=1.0))
    with CuttingProxy(run.server.url) as proxy:
        # The group is generated and queued in the server; its EXEC is on the way there, or its answer on the way back.
        held = proxy.hold("EXEC", when="reply" if appended else "before")
        run.trainer.release(1, 1)
        killed = start_producer(run.config, proxy.url, "producer-0")
        held.wait(120)
        killed.kill()
        killed.wait()
        proxy.cut_all()
        held.release()
        run.start("producer-1")
        run.trainer.release(2, 2)
        groups = [decode_group(fields[Field.PAYLOAD]) for fields in run.trainer.read(2)]
    assert {group.index for group in groups} == {1, 2}
    assert next(g.producer_id for g in groups if g.index == 1) == ("producer-0" if appended else "producer-1")
    client = run.server.client
    assert client.xlen(KEYS.prompts) == client.xpending(KEYS.prompts, PRODUCERS_GROUP)["pending"] == 0
    assert ("took group 1 over from producer-0, attempt 2" in run.log("producer-1")) == (not appended)


async def test_nothing_of_an_earlier_run_of_its_name_is_sampled_or_appended_in_a_run_begun_anew(run, caplog) -> None:
    one = run()
    one.trainer.begin_anew("one")
    one.trainer.announce(5)
    engine = ScriptedEngine()
    engine.may_sample.clear()
    producer, task = await one.producer(engine)
    one.trainer.release(1, 4, version=5)
    await until(lambda: engine.num_active == 4)
    one.trainer.begin_anew("two")
    for version in range(6):
        one.trainer.announce(version, number=100 + version)

    def hand_back() -> None:
        """As a producer does that has not noticed yet."""
        one.client.xadd(KEYS.prompts, {Field.INDEX: 9, Field.VERSION: 5, Field.RUN_ID: "one"})

    hand_back()
    one.trainer.release(1, 4, version=5)
    await until(lambda: engine.loaded_versions == [5, 5])
    engine.may_sample.set()
    entries = await one.read(4)
    hand_back()
    await until(lambda: one.num_open() == 0)
    assert {fields[Field.RUN_ID] for fields in entries} == {b"two"} and set(one.appended()) == {1, 2, 3, 4}
    assert set(one.appended().values()) == {1} and not task.done()
    await until(lambda: (held := one.client.get(KEYS.producer("a"))) and decode_heartbeat(held).run_id == "two")
    assert "claims of an earlier run of this name are dropped" in caplog.text
    assert "field run_id = 'one', and this is run two" in caplog.text and len(producer.table) == 0


async def test_a_producer_ends_when_a_run_of_its_name_is_begun_anew_with_other_settings(run) -> None:
    one = run()

    def begin(run_id: str, run_file: str) -> None:
        one.trainer.begin_anew(run_id)
        one.client.hset(KEYS.description, "run_file", run_file)
        one.trainer.announce(5)

    begin("one", "{}")
    producer, task = await one.producer()
    await until(lambda: producer.context.run_id == "one")
    begin("two", '{"group_size": 8}')
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(task, 60)
    said = "another run of this name has begun (two, after one), with other settings"
    assert isinstance(caught.value.exceptions[0], OtherRunError) and said in str(caught.value.exceptions[0])


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"class": "A", "size": {"longest_edge": 64}}, ""),
        ({}, ""),
        ({"class": "A", "size": {"longest_edge": 32}}, "size = {'longest_edge': 64} here, {'longest_edge': 32} at the"),
        (
            {"class": "B", "size": {"longest_edge": 64}, "resample": 3},
            "'B' at the trainer; resample = None",
        ),
    ],
)
async def test_a_producer_whose_engine_is_shown_other_pixels_than_the_trainer_ends(run, trainer, said) -> None:
    one, engine = run(), ScriptedEngine()
    engine.image_processor = {"class": "A", "size": {"longest_edge": 64}}
    one.trainer.begin_anew("one")
    one.client.hset(KEYS.description, "image_processor", msgspec.json.encode(trainer))
    one.trainer.announce(5)
    producer, task = await one.producer(engine)
    if not said:
        await until(lambda: producer.context.run_id == "one")
        return
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(task, 60)
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigError) and said in str(error)


@pytest.mark.parametrize("stream", [KEYS.rollouts, KEYS.dead_rollouts])
async def test_a_stream_whose_entry_ids_are_used_up_is_waited_for(run, caplog, stream) -> None:
    one = run()
    producer, task = await one.producer(ScriptedEngine())
    one.trainer.release(1, NUM_PROMPTS)
    one.client.xadd(stream, {"index": 1}, id="18446744073709551615-18446744073709551615")
    if stream == KEYS.dead_rollouts:
        rollout = DeadRollout("a.1.0", "gone")
        producer.writer.put_letter(Claim(stream=KEYS.prompts, entry_id=b"0-1", index=1, version=0), rollout)
    await until(lambda: "waiting for the trainer to make the stream anew" in caplog.text)
    one.client.delete(stream)
    await until(lambda: set(range(1, NUM_PROMPTS + 1)) <= set(one.appended()))
    assert not task.done()


@pytest.mark.slow
def test_a_prompt_that_kills_its_producer_is_dead_after_max_attempts_and_harms_no_other(begin, tmp_path) -> None:
    poison, max_attempts = "9" * 4, 2
    (tmp_path / "poisoned.py").write_text(
        "from penstock.schemas.prompt import Prompt\n"
        "class Poisoned:\n"
        "    num_evaluation_prompts = 0\n"
        "    def __init__(self, *, seed): pass\n"
        f"    def prompt(self, index): return Prompt(text='{poison}' if index == 2 else str(index))\n"
        "    def evaluation_prompt(self, n): raise LookupError\n"
        "    def reward(self, prompt, completion): return 1.0\n"
    )
    run = begin(
        4,
        producers=ProducersConfig(claim_idle_s=0.5, max_attempts=max_attempts),
        environment=EnvironmentConfig(path="poisoned:Poisoned"),
    )
    client, path = run.server.client, os.pathsep.join([str(tmp_path), PYTHONPATH])
    lives = 0
    while client.xlen(KEYS.prompts):
        lives += 1
        assert lives <= max_attempts + 1, "more lives than attempts"
        engine = {"kill_on_prompt": ids(poison), "token_s": 0.05}
        process = run.start(f"producer-{lives}", environment={"PYTHONPATH": path}, **engine)
        wait_for(lambda process=process: process.poll() is not None or not client.xlen(KEYS.prompts))
    entries = {int(fields[Field.INDEX]): fields for fields in run.trainer.read(4)}
    assert set(entries) == {1, 2, 3, 4}
    assert {n for n, fields in entries.items() if fields[Field.KIND] == Kind.DEAD} == {2}
    assert entries[2][Field.REASON] == b"attempts: handed out %d times without a result" % max_attempts
    # A life for each of the poison's attempts. What was in flight beside it until it ran alone is answered later on.
    assert lives == max_attempts + 1
    tries_lost = {n: decode_group(entries[n][Field.PAYLOAD]).num_tries_lost for n in (1, 3, 4)}
    assert tries_lost[1] == max_attempts - 1 and max(tries_lost.values()) < max_attempts


async def test_two_producers_that_start_at_once_under_one_name_become_one(run, monkeypatch) -> None:
    async def is_free(*_: object) -> None:
        """Tells both that the id is free, as if they asked at the same moment."""

    monkeypatch.setattr(heartbeat_module, "check_id_is_free", is_free)
    one = run()

    async def live(pid: int) -> None:
        producer = one.build(ScriptedEngine(), "twin", one.server)
        # They are one process here; what tells them apart is what they say of themselves.
        describe = producer.heartbeat._describe
        producer.heartbeat._describe = lambda: msgspec.structs.replace(describe(), pid=pid)
        await producer.open()
        await producer.serve()

    one.tasks += [asyncio.create_task(live(pid)) for pid in (1, 2)]
    ended, running = await asyncio.wait(one.tasks, return_when=asyncio.FIRST_COMPLETED, timeout=120)
    assert len(ended) == len(running) == 1
    error = ended.pop().exception()
    assert "stop that one or choose another --id" in str(getattr(error, "exceptions", [error])[0])
    one.trainer.release(1, NUM_PROMPTS)
    await until(lambda: all_appended(one))
    assert not running.pop().done()


async def test_a_producer_that_was_stopped_for_long_ends_when_another_has_its_name(run) -> None:
    one = run()
    _, task = await one.producer(producer_id="a")
    await until(lambda: one.client.exists(KEYS.producer("a")) == 1)
    mine = decode_heartbeat(one.client.get(KEYS.producer("a")))
    theirs = msgspec.structs.replace(mine, pid=os.getpid() + 1)

    def write_theirs() -> bool:
        """Whether the producer has seen it; one that was about to write its own writes over it."""
        one.client.set(KEYS.producer("a"), encode_heartbeat(theirs))
        return task.done()

    await until(write_theirs)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(task, 60)
    assert "runs under it in run 'test'" in str(caught.value.exceptions[0])
    assert decode_heartbeat(one.client.get(KEYS.producer("a"))).pid == theirs.pid, "the other's is left alone"


async def test_a_blocking_read_longer_than_the_timeout_of_the_client_loses_nothing(run, monkeypatch) -> None:
    # The server holds each read for 2 s; the client gives it up after 0.3 s and does not know what it missed.
    monkeypatch.setattr(connection_module, "ANSWER_S", 0.3)
    monkeypatch.setattr(claims_module, "BLOCK_MS", connection_module.BLOCK_MS)
    one = run()
    _, task = await one.producer()
    for index in range(1, NUM_PROMPTS + 1):
        one.trainer.release(index, index)
        await asyncio.sleep(0.13)
    await until(lambda: all_appended(one))
    assert not task.done() and one.num_claimed() == 0


async def test_while_redis_is_away_a_producer_fills_its_table_and_no_more(run) -> None:
    one = run()
    bound = one.config.producers.groups_in_flight
    engine = ScriptedEngine()
    engine.may_sample.clear()
    with CuttingProxy(one.server.url) as proxy:
        producer, task = await one.producer(engine, via=proxy)
        one.trainer.release(1, 100)
        await until(lambda: engine.num_active == bound)
        proxy.refuse()
        engine.may_sample.set()
        # Everything it had in flight is generated, then it waits: nothing new is claimed, sampled or kept.
        await until(lambda: len(producer.writer._waiting) == len(producer.table) == bound and not engine.num_active)
        await asyncio.sleep(1.5)
        assert len(engine.requests) == len(producer.writer._waiting) == len(producer.table) == bound
        proxy.accept()
        await until(lambda: all_appended(one, 100))
    assert not task.done()


async def test_at_the_memory_limit_a_producer_pauses_and_goes_on(run, caplog) -> None:
    caplog.set_level(logging.INFO)
    one = run()
    engine = ScriptedEngine()
    engine.may_sample.clear()
    producer, task = await one.producer(engine)
    one.trainer.release(1, 100)
    await until(lambda: engine.num_active == one.config.producers.groups_in_flight)
    one.client.config_set("maxmemory", 1)
    engine.may_sample.set()
    await until(lambda: "at its memory limit" in caplog.text)
    # What was claimed before is still sampled.
    await until(lambda: len(producer.writer._waiting) == len(producer.table) > 0 and not engine.num_active)
    num_appended, num_requests = len(one.appended()), len(engine.requests)
    await asyncio.sleep(1.0)
    assert (len(one.appended()), len(engine.requests)) == (num_appended, num_requests)
    assert len(producer.table) <= one.config.producers.groups_in_flight
    one.client.config_set("maxmemory", 0)
    await until(lambda: all_appended(one, 100))
    assert set(one.appended().values()) == {1} and not task.done()
    assert len([line for line in caplog.messages if "at its memory limit" in line]) == 1


async def test_a_limit_reached_between_an_append_and_its_exec_is_a_pause_too(run) -> None:
    one = run()
    with CuttingProxy(one.server.url) as proxy:
        held = proxy.hold("EXEC", when="before")
        _, task = await one.producer(via=proxy)
        one.trainer.release(1, 1)
        await until(held.happened.is_set)
        one.client.config_set("maxmemory", 1)
        held.release()
        await asyncio.sleep(0.3)
        assert not task.done() and one.appended() == {}
        one.client.config_set("maxmemory", 0)
        await until(lambda: all_appended(one, 1))
    assert not task.done()
