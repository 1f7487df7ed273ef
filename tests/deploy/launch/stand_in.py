"""A process that stands in for a part of a run: `stand_in.py PART RUN_FOLDER BEHAVIOR`.

It keeps the promises a launcher relies on (heartbeat, `finished` flag, SIGTERM) and breaks the one that BEHAVIOR names.
What happens to it is appended to `<run>/events` as `part event seconds`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import redis

from penstock.schemas.heartbeat import HEARTBEAT_TTL_S, Heartbeat, encode_heartbeat
from penstock.schemas.keys import Commit, Keys
from penstock.schemas.rollout import EngineFingerprint

part, folder, behavior = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
keys = Keys(folder.name)
client = redis.Redis.from_url(os.environ["REDIS_URL"], protocol=2)
stopped = False


def tell(event: str) -> None:
    with (folder / "events").open("a") as file:
        file.write(f"{part} {event} {time.time()}\n")


def stop(*_: object) -> None:
    global stopped
    stopped = behavior != "deaf"
    tell("asked-to-stop")


signal.signal(signal.SIGTERM, stop)
fingerprint = EngineFingerprint(
    engine="stand-in",
    version="1",
    model="m",
    dtype="float32",
    head_dtype="float32",
    logprobs_mode="processed_logprobs",
    prefix_caching=False,
    async_scheduling=False,
)


def send_heartbeat() -> None:
    heartbeat = Heartbeat(
        producer_id=part,
        host="here",
        pid=os.getpid(),
        policy_version=7,
        in_flight=(),
        tokens_per_s=1234.0,
        num_tokens_generated=0,
        num_groups_appended=0,
        num_weight_loads_failed=0,
        metrics_port=0,
        fingerprint=fingerprint,
        sent_s=time.time(),
    )
    client.set(keys.producer(part), encode_heartbeat(heartbeat), ex=HEARTBEAT_TTL_S)


def wait(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not stopped:
        time.sleep(0.01)


def update(number: int) -> dict[str, object]:
    return {
        "update": number,
        "policy_version": number,
        "time_s": time.time(),
        "reward": 0.5,
        "ess_fraction": 0.99,
        "lag_histogram": {"0": 30, "1": 10},
        "num_tokens_trained": 40,
        "num_tokens_masked_lag": 0,
        "num_groups_trained": 4,
        "num_groups_skipped": 0,
        "queue_depth": 3,
    }


def train() -> int:
    print(f"threads {os.environ['OMP_NUM_THREADS']}", flush=True)
    if behavior == "broken":
        for number in range(13):
            print(f"2026-11-21 20:34:16.{number:03d} WARNING trainer v0 group {number} is dead: KeyError: 'gold'")
        print("2026-11-21 20:34:17.123 ERROR trainer v0 64 groups have died in a row: reward: KeyError: 'gold'")
        print("2026-11-21 20:34:17.124 INFO trainer v0 the record is closed", flush=True)
        return 1
    # A trainer consumes what producers make: it comes no further without them.
    while client.get(keys.producer("producer-0")) is None and not stopped:
        wait(0.02)
    for number in range(1, 6 if behavior == "finish" else 1_000_000):
        if stopped:
            tell("checkpoint")
            return 0
        with (folder / "updates.jsonl").open("a") as file:
            file.write(json.dumps(update(number)) + "\n")
        wait(0.05)
    client.hset(keys.commit, Commit.FINISHED, b"1")
    return 0


def produce() -> int:
    # An engine runs processes of its own.
    core = subprocess.Popen(["sleep", "1000"])
    tell(f"core-{core.pid}")
    wait(0.2)
    if behavior == "no-boot":
        print("the engine reports another value", flush=True)
        return 1
    if behavior == "unusable":
        return 2
    tell("serving")
    while not stopped:
        send_heartbeat()
        if client.hget(keys.commit, Commit.FINISHED) == b"1":
            tell("finished")
            return 0
        wait(0.05)
        if behavior == "dies-when-told" and (folder / "die").exists():
            (folder / "die").unlink()
            return 1
    tell("handed-back")
    return 0


tell(f"started-{os.getpid()}")
print(f"modules {os.environ['PENSTOCK_MODULES_PATH']}")
print(f"GPU {os.environ['CUDA_VISIBLE_DEVICES']}", *sys.argv[4:], flush=True)
status = train() if part == "trainer" else produce()
tell("ended")
sys.exit(status)
