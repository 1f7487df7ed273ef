"""The device that the trainer computes on."""

import torch

from penstock.schemas.config import ConfigError


def choose_device(name: str) -> torch.device:
    """The device that `trainer.device` means here.

    Raises:
        ConfigError: "cuda" without a CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device = 'cuda': torch finds no CUDA device; expected 'auto' or 'cpu' here")
    return torch.device(name)
