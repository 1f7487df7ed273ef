"""Counts, on CPU, the operations that would make the host wait for a GPU."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = frozenset(
    (
        "_local_scalar_dense",  # item(), bool(), int(), float()
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "_unique2",
    )
)


class HostWaits(TorchDispatchMode):
    """Counts, while active, the operations whose result the host reads or whose shape depends on values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        to_list = torch.Tensor.tolist

        def counted(tensor: torch.Tensor) -> Any:
            self.names.append("tolist")
            return to_list(tensor)

        # On CPU `tolist` reads memory without an operation.
        monkeypatch.setattr(torch.Tensor, "tolist", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.overloadpacket.__name__, kwargs or {}
        waits = name in _WAITING
        if name in ("index", "index_put", "index_put_"):
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        elif name == "repeat_interleave":
            waits = options.get("output_size") is None
        elif name == "segment_reduce":
            waits = not options.get("unsafe")
        if waits:
            self.names.append(name)
        return func(*args, **options)
