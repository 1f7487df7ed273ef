"""The measurements without an engine, each in a process of its own."""

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.gpu.device import Device
from bench.groups import learner_config, random_group
from bench.head.part import HeadProblem, make_problem, run
from bench.sizing import save_random
from bench.weights.publishing import Masters
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.weights.shard import PolicyShard, Task
from penstock.deploy.launch.memory import ModelShape
from penstock.schemas.config import ModelConfig
from penstock.schemas.keys import Keys

HEAD_MATMULS = {"recompute": 4, "in forward": 3}
"""Products of tokens, hidden size and vocabulary in forward and backward."""
CHANGED = 0.01
"""Share of the elements that an update changes."""


class GpuSizes(msgspec.Struct, frozen=True, kw_only=True):
    """An update has `num_rows` rows of `row_tokens` tokens; a policy of `weights_bytes` in bfloat16 is moved."""

    device: str = "cuda"
    rounds: int = 10
    gemm_size: int = 8192
    head_tokens: int = 8192
    row_tokens: int = 2048
    num_rows: int = 16
    tokens_per_pass: int = 8192
    weights_bytes: int = 2_000_000_000


class GpuJob(msgspec.Struct, frozen=True, kw_only=True):
    """shape: of the model, where there is one. folder: of what is written."""

    sizes: GpuSizes
    folder: str
    shape: ModelShape | None = None


def measure_head(job: GpuJob) -> dict[str, list[float]]:
    """Returns by implementation the seconds of forward and backward of each round, and `gemm_tflops`."""
    assert job.shape is not None
    sizes, device = job.sizes, Device(job.sizes.device)
    made = make_problem(sizes.head_tokens, job.shape.hidden, job.shape.vocabulary, torch.bfloat16)
    problem = HeadProblem(*(part.detach().to(device.torch).requires_grad_(part.requires_grad) for part in made))

    seconds = {name: device.seconds(partial(run, name, problem), sizes.rounds) for name in HEAD_MATMULS}
    return {"gemm_tflops": [device.gemm_tflops(sizes.gemm_size, sizes.rounds)], **seconds}


def measure_trainer(job: GpuJob) -> dict[str, Any]:
    """Measures updates of random weights that it writes into the folder. `flops` are an update's, `peak_tflops` the
    data sheet's, if it is known."""
    assert job.shape is not None
    sizes, device = job.sizes, Device(job.sizes.device)
    gemm_tflops = device.gemm_tflops(sizes.gemm_size, sizes.rounds)
    save_random(job.shape, Path(job.folder), device=sizes.device, dtype=torch.bfloat16)
    device.forget_peak()
    learner = Learner(
        learner_config(
            ModelConfig(path=job.folder, dtype="bfloat16"),
            device=sizes.device,
            tokens_per_microbatch=sizes.tokens_per_pass,
            gradient_checkpointing=True,
        )
    )
    # A token of the prompt and one short of a row's tokens sampled.
    lengths = [sizes.row_tokens - 1] * 2
    groups = [random_group(index, lengths, learner.vocabulary) for index in range(sizes.num_rows // 2)]
    batch = learner.pack(groups, lambda version: 0)
    report = learner.step(batch)
    if report.num_optimizer_steps != 1:
        raise ValueError(f"{report.num_optimizer_steps} optimizer steps, expected 1: {report.skipped_reason}")
    if device.is_cuda:
        device.forget_peak()  # the peak of loading is another one
    seconds = device.seconds(lambda: learner.step(batch), sizes.rounds)
    return {
        "gemm_tflops": gemm_tflops,
        "peak_tflops": device.peak_tflops,
        "num_tokens": sizes.row_tokens * sizes.num_rows,
        "flops": update_flops(job.shape, sizes.row_tokens, sizes.num_rows),
        "seconds": seconds,
        "peak_bytes": device.peak_bytes(),
    }


def update_flops(shape: ModelShape, row_tokens: int, num_rows: int) -> float:
    """Counts the operations of forward and backward passes, without what checkpointing recomputes: 6 for a token and a
    weight that it is multiplied with, 12 for a layer, an element of the query, and a pair of tokens of which one sees
    the other."""
    block = 2 * shape.hidden * (shape.query_width + shape.key_width) + 3 * shape.hidden * shape.intermediate
    weights = shape.layers * block * row_tokens + shape.vocabulary * shape.hidden * (row_tokens - 1)
    pairs = row_tokens * (row_tokens + 1) / 2
    return num_rows * (6.0 * weights + 12.0 * shape.layers * shape.query_width * pairs)


def measure_weights(job: GpuJob) -> dict[str, list[float]]:
    """Returns by policy the seconds of its snapshot, and of finding, encoding and writing what has changed."""
    sizes, device = job.sizes, Device(job.sizes.device)
    masters = Masters(sizes.weights_bytes)
    masters.weights = [weight.to(device.torch) for weight in masters.weights]
    shard = PolicyShard(Ranks(), Keys("gpu"), _no_redis, masters.collect)
    snapshot_s, write_s = [], []
    for version in range(sizes.rounds + 2):
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
        masters.change(CHANGED)
    limit = device.to_host_bytes_per_s(sizes.weights_bytes, sizes.rounds)
    return {"to_host_bytes_per_s": [limit], "snapshot_s": snapshot_s, "write_s": write_s}


def _no_redis(_: object) -> object:
    raise ValueError("chunks in Redis: expected those of a folder")
