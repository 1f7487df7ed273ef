"""The head section: accuracy, memory and time of the float32 head against the naive way.

Every process has one torch thread, like each process of a run on one machine; compare with more only at equal numbers.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from bench.head.part import HEADS, Dtype, HeadJob
from bench.result import Figure, Goal, compare, compare_rounds
from bench.section import Bench, BenchSection, measure_apart

MAX_ERROR = 2e-5
MAX_GRADIENT_ERROR: dict[Dtype, float] = {"float32": 2e-6, "bfloat16": 3e-3}
MAX_MEMORY = {4096: 0.2, 16384: 0.06}
MAX_TIME = {"recompute": 1.0, "in forward": 0.75}


class HeadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults take about three minutes on a quiet core and 11 GB of memory."""

    hidden_size: int = 1024
    vocabulary: int = 32000
    accuracy_tokens: int = 256
    memory_tokens: tuple[int, ...] = (4096, 16384)
    time_tokens: int = 2048
    rounds: int = 3


def _measure(bench: Bench, what: str, kind: Any, num_tokens: int, heads: tuple[str, ...], **more: Any) -> Any:
    job = HeadJob(
        heads=heads,
        num_tokens=num_tokens,
        hidden_size=bench.settings.hidden_size,
        vocabulary=bench.settings.vocabulary,
        **more,
    )
    return measure_apart(f"head-{what}", f"bench.head.part:measure_{what}", job, kind, bench.folder)


def accuracy_figures(bench: Bench) -> Iterator[Figure]:
    """Compares the larger error of our two ways with the error allowed."""
    for dtype, allowed in MAX_GRADIENT_ERROR.items():
        kind = dict[str, dict[str, float]]
        found = _measure(bench, "errors", kind, bench.settings.accuracy_tokens, tuple(HEADS), dtype=dtype)
        quantities = {"logprobs": MAX_ERROR, "entropy": MAX_ERROR, "grad_hidden": allowed, "grad_weight": allowed}
        for quantity, bound in quantities.items():
            errors = {name: errors[quantity] for name, errors in found.items()}
            yield compare(
                f"{quantity}, {dtype} inputs: error against float64",
                unit="",
                measured=max(errors[name] for name in MAX_TIME),
                reference=bound,
                reference_is="the error allowed: the largest of results, relative of gradients",
                goal=Goal(at_most=1.0),
                details=errors,
            )


def memory_figures(bench: Bench) -> Iterator[Figure]:
    for num_tokens in bench.settings.memory_tokens:
        peaks = {name: _measure(bench, "peak", int, num_tokens, (name,)) for name in HEADS}
        for name in MAX_TIME:
            yield compare(
                f"peak memory, {num_tokens} tokens, {name}",
                unit="MB",
                measured=peaks[name] / 1e6,
                reference=peaks["naive"] / 1e6,
                reference_is="naive full logits; both beyond the inputs, gradients included",
                goal=Goal(at_most=MAX_MEMORY[num_tokens]) if num_tokens in MAX_MEMORY else None,
            )


def time_figures(bench: Bench) -> Iterator[Figure]:
    settings = bench.settings
    kind = dict[str, list[float]]
    seconds = _measure(bench, "seconds", kind, settings.time_tokens, tuple(HEADS), rounds=settings.rounds)
    for name, at_most in MAX_TIME.items():
        yield compare_rounds(
            f"time, {settings.time_tokens} tokens, {name}",
            seconds[name],
            seconds["naive"],
            reference_is="naive full logits, the same rounds; processor time of forward and backward",
            unit="s",
            goal=Goal(at_most=at_most),
            details={"seconds": seconds},
        )


HEAD = BenchSection(
    "head",
    {"accuracy": accuracy_figures, "memory": memory_figures, "time": time_figures},
    HeadSettings(),
    quick=HeadSettings(
        hidden_size=256, vocabulary=4000, accuracy_tokens=64, memory_tokens=(2048,), time_tokens=512, rounds=1
    ),
)
