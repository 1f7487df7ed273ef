"""Releases task indexes while the lag credit lasts, and again where one was lost on the way."""

import logging
from collections.abc import Collection

from consumers.connection import Connection
from consumers.ledger import Ledger
from consumers.reader import LagOf, Reader
from consumers.scripts import Scripts
from schemas.config import RunConfig
from schemas.keys import Field, Keys

log = logging.getLogger(__name__)


class Releaser:
    """Keeps the number of released, unsettled indexes at the credit, and never above what the run still needs.

    The credit bounds lag: a finished group waits behind at most `max_lag` batches.
    """

    def __init__(
        self, connection: Connection, scripts: Scripts, keys: Keys, ledger: Ledger, config: RunConfig, epoch: int
    ) -> None:
        self._connection = connection
        self._scripts = scripts
        self._prompts = keys.prompts
        self._ledger = ledger
        self._config = config
        self._epoch = epoch

    def top_up(self, policy_version: int) -> int:
        """Releases new indexes; returns how many."""
        ledger, config = self._ledger, self._config
        needed = config.num_updates * config.groups_per_step - ledger.count("trained") - ledger.count("skipped")
        target = len(ledger.settled) + min(config.credit, needed)
        before = ledger.num_released
        if target <= before:
            return 0
        ledger.num_released = self._connection.call(
            lambda _: self._scripts.release(self._epoch, target, before, policy_version)
        )
        return ledger.num_released - before

    def release_again(self, indexes: Collection[int], reason: str, policy_version: int) -> None:
        """Puts released, unsettled indexes back among the prompts."""
        if not indexes:
            return
        self._connection.call(lambda _: self._scripts.release_again(self._epoch, policy_version, sorted(indexes)))
        self._ledger.released_again[reason] += len(indexes)

    def reconcile(self, reader: Reader, lag_of: LagOf, policy_version: int) -> int:
        """Releases again what is neither a prompt, nor on the rollout stream, nor settled; returns how many.

        Prompts are listed first and the rollouts read after: a group moves from one to the other in one step, so it
        is seen in at least one of them.
        """
        entries = self._connection.call(lambda client: client.xrange(self._prompts))
        open_prompts = {int(fields[Field.INDEX]) for _, fields in entries}
        reader.read_to_end(lag_of)
        lost = [
            index
            for index in self._ledger.settled.missing(self._ledger.num_released)
            if index not in open_prompts and index not in reader.hand and index not in reader.refused_indexes
        ]
        if lost:
            log.warning("reconcile: releasing %d lost indexes again, first %d", len(lost), lost[0])
            self.release_again(lost, "lost", policy_version)
        return len(lost)

    def num_open_prompts(self) -> int:
        return self._connection.call(lambda client: client.xlen(self._prompts))
