"""A producer in simulated time: it claims by the real rules, and its engine shares its speed among sequences."""

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

import msgspec

from penstock.producers.stream.in_flight import Claim, InFlightTable
from penstock.producers.weights.follower import steps_between
from penstock.schemas.config import RunConfig
from penstock.schemas.rollout import VersionSpan

ALONE = 4.0
"""The assumed speed of a sequence alone in an engine, as a multiple of its speed with all seats taken."""
_ROUNDING = 1e-6
"""Tokens, and parts of a `SpeedCourse`."""


class Clock:
    """Simulated seconds, and the actions that are due."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._number = count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._number), action))

    def step(self) -> bool:
        """Advances to the next action and runs it; returns False if there is none."""
        if self._queue:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
            return True
        return False


class EngineSpeed(NamedTuple):
    """A decoding step of n sequences takes `base_s + n * sequence_s` and adds a token to each of them."""

    base_s: float
    sequence_s: float

    @classmethod
    def of(cls, tokens_per_s: float, alone_per_s: float, seats: int) -> "EngineSpeed":
        """Returns a speed. tokens_per_s: of all seats together. alone_per_s: of one sequence alone."""
        each_s = (seats / tokens_per_s - 1 / alone_per_s) / (seats - 1) if seats > 1 else 0.0
        return cls(1 / alone_per_s - each_s, each_s)

    def tokens_per_s(self, num_sequences: float) -> float:
        """Returns the tokens per second of each sequence."""
        return 1 / (self.base_s + num_sequences * self.sequence_s)


class SpeedCourse(NamedTuple):
    """Factors of an engine's speed over time, each for `each_s` seconds; after the last the first follows."""

    factors: tuple[float, ...]
    each_s: float

    def at(self, time_s: float) -> tuple[float, float]:
        """Returns the factor, and the seconds that it still lasts."""
        place = int(time_s / self.each_s + _ROUNDING)
        return self.factors[place % len(self.factors)], (place + 1) * self.each_s - time_s


STEADY = SpeedCourse((1.0,), math.inf)


class RunPace(msgspec.Struct, frozen=True, kw_only=True):
    """The speeds of a run's parts.

    speed: of one producer's engine. speed_courses: its changes, by producer in turn.
    update_s: the part of an update's time, from its batch's arrival to the next wait for groups, that is the same for
        every batch. token_s: the part for each sampled token of the batch.
    update_factors: factors of the updates' times, in turn.
    announce_s: from the end of an update until its policy is announced. load_s: from there until an engine has it;
    pause_s: the end of that time, in which the engine samples nothing.
    reward_s: samples of the seconds from a group's last token to its append.
    flat: share of tasks whose rewards do not differ.
    joins_s: when each producer starts, in turn; further ones are there from the start.
    """

    speed: EngineSpeed
    speed_courses: tuple[SpeedCourse, ...] = (STEADY,)
    update_s: float = 0.0
    token_s: float
    update_factors: tuple[float, ...] = (1.0,)
    announce_s: float = 0.0
    load_s: float = 0.0
    pause_s: float = 0.0
    reward_s: tuple[float, ...] = (0.0,)
    flat: float = 0.0
    joins_s: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class EngineJob:
    """A claim that is being sampled. spans: the version spans of its finished siblings."""

    claim: Claim
    lengths: Sequence[int]
    spans: dict[int, tuple[VersionSpan, ...]] = field(default_factory=dict)
    is_given_up: bool = False


