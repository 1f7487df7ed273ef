"""Who generates for a run: what heartbeats say, how far behind it is, and what nobody looks after."""

import re
import time
from typing import Any

import pytest

import wire_examples
from parity_records import INSTANCES, SAYS, write_parity
from penstock.schemas.heartbeat import HEARTBEAT_TTL_S, Heartbeat, InFlight, encode_heartbeat
from penstock.schemas.keys import PRODUCERS_GROUP, Field
from penstock.schemas.policy import make_version
from short_run import ShortRun

pytestmark = pytest.mark.redis


@pytest.fixture
def run(redis_url, tmp_path, monkeypatch, redis_client):
    run = ShortRun(redis_url, tmp_path, monkeypatch)
    redis_client.hset(run.keys.commit, mapping={"epoch": 0, "policy_version": 9, "announced:0": 9})
    yield run
    run.close()


def heartbeat(producer_id: str, ages: tuple[float, ...] = (), **changes: Any) -> Heartbeat:
    # Its clock is an hour ahead: no figure may rest on the difference between two clocks.
    now = time.time() + 3600
    in_flight = tuple(InFlight(index=n, claimed_s=now - age, attempt=1) for n, age in enumerate(ages))
    fields = {"host": "spot-17", "pid": 4242, "policy_version": 9, "tokens_per_s": 1234.4, "in_flight": in_flight}
    return wire_examples.heartbeat(producer_id, **{**fields, "sent_s": now, **changes})


def send(client, run: ShortRun, heartbeat: Heartbeat, *, ago_s: float = 0.0) -> None:
    key = run.keys.producer(heartbeat.producer_id)
    client.set(key, encode_heartbeat(heartbeat), px=int((HEARTBEAT_TTL_S - ago_s) * 1000))


def claim(client, run: ShortRun, consumer: str, count: int, *, stream: str | None = None) -> None:
    stream = stream or run.keys.prompts
    for index in range(count):
        client.xadd(stream, {Field.INDEX: index + 1, Field.VERSION: 9})
    if not client.exists(stream) or not client.xinfo_groups(stream):
        client.xgroup_create(stream, PRODUCERS_GROUP, id="0", mkstream=True)
    client.xreadgroup(PRODUCERS_GROUP, consumer, {stream: ">"}, count=count)


SHOWN = r"""
Run test: newest policy 9, 8 producers alive
producer policy lag in flight tokens/s mismatch bad loads seen host:pid
p 9 0 0 1,234 - 0 N s spot-17:4242
bad 9 0 0 1,234 3.1e-01 0 N s spot-17:4242
deep 9 0 0 1,234 - 0 N s spot-17:4242
torn 9 0 0 1,234 - 0 N s spot-17:4242
again 9 0 0 1,234 - 0 N s spot-17:4242
sound 9 0 0 1,234 2.0e-04 0 N s spot-17:4242
producer-2 9 0 0 1,234 - 0 N s spot-17:4242
producer-10 7 2 2 (N s) 1,234 - 2 N s spot-17:4242
p: agents are served at http://10.0.0.5:9500
p: last error: v9: checksum differs \x1b[2J
bad: quarantined, nothing of it is trained: engine and trainer differ \x1b[2J[bold] by 0.31 nats
new: alive, with a heartbeat of another release
free: no heartbeat, but it holds 1 prompts and 0 evaluations, free for the next producer that claims
gone: no heartbeat, but it holds 3 prompts and 2 evaluations, idle for N to N s
"""
"""With one space for many, without rules, times in seconds left out."""


