"""Agents' rollouts and their groups, from the opening to the outcome."""

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import quote, unquote

import msgspec

from penstock.producers.endpoint.call_ledger import CallLedger
from penstock.producers.endpoint.recording import (
    KeptRollout,
    Recorded,
    RunningCall,
    answered_part,
    encode,
    running_part,
)
from penstock.producers.stream.in_flight import Claim, Dead, ProgressPart
from penstock.schemas.keys import number_in
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import (
    ABANDONED,
    MAX_ENTRY_BYTES,
    TOO_LARGE,
    EngineFingerprint,
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Timings,
    encode_group,
    one_line,
)
from penstock.schemas.segments import CallError, segments

NO_TOKEN = "nothing_sampled"
NO_RECORD = "invalid_record"


@dataclass(slots=True, eq=False)
class AgentRollout:
    """An agent's conversations about one task, from the opening to the end.

    reason: why it died; empty while it is open and once it is finished. error: the environment's, if it died of one.
    running: the tasks that answer its calls, and of a conversation inside the producer the one that holds it.
    calls: those being answered, by their number.
    recorded: the calls that an earlier holder had begun, for repeated requests.
    is_waiting: True until its conversation, held inside the producer, starts again here.
    finished: its trained segments and its reward; None unless it is finished.
    is_abandoned: it died because its agent fell silent.
    """

    id: str
    group: "AgentGroup"
    ledger: CallLedger = field(default_factory=CallLedger)
    running: set[asyncio.Task] = field(default_factory=set)
    calls: dict[int, RunningCall] = field(default_factory=dict)
    recorded: Recorded = field(default_factory=Recorded)
    is_waiting: bool = False
    last_seen: float = field(default_factory=time.monotonic)
    finished: Rollout | None = None
    reason: str = ""
    error: BaseException | None = None
    is_abandoned: bool = False

    @property
    def is_open(self) -> bool:
        return self.finished is None and not self.reason

    @property
    def reward(self) -> Reward | None:
        return None if self.finished is None else self.finished.reward

    @property
    def num_sampled(self) -> int:
        return self.ledger.num_sampled if self.finished is None else self.finished.num_sampled_tokens

    def is_idle(self, now: float, timeout_s: float) -> bool:
        return not self.running and now - self.last_seen > timeout_s

    def finish(self, reward: Reward) -> str:
        """Freezes it with its reward; one that cannot be trained dies, and its siblings live on.

        Returns the problem; empty if it is finished.
        """
        try:
            chains, _ = segments(self.ledger.recorded())
            finished = Rollout(segments=tuple(chain.segment for chain in chains), reward=reward)
            num_bytes = len(msgspec.msgpack.encode(finished))
            msgspec.convert(msgspec.to_builtins(reward), Reward)
        except CallError as error:
            self.die(error.code)
            return str(error)
        except Exception as error:  # an environment's reward may hold values that cannot be encoded
            self.die(NO_RECORD)
            return one_line(f"{type(error).__name__}: {error}")
        if not finished.segments:
            self.die(NO_TOKEN)
            return "no sampled token to train"
        if num_bytes > self.group.rollout_bytes:
            self.die(TOO_LARGE)
            return f"{num_bytes:,} bytes, expected at most {self.group.rollout_bytes:,}, its share of a stream entry"
        self.finished = finished
        self._end()
        return ""

    def die(self, reason: str) -> None:
        self.reason = reason
        self._end()

    def let_go(self) -> None:
        """Cancels its calls here; it stays open, and another producer continues it."""
        for task in self.running:
            task.cancel()

    def parts(self, n: int, running: bool) -> Iterator[ProgressPart]:
        """See `Claim.parts`; of the `n`-th rollout of its group."""
        kept = KeptRollout(
            id=self.id,
            unread=tuple(sorted(self.ledger.unread)),
            reason=self.reason,
            is_abandoned=self.is_abandoned,
            finished=self.finished,
        )
        num_tokens = 0 if self.finished is None else self.finished.num_sampled_tokens
        yield ProgressPart(f"rollouts.{n}", (self.is_open, kept.unread), num_tokens, partial(encode, kept))
        if not self.is_open:
            return  # calls may be ending still
        for place, left in self.recorded.left.items():
            yield ProgressPart(f"left.{n}.{place}", None, left.completion.num_tokens, partial(encode, left))
        for call in self.ledger.calls:
            yield answered_part(f"calls.{n}.{call.number}", call)
        for number, one in self.calls.items():
            yield running_part(f"calls.{n}.{number}", one, grows=running)

    def _end(self) -> None:
        self.let_go()
        self.ledger, self.recorded, self.is_waiting = CallLedger(), Recorded(), False


