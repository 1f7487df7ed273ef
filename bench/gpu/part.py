"""The measurements without an engine, each in a process of its own."""

import math
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from bench.gpu.device import Device
from bench.groups import learner_config, random_group
from bench.head.implementations import IMPLEMENTATIONS, HeadProblem, make_problem
from bench.sizing import save_random
from bench.weights.publishing import Masters
from penstock.consumers.learning.learner import Learner
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.weights.shard import PolicyShard, Task
from penstock.deploy.launch.memory import ModelShape
from penstock.schemas.config import ModelConfig
from penstock.schemas.keys import Keys

HEAD_MATMULS = {"recompute": 4, "in forward": 3}
"""Products of tokens, hidden size and vocabulary in forward and backward."""
NUM_TENSORS = 64
CHANGED = 0.01
"""Share of the elements that an update changes."""


class HeadJob(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    num_tokens: int
    hidden_size: int
    vocabulary: int
    gemm_size: int
    rounds: int


class HeadFound(msgspec.Struct, frozen=True, kw_only=True):
    """seconds: by implementation, forward and backward of each round."""

    gemm_tflops: float
    seconds: dict[str, list[float]]


class TrainerJob(msgspec.Struct, frozen=True, kw_only=True):
    """One update of rows of one length, on random weights that the process writes into `folder`."""

    device: str
    folder: str
    shape: ModelShape
    row_tokens: int
    num_rows: int
    tokens_per_pass: int
    gemm_size: int
    rounds: int


class TrainerFound(msgspec.Struct, frozen=True, kw_only=True):
    """peak_tflops: of the data sheet, if it is known. num_tokens, flops: of an update. phase_s: of the last one."""

    gemm_tflops: float
    peak_tflops: float | None
    num_tokens: int
    flops: float
    seconds: list[float]
    peak_bytes: int
    phase_s: dict[str, float]


class PolicyJob(msgspec.Struct, frozen=True, kw_only=True):
    """A policy taken from the device as chunks, or read from a file onto the device as an engine reads it.

    num_bytes: of the policy in bfloat16. folder: of the chunks, or of the file.
    """

    device: str
    folder: str
    num_bytes: int
    rounds: int


class WeightsFound(msgspec.Struct, frozen=True, kw_only=True):
    """snapshot_s, write_s: of each policy. num_bytes: of the chunks of the last one."""

    to_host_bytes_per_s: float
    snapshot_s: list[float]
    write_s: list[float]
    num_bytes: int


class KernelJob(msgspec.Struct, frozen=True, kw_only=True):
    """One operator of vLLM's extension."""

    device: str


class KernelFound(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    error: float
    """The largest, relative to the same in float32 by torch."""


class LoadFound(msgspec.Struct, frozen=True, kw_only=True):
    """pinned_s: the file's pages locked. mapped_s: mapped by safetensors. buffer_s: from pinned memory of torch's."""

    pinned_s: list[float]
    mapped_s: list[float]
    buffer_s: list[float]


def measure_head(job: HeadJob) -> HeadFound:
    device = Device(job.device)
    made = make_problem(job.num_tokens, job.hidden_size, job.vocabulary, torch.bfloat16)
    problem = HeadProblem(*(each.detach().to(device.torch).requires_grad_(each.requires_grad) for each in made))

    def run(name: str) -> None:
        problem.loss(*IMPLEMENTATIONS[name].make()(problem)).backward()
        problem.hidden.grad = problem.weight.grad = None

    return HeadFound(
        gemm_tflops=device.gemm_tflops(job.gemm_size, job.rounds),
        seconds={name: device.seconds(lambda name=name: run(name), job.rounds) for name in HEAD_MATMULS},  # type: ignore[misc]
    )


def measure_trainer(job: TrainerJob) -> TrainerFound:
    device = Device(job.device)
    gemm_tflops = device.gemm_tflops(job.gemm_size, job.rounds)
    save_random(job.shape, Path(job.folder), device=job.device, dtype=torch.bfloat16)
    device.forget_peak()
    config = learner_config(
        ModelConfig(path=job.folder, dtype="bfloat16"),
        device=job.device,
        tokens_per_microbatch=job.tokens_per_pass,
        gradient_checkpointing=True,
    )
    learner = Learner(config)
    # A token of the prompt and one short of a row's tokens sampled.
    lengths = [job.row_tokens - 1] * 2
    groups = [random_group(index, lengths, learner.vocabulary) for index in range(job.num_rows // 2)]
    batch = learner.pack(groups, lambda version: 0)
    report = learner.step(batch)
    if report.num_optimizer_steps != 1:
        raise ValueError(
            f"{report.num_optimizer_steps} optimizer steps of a batch, expected 1: {report.skipped_reason}"
        )

    def step() -> None:
        nonlocal report
        report = learner.step(batch)

    if device.is_cuda:
        device.forget_peak()  # the peak of loading is another one
    seconds = device.seconds(step, job.rounds)
    return TrainerFound(
        gemm_tflops=gemm_tflops,
        peak_tflops=device.peak_tflops,
        num_tokens=job.row_tokens * job.num_rows,
        flops=update_flops(job.shape, job.row_tokens, job.num_rows),
        seconds=seconds,
        peak_bytes=device.peak_bytes(),
        phase_s=report.phase_s,
    )


def update_flops(shape: ModelShape, row_tokens: int, num_rows: int) -> float:
    """Counts the operations of forward and backward passes, without what checkpointing recomputes: 6 for a token and a
    weight that it is multiplied with, 12 for a layer, an element of the query, and a pair of tokens of which one sees
    the other."""
    block = 2 * shape.hidden * (shape.query_width + shape.key_width) + 3 * shape.hidden * shape.intermediate
    weights = shape.layers * block * row_tokens + shape.vocabulary * shape.hidden * (row_tokens - 1)
    pairs = row_tokens * (row_tokens + 1) / 2
    return num_rows * (6.0 * weights + 12.0 * shape.layers * shape.query_width * pairs)


def measure_weights(job: PolicyJob) -> WeightsFound:
    device = Device(job.device)
    masters = Masters(job.num_bytes)
    masters.weights = [weight.to(device.torch) for weight in masters.weights]
    shard = PolicyShard(Ranks(), Keys("gpu"), _no_redis, masters.collect)
    snapshot_s, write_s, num_bytes = [], [], 0
    for version in range(job.rounds + 2):
        device.synchronize()
        began = time.perf_counter()
        shard.snapshots.begin(version)
        shard.snapshots.wait()
        taken = time.perf_counter()
        before = version - 1 if version else None
        written = shard.write(Task(version, before, before is None, job.folder, math.inf, version))
        if written.failure is not None:
            raise written.failure
        # The first two policies allocate the buffers.
        if version > 1:
            snapshot_s.append(taken - began)
            write_s.append(time.perf_counter() - taken)
        num_bytes = sum(chunk.num_bytes for chunk in written.chunks)
        masters.change(CHANGED)
    return WeightsFound(
        to_host_bytes_per_s=device.to_host_bytes_per_s(job.num_bytes, job.rounds),
        snapshot_s=snapshot_s,
        write_s=write_s,
        num_bytes=num_bytes,
    )


def _no_redis(_: object) -> object:
    raise ValueError("chunks in Redis: expected those of a folder")


def measure_kernel(job: KernelJob) -> KernelFound:
    import vllm
    from vllm import _custom_ops

    rows, weight = (torch.randn(size, device=job.device).bfloat16() for size in ((64, 1024), (1024,)))
    found = torch.empty_like(rows)
    _custom_ops.rms_norm(found, rows, weight, 1e-6)
    expected = torch.nn.functional.rms_norm(rows.float(), (1024,), weight.float(), 1e-6)
    error = ((found.float() - expected).norm() / expected.norm()).item()
    return KernelFound(version=vllm.__version__, error=error)


def measure_load(job: PolicyJob) -> LoadFound:
    from penstock.producers.engines.pinned_files import PinnedFiles

    device, file = Device(job.device), str(Path(job.folder) / "policy.safetensors")
    elements = job.num_bytes // 2 // NUM_TENSORS
    save_file({f"layers.{n}": torch.full((elements,), float(n)).bfloat16() for n in range(NUM_TENSORS)}, file)
    names = [f"layers.{n}" for n in range(NUM_TENSORS)]
    targets = {name: torch.empty(elements, dtype=torch.bfloat16, device=device.torch) for name in names}
    buffers = {name: torch.empty(elements, dtype=torch.bfloat16, pin_memory=device.is_cuda) for name in names}
    pinned = PinnedFiles(lambda _: iter(load_file(file).items()))

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            targets[name].copy_(tensor)

    def load_pinned() -> None:
        with pinned.reading([file]) as tensors:
            load(tensors)

    found = LoadFound(
        pinned_s=device.seconds(load_pinned, job.rounds),
        mapped_s=device.seconds(lambda: load(load_file(file).items()), job.rounds),
        buffer_s=device.seconds(lambda: load(buffers.items()), job.rounds),
    )
    load_pinned()
    wrong = [name for n, (name, tensor) in enumerate(targets.items()) if not torch.all(tensor == n)]
    if wrong:
        raise ValueError(f"{wrong} hold other values than the file")
    return found
