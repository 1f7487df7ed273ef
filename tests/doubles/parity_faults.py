"""Faults of an engine's updates and of a trainer's head, for tests of the parity check."""

from typing import Any

import torch

from penstock.producers.interfaces import Restore
from penstock.schemas.policy import WeightManifest


class LabelsOnly:
    """An engine whose updates change the version label alone."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def load_weights(self, manifest: WeightManifest, path: str, restore: Restore | None = None) -> float:
        await self._engine._llm.update_weight_version(str(manifest.version))
        self._engine.policy_version = manifest.version
        return 0.0


def bfloat16_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: Any = 1.0, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `penstock.consumers.learning.model.head.selected_logprobs` with logits rounded to bfloat16."""
    logits = (hidden.bfloat16() @ weight.bfloat16().t()).float() / torch.as_tensor(temperature).reshape(-1, 1)
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
