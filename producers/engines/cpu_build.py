"""vLLM plug-in, loaded in every engine process: what its CPU build computes wrongly, or cannot import."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

_ROTATE = RotaryEmbedding.forward_cpu
_USERS = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_IMAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


def _rotated(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
    """The kernel is right for `[num_tokens, heads * size]`; some models hand it `[num_tokens, heads, size]`."""
    return _ROTATE(self, positions, query, key) if query.dim() == 2 else self.forward_native(positions, query, key)


def install() -> None:
    """Makes engines on CPUs compute as others do; without torchvision, which has to fit torch's build, they read the
    classes of Qwen3.5, whose text needs no images."""
    if not current_platform.is_cpu():
        return
    setattr(RotaryEmbedding, "forward_cpu", _rotated)  # noqa: B010
    if find_spec(_IMAGES[0]) is None and _USERS not in sys.modules:
        sys.modules |= {name: ModuleType(name) for name in _IMAGES}
        vars(sys.modules[_IMAGES[-1]])["functional"] = None
        try:
            import_module(_USERS)
        finally:
            for name in _IMAGES:
                del sys.modules[name]
