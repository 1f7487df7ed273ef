"""Releases task indexes and takes in prompt groups: the trainer's side of the prompt and rollout streams."""

import logging
from collections.abc import Callable

from penstock.consumers.learning.advantages import has_variance
from penstock.consumers.learning.batch.lag import LagTable, is_stale, known_lags, masked_tokens
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.quarantine import Quarantine
from penstock.consumers.stream.reader import Reader, ReadyGroup, Refused, group_versions, readable
from penstock.consumers.stream.release import Releaser, ReleaseWindow
from penstock.consumers.stream.run_progress import RunProgress
from penstock.consumers.stream.scripts import Scripts
from penstock.consumers.stream.settlement import Settlement
from penstock.schemas.config import DEFAULT_CURRICULUM, RunConfig
from penstock.schemas.keys import entry_key
from penstock.schemas.process import clock
from penstock.schemas.record import PASSED_OVER
from penstock.schemas.rollout import RolloutGroup, died_of_length, encode_group

log = logging.getLogger(__name__)

OnEnded = Callable[[str, int, RolloutGroup | None, float, str], None]


class Intake:
    """Keeps the credit released, and hands out ready groups in order of release until each is settled.

    check: raises RecordError for a group that the trainer cannot reproduce.
    is_kept: tells whether the weights of an older policy are there; None if tokens need only the newest.
    """

    def __init__(
        self,
        config: RunConfig,
        scripts: Scripts,
        ledger: Ledger,
        lag_of: LagTable,
        progress: RunProgress,
        check: Callable[[RolloutGroup], None],
        is_kept: Callable[[int], bool] | None = None,
    ) -> None:
        self.ledger = ledger
        self.lag_of = lag_of
        self.reader = Reader(
            scripts.connection, scripts.keys, ledger, config.group_size, check, scripts.renew, scripts.run_id
        )
        self.died: list[Refused] = []
        """Groups that died or were skipped before a batch took them, for the record, if the run keeps one."""
        self.on_ended: OnEnded = lambda *ended: None
        """Called for each group that no batch trains; see `GroupTraces.ended`."""
        self.received_s: dict[int, float] = {}
        """When the groups of the last batch were read, by index."""
        self.quarantine = Quarantine(scripts)
        self._config = config
        self._keeps_record = config.record
        self._oldest_lag = config.oldest_lag
        self._is_kept = is_kept
        self._progress = progress
        chooses = config.curriculum.path != DEFAULT_CURRICULUM and config.teacher is None
        self._settlement = Settlement(
            ledger,
            config.trainer.max_dead_in_a_row,
            scripts.dead_letter,
            lambda group: chooses and not has_variance(group, config.advantage),
        )
        self._releaser = Releaser(scripts, ledger, self.reader, config, progress)
        self._window = ReleaseWindow(config, ledger)

    @property
    def num_ready(self) -> int:
        """Groups that were read and are not settled yet."""
        return len(self.reader.ready)

    @property
    def num_abandoned(self) -> int:
        """Groups abandoned by agents since the last good one: if any, the run waits for agents."""
        return self._settlement.num_abandoned

    def read(self) -> int:
        """Reads new entries; returns how many. Waits at most `BLOCK_S` for the first; a producer that appends one
        unblocks it."""
        return self.reader.read(self.lag_of, block=True)

    def is_short(self, num_groups: int) -> bool:
        """Returns whether more entries must be read before a batch of `num_groups` is complete."""
        return self._waits_for_all or len(self._window.in_turn(self.reader.ready)) < num_groups

    @property
    def waits_for(self) -> int | None:
        """The index that the others wait behind if they wait: the first released of those that are being sampled."""
        return self._window.oldest_away(self.reader.ready)

    def batch(self, num_groups: int) -> list[RolloutGroup] | None:
        """Returns the groups whose turn it is (`ReleaseWindow`), sorted by index, none of them stale; None while there
        are too few. They stay ready until they are settled. Also settles refused records and releases as the credit
        allows.

        Raises:
            RunFailedError: see `Settlement.settle_refused`.
        """
        self._settle_refused()
        self._withhold()
        self._pass_over()
        if self.num_ready >= num_groups:
            self._postpone_stale()
        self.release()
        ready = self.reader.ready
        taken = [] if self._waits_for_all else self._window.in_turn(ready)[:num_groups]
        if len(taken) < num_groups:
            return None
        self.received_s = {index: ready[index].received_s for index in taken}
        return [ready[index].group for index in sorted(taken)]

    def settle(self, groups: list[RolloutGroup], report: StepReport) -> None:
        """Settles the batch, then counts the step, which may raise: trained groups must not be trained again.

        Groups that did not make a step fail stay ready; without any optimizer step so do all that did not fail.

        Raises:
            RunFailedError: see `Settlement.count_step`.
        """
        ready, progress = self.reader.ready, self._progress
        if self._config.mode == "asynchronous":
            share = progress.passed.count / (progress.passed.count + len(groups))
            progress.skipped_share = (progress.skipped_share + share) / 2
        self._settlement.mark_dead({index: ready[index] for index in report.failed}, report.failed)
        self._count("dead", *(ready[index].group for index in report.failed))
        for index, reason in report.failed.items():
            self.on_ended("dead", index, ready[index].group, ready[index].received_s, reason)
        settled = [group for group in groups if report.settles(group.index) and group.index not in report.failed]
        if report.counts_as_update:
            self._settlement.settle_batch(settled, report)
            for outcome, teaches in (("trained", True), ("skipped", False)):
                self._count(outcome, *(group for group in settled if report.teaches(group.index) == teaches))
            progress.num_batches += 1
        for index in (*report.failed, *(group.index for group in settled)):
            del ready[index]
        self._settlement.count_step(None if report.counts_as_update else report.skipped_reason)

    @property
    def credit(self) -> int:
        """The most groups that may be open now."""
        return self._releaser.credit

    def release(self) -> None:
        """Releases as many indexes as the credit allows, first those to be sampled again."""
        self._releaser.release(self.lag_of.current)

    def reconcile(self) -> None:
        """Releases indexes again that Redis has lost, then others as the credit allows."""
        self._releaser.reconcile(self.lag_of)
        self._settle_refused()
        self.release()

    def num_open_prompts(self) -> int:
        return self._releaser.num_open_prompts()

    def _settle_refused(self) -> None:
        """Settles refused records as dead, except groups that quarantined producers sampled."""
        taken = self.reader.take_refused()
        self._withhold_refused([record for record in taken if self.quarantine.holds(record.samplers)])
        refused = [record for record in taken if not self.quarantine.holds(record.samplers)]
        for record in refused:
            self._count_refused(record, "dead")
        if self._keeps_record:
            self.died += [record for record in refused if record.index is not None]
        self._settlement.settle_refused(refused)

    @property
    def _room_to_skip(self) -> int:
        """Groups without variance that the batch being filled may still skip."""
        return self._config.max_skipped - self._progress.passed.count

    @property
    def _waits_for_all(self) -> bool:
        """Synchronous mode decides which groups to skip once no group is in flight, so that a run is reproducible."""
        num_away = self.ledger.num_open - len(self.ledger.postponed) - self.num_ready
        return self._config.mode == "synchronous" and self._room_to_skip > 0 and num_away > 0

    def _pass_over(self) -> None:
        """Settles ready groups without reward variance as skipped, if the batch is to have others: each makes room for
        another group."""
        if self._room_to_skip <= 0 or self._waits_for_all:
            return
        ready = self.reader.ready
        flat = [index for index, each in ready.items() if not has_variance(each.group, self._config.advantage)]
        for index in (sorted(flat) if self._config.mode == "synchronous" else flat)[: self._room_to_skip]:
            _, group, received_s = ready.pop(index)
            self.on_ended("skipped", index, group, received_s, "")
            self._settlement.pass_over(group)
            self._count("skipped", group)
            self._progress.passed.add(group)
            if self._keeps_record:
                self.died.append(Refused(index, PASSED_OVER, encode_group(group), producer=group.producer_id))

    def _withhold(self) -> None:
        """Postpones ready groups that a quarantined producer sampled: they are sampled again."""
        ready = self.reader.ready
        held = [index for index, each in ready.items() if self.quarantine.holds(each.group.samplers)]
        for index in held:
            self._count_again(ready.pop(index), "quarantined")
        self._releaser.postpone(held, "quarantined")

    def _withhold_refused(self, records: list[Refused]) -> None:
        """Does the same as `_withhold` for groups that were refused for their rows."""
        held = {record.index: record for record in records if record.index is not None}
        for index, record in held.items():
            if self._is_first(index, record.entry_id):
                self._count_refused(record, "quarantined")
        self._releaser.postpone(held, "quarantined")

    def _postpone_stale(self) -> None:
        """Postpones groups whose tokens would all be masked for their lag, and those with tokens whose policy is needed
        and gone: a resume may leave some."""
        ready = self.reader.ready
        stale = [index for index, each in ready.items() if is_stale(each.group, self.lag_of, self._oldest_lag)]
        if self._is_kept is not None and (gone := self._gone_policies()):
            lost = [index for index, each in ready.items() if gone & group_versions(each.group)]
            log.warning(
                "%d groups are sampled again: policies %s, which sampled them, are gone", len(lost), sorted(gone)
            )
            stale = [*{*stale, *lost}]
        for index in stale:
            self._count_again(ready.pop(index), "stale")
        self._releaser.postpone(stale, "stale")

    def _gone_policies(self) -> set[int]:
        """Returns the older policies of tokens to train on in ready groups that are not kept."""
        lag, is_kept = known_lags(self.lag_of), self._is_kept
        versions = {version for each in self.reader.ready.values() for version in group_versions(each.group)}
        return {v for v in versions if 0 < (lag(v) or 0) <= self._oldest_lag and is_kept is not None and not is_kept(v)}

    def _count(self, outcome: str, *groups: RolloutGroup) -> None:
        lag = known_lags(self.lag_of)
        for group in groups:
            masked = masked_tokens(group, lag, self._oldest_lag) if outcome in ("trained", "skipped") else ()
            self.ledger.attrition.add(group.environment, outcome, group, self._config.group_size, masked)

    def _count_again(self, ready: ReadyGroup, outcome: str) -> None:
        if self._is_first(ready.group.index, ready.entry_id):
            self._count(outcome, ready.group)
            self.on_ended(outcome, ready.group.index, ready.group, ready.received_s, "")

    def _is_first(self, index: int, entry_id: bytes) -> bool:
        """Returns True once for a group that is to be sampled again, however often its entry is read again after a
        resume or a restart of Redis."""
        counted = self.ledger.stale.get(index)
        if counted is not None and entry_key(counted.encode()) >= entry_key(entry_id):
            return False
        self.ledger.stale[index] = entry_id.decode()
        return True

    def _count_refused(self, record: Refused, outcome: str) -> None:
        if record.index is None:
            return
        task, group = self.ledger.tasks.get(record.index), readable(record.payload)
        self.on_ended(outcome, record.index, group, clock.steady_s(), record.reason)
        self.ledger.attrition.add(
            "" if task is None else task.environment,
            outcome,
            group,
            self._config.group_size,
            is_too_long=died_of_length(record.reason),
        )
