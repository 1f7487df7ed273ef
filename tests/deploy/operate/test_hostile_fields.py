"""The operator's commands on a Redis into which somebody has written whatever its fields can hold.

FUZZ_SEED takes another seed than the fixed one; a failure names its seed and round.
"""

import os
import random

import pytest
import redis

from mini_producer import dead_fields, group_fields
from penstock.schemas.heartbeat import InFlight, encode_heartbeat
from penstock.schemas.keys import PRODUCERS_GROUP, Field, Kind
from scripted_learner import KilledError
from short_run import ShortRun
from wire_examples import heartbeat

pytestmark = pytest.mark.redis

SEED = int(os.environ.get("FUZZ_SEED", 20261121))
ROUNDS = 12
WRITES_PER_ROUND = 40

DIGITS = b"9" * 5000
"""More than `int` takes."""
NO_NUMBERS = [
    DIGITS, b"9" * 19, b"0" * 19, b"-1", b"+3", b" 3", b"3\n", b"3_0", b"3.0", b"1e3", b"nan", b"", b"\x00", b"\xff",
    "٣".encode(), b"\x1b[2J", b"[bold]", b"x" * 70_000,
]  # fmt: skip
NAMES = [*NO_NUMBERS, b"producer-0", b"a\nb", "prodücer".encode()]
HEARTBEAT = encode_heartbeat(
    heartbeat(
        "a", policy_version=9, in_flight=(InFlight(index=1, claimed_s=2.0, attempt=1),), tokens_per_s=1.0, sent_s=3.0
    )
)
HEARTBEATS = [
    b"", b"{}", b"null", b"\xff", HEARTBEAT[:-9], HEARTBEAT + b"x", HEARTBEAT[:-1] + b',"x":' + b"[" * 50_000,
    HEARTBEAT.replace(b'"pid":1', b'"pid":' + DIGITS), HEARTBEAT.replace(b'"policy_version":9', b'"policy_version":-9'),
    HEARTBEAT.replace(b'"policy_version":9', b'"policy_version":' + b"9" * 30),
    HEARTBEAT.replace(b'"sent_s":3.0', b'"sent_s":1e308').replace(b'"claimed_s":2.0', b'"claimed_s":-1e308'),
    HEARTBEAT.replace(b'"tokens_per_s":1.0', b'"tokens_per_s":1e400'),
]  # fmt: skip


@pytest.fixture
def stopped(redis_url, tmp_path, monkeypatch):
    """A run killed at update 10, with one index that died, its checkpoint of update 8, and nobody there."""
    run = ShortRun(redis_url, tmp_path, monkeypatch)
    run.producer(lambda index, version: dead_fields(3, "reward: x") if index == 3 else group_fields(index, version))
    with pytest.raises(KilledError):
        run.trainer(fail_at={10: KilledError()}).run()
    run.end_producers()
    yield run
    run.close()


def ledger(run: ShortRun, capsys) -> dict:
    found = run.json(capsys, "audit", "test")
    assert found["balanced"], found["ledger"]["problems"]
    places = ("released", "trained", "skipped", "dead", "on_stream", "postponed")
    # Which of the prompts are claimed may change: junk may be claimed before them.
    prompts = found["ledger"]["claimed"] + found["ledger"]["queued"]
    return {place: found["ledger"][place] for place in places} | {"prompts": prompts}


def test_trainer_and_audit_read_the_same_number_in_a_field(stopped, redis_client, capsys):
    payload = group_fields(7, 9)[Field.PAYLOAD]
    for junk in NO_NUMBERS:
        redis_client.xadd(stopped.keys.rollouts, {Field.INDEX: junk, Field.KIND: Kind.GROUP, Field.PAYLOAD: payload})
        redis_client.hset(stopped.keys.requeued, junk, b"\xff")
    stopped.producer()
    assert stopped.trainer(resume=True).run()
    found = stopped.json(capsys, "audit", "test")
    assert found["balanced"] and found["finished"] and found["ledger"]["dead"] == 1
    letters = [letter["index"] for letter in stopped.json(capsys, "dead", "list", "test")]
    assert letters == [3] + [None] * len(NO_NUMBERS)


def write_junk(client: redis.Redis, run: ShortRun, rng: random.Random) -> int:
    """Writes what no part of a run would write; returns how many entries the audit must call never released."""
    keys, junk = run.keys, rng.choice(NO_NUMBERS)
    fields: dict = {rng.choice([Field.INDEX, Field.VERSION, Field.ATTEMPT, *NO_NUMBERS]): rng.choice(NO_NUMBERS)}
    match rng.randrange(7):
        case 0:
            client.xadd(keys.prompts, fields | {Field.INDEX: junk} if rng.random() < 0.8 else fields)
            return 1
        case 1:
            client.xadd(keys.rollouts, fields | {Field.KIND: rng.choice([Kind.GROUP, Kind.DEAD, junk])})
            return 1
        case 2:
            letter = {Field.INDEX: junk, Field.REASON: rng.choice(NAMES), Field.PAYLOAD: rng.choice(HEARTBEATS)}
            client.xadd(rng.choice([keys.dead, keys.dead_rollouts]), rng.choice([letter, fields]))
        case 3:
            client.hset(rng.choice([keys.dead_index, keys.requeued]), junk, rng.choice(NAMES))
        case 4:
            client.xadd(keys.evaluation_results, {Field.EVALUATION: junk + b"-" + rng.choice(NO_NUMBERS)} | fields)
        case 5:
            client.set(keys.producer("").encode() + rng.choice(NAMES), rng.choice(HEARTBEATS), ex=60)
        case 6:
            client.xreadgroup(PRODUCERS_GROUP, rng.choice(NAMES) or b"-", {keys.prompts: ">"}, count=1)
    return 0


def test_nothing_that_is_written_into_a_field_fails_a_command_or_moves_the_ledger(stopped, redis_client, capsys):
    before = ledger(stopped, capsys)
    num_never_released = 0
    for number in range(ROUNDS):
        rng = random.Random(f"{SEED}-{number}")
        num_never_released += sum(write_junk(redis_client, stopped, rng) for _ in range(WRITES_PER_ROUND))
        where = f"seed {SEED}, round {number}"
        assert ledger(stopped, capsys) == before, where
        assert stopped.json(capsys, "audit", "test")["ledger"]["never_released"] == num_never_released, where
        for argv in (["audit", "test"], ["producers", "test"], ["dead", "list", "test"], ["dead", "show", "test", "3"]):
            status, out, err = stopped.command(capsys, *argv)
            assert (status, err) == (0, ""), f"{argv}: {where}"
            assert "\x1b" not in out, f"{argv}: {where}"
            stopped.json(capsys, *argv)
    assert num_never_released > 100
    assert stopped.json(capsys, "dead", "requeue", "test", "--all")["indexes"] == [3]