class SimulatedEngine:
    """Samples every sequence that has a seat at the same speed; the others wait in a queue.

    course: changes of its speed. A job ends by the value of `_served`: the tokens of a sequence that has had a seat
    since the start.
    """

    def __init__(
        self,
        clock: Clock,
        speed: EngineSpeed,
        seats: int,
        done: Callable[[EngineJob], None],
        course: SpeedCourse = STEADY,
    ) -> None:
        self._clock = clock
        self._speed = speed
        self._course = course
        self._factor = 1.0
        self._seats = seats
        self._done = done
        self._served = 0.0
        self._since_s = 0.0
        self._number = count()
        self._running: list[tuple[float, int, float, int, EngineJob]] = []
        """A heap of sequences: `_served` at its end, number, `_served` at its start, sibling, job."""
        self._waiting: deque[tuple[EngineJob, int]] = deque()
        self._held: list[EngineJob] = []
        """Jobs that a closed engine has been given."""
        self._marks: list[tuple[float, int]] = [(0.0, 0)]
        """`_served` at each load, and the version loaded."""
        self._turn = 0
        self.is_paused = self.is_closed = False
        self.num_tokens = 0
        self.paused_s = 0.0
        self.seats_s = 0.0
        """Sum of the seconds in which seats were taken."""

    @property
    def is_idle(self) -> bool:
        return not (self._running or self._waiting)

    @property
    def version(self) -> int:
        return self._marks[-1][1]

    def add(self, job: EngineJob) -> None:
        if self.is_closed:
            self._held.append(job)
            return
        self._advance()
        self._waiting.extend((job, sibling) for sibling in range(len(job.lengths)))
        self._plan()

    def drop(self, job: EngineJob) -> None:
        """Gives up a job, and ends its sequences."""
        self._advance()
        job.is_given_up = True
        self._running = [each for each in self._running if each[-1] is not job]
        heapq.heapify(self._running)
        self._waiting = deque(each for each in self._waiting if each[0] is not job)
        self._held = [each for each in self._held if each is not job]
        self._plan()

    def close(self) -> None:
        """Holds new jobs until the next load."""
        self.is_closed = True

    def pause(self) -> None:
        self._advance()
        self.is_paused = True
        self._plan()

    def load(self, version: int) -> None:
        """Continues with the weights of a version."""
        self._advance()
        self._marks.append((self._served, version))
        self.is_paused = self.is_closed = False
        held, self._held = self._held, []
        self._waiting.extend((job, sibling) for job in held for sibling in range(len(job.lengths)))
        self._plan()

    def _advance(self) -> None:
        passed_s, self._since_s = self._clock.now_s - self._since_s, self._clock.now_s
        self.seats_s += passed_s * len(self._running)
        if self.is_paused:
            self.paused_s += passed_s
        elif self._running:
            self._served += passed_s * self._factor * self._speed.tokens_per_s(len(self._running))

    def _plan(self) -> None:
        """Assigns seats, and schedules the next end of a sequence or change of the speed."""
        while self._waiting and len(self._running) < self._seats and not self.is_paused:
            job, sibling = self._waiting.popleft()
            end = self._served + job.lengths[sibling]
            heapq.heappush(self._running, (end, next(self._number), self._served, sibling, job))
        self._turn += 1
        if self._running and not self.is_paused:
            left = self._running[0][0] - self._served
            turn = self._turn
            self._factor, lasts_s = self._course.at(self._clock.now_s)
            delay_s = left / (self._factor * self._speed.tokens_per_s(len(self._running)))
            self._clock.after(min(max(0.0, delay_s), lasts_s), lambda: self._end(turn))

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        finished = []
        while self._running and self._running[0][0] <= self._served + _ROUNDING:
            _, _, start, sibling, job = heapq.heappop(self._running)
            job.spans[sibling] = tuple(self._spans(start, job.lengths[sibling]))
            self.num_tokens += job.lengths[sibling]
            if len(job.spans) == len(job.lengths):
                finished.append(job)
        self._plan()
        for job in finished:
            self._done(job)

    def _spans(self, start: float, length: int) -> Iterator[VersionSpan]:
        """Yields which version sampled which tokens: the one that was loaded when a token was complete."""
        place = bisect_right(self._marks, start, key=lambda mark: mark[0]) - 1
        at = 0
        for n in range(place, len(self._marks)):
            is_last = n + 1 == len(self._marks)
            end = length if is_last else min(length, math.floor(self._marks[n + 1][0] - start + _ROUNDING))
            if end > at:
                yield VersionSpan(self._marks[n][1], at, end)
                at = end


