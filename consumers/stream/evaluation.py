"""Held-out evaluation by the producers: requested by policy version, answered on a separate stream."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from penstock.consumers.checkpoints.state import ReleasedTask
from penstock.consumers.learning.held_out import HeldOutAnswers, held_out_figures
from penstock.consumers.stream.reader import ENTRIES_PER_READ, LARGEST_CLOCK, START
from penstock.consumers.stream.scripts import Scripts
from penstock.schemas.config import HeldOut
from penstock.schemas.keys import Field, Kind, entry_key, is_of_run, number_in
from penstock.schemas.rollout import RecordError, decode_entry

log = logging.getLogger(__name__)

MOST_OPEN = 8
"""Evaluations that wait for producers at once. They answer held-out prompts before all others, so more are open only if
they answer none."""


class EvaluationResult(NamedTuple):
    """The figures of one policy on the held-out prompts."""

    update: int
    """The update after which the policy was published."""
    policy_version: int
    figures: dict[str, float]
    """See `held_out_figures`."""
    num_prompts: int
    num_failed: int
    """Prompts without any answer."""
    environments: dict[str, dict[str, float]]
    """The same figures, by environment."""


EntryId = tuple[int, int]


class ReceivedAnswers(NamedTuple):
    """The answers to one prompt. entry: the request's. samplers: see `RolloutGroup`; empty for a failed prompt."""

    entry: EntryId
    samplers: tuple[str, ...]
    found: HeldOutAnswers


