"""The groups that agents work on: opens rollouts on credit, and hands groups of finished ones to the writer."""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection

import msgspec

from penstock.producers.endpoint.adoption import adopt
from penstock.producers.endpoint.chat.errors import has_ended, is_moving, try_again
from penstock.producers.endpoint.groups import AgentGroup, AgentRollout
from penstock.producers.interfaces import Engine
from penstock.producers.observe.running_loop import running_s
from penstock.producers.rollout.adoption import UnusableProgressError
from penstock.producers.rollout.run_environments import RunEnvironments, pose
from penstock.producers.rollout.teacher import TeacherError
from penstock.producers.stream.claims import Claims
from penstock.producers.stream.context import ProducerContext, Teacher
from penstock.producers.stream.in_flight import Claim, Dead, DeadRollout, InFlightTable
from penstock.producers.stream.journals import JournalHolder, Journals
from penstock.producers.stream.progress_store import LARGEST_SHARE, ProgressStore
from penstock.producers.stream.writer import Writer
from penstock.producers.weights.follower import WeightFollower
from penstock.schemas.config import EndpointConfig
from penstock.schemas.process.cancellation import cancel_and_wait, gather_or_cancel
from penstock.schemas.process.plugins import ends_caller
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import MAX_ENTRY_BYTES, NOT_FINISHED, RolloutGroup

log = logging.getLogger(__name__)

CLAIM_S = 5.0
"""How long an opening waits for a claim; a later one serves the next opening."""
ENDED_KEPT = 4096
"""How many ended rollouts are remembered, to tell them from unknown ones."""
GROUP_BYTES = 64 * 1024
"""The part of a group's entry reserved for what is neither prompt nor rollout."""
TEACHER_S = 3.0
"""How long a stopping producer waits for a teacher's logprobs of finished groups."""
SAVE_S = 2.0
"""How long an answer waits for Redis to store it."""
LEAST_SHORT_GROUP = 2
"""The fewest finished rollouts with which a stopping producer appends a group whose progress is not kept: one reward
alone has no baseline."""


