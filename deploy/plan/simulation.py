"""Simulates a run: the trainer's own intake, with engines that only count tokens."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from random import Random
from typing import Any

import msgspec

from penstock.consumers.learning.lag import LagTable, known_lags, span_lags
from penstock.consumers.learning.minibatches import minibatches_of
from penstock.consumers.learning.step_report import NOTHING_TO_TRAIN, StepReport
from penstock.consumers.stream.checkpoints import CheckpointState
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.ledger import Ledger, ReleasedTask, RunFailedError
from penstock.consumers.stream.reader import ENTRIES_PER_READ, ReadyGroup, Refused
from penstock.consumers.stream.run_progress import RunProgress
from penstock.deploy.plan.producer import (
    Clock,
    EngineJob,
    RunPace,
    SimulatedProducer,
    seats,
)
from penstock.deploy.plan.workload import Lengths
from penstock.producers.stream.in_flight import Claim
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Keys
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import (
    NOT_FINISHED,
    OVERDUE,
    EngineFingerprint,
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Segment,
)

_PROMPT = Prompt(text="")
_FINGERPRINT = EngineFingerprint(
    engine="simulated", version="", model="", dtype="", head_dtype="", logprobs_mode="", prefix_caching=False,
    async_scheduling=False,
)  # fmt: skip
_SAMPLING = SamplingSettings()
_TERMS_OF_EVERY_ROW = "kl_coefficient", "entropy_coefficient"
"""Arguments of the objectives here; if one is above 0, groups without reward variance are trained too."""


class Course(msgspec.Struct, kw_only=True):
    """The totals and means of a run, recorded or simulated; None if unknown.

    num_intervals: updates that followed another one of the same trainer; seconds: the sum of the times between them.
    num_tokens: sampled tokens of their batches.
    waits, paused, seats_taken: shares of time of the trainer, of engines, and of all engines' seats.
    lags: tokens of batches by lag. num_ready: groups that wait to be trained, mean over updates. queue: those of them
    that the trainer has read and left, mean over updates.
    num_trained, num_skipped, num_stale, num_dead: groups by outcome; a stale one is sampled again.
    failure: why the run ended early.
    """

    num_updates: int = 0
    num_intervals: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    waits: float = 0.0
    paused: float | None = None
    seats_taken: float | None = None
    lags: dict[int, int] = {}
    num_masked: int = 0
    num_ready: float | None = None
    queue: float | None = None
    credit: float | None = None
    num_trained: int = 0
    num_skipped: int = 0
    num_stale: int = 0
    num_dead: int = 0
    failure: str = ""


class _Streams:
    """The streams of prompts and groups, in place of Redis and the trainer's scripts."""

    def __init__(self, keys: Keys) -> None:
        self.connection, self.keys = self, keys
        self.prompts: deque[Claim] = deque()
        self.evaluations: deque[Claim] = deque()
        self.groups: deque[RolloutGroup | Refused] = deque()
        self.num_entries = 0

    def call(self, command: Any) -> Any:
        return command(self)

    def release(self, after: int, tasks: Sequence[ReleasedTask], version: int) -> None:
        self.release_again(version, list(enumerate(tasks, start=after + 1)))

    def release_again(self, version: int, tasks: Sequence[tuple[int, ReleasedTask]]) -> None:
        for index, task in tasks:
            self.prompts.append(self._claim("prompts", index, version, task))

    def evaluate(self, version: int, tasks: Sequence[ReleasedTask]) -> None:
        for n, task in enumerate(tasks, start=1):
            self.evaluations.append(self._claim("evaluations", n, version, task, f"{version}-{n}"))

    def dead_letter(self, refused: Refused) -> None:
        """Does nothing: no one reads letters here."""

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        """Returns an empty hash: no producer is in quarantine."""
        return {}

    def _claim(self, stream: str, index: int, version: int, task: ReleasedTask, evaluation: str | None = None) -> Claim:
        self.num_entries += 1
        return Claim(
            stream=stream,
            entry_id=b"%d-0" % self.num_entries,
            index=index,
            version=version,
            evaluation_id=evaluation,
            environment=task.environment,
            task=task.number,
        )


