"""A run in virtual time: producers whose engines take a fixed time a token, and a trainer whose step takes one second,
around the trainer's own release and intake. Nothing is sampled, written or waited for."""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

import wire_examples
from penstock.consumers.checkpoints.state import CheckpointState
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.reader import ReadyGroup
from penstock.consumers.stream.run_progress import RunProgress
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Keys
from penstock.schemas.prompt import Reward
from penstock.schemas.rollout import Rollout, RolloutGroup, Segment, VersionSpan

STEP_S = 1.0
MEAN, MOST = 98, 512


@dataclass
class PlayedRun:
    """What came of a run. wait_s: of the trainer. sampled, trained: lengths by index. lags: tokens by lag."""

    ledger: Ledger
    total_s: float = 0.0
    wait_s: float = 0.0
    sampled: dict[int, list[int]] = field(default_factory=dict)
    trained: dict[int, list[int]] = field(default_factory=dict)
    lags: dict[int, int] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)

    @property
    def num_masked(self) -> int:
        return sum(counts.num_tokens_masked for *_, counts in self.ledger.attrition.counts())

    @property
    def trained_per_s(self) -> float:
        """Tokens trained per second, without masked ones."""
        return (sum(map(sum, self.trained.values())) - self.num_masked) / self.total_s


def play(
    config: RunConfig,
    *,
    token_s: float,
    seed: int = 0,
    in_flight: int = 10**6,
    lengths: Callable[[int, random.Random], Sequence[int]] | None = None,
    is_kept: Callable[[int], bool] | None = None,
) -> PlayedRun:
    """Plays a run to its end. token_s: of every engine, whatever its load. in_flight: groups that are sampled at once.
    lengths: of an index's siblings; by default geometric with mean `MEAN`, up to `MOST`. is_kept: see `Intake`."""
    player = _Player(config, token_s, random.Random(seed), in_flight, lengths, is_kept)
    while player.progress.num_batches < config.num_updates:
        groups = player.intake.batch(config.groups_per_batch)
        if groups is None:
            began_s = player.now_s
            player.finish_next()
            player.played.wait_s += player.now_s - began_s
        else:
            player.train(groups)
    player.played.total_s = player.now_s
    return player.played


class _Player:
    def __init__(
        self,
        config: RunConfig,
        token_s: float,
        draw: random.Random,
        in_flight: int,
        lengths: Callable[[int, random.Random], Sequence[int]] | None,
        is_kept: Callable[[int], bool] | None,
    ) -> None:
        self._config, self._token_s, self._draw, self._in_flight = config, token_s, draw, in_flight
        self._lengths = lengths or (lambda index, draw: [_geometric(draw) for _ in range(config.group_size)])
        self.now_s = 0.0
        self._versions = [(0.0, 0)]
        """When each policy was published."""
        self._prompts: deque[tuple[int, int]] = deque()
        self._sampling: list[tuple[float, int, float]] = []
        """A heap: the end of each group, its index and its beginning."""
        scripts: Any = SimpleNamespace(
            connection=SimpleNamespace(call=lambda command: {}),
            keys=Keys("played"),
            renew=lambda: None,
            run_id="",
            dead_letter=lambda record: None,
            release=lambda after, tasks, version: self._prompts.extend(
                (after + n, version) for n in range(1, len(tasks) + 1)
            ),
            release_again=lambda version, tasks: self._prompts.extend((index, version) for index, _ in tasks),
        )
        self.progress = RunProgress(0, CheckpointState(policy_version=-1))
        self.played = PlayedRun(Ledger())
        self._lag_of = LagTable(0, {}, {})
        self.intake = Intake(
            config, scripts, self.played.ledger, self._lag_of, self.progress, lambda group: None, is_kept
        )
        self.intake.release()
        self._claim()

    def _claim(self) -> None:
        newest, bound = self._versions[-1][1], self._config.lag_bound
        while self._prompts and len(self._sampling) < self._in_flight and self._prompts[0][1] - newest <= bound:
            index, _ = self._prompts.popleft()
            own = self.played.sampled[index] = list(self._lengths(index, self._draw))
            heapq.heappush(self._sampling, (self.now_s + max(own) * self._token_s, index, self.now_s))

    def finish_next(self) -> None:
        """Goes on to the end of the next group. Raises IndexError if there is none: the run waits for ever."""
        self._claim()  # those that are released now
        if not self._sampling:
            raise IndexError(f"nothing is sampled: {self.intake.num_ready} groups are ready, {self._prompts} wait")
        self.now_s, index, began_s = heapq.heappop(self._sampling)
        spans = [self._spans(began_s, length) for length in self.played.sampled[index]]
        self.intake.reader.ready[index] = ReadyGroup(b"1-%d" % index, _group(index, spans))
        self._claim()

    def _spans(self, began_s: float, length: int) -> list[tuple[int, int]]:
        """Returns version and number of tokens of each policy that a rollout met."""
        spans, start = [], 0
        later = [published_s for published_s, _ in self._versions[1:]] + [math.inf]
        for (_, version), until_s in zip(self._versions, later, strict=True):
            sampled = length if until_s == math.inf else math.ceil((until_s - began_s) / self._token_s)
            end = min(length, max(start, sampled))
            if end > start:
                spans.append((version, end - start))
            start = end
        return spans

    def train(self, groups: list[RolloutGroup]) -> None:
        done_s = self.now_s + STEP_S
        while self._sampling and self._sampling[0][0] <= done_s:
            self.finish_next()
        self.now_s = done_s
        for group in groups:
            self.played.trained[group.index] = [rollout.num_sampled_tokens for rollout in group.rollouts]
            for span in (span for each in group.rollouts for span in each.segments[0].version_spans):
                lag = self._lag_of(span.version)
                self.played.lags[lag] = self.played.lags.get(lag, 0) + span.end - span.start
        self.played.batches.append([group.index for group in groups])
        self.intake.settle(groups, _report(groups))
        version = self._versions[-1][1] + self._config.steps_per_batch
        self._versions.append((self.now_s, version))
        self._lag_of.advance(version)
        self.intake.release()
        self._claim()


def _geometric(draw: random.Random) -> int:
    return min(MOST, 1 + int(math.log(1 - draw.random()) / math.log(1 - 1 / MEAN)))


def _group(index: int, siblings: list[list[tuple[int, int]]]) -> RolloutGroup:
    """The reward is 1 for every other sibling. siblings: version and number of tokens of each span."""
    rollouts = []
    for place, counts in enumerate(siblings):
        spans, start = [], 1
        for version, num_tokens in counts:
            spans.append(VersionSpan(version, start, start + num_tokens))
            start += num_tokens
        segment = Segment(
            token_ids=bytes(4 * start),
            behavior_logprobs=bytes(4 * (start - 1)),
            loss_mask=((1, start),),
            version_spans=tuple(spans),
        )
        rollouts.append(Rollout(segments=(segment,), reward=Reward(value=float(place % 2))))
    return replace(wire_examples.group(index), environment="main", rollouts=tuple(rollouts))


def _report(groups: list[RolloutGroup]) -> StepReport:
    return StepReport(
        metrics={},
        lag_histogram={},
        num_tokens_trained=1,
        num_tokens_masked_lag=0,
        advantages={group.index: (1.0, -1.0) for group in groups},
    )
