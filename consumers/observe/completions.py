"""A few completions of a batch as text, for the sinks."""

from collections.abc import Sequence
from typing import Any

from penstock.consumers.observe.sinks.feeding import ShownCompletion
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.rollout import RolloutGroup, unpack_ids

SHOWN = 8


class CompletionTexts:
    """Decodes completions every `metrics.completions_every` updates.

    Raises:
        ConfigError: the model has no tokenizer.
    """

    def __init__(self, config: RunConfig) -> None:
        self._every = config.metrics.completions_every
        if self._every is None:
            return
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"metrics.completions_every = {self._every}: no tokenizer can be loaded from model.path = "
                f"{config.model.path!r}: {error}"
            ) from None

    def of(self, groups: Sequence[RolloutGroup], update: int) -> tuple[ShownCompletion, ...]:
        """Returns one completion of each of `SHOWN` groups, spread evenly over the batch; none if it is not time."""
        if self._every is None or update % self._every:
            return ()
        spread = [groups[n * len(groups) // SHOWN] for n in range(SHOWN)] if len(groups) > SHOWN else groups
        return tuple(self._completion(group, update) for group in spread)

    def _completion(self, group: RolloutGroup, update: int) -> ShownCompletion:
        rollout = group.rollouts[0]
        segment = rollout.segments[-1]  # the whole conversation, unless a turn began anew
        ids = unpack_ids(segment.token_ids).tolist()
        runs = segment.loss_mask or ((len(ids), len(ids)),)
        return ShownCompletion(
            update=update,
            environment=group.environment,
            prompt=self._tokenizer.decode(ids[: runs[0][0]]),
            completion=self._tokenizer.decode(ids[runs[0][0] : runs[-1][1]]),
            reward=rollout.reward.value,
        )
