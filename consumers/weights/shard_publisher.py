"""The part of a rank that is not the lead in a publication."""

import threading

from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.weights.shard import PolicyShard, Task


class ShardPublisher:
    """Writes this rank's shards, in a thread, as the lead's `Publisher` says. It announces nothing.

    ranks: all of them.
    """

    def __init__(self, shard: PolicyShard, ranks: Ranks) -> None:
        self._shard = shard
        self._beside = ranks.for_thread("publisher")
        self._thread = threading.Thread(target=self._serve, name="publisher", daemon=True)
        self._failure: Exception | None = None

    def begin(self, version: int) -> None:
        """Begins the snapshot of policy `version`. The lead's order, in the main thread.

        Raises what has ended the thread: the communication with the lead.
        """
        if self._failure is not None:
            raise self._failure
        self._shard.snapshots.begin(version)
        if self._thread.ident is None:
            self._thread.start()

    def _serve(self) -> None:
        try:
            while True:
                task = self._beside.hand_out(_lead_decides)
                self._beside.phase = "publish"
                self._beside.gather(self._shard.write(task))
                self._beside.phase = ""
        except Exception as error:
            self._failure = error


def _lead_decides(rank: int) -> Task:
    raise NotImplementedError("the lead alone knows what to write")
