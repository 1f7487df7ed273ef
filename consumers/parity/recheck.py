"""Groups without a row of lag 0, recomputed under the versions that their labels name, while the trainer waits and
occasionally between updates.

So the watch sees producers at any lag, even if the trainer never waits. The trainer's own model is not touched: a
second one, made with the first group, takes each version's weights from the weight log.
"""

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.learning.learner.fresh_rows import RowGap
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.learning.model.device import choose_device
from penstock.consumers.parity.logged_versions import LoggedVersions
from penstock.consumers.parity.replay import PolicyStore, Replay, as_labelled
from penstock.consumers.parity.report import TOLERANCES, ParityError
from penstock.consumers.parity.sample import SampleRow, read_sample
from penstock.consumers.parity.watch import is_within
from penstock.schemas.config import RunConfig
from penstock.schemas.rollout import RolloutGroup
from penstock.schemas.weights.reading import WeightReader

log = logging.getLogger(__name__)

MAX_WAITING = 4
"""Groups that wait. One more displaces the oldest one, whose versions are dropped first, of the instance with the most
groups; of several such instances, of the one that had the last turn."""
BUSY_SHARE = 0.03
"""The largest share of the trainer's time for rechecks between updates, except the first."""
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples modulo 2^64 are spread evenly."""


class Recheck:
    """Recomputes the share `parity.recheck` of those groups; the instance whose turn was longest ago is next.

    count: called with the outcome of a drawn group and the number of its tokens that were recomputed.
    """

    def __init__(
        self,
        config: RunConfig,
        reader: WeightReader,
        count: Callable[[str, int], None] = lambda outcome, tokens: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._count, self._clock = config, count, clock
        self._share = config.parity.recheck
        self._waiting: dict[int, RolloutGroup] = {}
        self._num_turns = 0
        self._turns: dict[str, int] = {}
        """The number of each instance's last turn, from 1, whether or not its group could be recomputed."""
        self._due_s = clock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._reader = reader
        self._store: tuple[LoggedVersions, PolicyStore] | None = None

    def add(self, groups: Sequence[RolloutGroup], report: StepReport) -> None:
        """Draws from the groups of a trained batch. Groups with rows of lag 0 are left out: these rows judge them, and
        their siblings would count the group twice."""
        if not report.counts_as_update:
            return
        left_out = report.fresh.keys() | report.failed.keys() | report.spared
        for group in groups:
            if group.index in left_out or not self._draws(group.index):
                continue
            if len(group.samplers) > 1:
                self._count("shared", 0)
                continue
            self._waiting[group.index] = group
            if len(self._waiting) > MAX_WAITING:
                self._displace()

    def one(self) -> tuple[list[RolloutGroup], dict[int, RowGap]]:
        """Recomputes the newest waiting group of the next instance; returns it and its gap by index, or nothing if none
        waits or it cannot be recomputed."""
        if not self._waiting:
            return [], {}
        group = min(reversed(self._waiting.values()), key=self._last_turn)
        del self._waiting[group.index]
        self._num_turns += 1
        self._turns[group.samplers[0]] = self._num_turns
        is_first, began_s = self._store is None, self._clock()
        gap = self._tried(group)
        ended_s = self._clock()
        # The first one also makes the second model, so its time says nothing about later ones.
        self._due_s = ended_s if is_first else ended_s + (ended_s - began_s) * (1 / BUSY_SHARE - 1)
        return ([], {}) if gap is None else ([group], {group.index: gap})

    def one_if_due(self) -> tuple[list[RolloutGroup], dict[int, RowGap]]:
        """As `one`, for a trainer that does not wait: nothing while the last recheck took more than `BUSY_SHARE` of the
        time since it began."""
        return self.one() if self._clock() >= self._due_s else ([], {})

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def _draws(self, index: int) -> bool:
        return index * _GOLDEN % 2**64 < self._share * 2**64

    def _last_turn(self, group: RolloutGroup) -> int:
        return self._turns.get(group.samplers[0], 0)

    def _displace(self) -> None:
        num = Counter(group.samplers[0] for group in self._waiting.values())
        group = max(self._waiting.values(), key=lambda each: (num[each.samplers[0]], self._last_turn(each)))
        del self._waiting[group.index]
        self._count("displaced", 0)

    def _tried(self, group: RolloutGroup) -> RowGap | None:
        try:
            gap = self._gap(group)
        except (ParityError, OSError) as error:
            log.warning("group %d is not rechecked: %s", group.index, error)
            self._count("failed", 0)
            return None
        except torch.OutOfMemoryError as error:
            log.error("nothing more is rechecked, the device has no room for a second model: %s", error)
            self._count("failed", 0)
            self._share, self._store = 0.0, None
            self._waiting.clear()
            torch.cuda.empty_cache()
            return None
        if gap is None:
            self._count("gone", 0)
        else:
            self._count("rechecked", gap.num_tokens)
        return gap

    def _gap(self, group: RolloutGroup) -> RowGap | None:
        """Returns the gap; None if the group names no version, or one whose weights are no longer kept."""
        needed = {
            span.version for rollout in group.rollouts for segment in rollout.segments for span in segment.version_spans
        }
        versions, policies = self._opened()
        vocabulary = policies.vocabulary  # makes the second model
        if min(needed, default=-1) < 0:
            return None
        versions.hold(needed)
        policies.forget()
        if not all(map(policies.has, needed)):
            return None
        sample = read_sample([group], vocabulary, policies.has)
        replay = Replay(sample, policies, self._config.trainer.tokens_per_microbatch)
        trainer = replay.logprobs(map(as_labelled, sample.rows))
        gap = RowGap.of(trainer, sample.engine, len(sample.rows))
        if not is_within(gap, TOLERANCES[policies.dtype]) and any(row.is_mixed for row in sample.rows):
            gap = RowGap.of(with_recomputed(replay, trainer), sample.engine, len(sample.rows))
        return gap

    def _opened(self) -> tuple[LoggedVersions, PolicyStore]:
        if self._store is None:
            self._folder = tempfile.TemporaryDirectory(prefix="penstock-parity-")
            versions = LoggedVersions(Path(self._config.model.path), Path(self._folder.name), self._reader)
            device = choose_device(self._config.trainer.device)
            self._store = versions, PolicyStore(self._config, versions, device)
        return self._store


