"""Agents' rollouts and their groups, from the opening to the outcome."""

import asyncio
import logging
import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from penstock.producers.endpoint.call_ledger import Call, CallLedger, digest
from penstock.producers.endpoint.recording import (
    Acted,
    Begun,
    Ended,
    Entry,
    KeptCall,
    Opened,
    RunningCall,
    Unread,
    encode,
)
from penstock.producers.endpoint.spans import rollout_spans
from penstock.producers.observe.running_loop import running_s
from penstock.producers.stream.in_flight import Claim, Dead
from penstock.producers.stream.journals import Journal
from penstock.schemas.images import MAX_IMAGES_BYTES
from penstock.schemas.keys import number_in
from penstock.schemas.process import clock
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import (
    ABANDONED,
    MAX_ENTRY_BYTES,
    TOO_LARGE,
    EngineFingerprint,
    Rollout,
    RolloutGroup,
    SamplingSettings,
    encode_entry,
    one_line,
    pack_ids,
)
from penstock.schemas.segments import CallError, segments
from penstock.schemas.spans import Value

log = logging.getLogger(__name__)

Json = dict[str, Any]

NO_TOKEN = "nothing_sampled"
NO_RECORD = "invalid_record"


@dataclass(slots=True, eq=False)
class AgentRollout:
    """An agent's conversations about one task, from the opening to the end. Whatever changes its state is entered in
    its group's journal.

    reason: why it died; empty while it is open and once it is finished. error: the environment's, if it died of one.
    running: the tasks that answer its calls, and of a conversation inside the producer the one that holds it.
    calls: those being answered, by their number.
    earlier: the calls that an earlier holder had begun and no request has repeated yet, the oldest first. Each is
        answered once as it was answered before, and one that was running is continued.
    earlier_acts: the actions of an earlier holder that its conversation has not come to yet.
    state: of its conversation after the last action.
    is_waiting: True until its conversation, held inside the producer, starts again here.
    last_seen: monotonic seconds of its agent's last request; infinite before the first one, while the agent sets up.
    finished: its trained segments and its reward; None unless it is finished. files: the images of its calls.
    is_abandoned: it died because its agent fell silent.
    opened_s: seconds since the epoch, at this producer.
    """

    id: str
    group: "AgentGroup"
    ledger: CallLedger = field(default_factory=CallLedger)
    running: set[asyncio.Task] = field(default_factory=set)
    calls: dict[int, RunningCall] = field(default_factory=dict)
    earlier: list[KeptCall] = field(default_factory=list)
    earlier_acts: list[Acted] = field(default_factory=list)
    state: bytes | None = None
    is_waiting: bool = False
    last_seen: float = math.inf
    finished: Rollout | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    reason: str = ""
    error: BaseException | None = None
    is_abandoned: bool = False
    opened_s: float = field(default_factory=clock.steady_s)

    @property
    def is_open(self) -> bool:
        return self.finished is None and not self.reason

    @property
    def reward(self) -> Reward | None:
        return None if self.finished is None else self.finished.reward

    @property
    def num_sampled(self) -> int:
        return self.ledger.num_sampled if self.finished is None else self.finished.num_sampled_tokens

    @property
    def place(self) -> int:
        """Its place in the group."""
        return self.group.rollouts.index(self)

    def is_idle(self, now: float, timeout_s: float) -> bool:
        return not self.running and now - self.last_seen > timeout_s

    def begin_call(self, request: bytes = b"", *, is_retry: bool = False) -> int:
        """See `CallLedger.begin`."""
        known = set(self.ledger.unread)
        number = self.ledger.begin(request, is_retry=is_retry)
        for unread in self.ledger.unread - known:
            self.group.enter(Unread(self.place, unread))
        return number

    def take_earlier(self, request: bytes, prompt_ids: Sequence[int]) -> KeptCall | None:
        """Removes and returns the oldest earlier call of this request, if the engine was given the same ids for it."""
        found = next((call for call in self.earlier if call.request == request), None) if request else None
        if found is None or found.prompt != digest(pack_ids(prompt_ids)):
            return None
        self.earlier.remove(found)
        return found

    def take_earlier_act(self) -> Acted | None:
        """Removes and returns the next action of an earlier holder; `state` is what it left."""
        if not self.earlier_acts:
            return None
        act = self.earlier_acts.pop(0)
        self.state = self.state if act.state is None else act.state
        return act

    def enter_act(self, result: bytes, state: bytes | None) -> None:
        """Enters an action that is done now. state: of the conversation afterwards."""
        self.group.enter(Acted(rollout=self.place, result=result, state=None if state == self.state else state))
        self.state = state

    def record(
        self,
        running: RunningCall,
        call: Call,
        messages: Sequence[Json],
        reply: Mapping[str, Any],
        conversation: bytes = b"",
    ) -> None:
        """Adds a call that is answered now; see `CallLedger.record`."""
        files = self.ledger.new_files(call.files)
        self.ledger.record(call, messages, reply, conversation)
        entry = running.entry(
            self.place,
            call.completion,
            is_answered=True,
            base=-1 if call.base is None else call.base.number,
            context=call.context,
            chain=call.chain,
            reply=call.reply,
            began_s=call.began_s,
            ended_s=call.ended_s,
            images=call.images,
            files=files,
        )
        self.group.enter(entry, entry.completion.num_tokens)

    def enter_running(self) -> None:
        """Enters what its running calls have sampled since the last time."""
        for call in self.calls.values():
            found = call.siblings.so_far()
            if found and found[0].num_tokens > call.num_entered:
                entry = call.entry(self.place, found[0])
                self.group.enter(entry, entry.completion.num_tokens)

    def finish(self, reward: Reward) -> str:
        """Freezes it with its reward; one that cannot be trained dies, and its siblings live on.

        Returns the problem; empty if it is finished.
        """
        reason, problem = self._freeze(reward)
        if reason:
            self.die(reason)
            return problem
        calls = self.ledger.calls
        read = tuple(call.number for call in calls if call.delivered and call.number not in self.ledger.unread)
        numbers = tuple(call.number for call in calls)
        untrained = tuple(call.number for call in calls if not call.is_trained)
        self.group.enter(Ended(rollout=self.place, reward=reward, calls=numbers, read=read, untrained=untrained))
        self._end()
        return ""

    def die(self, reason: str) -> None:
        self.reason = reason
        self.group.enter(Ended(rollout=self.place, reason=reason, is_abandoned=self.is_abandoned))
        self._end()

    def restore_end(self, ended: Ended) -> None:
        """Ends it as its journal says. Raises ValueError if it cannot be finished again."""
        self.reason, self.is_abandoned = ended.reason, ended.is_abandoned
        if ended.reward is not None and (problem := self._freeze(ended.reward)[1]):
            raise ValueError(problem)
        self._end()

    def let_go(self) -> None:
        """Cancels its calls here; it stays open, and another producer continues it."""
        for task in self.running:
            task.cancel()

    def _freeze(self, reward: Reward) -> tuple[str, str]:
        """Makes it finished; returns a reason and a problem if it cannot be trained, else two empty strings."""
        try:
            chains, _ = segments(self.ledger.recorded())
            finished = Rollout(segments=tuple(chain.segment for chain in chains), reward=reward)
            num_bytes = len(msgspec.msgpack.encode(finished))
            msgspec.convert(msgspec.to_builtins(reward), Reward)
        except CallError as error:
            return error.code, str(error)
        except Exception as error:  # an environment's reward may hold values that cannot be encoded
            return NO_RECORD, one_line(f"{type(error).__name__}: {error}")
        if not finished.segments:
            return NO_TOKEN, "no sampled token to train"
        if num_bytes > self.group.rollout_bytes:
            limit = self.group.rollout_bytes
            return TOO_LARGE, f"{num_bytes:,} bytes, expected at most {limit:,}, its share of a stream entry"
        self.finished, self.files = finished, self.ledger.files
        return "", ""

    def _end(self) -> None:
        self.let_go()
        group = self.group
        about: dict[str, Value] = {"rl.environment.name": group.claim.environment}
        if self.reward is not None:
            about["rl.reward.score"] = self.reward.value
        times = self.opened_s, clock.steady_s()
        group.claim.spans += rollout_spans(self.id, about, group.fingerprint, self.ledger.calls, *times, self.reason)
        self.ledger, self.earlier, self.earlier_acts, self.is_waiting = CallLedger(), [], [], False
        self.state = None


