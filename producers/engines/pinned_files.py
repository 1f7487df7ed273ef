"""Weight files that a GPU reads directly: mapped and page-locked once, before the first of many loads."""

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

from penstock.producers.engines.weight_files import DTYPES

RELEASE_S = 1.0
"""A file that was removed or replaced is released after this long."""

Tensors = Iterator[tuple[str, torch.Tensor]]


class PinnedFile:
    """A safetensors file. Its pages are mapped, not copied: changes to the file are visible here.

    If the driver refuses to lock them, which vLLM logs, they are read like any other memory.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:  # the driver locks writable pages only
            self._file = os.fstat(file.fileno())
            self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        self._is_locked = host_register(self._bytes.data_ptr(), len(self._bytes))

    def is_at(self, path: str) -> bool:
        try:
            there = os.stat(path)
        except FileNotFoundError:
            return False
        return os.path.samestat(self._file, there) and there.st_size == len(self._bytes)

    def tensors(self) -> Tensors:
        """Yields names and tensors in file order."""
        start = 8 + int.from_bytes(self._bytes[:8].numpy().tobytes(), "little")
        header = json.loads(self._bytes[8:start].numpy().tobytes())
        header.pop("__metadata__", None)
        for name, place in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = place["data_offsets"]
            values = self._bytes[start + begin : start + end].view(getattr(torch, DTYPES[place["dtype"]]))
            yield name, values.view(place["shape"])

    def close(self) -> None:
        if self._is_locked:
            host_unregister(self._bytes.data_ptr())


class PinnedFiles:
    """The files of the last load, kept for the next one.

    They take no further memory. A removed or replaced file is kept for `RELEASE_S` at most, and not beyond the next
    load: there may be no room for two policies.

    read: reads the tensors of files that this process may not write to.
    """

    def __init__(self, read: Callable[[list[str]], Tensors]) -> None:
        self._read = read
        self._files: dict[str, PinnedFile] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="pinned-files", daemon=True).start()

    @contextmanager
    def reading(self, paths: list[str]) -> Iterator[Tensors]:
        """Yields the tensors of the files, in order; no file is released meanwhile.

        Raises:
            OSError: a file cannot be opened.
        """
        with self._lock:
            self._release(keep=paths)
            if not all(os.access(path, os.W_OK) for path in paths):
                yield self._read(paths)
                return
            for path in paths:
                if path not in self._files:
                    self._files[path] = PinnedFile(path)
            yield chain.from_iterable(self._files[path].tensors() for path in paths)

    def _release(self, keep: Sequence[str]) -> None:
        for path, file in list(self._files.items()):
            if path not in keep or not file.is_at(path):
                del self._files[path]
                file.close()

    def _watch(self) -> None:
        while True:
            time.sleep(RELEASE_S)
            with self._lock:
                self._release(keep=list(self._files))
