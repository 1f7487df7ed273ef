"""What ranks do in tests of the sharded learner."""

from pathlib import Path
from typing import Any

import torch

from penstock.consumers.distributed.watch import Watch
from penstock.consumers.learning.interfaces import LossInputs, LossOutputs
from penstock.consumers.learning.learner import Learner
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.learning.step_report import StepReport
from penstock.schemas.config import RunConfig
from penstock.schemas.rollout import RolloutGroup
from training_groups import lag_from

MARK = -3.25
"""A behavior logprob at which `Marked` has a loss of NaN."""


class Marked:
    """REINFORCE with a loss of NaN wherever the mark is."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        gain = inputs.importance_weights * inputs.advantages * inputs.current_logprobs
        loss = -torch.where(inputs.loss_mask, gain, 0.0).sum() / inputs.denominator
        return LossOutputs(loss=loss * float("nan") if (inputs.behavior_logprobs == MARK).any() else loss)


def train(
    ranks: Ranks, watch: Watch | None, configs: dict[str, RunConfig], batches: list[list[RolloutGroup]]
) -> dict[str, tuple[list[StepReport], dict[str, torch.Tensor]]] | None:
    """The reports of the batches and the weights after them, by the name of the configuration; on the lead."""
    found = {}
    for name, config in configs.items():
        learner = Learner(config, ranks)
        if ranks.is_lead:
            reports = [learner.step(learner.pack(groups, lag_from(7))) for groups in batches]
            found[name] = reports, learner.published_weights()
            ranks.order("end")
        else:
            follow_to_the_end(ranks, learner.orders)
    return found if ranks.is_lead else None


class EndOfOrders(Exception):
    """Of the order `end`."""


def follow_to_the_end(ranks: Ranks, orders: dict[str, Any]) -> None:
    def end() -> None:
        raise EndOfOrders

    try:
        ranks.follow({**orders, "end": end})
    except EndOfOrders:
        return


def train_from_checkpoints(
    ranks: Ranks, watch: Watch | None, config: RunConfig, batches: list[list[RolloutGroup]], read: Path, write: Path
) -> dict[str, torch.Tensor] | None:
    """The weights after the batches, from the tensors in `read` on if they are there; leaves its own in `write`."""
    learner = Learner(config, ranks)
    if not ranks.is_lead:
        follow_to_the_end(ranks, learner.orders)
        return None
    if read.exists():
        learner.load_checkpoint(read, {"num_steps": 3, "rng": torch.get_rng_state().tolist()})
    for groups in batches:
        learner.step(learner.pack(groups, lag_from(7)))
    write.mkdir(parents=True)
    learner.begin_checkpoint(write).result()
    weights = learner.published_weights()
    ranks.order("end")
    return weights
