"""The head section: memory and time of the float32 head against the naive way.

Every process has one torch thread, like each process of a run on one machine; compare with more only at equal numbers.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from bench.head.part import HEADS, HeadJob
from bench.result import Figure, Goal, compare_rounds
from bench.section import Bench, BenchSection, measure_apart

MAX_MEMORY = {4096: 0.2, 16384: 0.06}
MAX_TIME = {"recompute": 1.0, "in forward": 0.75}


class HeadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults take about three minutes on a quiet core and 11 GB of memory."""

    hidden_size: int = 1024
    vocabulary: int = 32000
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


def memory_figures(bench: Bench) -> Iterator[Figure]:
    for num_tokens in bench.settings.memory_tokens:
        peaks = {name: _measure(bench, "peak", int, num_tokens, (name,)) for name in HEADS}
        for name in MAX_TIME:
            yield Figure(
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
    {"memory": memory_figures, "time": time_figures},
    HeadSettings(),
    quick=HeadSettings(hidden_size=256, vocabulary=4000, memory_tokens=(2048,), time_tokens=512, rounds=1),
)