def with_recomputed(replay: Replay, labelled: Tensor) -> Tensor:
    """Returns [M] logprobs of a sample whose engine may have recomputed the keys and values of a row before any token.

    vLLM does so for a request that was preempted or is continued. The new keys and values are those of the policy that
    samples the next token. The places of recomputation are chosen so that the row is nearest to its record. A token
    that was sampled by another policy than the labelled one stays as far off.

    labelled: [M] logprobs without recomputation.
    """
    found = labelled.clone()
    mixed = [row for row in replay.sample.rows if row.is_mixed]
    spans = {row.first: np.flatnonzero(np.diff(row.versions, prepend=row.versions[0] - 1)) for row in mixed}
    """The first token of each policy, by row."""
    tried = {row.first: [labelled[row.tokens]] for row in mixed}
    for n in range(1, max(map(len, spans.values()), default=0)):
        some = [row for row in mixed if n < len(spans[row.first])]
        again = replay.logprobs(as_labelled(row, _since(row, int(spans[row.first][n]))) for row in some)
        for row in some:
            tried[row.first].append(again[row.tokens])
    for row in mixed:
        under = torch.stack(tried[row.first])  # [policies, m]
        costs = (under - replay.sample.engine[row.tokens]).abs().numpy()
        chosen = _nearest(costs, np.searchsorted(spans[row.first], np.arange(costs.shape[1]), side="right") - 1)
        found[row.tokens] = under.gather(0, torch.from_numpy(chosen)[None])[0]
    return found


def _since(row: SampleRow, start: int) -> np.ndarray:
    """Returns the row's versions, [m], with that of token `start` for all tokens before it."""
    versions = row.versions.copy()
    versions[:start] = versions[start]
    return versions


def _nearest(costs: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Returns, [m], the policy that last computed the keys and values at each token: the cheapest path that starts with
    policy 0 and at any token may change to policy `now[token]`, but to no other. costs: [policies, m]."""
    total = np.full(len(costs), np.inf)
    total[0] = 0.0
    came_from = np.empty(costs.shape[1], dtype=np.int64)
    for token, policy in enumerate(now):
        came_from[token] = best = int(total.argmin())
        total[policy] = total[best]
        total += costs[:, token]
    chosen = np.empty(costs.shape[1], dtype=np.int64)
    state = int(total.argmin())
    for token in range(costs.shape[1] - 1, -1, -1):
        chosen[token] = state
        if state == now[token]:
            state = int(came_from[token])
    return chosen
