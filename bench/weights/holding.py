"""A producer without an engine, which holds each policy."""

import threading
import time
from typing import Any

import msgspec
import redis

from bench.machine import status_bytes
from bench.weights.publishing import holders_key
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.weights.host_copy import HostCopy
from penstock.schemas.keys import Field, Keys
from penstock.schemas.weights.log import decode_manifest
from penstock.schemas.weights.reading import WeightReader

BLOCK_MS = 1000
LOOK_S = 0.005


class HoldingJob(msgspec.Struct, frozen=True, kw_only=True):
    """last: the version that ends it. host_folder: of the copy."""

    url: str
    run: str
    host_folder: str
    last: int


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """held_s: version to the monotonic time from which on the copy held it. first_s: from the start to the first one.

    own_bytes: memory that was this process's alone, over what it had before the copy was opened: each monotonic time
    at which it changed, and to how much. copy_bytes: the most in the copy's folder. num_bytes: fetched.
    """

    held_s: dict[int, float]
    first_s: float
    own_bytes: list[tuple[float, int]]
    copy_bytes: int
    num_bytes: int


def hold(job: HoldingJob) -> Held:
    keys = Keys(job.run)
    client: Any = redis.Redis.from_url(job.url, protocol=2)
    reader = WeightReader(lambda command: command(client), keys)
    copy = HostCopy(job.host_folder, job.run, "bench", reader, ProducerMetrics())
    held_s: dict[int, float] = {}
    most_in_folder = 0
    cursor: bytes | str = "0-0"
    began = time.monotonic()
    copy.open()
    memory = _Memory()
    try:
        while job.last not in held_s:
            reply = client.xread({keys.policy: cursor}, block=BLOCK_MS)
            if not reply:
                continue
            cursor, fields = reply[0][1][-1]
            manifest = copy.lock_at(decode_manifest(fields[Field.MANIFEST], keys.policy))
            now = time.monotonic()
            copy.release()
            if held_s.setdefault(manifest.version, now) == now:
                client.hincrby(holders_key(job.run), str(manifest.version))
            most_in_folder = max(most_in_folder, sum(file.stat().st_blocks * 512 for file in copy.folder.iterdir()))
    finally:
        own_bytes = memory.end()
        copy.close()
    return Held(
        held_s=held_s,
        first_s=min(held_s.values()) - began,
        own_bytes=own_bytes,
        copy_bytes=most_in_folder,
        num_bytes=copy.num_bytes,
    )


class _Memory:
    """Watches the resident memory that is this process's own, and no file's."""

    def __init__(self) -> None:
        self._before = status_bytes("RssAnon")
        self._found: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def end(self) -> list[tuple[float, int]]:
        """See `Held.own_bytes`."""
        self._ended.set()
        self._thread.join()
        return self._found

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            found = status_bytes("RssAnon") - self._before
            if not self._found or found != self._found[-1][1]:
                self._found.append((time.monotonic(), found))