class Simulation:
    """One run. `Intake` releases, skips, settles and finds groups stale; claims follow `Claims`; there are no faults.

    num_updates: ends after this many, as if the run were stopped.
    """

    def __init__(
        self, config: RunConfig, num_producers: int, pace: RunPace, lengths: Lengths, num_updates: int
    ) -> None:
        self._config = config = msgspec.structs.replace(config, record=False)
        self._pace = pace
        self._lengths = lengths
        self._num_updates = num_updates
        self._random = Random(f"plan {config.seed}")
        self.clock = Clock()
        self._streams = streams = _Streams(Keys(config.name))
        terms = config.advantage.kl_coefficient, *map(config.objective.kwargs.get, _TERMS_OF_EVERY_ROW)
        self._trains_every_row = config.teacher is not None or any(terms)
        self.ledger = Ledger()
        self._lag_of = LagTable(0, {}, {})
        self._progress = RunProgress(0, CheckpointState(policy_version=0))
        scripts: Any = streams
        self.intake = Intake(config, scripts, self.ledger, self._lag_of, self._progress, lambda group: None)
        how = config, pace, self._drawn, self._finish, self._claim
        self.producers: deque[SimulatedProducer] = deque()
        for n in range(num_producers):
            producer = SimulatedProducer(self.clock, *how, pace.speed_courses[n % len(pace.speed_courses)])
            if n < len(pace.joins_s) and pace.joins_s[n]:
                self.clock.after(pace.joins_s[n], partial(self._join, producer))
            else:
                self.producers.append(producer)
        self._held_out = [
            ReleasedTask(name, n + 1) for name, how in config.held_out.items() for n in range(how.num_prompts or 0)
        ]
        self._factors = cycle(pace.update_factors)
        self._announced = 0
        self._is_training = False
        self._idle_since_s = self._waited_s = self._announced_s = self._began_s = 0.0
        self._ready: list[int] = []
        self._queue: list[int] = []
        self._credit: list[int] = []
        self.course = Course()

    def run(self) -> Course:
        """Raises ConfigError as `penstock.consumers.stream.tasks.TaskPlan` and the advantage function do."""
        course = self.course
        self._streams.evaluate(0, self._held_out)
        try:
            self.intake.release()
            self._claim()
            while course.num_updates < self._num_updates and self.clock.step():
                pass
        except RunFailedError as error:
            course.failure = str(error)
        course.seconds = self._idle_since_s - self._began_s
        engines, num_seats = [producer.engine for producer in self.producers], seats(self._config)
        if self.clock.now_s:
            whole_s = len(engines) * self.clock.now_s
            course.paused = sum(engine.paused_s for engine in engines) / whole_s
            course.seats_taken = sum(engine.seats_s for engine in engines) / whole_s / num_seats
        course.waits = self._waited_s / course.seconds if course.seconds else 0.0
        course.num_ready, course.queue, course.credit = map(_mean, (self._ready, self._queue, self._credit))
        course.num_trained, course.num_skipped = (self.ledger.count(name) for name in ("trained", "skipped"))
        course.num_dead, course.num_stale = self.ledger.count("dead"), self.ledger.released_again["stale"]
        return course

    def _drawn(self, claim: Claim) -> list[int]:
        """Returns the lengths of a claim's siblings, as the engine cuts them."""
        config, name = self._config, claim.environment
        if claim.evaluation_id is None:
            num, most = config.group_size, config.every_environment[name].max_tokens or config.sampling.max_tokens
        else:
            how = config.held_out[name]
            num, most = how.num_samples or 1, how.max_tokens or config.sampling.max_tokens
        return [max(1, round(min(most, length))) for length in self._lengths(self._random, num)]

    def _finish(self, producer: SimulatedProducer, job: EngineJob) -> None:
        delay_s = 0.0 if job.is_given_up else self._random.choice(self._pace.reward_s)
        self.clock.after(delay_s, lambda: self._append(producer, job))

    def _append(self, producer: SimulatedProducer, job: EngineJob) -> None:
        producer.table.remove(job.claim)
        claim = job.claim
        if claim.evaluation_id is None:
            deadline_s = self._config.producers.generation_deadline_s
            overdue = Refused(claim.index, f"{OVERDUE}: {NOT_FINISHED} {deadline_s:g} s", b"")
            self._streams.groups.append(overdue if job.is_given_up else self._group(job))
        self._look()

    def _group(self, job: EngineJob) -> RolloutGroup:
        claim = job.claim
        is_flat = Random(f"{self._config.seed} {claim.environment} {claim.task}").random() < self._pace.flat
        rollouts = []
        for sibling, length in enumerate(job.lengths):
            segment = Segment(
                token_ids=b"",
                behavior_logprobs=bytes(4 * length),
                loss_mask=((0, length),),
                version_spans=job.spans[sibling],
            )
            rollouts.append(Rollout(segments=(segment,), reward=Reward(value=float(sibling == 0 and not is_flat))))
        return RolloutGroup(
            index=claim.index,
            prompt=_PROMPT,
            rollouts=tuple(rollouts),
            producer_id="",
            fingerprint=_FINGERPRINT,
            sampling=_SAMPLING,
            environment=claim.environment,
            task=claim.task,
        )

    def _claim(self) -> None:
        """Lets producers read in turn until none gets anything."""
        streams, num_empty = self._streams, 0
        while num_empty < len(self.producers) and (streams.prompts or streams.evaluations):
            num_empty = 0 if self.producers[0].take(streams.evaluations, streams.prompts) else num_empty + 1
            self.producers.rotate(-1)

    def _read(self) -> int:
        """Reads as `Reader.read` does: groups that were sampled for released, unsettled indexes, each once."""
        reader, groups = self.intake.reader, self._streams.groups
        num_read = min(ENTRIES_PER_READ, len(groups))
        for _ in range(num_read):
            self._streams.num_entries += 1
            entry_id, found = b"%d-0" % self._streams.num_entries, groups.popleft()
            if isinstance(found, Refused):
                reader.refuse(replace(found, entry_id=entry_id, num_received=reader.num_received))
            else:
                reader.ready[found.index] = ReadyGroup(entry_id, found)
                reader.num_received += 1
        return num_read

    def _look(self) -> None:
        """Looks for a batch as `Trainer._take` does, unless it is training."""
        num_groups = self._config.groups_per_batch
        while not self._is_training:
            num_read = self._read() if self.intake.is_short(num_groups) else 0
            groups = self.intake.batch(num_groups)
            if groups is not None:
                self._train(groups)
            elif not num_read:
                break
        self._claim()

    def _train(self, groups: list[RolloutGroup]) -> None:
        lag, bound = known_lags(self._lag_of), self._config.lag_bound
        self._is_training = True
        waited_s = self.clock.now_s - self._idle_since_s
        lags: Counter[int] = Counter()
        unmasked: set[int] = set()
        for group in groups:
            for segment in (segment for rollout in group.rollouts for segment in rollout.segments):
                for span, d in zip(segment.version_spans, span_lags(segment, lag, bound), strict=True):
                    lags[d] += span.end - span.start
                    if d <= bound:
                        unmasked.add(group.index)
        num_tokens, num_masked = lags.total(), sum(num for d, num in lags.items() if d > bound)
        num_streamed = sum(isinstance(found, RolloutGroup) for found in self._streams.groups)
        self._ready.append(self.intake.num_ready + num_streamed)
        takes_s = (self._pace.update_s + num_tokens * self._pace.token_s) * next(self._factors)
        advantages = {group.index: tuple(rollout.reward.value for rollout in group.rollouts) for group in groups}
        trained = [
            any(group.index in unmasked and (self._trains_every_row or any(advantages[group.index])) for group in part)
            for part in minibatches_of(groups, self._config)
        ]
        report = StepReport(
            metrics={},
            lag_histogram=dict(lags),
            num_tokens_trained=num_tokens - num_masked,
            num_tokens_masked_lag=num_masked,
            advantages=advantages,
            has_teacher=self._config.teacher is not None,
            num_optimizer_steps=self._config.trainer.num_epochs * sum(trained),
            skipped_reason=None if any(trained) else NOTHING_TO_TRAIN,
        )
        self.clock.after(takes_s, lambda: self._publish(groups, report, waited_s))

    def _publish(self, groups: list[RolloutGroup], report: StepReport, waited_s: float) -> None:
        """Publishes a policy, once the previous one is announced."""
        if self.clock.now_s < self._announced_s:
            self.clock.after(self._announced_s - self.clock.now_s, lambda: self._publish(groups, report, waited_s))
            return
        course = self.course
        for d, num in report.lag_histogram.items():
            course.lags[d] = course.lags.get(d, 0) + num
        course.num_masked += report.num_tokens_masked_lag
        if course.num_updates:
            self._waited_s += waited_s
            course.num_intervals += 1
            course.num_tokens += sum(report.lag_histogram.values())
        self.intake.settle(groups, report)
        if report.skipped_reason is None:
            version = self._lag_of.current + report.num_optimizer_steps
            self._lag_of.advance(version)
            self._announced_s = self.clock.now_s + self._pace.announce_s
            self.clock.after(self._pace.announce_s, lambda: self._announce(version))
        self.intake.release()
        self._progress.take_passed()
        self._queue.append(self.intake.num_ready)
        self._credit.append(self.intake.credit)
        course.num_updates += 1
        self._began_s = self._began_s or self.clock.now_s
        self._idle_since_s = self.clock.now_s
        if course.num_updates % self._config.evaluation.every == 0:
            self._streams.evaluate(self._lag_of.current, self._held_out)
        self._is_training = False
        self._look()

    def _join(self, producer: SimulatedProducer) -> None:
        producer.join(self._announced)
        self.producers.append(producer)
        self._claim()

    def _announce(self, version: int) -> None:
        self._announced = version
        for producer in self.producers:
            producer.announce(version)
        self._claim()


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None