@dataclass(slots=True, eq=False, kw_only=True)
class AgentGroup:
    """The siblings of one claimed prompt. At most `size` are ever opened: one that dies leaves the group short.

    deadline_s: from its first opening to its deadline.
    sampling: the settings of its calls.
    producer_id, instance, fingerprint: of the producer that holds it.
    rollout_bytes: the largest encoded size of one rollout.
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
    claimed_at: float = field(default_factory=time.monotonic)
    deadline: float = math.inf
    rollouts: list[AgentRollout] = field(default_factory=list)

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
                rollout.is_waiting, rollout.last_seen = False, time.monotonic()
                return rollout
        if not self.rollouts:
            self.begin()
        rollout = AgentRollout(rollout_id(self.producer_id, self.claim.index), self, self.new_ledger())
        self.rollouts.append(rollout)
        return rollout

    def begin(self) -> None:
        """Starts the time until the deadline."""
        self.deadline = time.monotonic() + self.deadline_s
        self.claim.has_begun = True

    def restart(self) -> None:
        """Forgets its rollouts and counts them as a lost try."""
        self.rollouts, self.deadline, self.claimed_at = [], math.inf, time.monotonic()
        self.claim.num_lost_before, self.claim.sampled_by = self.claim.num_tries_lost + 1, ()

    def new_ledger(self) -> CallLedger:
        calls_bytes = self.rollout_bytes - self.rollout_bytes // 8  # the rest is for the reward and its parts
        return CallLedger(calls_bytes, self.sampling.token_bytes)

    def parts(self, running: bool) -> Iterator[ProgressPart]:
        """See `Claim.parts`; none before its first rollout."""
        if self.rollouts:
            yield ProgressPart(
                "group", encode=lambda: encode_group(self.record().finished_by(self.instance), dead=True)
            )
        for n, rollout in enumerate(self.rollouts):
            yield from rollout.parts(n, running)

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
        now = time.time()
        return RolloutGroup(
            index=self.claim.index if self.claim.evaluation_id is None else 0,
            prompt=self.prompt,
            rollouts=tuple(rollouts),
            producer_id=self.producer_id,
            fingerprint=self.fingerprint,
            sampling=self.sampling,
            timings=Timings(claimed_s=self.claim.claimed_s, generated_s=now, appended_s=now),
            evaluation_id=self.claim.evaluation_id,
            missing=one_line(self.missing()),
            environment=self.claim.environment,
            task=self.claim.task,
            num_tries_lost=self.claim.num_tries_lost,
            sampled_by=self.claim.sampled_by,
        )


def rollout_id(producer_id: str, index: int) -> str:
    """Returns a new id that names the producer and the index and needs no escaping in a URL's path."""
    safe = quote(producer_id, safe="").replace("~", "%7E").replace("%", "~")
    return f"{safe}.{index}.{secrets.token_hex(8)}"


def origin_of(rollout_id: str) -> tuple[str, int] | None:
    """Returns the producer that opened a rollout, and its index; None for an id that `rollout_id` cannot have made."""
    safe, _, rest = rollout_id.rpartition(".")[0].rpartition(".")
    index = number_in(rest.encode())
    return (unquote(safe.replace("~", "%")), index) if safe and index is not None else None