@dataclass(slots=True, eq=False, kw_only=True)
class AgentGroup:
    """The siblings of one claimed prompt. At most `size` are ever opened: one that dies leaves the group short.

    deadline_s: from the start of its first conversation to its deadline.
    sampling: the settings of its calls.
    producer_id, instance, fingerprint: of the producer that holds it.
    rollout_bytes: the largest encoded size of one rollout.
    is_kept: whether other producers may continue it from its journal.
    claimed_at: monotonic seconds, like `deadline`.
    """

    claim: Claim
    prompt: Prompt
    size: int
    deadline_s: float
    sampling: SamplingSettings
    producer_id: str
    fingerprint: EngineFingerprint
    instance: str = ""
    rollout_bytes: int = MAX_ENTRY_BYTES
    claimed_at: float = field(default_factory=running_s)
    deadline: float = math.inf
    rollouts: list[AgentRollout] = field(default_factory=list)
    is_kept: bool = False
    journal: Journal = field(init=False)
    asked: tuple[Prompt, dict[str, bytes]] = field(init=False)
    """The prompt as a record has it, and its image files."""

    def __post_init__(self) -> None:
        self.asked = self.prompt.without_files()
        self.journal = Journal(claim=self.claim, is_given_up=not self.is_kept)

    @property
    def has_place(self) -> bool:
        return len(self.rollouts) < self.size or any(rollout.is_waiting for rollout in self.rollouts)

    @property
    def is_complete(self) -> bool:
        """True if every place was taken and no rollout is open."""
        return not self.has_place and not any(rollout.is_open for rollout in self.rollouts)

    @property
    def num_finished(self) -> int:
        return sum(rollout.finished is not None for rollout in self.rollouts)

    def open(self) -> AgentRollout:
        """Returns a rollout that waits for its conversation, or a new one."""
        for rollout in self.rollouts:
            if rollout.is_waiting:
                rollout.is_waiting = False
                return rollout
        if not self.rollouts:
            self._begin()
        rollout = AgentRollout(rollout_id(self.producer_id, self.claim.index), self, self.new_ledger())
        self.rollouts.append(rollout)
        self.enter(Opened(rollout.id))
        return rollout

    def start(self) -> None:
        """Starts the time until the deadline, unless it has started."""
        self.deadline = min(self.deadline, running_s() + self.deadline_s)

    def _begin(self) -> None:
        """Starts the journal."""
        self.claim.has_begun = True
        if not self.journal.is_given_up:
            try:
                self.enter(Begun(encode_entry(self.record().finished_by(self.instance), dead=True)[0]))
            except (TypeError, ValueError, OverflowError) as error:  # a prompt's values are the user's
                self.give_up_journal(error)

    def continue_with(self, rollouts: list[AgentRollout], entries: Sequence[bytes], num_tokens: int) -> None:
        """Takes the rollouts of an earlier holder. entries: of its journal after the first, with so many tokens."""
        self.rollouts = rollouts
        self._begin()
        for entry in entries:
            self.journal.add(entry)
        self.journal.num_entered = num_tokens

    def enter(self, entry: Entry, num_tokens: int = 0) -> None:
        """Adds an entry to the journal, which is given up if it cannot be encoded. num_tokens: sampled tokens in it."""
        if not self.journal.is_given_up:
            try:
                self.journal.add(encode(entry), num_tokens)
            except (TypeError, ValueError, OverflowError) as error:  # a reward's values are the user's
                self.give_up_journal(error)

    def give_up_journal(self, why: object) -> None:
        """Leaves nothing for another producer from now on."""
        if not self.journal.is_given_up:
            log.warning("progress of %s is not kept: %s", self.claim, why)
        self.journal.give_up()

    def restart(self) -> None:
        """Forgets its rollouts and counts them as a lost try."""
        self.rollouts, self.deadline, self.claimed_at = [], math.inf, running_s()
        self.claim.num_lost_before, self.claim.sampled_by = self.claim.num_tries_lost + 1, ()
        self.journal.restart()

    def new_ledger(self) -> CallLedger:
        calls_bytes = self.rollout_bytes - self.rollout_bytes // 8  # the rest is for the reward and its parts
        route_bytes = self.fingerprint.route_bytes or 0
        ledger = CallLedger(calls_bytes, self.sampling.token_bytes + route_bytes, 4 + route_bytes)
        ledger.files |= self.asked[1]
        ledger.max_image_bytes = (MAX_IMAGES_BYTES - sum(map(len, ledger.files.values()))) // self.size
        return ledger

    def missing(self) -> str:
        """Returns why siblings are missing; empty for a whole group."""
        reasons = Counter(rollout.reason for rollout in self.rollouts if rollout.reason)
        if self.has_place:
            reasons["never opened"] = self.size - len(self.rollouts)
        return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))

    def outcome(self) -> RolloutGroup | Dead:
        """Returns the group of the finished rollouts; dead without any."""
        finished = [one.finished for one in self.rollouts if one.finished is not None]
        group = self.record(finished)
        if finished:
            return group
        if all(rollout.is_abandoned for rollout in self.rollouts):
            return Dead(f"{ABANDONED}: nothing was heard of the agents: {self.missing()}", group=group)
        return Dead(f"agents: no rollout of {self.size} finished: {self.missing()}", group=group)

    def record(self, rollouts: Sequence[Rollout] = ()) -> RolloutGroup:
        """Returns the group as it is now, with these rollouts."""
        prompt, files = self.asked
        places = (place for rollout in rollouts for one in rollout.segments for place in one.images or ())
        known = {digest: data for one in self.rollouts for digest, data in one.files.items()}
        files = files | {place.digest: known[place.digest] for place in places if place.digest not in files}
        return RolloutGroup(
            index=self.claim.index if self.claim.evaluation_id is None else 0,
            prompt=prompt,
            rollouts=tuple(rollouts),
            producer_id=self.producer_id,
            fingerprint=self.fingerprint,
            sampling=self.sampling,
            timings=self.claim.timings(clock.steady_s()),
            evaluation_id=self.claim.evaluation_id,
            missing=one_line(self.missing()),
            environment=self.claim.environment,
            task=self.claim.task,
            num_tries_lost=self.claim.num_tries_lost,
            sampled_by=self.claim.sampled_by,
            images=files or msgspec.UNSET,
        )


def rollout_id(producer_id: str, index: int) -> str:
    """Returns a rollout's id, which names its producer and its index and needs no escaping in a URL's path."""
    safe = quote(producer_id, safe="").replace("~", "%7E").replace("%", "~")
    return f"{safe}.{index}.{secrets.token_hex(8)}"


def origin_of(rollout_id: str) -> tuple[str, int] | None:
    """Returns the producer that opened a rollout, and its index; None for an id that `rollout_id` cannot have made."""
    safe, _, rest = rollout_id.rpartition(".")[0].rpartition(".")
    index = number_in(rest.encode())
    return (unquote(safe.replace("~", "%")), index) if safe and index is not None else None
