"""Agents' rollouts and their groups, from the opening to the outcome."""

import asyncio
import math
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

import msgspec

from penstock.producers.endpoint.call_ledger import CallLedger
from penstock.producers.stream.in_flight import Claim, Dead
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import (
    ABANDONED,
    MAX_ENTRY_BYTES,
    EngineFingerprint,
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Segment,
    Timings,
    one_line,
)
from penstock.schemas.segments import CallError, segments

NO_TOKEN = "nothing_sampled"
TOO_LARGE = "rollout_too_large"
NO_RECORD = "invalid_record"


@dataclass(slots=True, eq=False)
class AgentRollout:
    """An agent's conversations about one task, from the opening to the end.

    reason: why it died; empty while it is open and once it is finished. error: the environment's, if it died of one.
    segments: the trained segments, once it is finished.
    is_abandoned: it died because nothing was heard of its agent.
    """

    id: str
    group: "AgentGroup"
    ledger: CallLedger = field(default_factory=CallLedger)
    running: set[asyncio.Task] = field(default_factory=set)
    last_seen: float = field(default_factory=time.monotonic)
    reward: Reward | None = None
    reason: str = ""
    error: BaseException | None = None
    segments: tuple[Segment, ...] = ()
    is_abandoned: bool = False

    @property
    def is_open(self) -> bool:
        return self.reward is None and not self.reason

    def is_idle(self, now: float, timeout_s: float) -> bool:
        return not self.running and now - self.last_seen > timeout_s

    def finish(self, reward: Reward) -> str:
        """Freezes it with its reward; one that cannot be trained is dead, which leaves its siblings as they are.

        Returns the problem; empty for one that is finished.
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
        self.segments, self.reward = finished.segments, reward
        self._end()
        return ""

    def die(self, reason: str) -> None:
        self.reason = reason
        self._end()

    def _end(self) -> None:
        for task in self.running:
            task.cancel()
        self.ledger = CallLedger()


@dataclass(slots=True, eq=False)
class AgentGroup:
    """The siblings of one claimed prompt. At most `size` are ever opened: one that dies leaves the group short.

    deadline_s: from its first opening to its deadline.
    sampling: the settings of its calls.
    rollout_bytes: the largest encoded size of one rollout.
    posed: monotonic seconds, like `deadline`.
    """

    claim: Claim
    prompt: Prompt
    size: int
    deadline_s: float
    sampling: SamplingSettings
    rollout_bytes: int = MAX_ENTRY_BYTES
    posed: float = field(default_factory=time.monotonic)
    deadline: float = math.inf
    rollouts: list[AgentRollout] = field(default_factory=list)

    @property
    def has_place(self) -> bool:
        return len(self.rollouts) < self.size

    @property
    def is_complete(self) -> bool:
        """Every place was taken, and no rollout is open."""
        return not self.has_place and not any(rollout.is_open for rollout in self.rollouts)

    @property
    def num_finished(self) -> int:
        return sum(rollout.reward is not None for rollout in self.rollouts)

    def open(self, producer_id: str) -> AgentRollout:
        if not self.rollouts:
            self.deadline = time.monotonic() + self.deadline_s
            self.claim.has_begun = True
        calls_bytes = self.rollout_bytes - self.rollout_bytes // 8  # the rest is for the reward and its parts
        ledger = CallLedger(calls_bytes, self.sampling.token_bytes)
        rollout = AgentRollout(rollout_id(producer_id), self, ledger)
        self.rollouts.append(rollout)
        return rollout

    def missing(self) -> str:
        """Why siblings are missing; empty for a whole group."""
        reasons = Counter(rollout.reason for rollout in self.rollouts if rollout.reason)
        if self.has_place:
            reasons["never opened"] = self.size - len(self.rollouts)
        return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))

    def outcome(self, producer_id: str, fingerprint: EngineFingerprint) -> RolloutGroup | Dead:
        """The group of the finished rollouts; dead without any."""
        finished = [rollout for rollout in self.rollouts if rollout.reward is not None]
        now = time.time()
        group = RolloutGroup(
            index=self.claim.index if self.claim.evaluation_id is None else 0,
            prompt=self.prompt,
            rollouts=tuple(Rollout(segments=one.segments, reward=one.reward or Reward(value=0.0)) for one in finished),
            producer_id=producer_id,
            fingerprint=fingerprint,
            sampling=self.sampling,
            timings=Timings(claimed_s=self.claim.claimed_s, generated_s=now, appended_s=now),
            evaluation_id=self.claim.evaluation_id,
            missing=one_line(self.missing()),
            environment=self.claim.environment,
            task=self.claim.task,
            num_tries_lost=self.claim.num_tries_lost,
        )
        if finished:
            return group
        if all(rollout.is_abandoned for rollout in self.rollouts):
            return Dead(f"{ABANDONED}: nothing was heard of the agents: {self.missing()}", group=group)
        return Dead(f"agents: no rollout of {self.size} finished: {self.missing()}", group=group)


def rollout_id(producer_id: str) -> str:
    """A new id that names the producer and needs no escaping in a URL's path."""
    safe = quote(producer_id, safe="").replace("~", "%7E").replace("%", "~")
    return f"{safe}.{secrets.token_hex(8)}"


def producer_of(rollout_id: str) -> str | None:
    """The producer that opened a rollout; None for an id that `rollout_id` cannot have made."""
    safe, dot, _ = rollout_id.rpartition(".")
    return unquote(safe.replace("~", "%")) if dot and safe else None
