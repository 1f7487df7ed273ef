"""Held-out evaluation by the producers: requested by policy version, answered on a stream of its own."""

import logging
from collections.abc import Mapping
from typing import NamedTuple

from penstock.consumers.learning.held_out import HeldOutAnswers, held_out_figures
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.ledger import ReleasedTask
from penstock.consumers.stream.reader import ENTRIES_PER_READ, START, entry_key
from penstock.consumers.stream.scripts import Scripts
from penstock.schemas.config import HeldOutConfig
from penstock.schemas.keys import Field, Keys, Kind, number_in
from penstock.schemas.rollout import RecordError, decode_group

log = logging.getLogger(__name__)


class EvaluationResult(NamedTuple):
    """What one policy reached on the held-out prompts."""

    update: int
    """The update after which the policy was published."""
    policy_version: int
    figures: dict[str, float]
    """As of `held_out_figures`."""
    num_prompts: int
    num_failed: int
    """Prompts without any answer."""
    environments: dict[str, dict[str, float]]
    """The same figures by environment."""


class Evaluator:
    """Requests evaluations and collects their results. Never waits.

    sets: how each environment's held-out prompts are evaluated, `num_prompts` included.
    """

    def __init__(
        self,
        connection: TrainerConnection,
        scripts: Scripts,
        keys: Keys,
        epoch: int,
        sets: Mapping[str, HeldOutConfig],
    ) -> None:
        self._connection = connection
        self._scripts = scripts
        self._stream = keys.evaluation_results
        self._epoch = epoch
        self._sets = sets
        self._held_out = [ReleasedTask(name, n + 1) for name, how in sets.items() for n in range(how.num_prompts or 0)]
        self._cursor = START
        self._pending: dict[int, dict[int, HeldOutAnswers]] = {}
        """By version and number of the prompt."""
        self._update_of: dict[int, int] = {}
        self._last_requested = -1

    def request(self, policy_version: int, update: int) -> bool:
        """Asks the producers to evaluate the policy published after `update`, unless that was requested before or there
        are no held-out prompts. Returns whether a result will follow."""
        if policy_version == self._last_requested or not self._held_out:
            return False
        self._last_requested = policy_version
        self._pending[policy_version] = {}
        self._update_of.setdefault(policy_version, update)
        self._ask()
        return True

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
        found = HeldOutAnswers(self._held_out[n - 1].environment)
        if fields.get(Field.KIND) == Kind.GROUP:
            try:
                group = HeldOutAnswers.of(decode_group(fields.get(Field.PAYLOAD, b"")))
                # Records of earlier releases name no environment.
                found = group if group.environment in self._sets else group._replace(environment=found.environment)
            except RecordError as error:
                log.warning("evaluation %d-%d: %s", version, n, error)
        answers.setdefault(n, found)

    def _result(self, version: int) -> EvaluationResult:
        answers = list(self._pending.pop(version).values())
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