class SimulatedProducer:
    """Claims, waits for weights as `penstock.producers.loop.Producer` does, samples, and passes finished jobs on.

    course: of its engine's speed.
    draw: returns the lengths of a claim's siblings. finish: takes a job that is sampled, or past its deadline.
    wake: called after a load, when it may claim again.
    """

    def __init__(
        self,
        clock: Clock,
        config: RunConfig,
        pace: RunPace,
        draw: Callable[[Claim], Sequence[int]],
        finish: Callable[["SimulatedProducer", EngineJob], None],
        wake: Callable[[], None],
        course: SpeedCourse,
    ) -> None:
        self._clock = clock
        self._config = config
        self._load_s, self._pause_s = max(pace.load_s, pace.pause_s), pace.pause_s
        self._draw = draw
        self._finish = finish
        self._wake = wake
        self.table = InFlightTable(
            num_groups=config.producers.groups_in_flight,
            group_size=config.group_size,
            num_samples=max(how.num_samples or 1 for how in config.held_out.values()),
        )
        self.engine = SimulatedEngine(clock, pace.speed, seats(config), self._end, course)
        self.newest = 0
        self._loading: int | None = None
        self._early: list[Claim] = []
        """Claims that wait for fresher weights."""

    def take(self, evaluations: deque[Claim], prompts: deque[Claim]) -> bool:
        """Claims as much as one read does, if it would read now; returns whether it claimed anything."""
        behind = steps_between(self.engine.version, self.newest)
        if behind > self._config.lag_bound or not self.table.groups_free:
            return False
        most = ((evaluations, self.table.most_evaluations), (prompts, self.table.most_prompts))
        claims = [queue.popleft() for queue, num in most for _ in range(min(num, len(queue)))]
        for claim in claims:
            self.table.add(claim)
        self._early += claims
        self._start()
        return bool(claims)

    def join(self, version: int) -> None:
        """Starts late, with the newest policy."""
        self.newest = version
        self.engine.load(version)

    def announce(self, version: int) -> None:
        """Records the newest policy, and loads it unless a load is in progress."""
        self.newest = version
        if self._loading is None:
            self._fetch()

    def _start(self) -> None:
        held, bound = self.engine.version, self._config.lag_bound
        early, self._early = self._early, []
        for claim in early:
            if steps_between(held, claim.version) > (bound if claim.evaluation_id is None else 0):
                self._early.append(claim)
                continue
            job = EngineJob(claim, self._draw(claim))
            self.engine.add(job)
            self._clock.after(self._config.producers.generation_deadline_s, partial(self._overdue, job))

    def _fetch(self) -> None:
        self._loading = self.newest
        self._clock.after(self._load_s - self._pause_s, self._pause)

    def _pause(self) -> None:
        if self._config.engine.update == "drained" and not self.engine.is_idle:
            self.engine.close()  # `_end` continues
            return
        self.engine.pause()
        self._clock.after(self._pause_s, self._loaded)

    def _loaded(self) -> None:
        assert self._loading is not None
        self.engine.load(self._loading)
        self._loading = None
        if self.newest != self.engine.version:
            self._fetch()
        self._start()
        self._wake()

    def _end(self, job: EngineJob) -> None:
        if self.engine.is_closed and self.engine.is_idle and not self.engine.is_paused:
            self._pause()
        self._finish(self, job)

    def _overdue(self, job: EngineJob) -> None:
        if len(job.spans) < len(job.lengths):
            self.engine.drop(job)
            self._end(job)


def seats(config: RunConfig) -> int:
    """Returns the most sequences that one producer decodes at once."""
    return min(config.engine.max_num_seqs, config.producers.groups_in_flight * config.group_size)