def test_producers_are_listed_with_what_they_hold_and_cannot_steer_the_terminal(run, redis_client, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    send(redis_client, run, heartbeat("producer-10", policy_version=7, ages=(2.0, 31.5), num_weight_loads_failed=2))
    send(redis_client, run, heartbeat("producer-2"), ago_s=6)
    error = "v9: checksum differs \x1b[2J"
    send(redis_client, run, heartbeat("p", endpoint="http://10.0.0.5:9500", last_error=error))
    for name, instance in INSTANCES.items():
        send(redis_client, run, heartbeat(name, instance=instance))
    write_parity(redis_client, run.keys)
    redis_client.set(run.keys.producer("new"), b'{"producer": "new"}', ex=60)
    redis_client.set("{test2}:producers:x", encode_heartbeat(heartbeat("x")))  # of another run
    for consumer, count in (("producer-10", 2), ("new", 1), ("gone", 3)):
        claim(redis_client, run, consumer, count)
    claim(redis_client, run, "gone", 2, stream=run.keys.evaluations)
    claim(redis_client, run, "free", 1)
    *_, row = redis_client.xpending_range(run.keys.prompts, PRODUCERS_GROUP, "-", "+", 9)
    redis_client.xclaim(run.keys.prompts, PRODUCERS_GROUP, "free", 0, [row["message_id"]], idle=10**9)
    found = run.json(capsys, "producers", "test")
    alive = {each["producer_id"]: each for each in found["alive"]}
    two, ten = alive["producer-2"], alive["producer-10"]
    assert (two["num_in_flight"], two["oldest_in_flight_s"], two["lag"]) == (0, None, 0)
    assert (ten["num_in_flight"], ten["num_claims"], ten["num_weight_loads_failed"], ten["lag"]) == (2, 2, 2, 2)
    assert 31.5 <= ten["oldest_in_flight_s"] < 31.5 + HEARTBEAT_TTL_S and 6 <= two["last_seen_s"] < HEARTBEAT_TTL_S
    assert (alive["bad"]["mismatch"], alive["bad"]["quarantine"], alive["torn"]["mismatch"]) == (0.31, SAYS, None)
    free, gone = found["orphaned"]
    assert (found["unreadable"], free["consumer"], gone["consumer"]) == (["new"], "free", "gone")
    assert 0 <= gone["shortest_idle_s"] <= gone["longest_idle_s"] < 60 and 1e6 <= free["longest_idle_s"] < 2e6
    out = run.command(capsys, "producers", "test")[1]
    lines = (" ".join(line.split()) for line in re.sub(r"\d+\.\d(?= s| to)", "N", out).splitlines())
    assert [line for line in lines if line.strip("─")] == SHOWN.strip().splitlines()


def test_lag_goes_through_the_fork_and_is_unknown_for_a_policy_nobody_announced(run, redis_client, capsys):
    commit = {"epoch": 1, "policy_version": make_version(1, 3), "fork:1": 7, f"announced:{1}": make_version(1, 3)}
    redis_client.hset(run.keys.commit, mapping=commit)
    for name, version in (("a", 9), ("b", make_version(1, 0)), ("c", -1), ("d", make_version(1, 4))):
        send(redis_client, run, heartbeat(name, policy_version=version))
    # From 9 two steps back to 7, then three forward.
    assert [each["lag"] for each in run.json(capsys, "producers", "test")["alive"]] == [5, 3, None, None]


def test_a_run_is_known_by_its_name_where_only_redis_is(run, redis_client, capsys):
    redis_client.hset("{elsewhere}:commit", "epoch", 0)
    assert run.json(capsys, "producers", "elsewhere")["newest_version"] is None
    status, out, err = run.command(capsys, "producers", "nowhere")
    assert (status, out) == (2, "")
    assert err == f"penstock: nowhere: neither a folder, nor a run in {run.runs} or in the Redis at REDIS_URL\n"
    status, _, err = run.command(capsys, "audit", "elsewhere")
    assert status == 2 and "elsewhere: its folder, with the checkpoints, is not on this machine" in err


def test_a_user_without_the_right_to_look_is_told_so_in_one_line(run, redis_client, capsys, monkeypatch):
    redis_client.execute_command("ACL", "SETUSER", "blind", "on", ">secret", "~*", "+ping", "+hello")
    socket = redis_client.get_connection_kwargs()["path"]
    monkeypatch.setenv("REDIS_URL", f"unix://blind:secret@{socket}")
    try:
        for command, expected in ((["producers", "test"], 1), (["dead", "list", "test"], 1), (["audit", "test"], 2)):
            status, out, err = run.command(capsys, *command)
            assert (status, out) == (expected, "") and err.count("\n") == 1
            assert err.startswith("penstock: Redis refuses: ") and "secret" not in err
    finally:
        redis_client.execute_command("ACL", "DELUSER", "blind")