class Evaluator:
    """Requests evaluations and collects their results. Never waits.

    Prompt n of a policy has the entry `<version>-<n>`. Answers of a quarantined producer do not count: their prompts
    are requested again in the entries after the last one, as if the latest requested policy had more prompts.

    sets: how each environment's held-out prompts are evaluated, including `num_prompts`.
    is_held: returns whether one of these producer instances is quarantined.
    """

    def __init__(
        self,
        scripts: Scripts,
        sets: Mapping[str, HeldOut],
        is_held: Callable[[Iterable[str]], bool] = lambda samplers: False,
    ) -> None:
        self._scripts = scripts
        self._stream = scripts.keys.evaluation_results
        self._sets, self._is_held = sets, is_held
        self._held_out = [ReleasedTask(name, n + 1) for name, how in sets.items() for n in range(how.num_prompts or 0)]
        self._cursor = START
        self._pending: dict[int, dict[int, ReceivedAnswers]] = {}
        """By version and prompt number."""
        self._asked: dict[EntryId, tuple[int, int]] = {}
        """Version and prompt number by entry, for pending evaluations."""
        self._update_of: dict[int, int] = {}
        self._last_asked: EntryId = (-1, 0)

    def request(self, policy_version: int, update: int) -> bool:
        """Requests an evaluation of the policy published after `update`, unless it was requested before or there are no
        held-out prompts. Returns whether a result will follow."""
        if policy_version == self._last_asked[0] or not self._held_out:
            return False
        self._pending[policy_version] = {}
        self._update_of.setdefault(policy_version, update)
        self._ask({(policy_version, n): (policy_version, n) for n in range(1, len(self._held_out) + 1)})
        self._drop_replaced()
        return True

    def request_again(self) -> None:
        """Requests unanswered evaluations again, since Redis may have lost them. Answers to both count once."""
        self._cursor = START
        self._ask({})

    def collect(self) -> list[EvaluationResult]:
        """Returns the evaluations completed since the last call, oldest policy first."""
        while True:
            reply = self._scripts.connection.call(
                lambda client: client.xread({self._stream: self._cursor}, count=ENTRIES_PER_READ)
            )
            entries = reply[0][1] if reply else []
            for entry_id, fields in entries:
                self._receive(fields)
                self._cursor = entry_id
            if entries:
                self._trim()
            if len(entries) < ENTRIES_PER_READ:
                break
        self._ask_others()
        done = [version for version, answers in self._pending.items() if len(answers) == len(self._held_out)]
        return [self._result(version) for version in sorted(done)]

    @property
    def pending(self) -> list[int]:
        return sorted(self._pending)

    def _trim(self) -> None:
        """Removes the answers read: a trainer that resumes asks for evaluations of its own."""
        milliseconds, sequence = entry_key(self._cursor)
        if milliseconds > LARGEST_CLOCK:
            self._scripts.renew()
            self._cursor = START
        else:
            self._scripts.trim_results(f"{milliseconds}-{sequence + 1}")

    def _drop_replaced(self) -> None:
        """Withdraws the oldest evaluations that no producer has begun to answer, if too many are open."""
        waiting = [version for version in sorted(self._pending)[:-1] if not self._pending[version]]
        for version in waiting[: max(0, len(self._pending) - MOST_OPEN)]:
            log.warning("the evaluation of policy %d is dropped: %d others wait for producers", version, MOST_OPEN)
            self._scripts.drop_evaluations([f"{entry[0]}-{entry[1]}" for entry in self._forget(version)])

    def _forget(self, version: int) -> list[EntryId]:
        """Forgets an open evaluation; returns the ids of its requests."""
        del self._pending[version]
        entries = [entry for entry, prompt in self._asked.items() if prompt[0] == version]
        for entry in entries:
            del self._asked[entry]
        return entries

    def _ask(self, more: Mapping[EntryId, tuple[int, int]]) -> None:
        """Requests these prompts, and all pending ones again: Redis may have lost them. Existing requests stay
        unchanged."""
        self._asked |= more
        self._last_asked = max([self._last_asked, *more])
        asked = [
            (f"{version}-{n}", self._held_out[number - 1]) for (version, n), (_, number) in sorted(self._asked.items())
        ]
        self._scripts.evaluate(asked)

    def _ask_others(self) -> None:
        """Drops the answers of quarantined producers and requests their prompts again."""
        version, n = self._last_asked
        again: dict[EntryId, tuple[int, int]] = {}
        for answers in self._pending.values():
            for number, each in list(answers.items()):
                if self._is_held(each.samplers):
                    del answers[number]
                    n += 1
                    again[version, n] = self._asked.pop(each.entry)
        if again:
            log.warning("%d held-out prompts are asked again: a quarantined producer answered them", len(again))
            self._ask(again)

    def _receive(self, fields: dict[bytes, bytes]) -> None:
        before, _, after = fields.get(Field.EVALUATION, b"").partition(b"-")
        version, n = number_in(before), number_in(after)
        if version is None or n is None or (version, n) not in self._asked:
            return  # an evaluation that is complete, or of an earlier trainer
        if not is_of_run(fields, self._scripts.run_id):
            return  # answered by the weights of another run of this name
        entry, (version, n) = (version, n), self._asked[version, n]
        samplers: tuple[str, ...] = ()
        found = HeldOutAnswers(self._held_out[n - 1].environment)
        if fields.get(Field.KIND) == Kind.GROUP:
            try:
                group = decode_entry(fields.get(Field.PAYLOAD, b""))
                if group.environment not in self._sets:  # records of earlier releases name none
                    group = msgspec.structs.replace(group, environment=found.environment)
                samplers, found = group.samplers, HeldOutAnswers.of(group)
            except RecordError as error:
                log.warning("evaluation %d-%d: %s", version, n, error)
        self._pending[version].setdefault(n, ReceivedAnswers(entry, samplers, found))

    def _result(self, version: int) -> EvaluationResult:
        answers = [each.found for each in self._pending[version].values()]
        self._forget(version)
        num_failed = sum(not each.rewards for each in answers)
        if num_failed:
            log.warning("evaluation of policy %d: %d of %d prompts failed", version, num_failed, len(answers))
        by_environment: dict[str, list[HeldOutAnswers]] = {}
        for each in answers:
            by_environment.setdefault(each.environment, []).append(each)
        return EvaluationResult(
            update=self._update_of.pop(version),
            policy_version=version,
            figures=held_out_figures(answers, self._sets),
            num_prompts=len(answers),
            num_failed=num_failed,
            environments={name: held_out_figures(own, self._sets) for name, own in sorted(by_environment.items())},
        )
