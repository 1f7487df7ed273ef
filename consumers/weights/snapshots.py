"""Copies of the published policy in host memory: the newest one, the one before, and older ones if they are read."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from penstock.consumers.learning.model.published import PublishedPart
from penstock.consumers.weights.worker import Worker
from penstock.schemas.config import ConfigError
from penstock.schemas.policy import TensorSpec
from penstock.schemas.weights.layout import Array, as_bits

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Snapshots:
    """Rounds the masters to the published type in a thread; the buffers of versions that are no longer kept are reused.

    collect: called in the main thread; see `PackedModel.published_parts`. num_kept: the number of versions, 2 or more.
    """

    def __init__(self, collect: Callable[[], Callable[[], list[PublishedPart]]], num_kept: int = 2) -> None:
        self.num_kept = num_kept
        self._collect = collect
        self._buffers: dict[int, list[Tensor]] = {}
        self._stream: torch.cuda.Stream | None = None
        self._taken: dict[int, Future[None]] = {}
        """By version; another thread may wait for one before it is begun."""
        self._newest = -1
        self._worker = Worker("snapshot")
        self.tensors: tuple[TensorSpec, ...] = ()
        """All published tensors, whole; set by the first snapshot."""
        self.starts: list[int] = []
        """For each tensor, the number of its elements before those of this rank."""

    def begin(self, version: int) -> None:
        """Begins to copy the masters as policy `version`; they must not change until `wait` has returned. Keeps the
        newest of the versions before it, `num_kept` in all."""
        parts = self._collect()
        spare: list[Tensor] = []
        if len(self._buffers) >= self.num_kept:
            oldest = min(self._buffers)
            del self._taken[oldest]
            spare = self._buffers.pop(oldest)
        ready = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            ready = torch.cuda.current_stream().record_event()  # the masters are written to up to here
        if self._future(version).done():  # a policy that is published again
            del self._taken[version]
        self._newest = version
        taken = self._future(version)
        self._worker.give(lambda: self._take(taken, version, parts, spare, ready))

    def wait(self) -> None:
        """Returns once the last snapshot is taken; raises the error that it failed with."""
        if self._newest >= 0:
            self._future(self._newest).result()

    def end(self) -> None:
        """Ends the thread after the snapshots that were begun."""
        self._worker.end()

    def bits(self, version: int) -> list[Array]:
        """Returns this rank's elements of each tensor as unsigned integers, [count], of a version that is kept. Waits
        for the snapshot."""
        self._future(version).result()
        return [as_bits(buffer.view(_INTEGERS[buffer.element_size()]).numpy()) for buffer in self._buffers[version]]

    def values(self, version: int) -> list[Tensor] | None:
        """Returns this rank's elements of each tensor, [count], if the version is kept. Waits for its snapshot."""
        if version not in self._taken:
            return None
        self._future(version).result()
        return self._buffers[version]

    def add(self, version: int, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Keeps a policy, whole by name, that was published before; returns this rank's elements of it."""
        held = zip(self.tensors, self.starts, self._buffers[self._newest], strict=True)
        values = [tensors[of.name].flatten()[start : start + len(like)].clone() for of, start, like in held]
        self._buffers[version] = values
        self._future(version).set_result(None)
        return values

    def _future(self, version: int) -> Future[None]:
        return self._taken.setdefault(version, Future())

    def _take(
        self,
        taken: Future[None],
        version: int,
        collect: Callable[[], list[PublishedPart]],
        spare: list[Tensor],
        ready: torch.cuda.Event | None,
    ) -> None:
        try:
            with torch.no_grad():
                parts = collect()
                buffers = spare or [
                    torch.empty(len(part.values), dtype=part.dtype, pin_memory=part.values.is_cuda) for part in parts
                ]
                if parts and parts[0].values.is_cuda:
                    self._copy_from_device(parts, buffers, ready)
                else:
                    for part, buffer in zip(parts, buffers, strict=True):
                        buffer.copy_(part.values)
            for part, buffer in zip(parts, buffers, strict=True):
                if part.dtype is torch.float16 and not buffer.isfinite().all():
                    raise ConfigError(
                        f"model.dtype = 'float16': policy {version} cannot be published, {part.name} has a weight of "
                        f"{float(part.values[~buffer.isfinite().to(part.values.device)][0]):g}, float16 ends at 65504; "
                        "expected a lower trainer.learning_rate, or 'bfloat16'"
                    )
            self.tensors = tuple(
                TensorSpec(name=part.name, dtype=str(part.dtype).removeprefix("torch."), shape=part.shape)
                for part in parts
            )
            self.starts = [part.start for part in parts]
            self._buffers[version] = buffers
        except BaseException as error:
            taken.set_exception(error)
        else:
            taken.set_result(None)

    def _copy_from_device(
        self, parts: list[PublishedPart], buffers: list[Tensor], ready: torch.cuda.Event | None
    ) -> None:
        """Copies in a stream of its own after `ready`, concurrently with later kernels of the main thread's stream."""
        device = parts[0].values.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        if ready is not None:
            self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            for part, buffer in zip(parts, buffers, strict=True):
                buffer.copy_(part.values.to(part.dtype), non_blocking=True)  # rounded on the device: half the bytes
        self._stream.record_event().synchronize()
