"""The host seldom waits for a device: it has to be ahead with the next kernels."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from host_waits import HostWaits
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.loss.importance import correct_packed
from penstock.schemas.config import CorrectionConfig, Plug, Rejection, TrainerConfig
from training_groups import configuration, lag_from, random_group, tiny_model

OBJECTIVES = "penstock.consumers.learning.objectives"


def waits_of_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, **changes: Any
) -> tuple[int, list[str]]:
    """Micro-batches of a batch, and what its steps wait for."""
    trainer = TrainerConfig(device="cpu", tokens_per_microbatch=tokens)
    config = configuration(folder, trainer=msgspec.structs.replace(trainer, **changes.pop("trainer", {})), **changes)
    learner = Learner(config)
    batch = pack([random_group(index, 0) for index in range(1, 9)], lag_from(7), config)
    with monkeypatch.context() as patched, HostWaits(patched) as waits:
        assert learner.step(batch).skipped_reason is None
    return len(batch.microbatches), waits.names


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # The head looks at its arguments once, and compares the derivatives it promised with those that arrive.
        ({}, 2),
        ({"correction": CorrectionConfig("token_mask", lower=0.5, schedule="power")}, 2),
        # Without a promise it has nothing to compare.
        ({"correction": CorrectionConfig("sequence_mask", rejection=(Rejection("seq_max_k1", 1e4),))}, 1),
        ({"correction": CorrectionConfig(off_policy_delta=0.1)}, 1),
        ({"objective": Plug(path=f"{OBJECTIVES}.gspo:Gspo")}, 1),
        # The proximal policy is scored before the first step.
        ({"trainer": {"num_epochs": 2}, "max_lag": 8}, 1 + 2 * 2),
    ],
)
def test_another_micro_batch_costs_few_waits(tmp_path, monkeypatch, changes, expected) -> None:
    tiny_model(tmp_path)
    few, with_few = waits_of_a_step(tmp_path, monkeypatch, 10_000, **changes)
    many, with_many = waits_of_a_step(tmp_path, monkeypatch, 40, **changes)
    assert many >= few + 4
    assert len(with_many) - len(with_few) == expected * (many - few), sorted(with_many)


def test_a_correction_waits_for_nothing(monkeypatch) -> None:
    rows = torch.tensor([0, 0, 3, 3, 7])
    lag, mask, logprobs = torch.tensor([0, 1, 2, 0, 5]), torch.tensor([True, True, False, True, True]), -torch.rand(5)
    settings = {"schedule": "power", "lower": 0.5, "off_policy_delta": 0.1}
    for mode in ("token_truncate", "sequence_mask"):
        config = CorrectionConfig(
            mode, rejection=(Rejection("seq_mean_k3", 0.5), Rejection("token_k1", 2.0)), **settings
        )
        arguments = (logprobs, logprobs.flip(0), mask, lag, rows, config)
        others = {"advantages": torch.randn(5), "current_logprobs": logprobs - 0.1}
        with monkeypatch.context() as patched, HostWaits(patched) as waits:
            correct_packed(*arguments, **others)
        assert waits.names == []


def test_a_micro_batch_is_copied_without_waiting(tmp_path, monkeypatch) -> None:
    tiny_model(tmp_path)
    config = configuration(tmp_path)
    (micro,) = pack([random_group(1, 0)], lag_from(7), config).microbatches
    blocking = []
    copy = torch.Tensor.to

    def recorded(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        blocking.append(not options.get("non_blocking"))
        return copy(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    micro.to(torch.device("meta"))
    assert len(blocking) >= 12 and not any(blocking)
