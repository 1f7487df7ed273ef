"""The host seldom waits for a device: it has to be ahead with the next kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch

from host_waits import HostWaits
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.learner.learner import Learner
from penstock.schemas.config import CorrectionConfig, Plug, Rejection, TrainerConfig
from training_groups import configuration, lag_from, random_group, random_groups

OBJECTIVES = "penstock.consumers.learning.objectives"


def waits_of_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, trainer: Any = None, **changes: Any
) -> tuple[int, list[str]]:
    """Micro-batches of a batch, and what its steps wait for."""
    settings = TrainerConfig(device="cpu", tokens_per_microbatch=tokens, **(trainer or {}))
    learner = Learner(configuration(folder, trainer=settings, **changes))
    batch = learner.pack(random_groups(8), lag_from(7))
    with monkeypatch.context() as patched, HostWaits(patched) as waits:
        assert learner.step(batch).skipped_reason is None
    return len(batch.microbatches), waits.names


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # The head looks at its arguments once, and compares the derivatives it promised with those that arrive.
        ({"correction": CorrectionConfig("token_mask", lower=0.5)}, 2),
        # Without a promise it has nothing to compare.
        ({"correction": CorrectionConfig("sequence_mask", rejection=(Rejection("seq_max_k1", 1e4),))}, 1),
        ({"correction": CorrectionConfig(off_policy_delta=0.1), "objective": Plug(path=f"{OBJECTIVES}.gspo:Gspo")}, 1),
        # The proximal policy is scored before the first step.
        ({"trainer": {"num_epochs": 2}, "max_lag": 8}, 1 + 2 * 2),
    ],
)
def test_another_micro_batch_costs_few_waits(folder, monkeypatch, changes, expected) -> None:
    (few, with_few), (many, with_many) = (
        waits_of_a_step(folder, monkeypatch, tokens, **changes) for tokens in (10_000, 40)
    )
    assert many >= few + 4
    assert len(with_many) - len(with_few) == expected * (many - few), sorted(with_many)


def test_a_micro_batch_is_copied_without_waiting(folder, monkeypatch) -> None:
    (micro,) = pack([random_group(1, 0)], lag_from(7), configuration(folder)).microbatches
    blocking = []
    copy = torch.Tensor.to

    def recorded(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        blocking.append(not options.get("non_blocking"))
        return copy(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    micro.to(torch.device("meta"))
    assert len(blocking) >= 12 and not any(blocking)