class Agents:
    """The groups that agents have open on this producer.

    claims: from the prompts stream alone, one at a time.
    pass_on: takes a claim that is no conversation, in a run in which others are.
    """

    def __init__(
        self,
        context: ProducerContext,
        endpoint: EndpointConfig,
        *,
        environments: RunEnvironments,
        table: InFlightTable,
        weights: WeightFollower,
        writer: Writer,
        progress: ProgressStore,
        engine: Engine,
        pass_on: Callable[[Claim], None],
    ) -> None:
        config = context.config
        self._context = context
        self._config = config
        self._endpoint = endpoint
        # Agents may keep a group open for long: one place stays free for evaluations.
        any_evaluated = any(num_prompts != 0 for num_prompts in config.num_evaluation_prompts.values())
        self._reserve = 1 if config.producers.groups_in_flight > 1 and any_evaluated else 0
        self._environments = environments
        self.claims = Claims(
            context.connection,
            context.keys,
            context.producer_id,
            table,
            config.producers,
            (context.keys.prompts,),
            one_at_a_time=True,
        )
        self._table = table
        self._weights = weights
        self._writer = writer
        self._progress = progress
        self.journals = Journals(progress, JournalHolder(context.instance, context.producer_id))
        self._with_teacher: set[asyncio.Task[None]] = set()
        """Each adds the teacher's logprobs to a group and appends it."""
        self._engine = engine
        self._pass_on = pass_on
        self._metrics = context.metrics
        self._groups: list[AgentGroup] = []
        self._open: dict[str, AgentRollout] = {}
        self._metrics.agent_rollouts_open.set_function(lambda: len(self._open))
        self._ended: OrderedDict[str, tuple[Reward | None, str]] = OrderedDict()
        self._claiming: asyncio.Task[bool] | None = None
        self._changed = asyncio.Event()
        self._is_closing = False

    @property
    def has_room(self) -> bool:
        return self._table.groups_free > self._reserve

    async def wait_for_room(self) -> None:
        """Waits until one more group fits next to the place reserved for evaluations."""
        await self._table.wait_for_room(self._reserve + 1)

    async def open(self) -> AgentRollout:
        """Opens a rollout in the oldest group with a free place, else in a newly claimed group.

        Raises:
            ApiError: 429 without credit or room, 503 while this producer stops.
        """
        while (group := self._with_place()) is None or self._is_closing:
            if self._is_closing:
                raise try_again(503, "this producer is stopping; open the rollout on another", "stopping")
            # Other openings may wait for the same claim and fill its places first.
            if not await self.claim():
                raise try_again(429, "no prompt is available: the run's credit is in use", "no_credit")
        rollout = group.open()
        self._open[rollout.id] = rollout
        return rollout

    def find(self, rollout_id: str) -> AgentRollout | None:
        """Returns the open rollout of this id; None if it was never opened here.

        Raises:
            ApiError: 410, it has ended.
        """
        rollout = self._open.get(rollout_id)
        if rollout is None and rollout_id in self._ended:
            raise has_ended(rollout_id, self._ended[rollout_id][1])
        return rollout

    def holds(self, index: int) -> bool:
        """Returns whether the group of this index is here."""
        return any(group.claim.index == index for group in self._groups)

    async def save(self, group: AgentGroup) -> None:
        """Saves what has changed in a group before an agent relies on it. If Redis does not answer, the agent continues
        all the same: what it was told is lost if this producer is killed.

        Raises:
            ApiError: 503, another producer continues the group, and does not know what has changed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAVE_S):
                await self.journals.append(group.journal)
        self._check_held(group)

    async def save_all(self) -> float:
        """Saves what has changed in every group, with what running calls have sampled. Returns the processor seconds
        that it took to ask the engine for that."""
        began = time.thread_time()
        for group in self._groups:
            for rollout in group.rollouts:
                rollout.enter_running()
        took_s = time.thread_time() - began
        for group in list(self._groups):
            await self.journals.append(group.journal)
        return took_s

    async def keep_saved(self) -> None:
        """Waits half of `progress_s`, or longer if saving would take more than its share of the processor's time, and
        saves; runs until cancelled."""
        took_s = 0.0
        while True:
            await asyncio.sleep(max(self._config.producers.progress_s / 2, took_s / LARGEST_SHARE))
            took_s = (took_s + await self.save_all()) / 2

    async def check_held(self, group: AgentGroup) -> None:
        """Raises ApiError 503 if another producer continues the group."""
        await self.journals.find_moved([group.journal])
        self._check_held(group)

    def _check_held(self, group: AgentGroup) -> None:
        self._leave_moved()
        if group.journal.has_moved:
            raise is_moving(f"of {group.claim}")

    def _leave_moved(self) -> None:
        """Lets go of the groups that others go on with, while this producer was taken for dead."""
        for group in list(self._groups):
            if group.journal.has_moved:
                log.warning("%s continues on another producer, which took this one for dead", group.claim)
                self._leave(group)
                self._table.remove(group.claim)

    def leave(self, claims: Collection[Claim]) -> None:
        """Ends what runs here for these claims; the caller removes them from the table."""
        for group in [group for group in self._groups if group.claim in claims]:
            self._leave(group)

    def _leave(self, group: AgentGroup) -> None:
        """Ends what runs here for a group that another producer, or nobody, continues."""
        group.journal.has_moved = True  # what would be saved now lacks the calls that end here
        for rollout in group.rollouts:
            self._open.pop(rollout.id, None)
            self._ended.pop(rollout.id, None)
            rollout.let_go()
        self._groups.remove(group)
        self._changed.set()

    def finish(self, rollout: AgentRollout, reward: Reward) -> str:
        """Freezes a rollout with its reward; the last of a group completes the group. One that cannot be trained dies.

        Returns the problem; empty if it is finished.
        """
        num_sampled = rollout.ledger.num_sampled
        if problem := rollout.finish(reward):
            log.warning("rollout %s of %s cannot be finished: %s", rollout.id, rollout.group.claim, problem)
        self._metrics.agent_tokens.inc(num_sampled)
        self._end(rollout)
        return problem

    def is_finished_with(self, rollout_id: str, reward: Reward) -> bool:
        """Returns whether the rollout has ended with this reward: a client repeats a finish whose answer was lost."""
        return self._ended.get(rollout_id, (None, ""))[0] == reward

    async def watch(self) -> None:
        """Waits for rollouts to fall idle, for groups to reach their deadline, and for groups of outside agents whose
        producer is gone; runs until cancelled."""
        pause_s = min(1.0, self._endpoint.idle_timeout_s / 4, self._endpoint.group_deadline_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            now = running_s()  # first: a producer that is suspended below must not find its agents idle
            await self.journals.find_moved([group.journal for group in self._groups])
            self._leave_moved()
            self.end_overdue(now)
            await self._hand_back_unopened(now)
            if not self._environments.any_converse:
                await self._take_lost()

    def end_overdue(self, now: float) -> None:
        """Gives up silent rollouts, and closes groups past their deadline. now: as `running_s`."""
        for rollout in list(self._open.values()):
            if rollout.is_idle(now, self._endpoint.idle_timeout_s):
                rollout.is_abandoned = True
                self.give_up(rollout, f"idle for {self._endpoint.idle_timeout_s:g} s (endpoint.idle_timeout_s)")
        for group in list(self._groups):
            if now > group.deadline:
                reason = f"{NOT_FINISHED} {self._endpoint.group_deadline_s:g} s (endpoint.group_deadline_s)"
                self._close_group(group, reason)

    async def _hand_back_unopened(self, now: float) -> None:
        """Hands back prompts whose clients are gone before they opened a rollout."""
        for group in list(self._groups):
            if not group.rollouts and now - group.claimed_at > self._endpoint.idle_timeout_s:
                self._groups.remove(group)
                await self.claims.give_back(group.claim)

    async def _take_lost(self) -> None:
        """Takes over groups that others have left: their agents wait, and may never open a rollout here."""
        while self.has_room and not self._is_closing and self._weights.behind <= self._config.lag_bound:
            if not (claims := await self.claims.take_lost()):
                return
            for claim in claims:
                await self._pose(claim)

    async def drain(self) -> None:
        """Takes no more openings; waits until no rollout is open and the teacher has scored what is finished."""
        self._is_closing = True
        while self._open:
            self._changed.clear()
            await self._changed.wait()
        while self._with_teacher:
            await asyncio.wait(self._with_teacher)

    async def close(self, *, append: bool) -> None:
        """Ends everything that is open. Groups whose progress is kept are left to other producers; with `append`,
        others with enough finished rollouts are appended. Claims of the rest stay in the table, to be handed back."""
        self._is_closing = True
        if self._claiming is not None:
            await cancel_and_wait([self._claiming])
        for group in list(self._groups):
            if group.claim.has_progress:
                self._leave(group)
            elif append and group.num_finished >= LEAST_SHORT_GROUP:
                self._close_group(group, "producer stopped")
            else:
                for rollout in group.rollouts:
                    if rollout.is_open:
                        self.give_up(rollout, "producer stopped", complete=False)
                self._groups.remove(group)
        if append and self._with_teacher:
            await asyncio.wait(self._with_teacher, timeout=TEACHER_S)
        await cancel_and_wait(self._with_teacher)

    def _with_place(self) -> AgentGroup | None:
        return next((group for group in self._groups if group.has_place), None)

    async def claim(self) -> bool:
        """Claims a group, or waits for the claim in progress, which outlives the opening that began it. Returns whether
        there was a prompt.

        Raises:
            ApiError: 429, the weights are too old or there is no room.
        """
        if self._claiming is None or self._claiming.done():
            if self._weights.behind > self._config.lag_bound:
                raise try_again(429, "this producer's weights are behind the run's", "weights_behind")
            if not self.has_room:
                raise try_again(429, "this producer has as many groups as it takes at once", "no_room")
            self._claiming = asyncio.create_task(self._take())
        await asyncio.wait({self._claiming}, timeout=CLAIM_S)
        return self._claiming.done() and not self._claiming.cancelled() and self._claiming.result()

    async def _take(self) -> bool:
        """Claims until a group has a free place; returns False if no prompt or no room is left."""
        while self.has_room and (claims := await self.claims.take()):
            for claim in claims:
                await self._pose(claim)
            if self._with_place() is not None:
                return True
        return False

    async def _pose(self, claim: Claim) -> None:
        """Begins a claim's group in a task of its own, which the environment may cancel."""
        try:
            await gather_or_cancel([self._begin(claim)])
        except asyncio.CancelledError as error:
            if ends_caller(error):
                raise
            self._writer.put(claim, Dead.of("prompt", error))

    async def _begin(self, claim: Claim) -> None:
        max_attempts = self._config.producers.max_attempts
        if claim.attempt > max_attempts:
            claim.has_progress = True  # it may be what kills its producers
            self._writer.put(claim, Dead(f"attempts: handed out {max_attempts} times without a result"))
            return
        try:
            source = self._environments.named(claim.environment)
            if self._environments.any_converse and not source.converses:
                self._pass_on(claim)
                return
            prompt = pose(source.environment, claim.task)
            rollout_bytes = self._rollout_bytes(prompt)
        except BaseException as error:  # the environment is the user's
            if ends_caller(error):
                raise
            self._writer.put(claim, Dead.of("prompt", error))
            return
        group = AgentGroup(
            claim=claim,
            prompt=prompt,
            size=self._config.group_size,
            deadline_s=self._endpoint.group_deadline_s,
            sampling=source.sampling,
            producer_id=self._context.producer_id,
            fingerprint=self._engine.fingerprint,
            instance=self._context.instance,
            rollout_bytes=rollout_bytes,
            is_kept=self._config.producers.progress_s > 0,
        )
        claim.converses = True
        if entries := await self.journals.read(claim):
            await self._adopt(group, entries, replay=source.converses)
        if claim.has_progress and not group.rollouts:
            await self._progress.forget(claim)
        self._groups.append(group)
        for rollout in group.rollouts:
            if not rollout.is_open:
                self._ended[rollout.id] = rollout.reward, rollout.reason
            elif not rollout.is_waiting:
                self._open[rollout.id] = rollout
        if group.is_complete:
            self._hand_over(group)
        else:
            await self.save(group)

    async def _adopt(self, group: AgentGroup, entries: list[bytes], *, replay: bool) -> None:
        claim = group.claim
        try:
            num_tokens = adopt(
                group, entries, held=self._engine.policy_version, lag_bound=self._config.lag_bound, replay=replay
            )
        except UnusableProgressError as error:
            self._metrics.progress_failures.labels("record").inc()
            log.warning("%s starts again, its progress cannot be used: %s", claim, error)
            return
        if await self._progress.is_quarantined(claim, claim.sampled_by, claim.sampled_by[-1]):
            group.restart()
            return
        self._metrics.progress_tokens.labels("adopted").inc(num_tokens)
        num_ended = sum(not rollout.is_open for rollout in group.rollouts)
        log.info(
            "%s goes on from %d tokens, %d of %d rollouts ended", claim, num_tokens, num_ended, len(group.rollouts)
        )

    def restart(self, group: AgentGroup) -> None:
        """Starts a group again after one of its conversations did not repeat the calls it had made before. To restart
        that conversation alone would favor short ones, because those that had ended would be kept."""
        log.warning("%s starts again: a repeated conversation has diverged from its recorded calls", group.claim)
        for one in group.rollouts:
            self._metrics.progress_tokens.labels("ignored").inc(one.num_sampled)
            self._open.pop(one.id, None)
            if one.is_open:
                one.die("restarted")
        group.restart()
        self._changed.set()

    def _rollout_bytes(self, prompt: Prompt) -> int:
        """Returns the share of its group's stream entry that each rollout may take.

        Raises:
            Exception: the entry cannot hold the prompt.
        """
        num_bytes = len(msgspec.msgpack.encode(prompt.without_files()[0]))
        left = MAX_ENTRY_BYTES - GROUP_BYTES - num_bytes
        if left < self._config.group_size:
            raise ValueError(f"{num_bytes:,} bytes encoded, which leave no room for rollouts in a stream entry")
        # A teacher adds 4 bytes to each sampled token's 8 or more.
        return left // self._config.group_size * 2 // (2 if self._context.teacher is None else 3)

    def give_up(self, rollout: AgentRollout, reason: str, *, complete: bool = True) -> None:
        """Ends a rollout without a reward. complete: whether this may complete its group."""
        log.warning("rollout %s of %s: %s", rollout.id, rollout.group.claim, reason, exc_info=rollout.error)
        self._metrics.agent_tokens.inc(rollout.ledger.num_sampled)
        rollout.die(reason)
        self._end(rollout, complete=complete)

    def _end(self, rollout: AgentRollout, *, complete: bool = True) -> None:
        """Records that a rollout is no longer open."""
        self._open.pop(rollout.id, None)
        self._ended[rollout.id] = rollout.reward, rollout.reason
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)
        self._metrics.agent_rollouts.labels("dead" if rollout.reason else "finished").inc()
        if rollout.reason:
            self._writer.put_letter(rollout.group.claim, DeadRollout(rollout.id, rollout.reason, rollout.error))
        if complete and rollout.group.is_complete:
            self._hand_over(rollout.group)
        self._changed.set()

    def _close_group(self, group: AgentGroup, reason: str) -> None:
        """Ends what is open in a group and hands the group over."""
        for rollout in group.rollouts:
            if rollout.is_open:
                rollout.is_abandoned = not (rollout.running or rollout.ledger.num_begun)
                self.give_up(rollout, reason, complete=False)
        self._hand_over(group)

    def _hand_over(self, group: AgentGroup) -> None:
        self._groups.remove(group)
        try:
            outcome = group.outcome()
            if self._context.teacher is None or isinstance(outcome, Dead):
                self._append(group.claim, outcome)
            else:
                scoring = asyncio.create_task(self._append_scored(group.claim, outcome, self._context.teacher))
                self._with_teacher.add(scoring)
                scoring.add_done_callback(self._with_teacher.discard)
        except Exception as error:  # as in the producer's loop: one group never ends the others, nor keeps its claim
            self._writer.put(group.claim, Dead.of("producer", error))
        if missing := group.missing():
            log.warning("%s is short: %s", group.claim, missing)
            self._context.events.write(
                "short_group", index=group.claim.index, finished=group.num_finished, missing=missing
            )

    async def _append_scored(self, claim: Claim, group: RolloutGroup, teacher: Teacher) -> None:
        try:
            self._append(claim, await teacher(group))
        except TeacherError as error:
            self._append(claim, Dead(f"teacher: {error}", error.__cause__, group))
        except Exception as error:
            self._append(claim, Dead.of("producer", error, group))

    def _append(self, claim: Claim, outcome: RolloutGroup | Dead) -> None:
        if self._writer.put(claim, outcome) and not isinstance(outcome, Dead):
            self._metrics.agent_tokens_delivered.inc(sum(one.num_sampled_tokens for one in outcome.rollouts))
