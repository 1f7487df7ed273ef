"""The trainer's end of the stream on its own: the reader, the books and the commit, with no training."""

import uuid
from typing import Any

import msgspec
import redis
from penstock.consumers.learning.staleness import LagTable
from penstock.consumers.learning.trainable import check_trainable
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.reader import Reader
from penstock.consumers.stream.scripts import Scripts
from penstock.schemas.keys import Field, Keys, Kind
from penstock.schemas.rollout import RolloutGroup, encode_group

from bench.records import GROUP_SIZE
from bench.stream_appending import PATIENCE_S

VOCABULARY = 50_000
ENTRIES_PER_ROUND_TRIP = 16


def fill(client: "redis.Redis", keys: Keys, group: RolloutGroup, num_groups: int) -> int:
    """Appends copies of a group under indexes 1 to `num_groups`, with no prompts; returns their bytes of payload."""
    total = 0
    for start in range(1, num_groups + 1, ENTRIES_PER_ROUND_TRIP):
        pipeline = client.pipeline(transaction=False)
        for index in range(start, min(start + ENTRIES_PER_ROUND_TRIP, num_groups + 1)):
            payload = encode_group(msgspec.structs.replace(group, index=index))
            pipeline.xadd(keys.rollouts, {Field.INDEX: index, Field.KIND: Kind.GROUP, Field.PAYLOAD: payload})
            total += len(payload)
        pipeline.execute()
    return total


class ReadDesk:
    """A trainer's reader, its books and its commit script, without a trainer."""

    def __init__(self, url: str, keys: Keys, num_released: int, *, decodes: bool = True) -> None:
        self._connection = TrainerConnection(url, PATIENCE_S)
        self._ledger = Ledger()
        self._ledger.num_released = num_released
        # The versions that `records.make_group` labels its tokens with are all announced.
        self._lag_of = LagTable(2000, {}, {})
        kind = Reader if decodes else _Undecoded
        self._reader = kind(
            self._connection, keys, self._ledger, GROUP_SIZE, lambda group: check_trainable(group, VOCABULARY)
        )
        self._scripts = Scripts(self._connection.client, keys)
        self._scripts.open_epoch(0, uuid.uuid4().hex)
        self.num_read = 0

    def read(self, *, block: bool) -> int:
        """Reads once and settles what came, as a trainer that trains at once would; returns the number of entries."""
        num_entries = self._reader.read(self._lag_of, block=block)
        if self._reader.take_refused():
            raise RuntimeError("the reader refuses what the benchmark has appended")
        for index in self._reader.ready:
            self._ledger.settle(index, "trained")
        self._reader.ready.clear()
        self.num_read += num_entries
        return num_entries

    def acknowledge(self) -> int:
        """The one acknowledgement of the protocol: a commit that trims the stream. Returns the entries trimmed."""
        keep = self._reader.first_unsettled()
        return self._connection.call(lambda _: self._scripts.commit(0, "bench", keep, b"0-0"))

    def close(self) -> None:
        self._connection.close()


class _Undecoded(Reader):
    """Reads as the reader does and looks at nothing."""

    def _receive(self, entry_id: bytes, fields: dict[bytes, bytes], lag_of: Any) -> None:
        pass
