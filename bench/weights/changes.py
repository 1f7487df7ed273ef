"""The bytes of an update as AdamW changes bfloat16 weights.

Weights are drawn as a new model's are, 0.02 wide; gradients are normal, and independent from step to step. Every
element has one: rows of an embedding that no token meets would not change.
"""

import math
from collections.abc import Iterator
from statistics import median

import msgspec
import torch

from bench.result import Figure, Goal
from penstock.schemas.weights.codec import changed, pack
from penstock.schemas.weights.layout import as_bits

BETAS = (0.9, 0.95)
"""The trainer's defaults."""
WIDTH = 0.02
PARTS_PER_CHUNK = 2


class ChangesJob(msgspec.Struct, frozen=True, kw_only=True):
    """thinned: one row of so many is drawn. warm_steps: until the moments are in their steady state."""

    thinned: int
    learning_rate: float
    goal: float
    warm_steps: int
    steps: int


def measure_changes(job: ChangesJob) -> Figure:
    draw = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(math.ceil(rows / job.thinned), columns, generator=draw) * WIDTH for rows, columns in qwen_508m()
    ]
    optimizer = torch.optim.AdamW(weights, lr=job.learning_rate, betas=BETAS, weight_decay=0.0)
    num_elements = sum(weight.numel() for weight in weights)
    found: list[tuple[int, int]] = []
    before = _published(weights)
    for step in range(job.warm_steps + job.steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draw)
        optimizer.step()
        after = _published(weights)
        if step >= job.warm_steps:
            found.append(_change(before, after))
        before = after
    return Figure(
        f"bytes per update, AdamW at a learning rate of {job.learning_rate:g}, shapes of a 508M model",
        unit="MB",
        measured=median(num_bytes for num_bytes, _ in found) / 1e6,
        reference=2 * num_elements / 1e6,
        reference_is="all elements in bfloat16; gradients are drawn at random, one row of each matrix in a few",
        goal=Goal(at_most=job.goal),
        details={"changed_frac": [num_changed / num_elements for _, num_changed in found]},
    )


def _published(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [weight.bfloat16().flatten().view(torch.int16) for weight in weights]


def _change(before: list[torch.Tensor], after: list[torch.Tensor]) -> tuple[int, int]:
    """Returns the bytes of the chunks, and the number of elements changed."""
    parts, num_changed = [], 0
    for tensor, (old, new) in enumerate(zip(before, after, strict=True)):
        part, count = changed(tensor, 0, as_bits(old.numpy()), as_bits(new.numpy()))
        num_changed += count
        if part is not None:
            parts.append(part)
    chunks = (parts[first : first + PARTS_PER_CHUNK] for first in range(0, len(parts), PARTS_PER_CHUNK))
    return sum(len(pack(chunk)) for chunk in chunks), num_changed


def qwen_508m() -> Iterator[tuple[int, int]]:
    """Yields the shapes of the matrices of a Qwen3 of 508 million parameters with tied embeddings."""
    hidden, layers, heads, kv_heads, head_dim, intermediate = 1024, 22, 16, 8, 128, 3072
    yield 151_936, hidden
    for _ in range(layers):
        yield heads * head_dim, hidden
        yield from ((kv_heads * head_dim, hidden),) * 2
        yield hidden, heads * head_dim
        yield from ((intermediate, hidden),) * 2
        yield hidden, intermediate
