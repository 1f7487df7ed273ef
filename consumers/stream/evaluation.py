"""Held-out evaluation by the producers: requested by policy version, answered on a stream of its own."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.consumers.learning.outcome import mean_rewards, reward_table
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.ledger import ReleasedTask
from penstock.consumers.stream.reader import ENTRIES_PER_READ, START, entry_key
from penstock.consumers.stream.scripts import Scripts
from penstock.schemas.keys import Field, Keys, Kind, number_in
from penstock.schemas.metrics import REWARD
from penstock.schemas.rollout import RecordError, decode_group

log = logging.getLogger(__name__)


class EvaluationResult(NamedTuple):
    """The held-out rewards of one policy."""

    update: int
    """The update after which the policy was published."""
    policy_version: int
    rewards: dict[str, float]
    """Means of `reward` and of each part, `reward/<part>`. A prompt whose evaluation failed counts as 0."""
    num_prompts: int
    num_failed: int
    environments: dict[str, dict[str, float]]
    """The same means by environment."""


class Evaluator:
    """Requests evaluations and collects their results. Never waits.

    held_out: the prompts of one evaluation.
    """

    def __init__(
        self, connection: TrainerConnection, scripts: Scripts, keys: Keys, epoch: int, held_out: Sequence[ReleasedTask]
    ) -> None:
        self._connection = connection
        self._scripts = scripts
        self._stream = keys.evaluation_results
        self._epoch = epoch
        self._held_out = held_out
        self._cursor = START
        self._pending: dict[int, dict[int, Mapping[str, float]]] = {}
        """By version and prompt its mean rewards, empty if it failed."""
        self._update_of: dict[int, int] = {}
        self._last_requested = -1

    def request(self, policy_version: int, update: int) -> None:
        """Asks the producers to evaluate the policy published after `update`, unless that was requested before."""
        if policy_version == self._last_requested or not self._held_out:
            return
        self._last_requested = policy_version
        self._pending[policy_version] = {}
        self._update_of.setdefault(policy_version, update)
        self._ask()

    def request_again(self) -> None:
        """Requests unanswered evaluations once more, after Redis may have lost them. Answers to both count once."""
        self._cursor = START
        self._ask()

    def collect(self) -> list[EvaluationResult]:
        """The evaluations that became complete since the last call, oldest policy first."""
        while True:
            reply = self._connection.call(
                lambda client: client.xread({self._stream: self._cursor}, count=ENTRIES_PER_READ)
            )
            entries = reply[0][1] if reply else []
            for entry_id, fields in entries:
                self._receive(fields)
                self._cursor = entry_id
            if len(entries) < ENTRIES_PER_READ:
                break
        done = [version for version, answers in self._pending.items() if len(answers) == len(self._held_out)]
        return [self._result(version) for version in sorted(done)]

    @property
    def pending(self) -> list[int]:
        return sorted(self._pending)

    def first_needed(self) -> bytes:
        """The entry id up to which the result stream may be trimmed."""
        milliseconds, sequence = entry_key(self._cursor)
        return START if self._pending else f"{milliseconds}-{sequence + 1}".encode()

    def _ask(self) -> None:
        self._connection.call(lambda _: self._scripts.evaluate(self._epoch, self._pending, self._held_out))

    def _receive(self, fields: dict[bytes, bytes]) -> None:
        before, _, after = fields.get(Field.EVALUATION, b"").partition(b"-")
        version, n = number_in(before), number_in(after)
        if version is None or n is None:
            return
        answers = self._pending.get(version)
        if answers is None or not 1 <= n <= len(self._held_out):
            return  # of an evaluation that is done, or of a trainer before this one
        rewards: Mapping[str, float] = {}
        if fields.get(Field.KIND) == Kind.GROUP:
            try:
                group = decode_group(fields.get(Field.PAYLOAD, b""))
                rewards = mean_rewards([reward_table(rollout.reward) for rollout in group.rollouts])
            except RecordError as error:
                log.warning("evaluation %d-%d: %s", version, n, error)
        answers.setdefault(n, rewards)

    def _result(self, version: int) -> EvaluationResult:
        found = self._pending.pop(version)
        answers = list(found.values())
        num_failed = sum(not rewards for rewards in answers)
        by_environment: dict[str, list[Mapping[str, float]]] = {}
        for n, task in enumerate(self._held_out, start=1):
            by_environment.setdefault(task.environment, []).append(found[n])
        environments = {name: _means(own) for name, own in by_environment.items()}
        if num_failed:
            log.warning("evaluation of policy %d: %d of %d prompts failed", version, num_failed, len(answers))
        return EvaluationResult(
            self._update_of.pop(version), version, _means(answers), len(answers), num_failed, environments
        )


def _means(answers: Collection[Mapping[str, float]]) -> dict[str, float]:
    answered = [rewards for rewards in answers if rewards]
    return {REWARD: 0.0, **mean_rewards(answered, len(answers) - len(answered))}
