"""A producer without an engine, in a thread: claims prompts and appends groups at once, and survives every fault of
Redis."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

import wire_examples
from penstock.schemas.keys import PRODUCERS_GROUP, Field, Keys, Kind
from penstock.schemas.policy import WeightManifest, steps_behind
from penstock.schemas.process.outage import takes_no_more
from penstock.schemas.prompt import Reward
from penstock.schemas.rollout import Rollout, RolloutGroup, Segment, VersionSpan, encode_group, pack_floats, pack_ids


def make_group(index: int, version: int, *, rewards=(0.0, 1.0), evaluation_id: str | None = None) -> RolloutGroup:
    """Returns a group of single-turn rollouts of 3 context and 3 sampled tokens, all sampled by `version`."""
    rollouts = tuple(
        Rollout(
            segments=(
                Segment(
                    token_ids=pack_ids([11, 12, 13, 21, 22, 2]),
                    behavior_logprobs=pack_floats([-0.5, -1.25, -0.0625]),
                    loss_mask=((3, 6),),
                    version_spans=(VersionSpan(version, 3, 6),),
                ),
            ),
            reward=Reward(value=reward),
        )
        for reward in rewards
    )
    group = wire_examples.group(index)
    return msgspec.structs.replace(
        group, rollouts=rollouts, evaluation_id=evaluation_id, sampling=wire_examples.AT_TEMPERATURE_1
    )


_TEMPORARY = ("NOGROUP", "UNBLOCKED", "MISCONF")


class MiniProducer(threading.Thread):
    """Answers every prompt and evaluation until `stop` is set or the run is finished.

    Samples with any policy within `lag_bound` of the one that the prompt names, as producers do, and continues after
    outages, after the server was emptied, and when it is full.
    `answer(index, version)` returns the fields of the rollout entry; the default is a group of rewards 0 and 1.
    `held_out(version)` is the reward of each held-out prompt of an evaluation; with `evaluated_by` the instance that
    answered it. `answers` counts by index, `num_pauses` counts refusals at the memory limit.
    """

    def __init__(
        self, url: str, run: str, answer: Callable[[int, int], dict] | None = None, lag_bound: int = 0
    ) -> None:
        super().__init__(daemon=True)
        self.lag_bound = lag_bound
        self.client = redis.Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=10.0)
        self.keys = Keys(run)
        self.stop = threading.Event()
        self.answer = answer or group_fields
        self.held_out: Callable[[int], float] = lambda version: 1.0
        self.evaluated_by: tuple[str, ...] = ()
        self.num_answered = 0
        self.answers: Counter[int] = Counter()
        self.num_pauses = 0
        self.epoch = -1
        self.problem: Exception | None = None

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                if not self.client.exists(self.keys.policy):
                    time.sleep(0.01)
                    continue
                for stream in (self.keys.prompts, self.keys.evaluations):
                    self._create_group(stream)
                    self._serve(stream, self.client.xautoclaim(stream, PRODUCERS_GROUP, "mini", min_idle_time=0)[1])
                while not self.stop.is_set() and self.client.exists(self.keys.policy):
                    if self._is_finished():
                        return
                    self._serve_once()
            except (redis.ConnectionError, redis.TimeoutError):
                time.sleep(0.01)
            except IndexError:
                continue  # the policy stream was emptied between two commands
            except redis.ResponseError as error:
                if not self._is_temporary(error):
                    self.problem = error
                    return
                time.sleep(0.01)

    def _is_finished(self) -> bool:
        """Returns whether the newest epoch has finished the run, as a producer decides it: a run that an older epoch
        finished was resumed since."""
        finished, epoch = self.client.hmget(self.keys.commit, "finished", "epoch")
        is_newest, self.epoch = int(epoch or -1) >= self.epoch, max(int(epoch or -1), self.epoch)
        return finished == b"1" and is_newest

    def _is_temporary(self, error: redis.ResponseError) -> bool:
        if isinstance(error, redis.ReadOnlyError):
            self.client.connection_pool.disconnect()  # a demoted server: the address may lead to another one now
            return True
        # The limit may be reached at EXEC, after every command was queued: the reply is an EXECABORT then.
        if isinstance(error, redis.exceptions.OutOfMemoryError) or "because of: OOM " in str(error):
            self.num_pauses += 1
            return True
        return str(error).startswith(_TEMPORARY) or takes_no_more(error)

    def _create_group(self, stream: str) -> None:
        try:
            self.client.xgroup_create(stream, PRODUCERS_GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _serve_once(self) -> None:
        reply = self.client.xreadgroup(
            PRODUCERS_GROUP, "mini", {self.keys.evaluations: ">", self.keys.prompts: ">"}, count=8, block=20
        )
        for stream, entries in reply or []:
            self._serve(stream.decode(), entries)

    def _serve(self, stream: str, entries: list) -> None:
        for entry_id, fields in entries:
            version = self._newest_policy()
            # Both may name a version that is not announced yet, a prompt the one that will take its group.
            is_prompt = stream == self.keys.prompts
            wanted = int(fields[Field.VERSION] if is_prompt else entry_id.partition(b"-")[0])
            while steps_behind(version, wanted) > self.lag_bound * is_prompt and not self.stop.is_set():
                time.sleep(0.001)
                version = self._newest_policy()
            pipeline = self.client.pipeline(transaction=True)
            if is_prompt:
                index = int(fields[Field.INDEX])
                self.answers[index] += 1
                pipeline.xadd(self.keys.rollouts, self.answer(index, version))
                self.num_answered += 1
            else:
                group = make_group(0, version, rewards=(self.held_out(wanted),), evaluation_id=entry_id.decode())
                payload = encode_group(msgspec.structs.replace(group, sampled_by=self.evaluated_by))
                pipeline.xadd(
                    self.keys.evaluation_results,
                    {Field.EVALUATION: entry_id, Field.KIND: Kind.GROUP, Field.PAYLOAD: payload},
                )
            pipeline.xack(stream, PRODUCERS_GROUP, entry_id)
            pipeline.xdel(stream, entry_id)
            pipeline.execute()

    def _newest_policy(self) -> int:
        newest = self.client.xrevrange(self.keys.policy, count=1)
        return msgspec.json.decode(newest[0][1][Field.MANIFEST], type=WeightManifest).version


def group_fields(index: int, version: int, **changes) -> dict:
    """Returns the fields of a rollout entry with `make_group(index, version)`."""
    return {
        Field.INDEX: str(index),
        Field.KIND: Kind.GROUP,
        Field.PAYLOAD: encode_group(make_group(index, version, **changes)),
    }


def dead_fields(index: int, reason: str) -> dict:
    """Returns the fields of a rollout entry about a group without a payload that is dead."""
    return {Field.INDEX: str(index), Field.KIND: Kind.DEAD, Field.REASON: reason}


def unscored_fields(index: int, reason: str) -> dict:
    """Returns the fields of a rollout entry about a group whose reward raised."""
    group = make_group(index, 0, rewards=(math.nan, math.nan))
    came = {
        Field.PAYLOAD: encode_group(group, dead=True),
        Field.PRODUCER: "p1",
        Field.TRACEBACK: "Traceback (most recent call last):\n  in reward\nKeyError: 'x'\n",
    }
    return dead_fields(index, reason) | came
