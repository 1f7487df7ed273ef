"""The head section: accuracy, memory and time of the float32 head against the naive way and against other heads.

Every process has one torch thread, like each process of a run on one machine; compare with more only at equal numbers.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence

import msgspec

from bench.head.implementations import IMPLEMENTATIONS, PEERS
from bench.head.part import Dtype, Entry, Job, Kind, Matmul, Measured
from bench.result import Figure, Goal, absent, compare
from bench.section import Bench, BenchSection, NoPeersError, measure_apart, peers_python

OURS = ("recompute", "in forward")
"""Backward computes the logits again; forward computes the gradients of a token-level loss at once."""
MAX_ERROR = 2e-5
MAX_GRADIENT_ERROR: dict[Dtype, float] = {"float32": 2e-6, "bfloat16": 3e-3}
MAX_MEMORY = {4096: 0.2, 16384: 0.06}
MAX_TIME: dict[Matmul, dict[str, float]] = {
    "default": {"recompute": 1.0, "in forward": 0.75},
    "onednn": {"recompute": 0.6, "in forward": 0.5},
}
CLOCK = "processor time of forward and backward"


class HeadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults take about five minutes on a quiet core and 11 GB of memory."""

    hidden_size: int = 1024
    vocabulary: int = 32000
    accuracy_tokens: int = 256
    memory_tokens: tuple[int, ...] = (4096, 16384)
    time_tokens: int = 2048
    peer_tokens: int = 512
    rounds: int = 3
    num_threads: int = 1


QUICK_HEAD = HeadSettings(
    hidden_size=256,
    vocabulary=4000,
    accuracy_tokens=64,
    memory_tokens=(2048,),
    time_tokens=512,
    peer_tokens=128,
    rounds=1,
)
"""Shows that everything runs. Its figures mean nothing."""


def measure_accuracy(bench: Bench) -> list[Figure]:
    entries = [Entry(name, dtype) for dtype in MAX_GRADIENT_ERROR for name in ("naive", *OURS)]
    return list(accuracy_figures(_measure(bench, "accuracy", entries, bench.settings.accuracy_tokens)))


def measure_memory(bench: Bench) -> list[Figure]:
    return [
        figure
        for num_tokens in bench.settings.memory_tokens
        for figure in memory_figures(num_tokens, _peaks(bench, [Entry("naive"), *map(Entry, OURS)], num_tokens))
    ]


def measure_time(bench: Bench) -> list[Figure]:
    entries = [Entry(name, matmul=matmul) for matmul in MAX_TIME for name in ("naive", *OURS)]
    num_tokens = bench.settings.time_tokens
    return list(time_figures(_measure(bench, "time", entries, num_tokens), num_tokens))


def measure_peers(bench: Bench) -> list[Figure]:
    """Measures all implementations in the peers' environment; ours too, except the memory, which has its own row."""
    try:
        python = peers_python()
    except NoPeersError as error:
        return [absent(name, str(error)) for name in PEERS]
    entries = [Entry(name, dtype) for dtype in MAX_GRADIENT_ERROR for name in IMPLEMENTATIONS]
    settings = bench.settings
    num_memory_tokens = settings.memory_tokens[0]
    accuracy = _measure(bench, "accuracy", entries, settings.accuracy_tokens, python)
    seconds = _measure(bench, "time", entries, settings.peer_tokens, python)
    others = [Entry(name) for name in IMPLEMENTATIONS if name not in OURS]
    peaks = _peaks(bench, others, num_memory_tokens, python)
    return list(peer_figures(accuracy, seconds, peaks, settings.peer_tokens, num_memory_tokens))


def _peaks(
    bench: Bench, entries: Sequence[Entry], num_tokens: int, python: str = sys.executable
) -> dict[Entry, Measured]:
    """Measures each in its own process: memory that one leaves behind must not count as another's."""
    return {entry: _measure(bench, "memory", [entry], num_tokens, python)[entry] for entry in entries}


def _measure(
    bench: Bench, kind: Kind, entries: Sequence[Entry], num_tokens: int, python: str = sys.executable
) -> dict[Entry, Measured]:
    settings = bench.settings
    job = Job(
        kind=kind,
        entries=tuple(entries),
        num_tokens=num_tokens,
        hidden_size=settings.hidden_size,
        vocabulary=settings.vocabulary,
        rounds=settings.rounds,
        num_threads=settings.num_threads,
    )
    measured = measure_apart(
        f"head, {kind}",
        "bench.head.part:measure",
        job,
        list[Measured],
        bench.folder,
        python=python,
    )
    for one in measured:
        if one.reason:
            print(f"head: {one.entry}: not measured: {one.reason}", flush=True)
    return {one.entry: one for one in measured}


