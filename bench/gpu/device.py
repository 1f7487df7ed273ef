"""The device that is measured: its clock, its memory, and what it can do at most."""

import time
from collections.abc import Callable
from statistics import median

import torch

from bench.machine import reset_peak, status_bytes

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
}
"""Dense bfloat16 by a part of the device's name, as NVIDIA's data sheets have it; the first that fits counts."""


class Device:
    """A CUDA device, or the CPU, on which everything can be tried at small sizes.

    A peak of memory is counted from `forget_peak` on: on CUDA what tensors hold, on the CPU the growth of the process.
    """

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.is_cuda = self.torch.type == "cuda"
        self._before = 0

    @property
    def peak_tflops(self) -> float | None:
        """None for a device that is not listed."""
        name = torch.cuda.get_device_name(self.torch) if self.is_cuda else ""
        return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def seconds(self, work: Callable[[], object], rounds: int) -> list[float]:
        """Times each of `rounds` rounds, after one that does not count."""
        found = []
        for _ in range(rounds + 1):
            self.synchronize()
            began = time.perf_counter()
            work()
            self.synchronize()
            found.append(time.perf_counter() - began)
        return found[1:]

    def gemm_tflops(self, size: int, rounds: int) -> float:
        """Measures the rate of a square matrix product in bfloat16."""
        left, right = (torch.randn(size, size, device=self.torch).bfloat16() for _ in range(2))
        return 2 * size**3 / median(self.seconds(lambda: left @ right, rounds)) / 1e12

    def to_host_bytes_per_s(self, num_bytes: int, rounds: int) -> float:
        """Measures the rate of a copy into pinned memory; on the CPU, of a copy in memory."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.torch)
        target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_cuda)
        return num_bytes / median(self.seconds(lambda: target.copy_(source, non_blocking=True), rounds))

    def forget_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch)
        else:
            reset_peak()
            self._before = status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.torch)
        return status_bytes("VmHWM") - self._before
