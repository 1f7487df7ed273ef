"""Files of tensors that any number of ranks write and read together: torch.distributed.checkpoint.

Each rank writes one safetensors file of its parts, whose metadata has their places in the whole tensors, as torch's
`HuggingFaceStorageReader` expects. Nothing is pickled.
"""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.process.files import digest, fsync

Specs = Mapping[str, tuple[torch.Size, torch.dtype]]
"""A tensor's shape and type by its name."""

# A world of one is intended here, and torch warns of it each time.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


class _RankWriter(dcp.StorageWriter):
    """Writes, fsyncs and digests one rank's parts. torch's writer copies them and holds the interpreter lock."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / f"rank-{rank}.safetensors"
        self.digests: dict[str, str] = {}
        """On the lead, after writing: the digest of each rank's file by name."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts, places = {}, {}
        for item in plan.items:
            part = planner.resolve_data(item)
            if (
                isinstance(part, Tensor) and item.tensor_data is not None and part.numel()
            ):  # small ones do not reach all
                parts[item.index.fqn] = part.contiguous()
                places[item.index.fqn] = {"saved_offsets": item.tensor_data.chunk.offsets}
        self._file.parent.mkdir(exist_ok=True)
        save_file(parts, self._file, {"DCP_SHARDING_INFO": json.dumps(places)})
        fsync(self._file)
        written: Future[list[WriteResult]] = Future()
        index = MetadataIndex(self._file.name)
        written.set_result([WriteResult(index, self._file.stat().st_size, storage_data=digest(self._file))])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.digests = {written.index.fqn: written.storage_data for rank in results for written in rank}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> dict[str, str]:
    """Writes `tensors`, which are in host memory, into `folder`, and returns once they are on the disk. Collective:
    each rank writes its part of a DTensor; any other tensor is equal on all ranks, and one of them writes it.

    Returns the digest of each file by its name on the lead; nothing on other ranks.

    Raises:
        OSError: some rank could not write; on all of them.
    """
    writer = _RankWriter(folder, ranks.rank)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
    except dcp.CheckpointException as failures:
        raise _first(failures, ranks) from failures
    return writer.digests


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Fills `tensors`, DTensors or not, in place from the files of any ranks. Collective.

    Raises:
        OSError: some rank could not read; on all of them.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        dcp.load(dict(tensors), storage_reader=reader, process_group=ranks.group, no_dist=ranks.group is None)
    except dcp.CheckpointException as failures:
        raise _first(failures, ranks) from failures


def specs_in(folder: Path) -> Specs:
    """Returns the shape and type of each whole tensor in `folder`, by name."""
    found: dict[str, Any] = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: (spec.size, spec.properties.dtype) for name, spec in found.items()}


def _first(failures: dcp.CheckpointException, ranks: Ranks) -> Exception:
    rank, (error, _) = next(iter(failures.failures.items()))
    if isinstance(error, OSError | SafetensorError):
        return OSError(f"rank {rank}: {error}" if ranks.size > 1 else str(error))
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")
