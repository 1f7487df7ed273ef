"""Releases task indexes while the lag credit lasts, releases lost ones again, and says whose turn it is to be taken."""

import logging
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby, islice
from operator import itemgetter

from penstock.consumers.checkpoints.state import ReleasedTask, RequeuedIndex
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.reader import LagOf, Reader
from penstock.consumers.stream.run_progress import RunProgress
from penstock.consumers.stream.scripts import Scripts
from penstock.consumers.stream.tasks import TaskPlan
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Field, is_of_run, number_in

log = logging.getLogger(__name__)


class Releaser:
    """Keeps the number of released, unsettled indexes at the credit, but never above what the run still needs.

    The credit bounds lag: a finished group waits behind at most `max_lag` batches. Each index is released with the
    policy version that the trainer will have when it takes the group in its turn (`ReleaseWindow`): a producer waits
    until its own is within the lag bound of that one. A group that is passed by others is taken at most that many steps
    later.
    """

    def __init__(
        self, scripts: Scripts, ledger: Ledger, reader: Reader, config: RunConfig, progress: RunProgress
    ) -> None:
        self._scripts = scripts
        self._ledger = ledger
        self._reader = reader
        self._plan = TaskPlan(config, ledger)
        self._config = config
        self._progress = progress
        self._requeued: dict[int, RequeuedIndex] = {}
        """Requeued dead letters, as of the last reconcile; some may already be released again."""

    @property
    def credit(self) -> int:
        """The most groups that may be open: `RunConfig.credit` groups that will be trained, plus the expected number of
        groups that batches will skip among those not read yet."""
        away = max(0, self._config.credit - len(self._reader.ready))
        expected = int(away / (1 - self._progress.skipped_share))
        return min(self._config.most_open, self._config.credit - away + expected)

    def release(self, policy_version: int) -> None:
        """Releases as many indexes as the credit allows, first those to be sampled again. Raises RunFailedError as
        `TaskPlan.next` does."""
        self._release_postponed(policy_version)
        self.release_requeued(policy_version)
        self._top_up(policy_version)

    def _top_up(self, policy_version: int) -> None:
        """Releases new indexes."""
        ledger = self._ledger
        target = len(ledger.settled) + min(self.credit, self._num_needed)
        while ledger.num_released < target:
            for version, tasks in self._by_version(self._plan.next(target - ledger.num_released), policy_version):
                self._scripts.release(ledger.num_released, tasks, version)
                for task in tasks:
                    ledger.release(task)

    def _by_version(self, tasks: Sequence[ReleasedTask], policy_version: int) -> list[tuple[int, list[ReleasedTask]]]:
        """Returns the tasks in order, by the version at which the trainer will take their groups."""
        num_ahead = self._ledger.num_open
        versions = [policy_version + self._steps_until_taken(num_ahead + place) for place in range(len(tasks))]
        pairs = groupby(zip(versions, tasks, strict=True), key=itemgetter(0))
        return [(version, [task for _, task in pair]) for version, pair in pairs]

    def _steps_until_taken(self, num_ahead: int) -> int:
        """Returns the optimizer steps that will be taken on the `num_ahead` open groups before the batch of the next
        one; the credit bounds them by the lag bound."""
        num_ready, config = min(num_ahead, len(self._reader.ready)), self._config
        expected = num_ready + (num_ahead - num_ready) * (1 - self._progress.skipped_share)
        return min(config.lag_bound, int(expected / config.groups_per_batch) * config.steps_per_batch)

    def _release_again(self, indexes: Sequence[int], reason: str, policy_version: int) -> None:
        """Releases indexes again that are not settled; in turn they come after all others that are open."""
        tasks = [(index, self._ledger.tasks[index]) for index in sorted(indexes)]
        self._scripts.release_again(policy_version + self._steps_until_taken(self._ledger.num_open - 1), tasks)
        for index in indexes:
            self._ledger.release_again(index, reason)

    def postpone(self, indexes: Iterable[int], reason: str) -> None:
        """Postpones released, unsettled indexes; `release` releases them again, in this order."""
        self._ledger.postponed.update(dict.fromkeys(indexes, reason))

    def _release_postponed(self, policy_version: int) -> None:
        """Releases postponed indexes again as the credit lasts.

        A rollback leaves many. If all were released at once, they would queue until they are stale again.
        """
        ledger, postponed = self._ledger, self._ledger.postponed
        for index in [i for i in postponed if i in ledger.settled or i in self._reader.ready]:
            del postponed[index]  # its group arrived after all
        room = self.credit - (ledger.num_open - len(postponed))
        by_reason: dict[str, list[int]] = {}
        for index in list(postponed)[: max(0, room)]:
            by_reason.setdefault(postponed.pop(index), []).append(index)
        for reason, indexes in by_reason.items():
            self._release_again(indexes, reason, policy_version)

    def reconcile(self, lag_of: LagOf) -> int:
        """Postpones indexes that are neither a prompt, nor on the rollout stream, nor settled; returns how many.

        Prompts are listed before rollouts are read: a group moves from one to the other in one step, so it is seen in
        at least one of them. Also reads which dead letters an operator has requeued.
        """
        scripts, reader = self._scripts, self._reader
        entries = self._reachable_prompts()
        # Producers may append here, and one may be broken or hostile.
        open_prompts = {
            number_in(fields.get(Field.INDEX)) for _, fields in entries if is_of_run(fields, scripts.run_id)
        }
        if None in open_prompts:
            log.warning("prompts: an entry names no task; the producer that claims it removes it")
        reader.read_to_end(lag_of)
        lost = [
            index
            for index in self._ledger.open_indexes()
            if index not in open_prompts
            and index not in reader.ready
            and index not in reader.refused_indexes
            and index not in self._ledger.postponed
        ]
        if lost:
            log.warning("reconcile: %d lost indexes will be released again, first %d", len(lost), lost[0])
            self.postpone(lost, "lost")
        requests = scripts.connection.call(lambda client: client.hgetall(scripts.keys.requeued))
        after = reader.cursor.decode()
        self._requeued = {
            index: RequeuedIndex(letter.decode(errors="replace"), after)
            for field, letter in requests.items()
            if (index := number_in(field)) is not None
        }
        return len(lost)

    def _reachable_prompts(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Returns the prompts that a producer can still get. Removes the others: a broken producer acknowledged them
        without deleting them, or an operator deleted its consumer."""
        scripts = self._scripts
        if dropped := scripts.drop_unreachable():
            log.warning("prompts: %d entries that no producer can get any more are removed", dropped)
        return scripts.connection.call(lambda client: client.xrange(scripts.keys.prompts))

    def release_requeued(self, policy_version: int) -> int:
        """Opens dead indexes whose letters were requeued, oldest first, as the credit lasts; returns how many.

        The request stays in Redis permanently, and the ledger has its outcome: a rollback undoes the opening and
        forgets it, and the next reconcile finds the request again. A release under the lost policies is then repeated,
        which costs one group that is dropped as a duplicate.
        """
        ledger = self._ledger
        self._requeued = {
            index: request for index, request in self._requeued.items() if ledger.may_reopen(index, request.letter)
        }
        room = min(len(self._requeued), self.credit - ledger.num_open)
        if room <= 0 or not self._num_needed:
            return 0
        indexes = sorted(self._requeued)[:room]
        log.info("releasing %d requeued indexes again, first %d", len(indexes), indexes[0])
        for index in indexes:
            ledger.reopen(index, *self._requeued.pop(index))
        self._release_again(indexes, "requeued", policy_version)
        return len(indexes)

    @property
    def _num_needed(self) -> int:
        """Groups that the remaining updates need."""
        return (self._config.num_updates - self._progress.num_batches) * self._config.groups_per_batch

    def num_open_prompts(self) -> int:
        return self._scripts.connection.call(lambda client: client.xlen(self._scripts.keys.prompts))


class ReleaseWindow:
    """A batch takes the ready groups that were released first. A group that is still being sampled is passed by at most
    `RunConfig.num_passing` of those released after it (a windowed FIFO: MiniMax, arXiv 2605.26494, section 6.2.4); then
    batches wait for it.

    So what takes long is never overtaken until it is stale, and what was sampled is trained whatever its length. The
    group that batches wait for arrives, dies (of its deadline, for example), or is found lost and released again behind
    the others, as one that is sampled again is: none is waited for forever.
    """

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._num_passing = config.num_passing
        self._ledger = ledger
        # A group that is skipped while a batch is filled takes none of its places.
        self._taken = ("trained",) if config.max_skipped else ("trained", "skipped")

    def oldest_away(self, ready: Collection[int]) -> int | None:
        """Returns the index that was released first of those that are being sampled."""
        ledger = self._ledger
        away = (index for index in ledger.open_indexes() if index not in ready and index not in ledger.postponed)
        return min(away, key=ledger.turn, default=None)

    def in_turn(self, ready: Collection[int]) -> list[int]:
        """Returns the ready indexes that may be taken now, in the order of their release."""
        order = sorted(ready, key=self._ledger.turn)
        oldest = self.oldest_away(ready)
        if oldest is None:
            return order
        turn = self._ledger.turn(oldest)
        before = [index for index in order if self._ledger.turn(index) < turn]
        num_passed = sum(self._ledger.by_outcome[outcome].num_above(turn[0]) for outcome in self._taken)
        return [*before, *islice(order, len(before), len(before) + max(0, self._num_passing - num_passed))]
