"""Reads the golden corrections, computed by the peers' own functions, as tensors."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "golden" / "corrections"


class Golden:
    """The content of one file: inputs as float64 [B, T] tensors, the mask as bool, advantages [B] broadcast to [B, T].

    lag: int64 [B, T]; from the tokens' versions if the file has them, else 0.
    """

    def __init__(self, name: str) -> None:
        content = json.loads((FOLDER / f"{name}.json").read_text())
        self.name = name
        self.params: dict[str, Any] = content["params"]
        self.outputs: dict[str, Any] = content["outputs"]
        inputs = content["inputs"]
        self.mask = torch.tensor(inputs["mask"], dtype=torch.bool)
        self.proximal = torch.tensor(inputs["train_logprobs"], dtype=torch.float64)
        self.behavior = torch.tensor(inputs["rollout_logprobs"], dtype=torch.float64)
        self.lag = torch.zeros(self.mask.shape, dtype=torch.int64)
        if "token_versions" in inputs:
            trainer = inputs.get("trainer_version", self.params.get("current_version"))
            self.lag = trainer - torch.tensor(inputs["token_versions"])
        if "current_logprobs" in inputs:
            self.current = torch.tensor(inputs["current_logprobs"], dtype=torch.float64)
        if "advantages" in inputs:
            advantages = torch.tensor(inputs["advantages"], dtype=torch.float64)
            self.advantages = advantages[:, None].expand(self.mask.shape)

    def poisoned(self, values: Tensor) -> Tensor:
        """Returns `values` with NaN and infinities where the mask is 0."""
        poison = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=values.dtype)
        return torch.where(self.mask, values, poison.repeat(values.numel())[: values.numel()].view(values.shape))

    def per_row(self, values: list[float | None]) -> Tensor:
        """Broadcasts a [B] list over each row's tokens: float64 [B, T], 0 where masked."""
        column = torch.tensor([v if v is not None else 0.0 for v in values], dtype=torch.float64)
        return torch.where(self.mask, column[:, None], 0.0)


def names(pattern: str) -> list[str]:
    """Returns the files' names without their suffix."""
    return sorted(file.name.removesuffix(".json") for file in FOLDER.glob(f"{pattern}.json"))


def per_token(values: list[list[float | None]]) -> Tensor:
    """Converts a [B][T] list to float64, with 0 for null."""
    return torch.tensor([[v if v is not None else 0.0 for v in row] for row in values], dtype=torch.float64)


def mask_of(rows: list[str]) -> Tensor:
    """Converts a list of strings of 0 and 1 to bool [B, T]."""
    return torch.tensor([[digit == "1" for digit in row] for row in rows])
