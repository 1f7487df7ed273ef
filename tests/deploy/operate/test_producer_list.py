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
from waiting import wait_for

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
    fields = {"host": "spot-17", "pid": 4242, "policy_version": 9, "tokens_per_s": 1234.5, "in_flight": in_flight}
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


def test_each_live_producer_is_listed_with_what_it_holds_and_how_fast_it_is(run, redis_client, capsys):
    send(redis_client, run, heartbeat("producer-10", policy_version=7, ages=(2.0, 31.5), num_weight_loads_failed=2))
    send(redis_client, run, heartbeat("producer-2"), ago_s=6)
    claim(redis_client, run, "producer-10", 2)
    found = run.json(capsys, "producers", "test")
    assert (found["newest_version"], found["finished"], found["orphaned"]) == (9, False, [])
    two, ten = found["alive"]
    assert (two["producer_id"], ten["producer_id"]) == ("producer-2", "producer-10")
    assert (two["lag"], ten["lag"]) == (0, 2)
    assert (two["num_in_flight"], two["oldest_in_flight_s"]) == (0, None)
    assert (ten["num_in_flight"], ten["num_claims"], ten["num_weight_loads_failed"]) == (2, 2, 2)
    assert 31.5 <= ten["oldest_in_flight_s"] < 31.5 + HEARTBEAT_TTL_S
    assert 6 <= two["last_seen_s"] < HEARTBEAT_TTL_S
    assert (two["host"], two["pid"], two["tokens_per_s"]) == ("spot-17", 4242, 1234.5)
    status, out, _ = run.command(capsys, "producers", "test")
    assert status == 0 and "Run test: newest policy 9, 2 producers alive" in out
    assert "1,234" in out.replace("1,235", "1,234")


def test_lag_goes_through_the_fork_and_is_unknown_for_a_policy_nobody_announced(run, redis_client, capsys):
    commit = {"epoch": 1, "policy_version": make_version(1, 3), "fork:1": 7, f"announced:{1}": make_version(1, 3)}
    redis_client.hset(run.keys.commit, mapping=commit)
    for name, version in (("a", 9), ("b", make_version(1, 0)), ("c", -1), ("d", make_version(1, 4))):
        send(redis_client, run, heartbeat(name, policy_version=version))
    # From 9 two steps back to 7, then three forward.
    assert [each["lag"] for each in run.json(capsys, "producers", "test")["alive"]] == [5, 3, None, None]


def test_a_producer_whose_heartbeat_expired_is_gone_and_what_it_holds_is_listed(run, redis_client, capsys):
    send(redis_client, run, heartbeat("alive"))
    send(redis_client, run, heartbeat("gone"), ago_s=HEARTBEAT_TTL_S - 0.3)
    claim(redis_client, run, "alive", 1)
    claim(redis_client, run, "gone", 3)
    claim(redis_client, run, "gone", 2, stream=run.keys.evaluations)
    wait_for(lambda: not redis_client.exists(run.keys.producer("gone")))
    found = run.json(capsys, "producers", "test")
    assert [each["producer_id"] for each in found["alive"]] == ["alive"]
    (orphaned,) = found["orphaned"]
    assert (orphaned["consumer"], orphaned["num_prompts"], orphaned["num_evaluations"]) == ("gone", 3, 2)
    assert 0 <= orphaned["shortest_idle_s"] <= orphaned["longest_idle_s"] < 60
    out = run.command(capsys, "producers", "test")[1]
    held = "gone: no heartbeat, but it holds 3 prompts and 2 evaluations, idle for "
    assert re.search(re.escape(held) + r"\d+\.\d to \d+\.\d s", out)


def test_what_one_says_of_itself_is_shown_and_cannot_steer_the_terminal(run, redis_client, capsys):
    claim(redis_client, run, "gone", 1)
    (row,) = redis_client.xpending_range(run.keys.prompts, PRODUCERS_GROUP, "-", "+", 9)
    redis_client.xclaim(run.keys.prompts, PRODUCERS_GROUP, "gone", 0, [row["message_id"]], idle=10**9)
    error = "v9: checksum differs \x1b[2J"
    send(redis_client, run, heartbeat("p", endpoint="http://10.0.0.5:9500", last_error=error))
    redis_client.set(run.keys.producer("new"), b'{"producer": "new"}', ex=10)
    claim(redis_client, run, "new", 1)
    redis_client.set("{test2}:producers:x", encode_heartbeat(heartbeat("x")))  # of another run
    found = run.json(capsys, "producers", "test")
    assert [alive["endpoint"] for alive in found["alive"]] == ["http://10.0.0.5:9500"]
    assert found["unreadable"] == ["new"], "alive, with a heartbeat of another release"
    out = run.command(capsys, "producers", "test")[1]
    for line in (
        "gone: no heartbeat, but it holds 1 prompts and 0 evaluations, free for the next",
        "p: agents are served at http://10.0.0.5:9500",
        "p: last error: v9: checksum differs \\x1b[2J",
        "new: alive, with a heartbeat of another release",
    ):
        assert line in out, line
    assert "\x1b" not in out


def test_a_quarantined_producer_is_told_from_sound_ones_and_cannot_steer_the_terminal(run, redis_client, capsys):
    for name, instance in INSTANCES.items():
        send(redis_client, run, heartbeat(name, instance=instance))
    write_parity(redis_client, run.keys)
    found = {each["producer_id"]: each for each in run.json(capsys, "producers", "test")["alive"]}
    assert {name: (each["mismatch"], each["quarantine"]) for name, each in found.items()} == {
        "sound": (2e-4, ""), "bad": (0.31, SAYS), "again": (None, ""), "torn": (None, ""), "deep": (None, ""),
    }  # fmt: skip
    out = run.command(capsys, "producers", "test")[1]
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0] in found}
    assert {name: row[5] for name, row in rows.items()} == {
        "sound": "2.0e-04", "bad": "3.1e-01", "again": "-", "torn": "-", "deep": "-",
    }  # fmt: skip
    said = [line for line in out.splitlines() if "quarantined" in line]
    assert said == [r"bad: quarantined, nothing of it is trained: engine and trainer differ \x1b[2J[bold] by 0.31 nats"]
    assert "\x1b" not in out


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