def accuracy_figures(measured: dict[Entry, Measured]) -> Iterator[Figure]:
    """Compares the larger error of our two ways with the error allowed."""
    for dtype, allowed in MAX_GRADIENT_ERROR.items():
        found = {name: measured[Entry(name, dtype)].accuracy for name in ("naive", *OURS)}
        quantities = {"logprobs": MAX_ERROR, "entropy": MAX_ERROR, "grad_hidden": allowed, "grad_weight": allowed}
        for quantity, bound in quantities.items():
            errors = {name: getattr(accuracy, quantity) for name, accuracy in found.items()}
            yield compare(
                f"{quantity}, {dtype} inputs: error against float64",
                unit="",
                measured=max(errors[name] for name in OURS),
                reference=bound,
                reference_is="the error allowed: the largest of results, relative of gradients",
                goal=Goal(at_most=1.0),
                details=errors,
            )


def memory_figures(num_tokens: int, peaks: dict[Entry, Measured]) -> Iterator[Figure]:
    naive = peaks[Entry("naive")].peak_bytes
    for name in OURS:
        peak = peaks[Entry(name)].peak_bytes
        assert peak is not None and naive is not None
        goal = MAX_MEMORY.get(num_tokens)
        yield compare(
            f"peak memory, {num_tokens} tokens, {name}",
            unit="MB",
            measured=peak / 1e6,
            reference=naive / 1e6,
            reference_is="naive full logits; both beyond the inputs, gradients included",
            goal=None if goal is None else Goal(at_most=goal),
        )


def time_figures(measured: dict[Entry, Measured], num_tokens: int) -> Iterator[Figure]:
    """Compares by the median over the rounds of ours / naive, naive with torch's default library."""
    naive = measured[Entry("naive")]
    for matmul, goals in MAX_TIME.items():
        same = measured[Entry("naive", matmul=matmul)]
        library = "torch's default library" if matmul == "default" else "oneDNN"
        for name, at_most in goals.items():
            ours = measured[Entry(name, matmul=matmul)]
            yield compare(
                f"time, {num_tokens} tokens, {name}, {library}",
                unit="s",
                measured=ours.median_s if ours.seconds else None,
                reference=naive.median_s,
                reference_is=f"naive full logits, torch's default library, the same rounds; {CLOCK}",
                goal=Goal(at_most=at_most),
                ratio=_ratio(ours, naive),
                details={
                    "seconds": ours.seconds,
                    "naive_seconds": naive.seconds,
                    "wall_seconds": ours.wall_seconds,
                    "naive_wall_seconds": naive.wall_seconds,
                    "ratio_of_naive_on_the_same_library": _ratio(ours, same),
                    **({"reason": ours.reason} if ours.reason else {}),
                },
            )


def _ratio(ours: Measured, naive: Measured) -> float | None:
    """Returns the median over rounds; both times of a round were taken under the same load."""
    if not ours.seconds or not naive.seconds:
        return None
    return statistics.median(a / b for a, b in zip(ours.seconds, naive.seconds, strict=False))


def peer_figures(
    accuracy: dict[Entry, Measured],
    seconds: dict[Entry, Measured],
    peaks: dict[Entry, Measured],
    num_tokens: int,
    num_memory_tokens: int,
) -> Iterator[Figure]:
    """Compares time with the naive way to the same results, and accuracy; ours in the same processes."""
    for entry, timed in seconds.items():
        if entry.name not in (*PEERS, *OURS):
            continue
        if timed.reason:
            yield absent(str(entry), timed.reason)
            continue
        naive_name = IMPLEMENTATIONS[entry.name].naive
        peak = peaks.get(entry)
        naive_peak = peaks[Entry(naive_name)].peak_bytes
        yield compare(
            f"{entry}: time, {num_tokens} tokens",
            unit="s",
            measured=timed.median_s,
            reference=seconds[Entry(naive_name)].median_s,
            reference_is=f"{naive_name}, float32 inputs, the same rounds; {CLOCK}",
            ratio=_ratio(timed, seconds[Entry(naive_name)]),
            details={
                "package": timed.package,
                "seconds": timed.seconds,
                "wall_seconds": timed.wall_seconds,
                "ratio_of_naive_on_the_same_inputs": _ratio(timed, seconds[Entry(naive_name, entry.dtype)]),
            },
        )
        found = accuracy[entry].accuracy
        assert found is not None
        yield compare(
            f"{entry}: logprob error against float64",
            unit="",
            measured=found.logprobs,
            reference=MAX_ERROR,
            reference_is="the error that the fp32 head is allowed",
            details=msgspec.to_builtins(found),
        )
        if peak is not None and peak.peak_bytes is not None and naive_peak is not None:
            yield compare(
                f"{entry}: peak memory, {num_memory_tokens} tokens",
                unit="MB",
                measured=peak.peak_bytes / 1e6,
                reference=naive_peak / 1e6,
                reference_is=f"{naive_name}; both beyond the inputs, gradients included",
            )


HEAD = BenchSection(
    "head",
    {"accuracy": measure_accuracy, "memory": measure_memory, "time": measure_time, "peers": measure_peers},
    HeadSettings(),
    QUICK_HEAD,
)
