"""Leadership of a run: the epoch that fences earlier trainers, and the lease that standby trainers wait for."""

import logging
import threading
import time
from collections.abc import Mapping

import redis

from penstock.consumers.checkpoints.checkpoints import Checkpoints
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.scripts import FencedError, Scripts
from penstock.schemas.keys import Commit, Keys

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""How often a trainer checks that it still leads the run."""
RENEWALS_PER_LEASE = 4
STANDBY_LOG_S = 30.0
"""How often a standby trainer logs why it waits; a new reason is logged at once."""


class Leadership:
    """One trainer's leadership of its run: its epoch, its lease, and the commit state and the run's description, which
    it restores if Redis loses them.

    A newer trainer is recognized by its epoch in Redis or, if Redis has lost it, by its file among the checkpoints,
    which is created before the epoch is opened. Without either, this trainer restores the commit hash.
    """

    def __init__(self, connection: TrainerConnection, keys: Keys, checkpoints: Checkpoints, lease_s: float) -> None:
        self.scripts = Scripts(connection, keys, self.restore, lease_s)
        self.checkpoints = checkpoints
        self._commit_state: tuple[Ledger, LagTable] | None = None
        self._description: Mapping[str, bytes] = {}
        self._lease_s = lease_s
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None
        self._checked_at = 0.0
        self._has_restored = False

    def stand_by(self) -> bool:
        """Waits until the run has begun and its lease has been free for `lease_s`; then takes the lease and returns
        True. Returns False once the run is finished.

        A trainer that dies, hangs or leaves unblocks it, and so does the end of the run. After an outage of Redis, and
        after it was emptied, the leading trainer gets time to renew its lease. A signal ends the wait by an exception
        of its handler (`StopSignals`).

        Raises:
            RedisGoneError: see `TrainerConnection.call`.
        """
        keys, connection = self.scripts.keys, self.scripts.connection
        free_since: float | None = None
        outages_seen = connection.num_outages
        said, say_at = "", 0.0
        while True:
            epoch, finished = connection.call(lambda client: client.hmget(keys.commit, [Commit.EPOCH, Commit.FINISHED]))
            holder = connection.call(lambda client: client.get(keys.lease))
            now = time.monotonic()
            if finished == b"1":
                return False
            has_begun = epoch is not None or self.checkpoints.newest_epoch() >= 0
            waits_for = self._waits_for(holder, has_begun)
            if waits_for != said or now >= say_at:
                said, say_at = waits_for, now + STANDBY_LOG_S
                log.info("standing by for run %s: %s", keys.run, said)
            if holder is not None or not has_begun or connection.num_outages != outages_seen:
                free_since, outages_seen = None, connection.num_outages
            elif free_since is None:
                free_since = now
            elif now - free_since >= self._lease_s and connection.call(lambda _: self.scripts.hold_lease()):
                log.warning("no trainer has held the run for %.1f s: taking it over", now - free_since)
                self._start_renewing()
                return True
            time.sleep(self._lease_s / 10)

    def _waits_for(self, holder: bytes | None, has_begun: bool) -> str:
        if holder is not None:
            return f"trainer {holder.decode(errors='replace').rpartition('-')[0]} holds it"
        if not has_begun:
            return "no trainer has begun it"
        return f"no trainer holds it; it is taken over after {self._lease_s:g} s of that"

    def open(self, epoch: int, description: Mapping[str, bytes], run_id: str = "") -> dict[bytes, bytes]:
        """Raises the run's epoch, which fences every earlier trainer, and writes the run's description; returns the
        commit hash. run_id: see `Scripts.open_epoch`."""
        self._description = description
        commit = self.scripts.open_epoch(epoch, run_id)
        self.scripts.describe(description)
        self._start_renewing()
        return commit

    def end(self, *, hand_over: bool = False) -> None:
        """Stops renewing the lease, so that it expires; with `hand_over`, releases it at once."""
        self._ended.set()
        if self._renewing is not None:
            self._renewing.join(1.0)  # the thread may wait for a server that does not answer
        if hand_over:
            try:
                self.scripts.leave_lease()
            except (redis.RedisError, OSError) as error:
                log.info("lease left to expire: %s", error)

    def check(self) -> None:
        """Checks in Redis, at most every `CHECK_S`, that this trainer still leads the run.

        Raises:
            FencedError: it does not.
        """
        if time.monotonic() - self._checked_at >= CHECK_S:
            self._checked_at = time.monotonic()
            self.scripts.check()

    def has_restored(self) -> bool:
        """Returns True once after Redis has lost this trainer's epoch: the streams have lost entries too."""
        had, self._has_restored = self._has_restored, False
        return had

    def restore(self) -> None:
        """Restores commit hash, description and tasks on a server that was emptied or returned to an older state.

        Raises:
            FencedError: a newer trainer leads the run.
        """
        found, epoch = self.scripts.connection.call(lambda _: self._restore_epoch()), self.scripts.epoch
        self.scripts.describe(self._description)
        if self._commit_state is not None:
            self.scripts.note_tasks(self._commit_state[0].tasks.copy())
        if found != epoch:
            where = "nothing of the run" if found < 0 else f"the run in epoch {found}"
            log.warning("redis has %s: restoring epoch %d and what belongs to it", where, epoch)
            self._has_restored = True

    def _restore_epoch(self) -> int:
        """Restores the commit hash; returns the epoch that was there. Each attempt looks for a newer trainer first."""
        newest, epoch = self.checkpoints.newest_epoch(), self.scripts.epoch
        if newest > epoch:
            raise FencedError(f"this trainer is of epoch {epoch}, and the checkpoint folder knows epoch {newest}")
        return self.scripts.restore(*self._restorable())

    def restore_from(self, ledger: Ledger, lag_of: LagTable) -> None:
        """Sets the sources of the commit state that `restore` writes."""
        self._commit_state = ledger, lag_of

    def _restorable(self) -> tuple[int, dict[str, str | int]]:
        """Returns the release cursor and the fields of the commit hash other than the epoch."""
        if self._commit_state is None:
            return 0, {}
        ledger, lag_of = self._commit_state
        fields: dict[str, str | int] = {}
        for prefix, by_epoch in ((Commit.FORK, lag_of.forks), (Commit.ANNOUNCED, lag_of.announced)):
            fields |= {f"{prefix.decode()}{epoch}": version for epoch, version in by_epoch.copy().items()}
        if self.checkpoints.pointer is not None:
            fields[Commit.CHECKPOINT.decode()] = self.checkpoints.pointer
        return ledger.num_released, fields

    def _start_renewing(self) -> None:
        if self._renewing is None:
            self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
            self._renewing.start()

    def _renew(self) -> None:
        """Renews the lease, in a thread. Waits for the next renewal; `end` unblocks it."""
        while not self._ended.wait(self._lease_s / RENEWALS_PER_LEASE):
            try:
                self.scripts.hold_lease()
            except (redis.RedisError, OSError) as error:
                # The trainer meets the same outage, reports it and gives up.
                log.debug("lease not renewed: %s", error)
