"""One trainer holds a run, another stands by; the first, woken up after it was replaced, changes nothing any more."""

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from penstock.consumers.checkpoints.checkpoints import Checkpoints
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.leadership import Leadership
from scripted_learner import KilledError
from trainer_bench import TrainerBench, assert_settled_once
from trainer_process import wait_until_stopped, with_learner
from waiting import wait_for

pytestmark = pytest.mark.redis


def files(bench: TrainerBench) -> dict[str, float]:
    """Those of the checkpoints with the time of their last change."""
    found = (bench.folder / "checkpoints").rglob("*")
    return {str(path): path.stat().st_mtime_ns for path in found if path.is_file()}


def contents(client: redis.Redis) -> dict[bytes, object]:
    """Everything in Redis but the lease."""
    read = {b"stream": client.xrange, b"hash": client.hgetall, b"string": client.get}
    return {key: read[client.type(key)](key) for key in client.scan_iter() if not key.endswith(b":lease")}


@pytest.fixture
def leadership(bench, redis_url) -> Iterator[Callable[[], Leadership]]:
    opened: list[Leadership] = []

    def make() -> Leadership:
        connection = TrainerConnection(redis_url, outage_s=20)
        bench.connections.append(connection)
        opened.append(Leadership(connection, bench.keys, Checkpoints(bench.folder / "checkpoints", 2), lease_s=1.0))
        return opened[-1]

    yield make
    for each in opened:
        each.end()


class StandbyThread(threading.Thread):
    def __init__(self, leadership: Leadership) -> None:
        super().__init__(daemon=True)
        self._leadership = leadership
        self.outcome: bool | None = None
        self.start()

    def run(self) -> None:
        self.outcome = self._leadership.stand_by()


def test_a_lease_that_is_renewed_keeps_a_standby_waiting_and_one_that_expires_lets_one_in(
    leadership, redis_client, bench
):
    holder = leadership()
    holder.open(0, {})
    waiting = [StandbyThread(leadership()) for _ in range(3)]
    time.sleep(2.5)  # two leases and a half: only a renewal keeps it
    wait_for(lambda: redis_client.exists(bench.keys.lease))  # where everything stood still, it is back in a moment
    assert [thread.outcome for thread in waiting] == [None] * 3
    holder.end()
    wait_for(lambda: any(thread.outcome for thread in waiting))
    assert [thread.outcome for thread in waiting].count(True) == 1, "one of them takes over, the others wait on"
    redis_client.hset(bench.keys.commit, "finished", 1)
    for thread in waiting:
        thread.join(60)
    assert sorted(thread.outcome for thread in waiting) == [False, False, True]


def test_a_standby_lets_a_live_trainer_renew_its_lease_after_redis_was_emptied(leadership, redis_client, bench):
    holder = leadership()
    bench.folder.joinpath("checkpoints").mkdir(parents=True, exist_ok=True)
    (bench.folder / "checkpoints" / "epoch-0").touch()
    holder.open(0, {})
    waiting = StandbyThread(leadership())
    for _ in range(4):
        redis_client.flushall()
        time.sleep(0.4)
    assert waiting.outcome is None
    holder.check()  # restores the epoch
    assert redis_client.hget(bench.keys.commit, "epoch") == b"0"
    redis_client.hset(bench.keys.commit, "finished", 1)
    waiting.join(60)


def epoch(client: redis.Redis, bench: TrainerBench) -> int:
    return int(client.hget(bench.keys.commit, "epoch") or -1)


def saved_version(client: redis.Redis, bench: TrainerBench) -> int:
    return int((client.hget(bench.keys.commit, "checkpoint") or b"0").partition(b"-")[0])


# It does not come to the end of its run before the test has stopped it. Checkpoints are committed between two steps, so
# that none can be waited for while a step is held.
LONG_STEP = with_learner("""
class Learner(ScriptedLearner):
    def step(self, batch):
        if self.num_steps >= 20:
            time.sleep(0.05)
        while Path("{hold}").exists():
            time.sleep(0.01)
        return super().step(batch)
""")


@pytest.mark.slow
def test_a_standby_process_takes_over_from_a_stopped_one_which_wakes_up_and_ends(bench, redis_client, processes):
    bench.overrides = ["num_updates=100", "checkpoint.every=10", "trainer.lease_s=2.0"]
    bench.producer()
    hold = bench.runs / "hold"
    first = processes.start("first", program=LONG_STEP.format(hold=hold))
    wait_for(lambda: epoch(redis_client, bench) == 0)
    second = processes.start("second", "--standby")
    wait_for(lambda: saved_version(redis_client, bench) >= 20)
    hold.touch()
    wait_for(lambda: " holds it" in processes.log("second"))
    time.sleep(2.5)
    assert epoch(redis_client, bench) == 0, "the lease of a live trainer is left alone"
    first.send_signal(signal.SIGSTOP)
    hold.unlink()
    wait_for(lambda: saved_version(redis_client, bench) >= 1_000_000_000)
    first.send_signal(signal.SIGCONT)
    assert first.wait(60) == 1
    assert second.wait(120) == 0
    assert_settled_once(bench, redis_client)
    logs = {name: processes.log(name) for name in ("first", "second")}
    assert "this trainer is of epoch 0, the run is in epoch 1" in logs["first"].splitlines()[-1]
    assert "taking it over" in logs["second"]
    assert not any("Traceback" in text for text in logs.values())
    third = processes.start("third", "--standby")
    assert third.wait(60) == 0
    assert "the run is finished" in processes.log("third")


# It reads its checkpoint as a real learner does, and there are no tensors in a folder that is gone.
ASLEEP_WHILE_LOADING = with_learner("""
from penstock.consumers.learning.model.tensor_files import specs_in

class Learner(ScriptedLearner):
    def load_checkpoint(self, folder, state):
        os.kill(os.getpid(), signal.SIGSTOP)
        specs_in(folder)
""")


def test_a_trainer_replaced_while_it_loads_its_checkpoint_says_that_it_was(bench, redis_client, processes):
    bench.producer()
    with pytest.raises(KilledError):
        bench.trainer(fail_at={5: KilledError()}).run()
    process = processes.start("second", "--resume", program=ASLEEP_WHILE_LOADING)
    wait_until_stopped(process)
    third = bench.trainer(resume=True)
    assert third.run()
    assert not list((bench.folder / "checkpoints").glob("4-*")), "the one that the second is loading is gone"
    before, streams = files(bench), contents(redis_client)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 1
    lines = processes.log("second").splitlines()
    assert lines[-1].endswith("this trainer is of epoch 1, the run is in epoch 2"), lines
    assert "Traceback" not in processes.log("second") and "transformers" not in processes.log("second")
    assert (files(bench), contents(redis_client)) == (before, streams)
    assert_settled_once(bench, redis_client)
