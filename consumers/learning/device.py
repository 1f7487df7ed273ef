"""The device that the trainer computes on."""

import torch

from penstock.schemas.config import ConfigError


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that `trainer.device` means here, for the rank of that number on this machine.

    Raises:
        ConfigError: "cuda" without a CUDA device for this rank.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device = 'cuda': torch finds no CUDA device; expected 'auto' or 'cpu' here")
    if name == "cuda" and local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"{torch.cuda.device_count()} CUDA devices here for rank {local_rank} of this machine; expected one for "
            "each of its ranks (torchrun's --nproc-per-node, trainer.num_processes)"
        )
    return torch.device(name, local_rank) if name == "cuda" else torch.device(name)
