"""The device that the trainer computes on, and the library that multiplies its float32 matrices on CPU."""

import torch
from torch import Tensor

from penstock.schemas.config import ConfigError

ONEDNN_MAX_ERROR = 1e-5
"""Largest error of a product, relative to its largest element: float32 stays below 1e-6, TF32 reaches 3e-4, bfloat16
2e-3."""


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Returns the device that `trainer.device` means on this machine, for the rank of that local number.

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


def enable_onednn_matmul() -> None:
    """Makes this process run float32 matmuls on CPU with oneDNN instead of torch's default library.

    Useful if the default is MKL on a processor on which MKL is slow. Torch's only switch is
    `torch.set_float32_matmul_precision`: "medium" and "high" send matmuls to oneDNN and allow it bfloat16 and TF32,
    which it uses if the processor has them. So each is tried on products of the head's three layouts against float64,
    and the first that keeps float32's accuracy stays. On CUDA the same switch allows TF32, so this is for CPU runs.

    Raises:
        ConfigError: neither keeps the accuracy on this processor, or neither changes anything.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    default, exact = _products(), _products(torch.float64)
    reasons = []
    for precision in ("medium", "high"):
        torch.set_float32_matmul_precision(precision)
        products = _products()
        error = max(_matmul_error(*pair) for pair in zip(products, exact, strict=True))
        if not error <= ONEDNN_MAX_ERROR:
            reasons.append(f"{precision!r} computes with an error of {error:.1e}, above {ONEDNN_MAX_ERROR:.0e}")
        elif all(torch.equal(*pair) for pair in zip(products, default, strict=True)):
            reasons.append(f"{precision!r} changes no bit, so the default library stays in charge")
        else:
            return
    torch.set_float32_matmul_precision(before)
    raise ConfigError(f"float32 matmuls cannot be handed to oneDNN on this processor: {'; '.join(reasons)}")


def _products(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Multiplies in the head's three layouts: logits, gradient of the hidden states, gradient of the weight."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, logits = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((192, 512), (640, 512), (192, 640))
    )
    return [hidden @ weight.t(), logits @ weight, logits.t() @ hidden]


def _matmul_error(product: Tensor, exact: Tensor) -> float:
    return float((product.double() - exact).abs().max() / exact.abs().max())
