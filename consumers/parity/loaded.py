"""The checks that a trainer makes of its first batches, with the model that it has in memory."""

from collections.abc import Sequence

from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.check import check_parity
from penstock.consumers.parity.confidence import Evidence
from penstock.consumers.parity.replay import LoadedPolicy
from penstock.consumers.parity.report import ParityError, ParityReport
from penstock.consumers.parity.sample import read_sample
from penstock.consumers.parity.tolerance import Tolerance, Yardstick, tolerance_of
from penstock.consumers.parity.yardstick import measure_yardstick
from penstock.schemas.config import RunConfig
from penstock.schemas.rollout import RolloutGroup

MAX_TOKENS = 20_000
"""Sampled tokens of a batch that are checked: about a second of a small model's time."""


class LoadedChecks:
    """The yardstick, and checks whose evidence adds up. If several ranks share the model, each has one, and all call
    the same methods in the same order."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._evidence = Evidence()
        self.yardstick: Yardstick | None = None

    @property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.yardstick, self._config.model.dtype)

    def measure(self, groups: Sequence[RolloutGroup], model: PackedModel) -> None:
        """Measures the model's yardstick on rows of any policy; leaves it unknown if no row can be used."""
        try:
            sample = read_sample(groups, model.vocabulary, lambda version: True)
        except ParityError:  # the check says so
            return
        self.yardstick = measure_yardstick(sample, model, self._config.trainer.tokens_per_microbatch)

    def check(self, groups: Sequence[RolloutGroup], model: PackedModel, version: int) -> ParityReport:
        """Checks groups that `model` sampled as `version`, together with those before that could not tell.

        Raises:
            ParityError: as `check_parity`, on every rank.
        """
        report = check_parity(
            groups,
            config=self._config,
            weights=lambda _: None,
            max_tokens=MAX_TOKENS,
            loaded=LoadedPolicy(version, model),
            yardstick=self.yardstick,
            evidence=self._evidence,
        )
        if report.verdict.status != "unclear":
            self._evidence = Evidence()
        return report
