"""A producer without an engine that survives every fault of Redis."""

import time
from collections import Counter

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from mini_producer import MiniProducer
from penstock.schemas.keys import PRODUCERS_GROUP
from penstock.schemas.process.outage import takes_no_more

_TEMPORARY = ("NOGROUP", "UNBLOCKED", "MISCONF")


class ResilientProducer(MiniProducer):
    """Continues after outages, after the server was emptied, and when it is full. `answers` counts by index,
    `num_pauses` counts refusals at the memory limit."""

    def __init__(self, url: str, run: str, answer=None, lag_bound: int = 0) -> None:
        super().__init__(url, run, answer, lag_bound)
        self.client.close()
        self.client = redis.Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=10.0)
        self.answers: Counter[int] = Counter()
        self.num_pauses = 0
        self.epoch = -1
        answer_once = self.answer

        def count(index: int, version: int) -> dict:
            self.answers[index] += 1
            return answer_once(index, version)

        self.answer = count

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
