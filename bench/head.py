"""The head section: the fp32 head's accuracy, memory and time beside the naive way and beside other people's heads.

Every process has one torch thread, like each process of a run on one machine; compare with more only at equal numbers.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from penstock.deploy.launch.child import Child, describe_status

from bench.head_implementations import IMPLEMENTATIONS, PEERS
from bench.head_part import NUM_THREADS, Dtype, Entry, Job, Kind, Matmul, Measured
from bench.result import BenchError, Figure, Goal, Result, compare, describe_machine, now

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
PART_LIMIT_S = 900.0


class HeadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults take about five minutes on a quiet core and 11 GB of memory."""

    hidden_size: int = 1024
    vocabulary: int = 32000
    accuracy_tokens: int = 256
    memory_tokens: tuple[int, ...] = (4096, 16384)
    time_tokens: int = 2048
    peer_tokens: int = 512
    rounds: int = 3


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


def measure_head(rows: Sequence[str], settings: HeadSettings, run_file: Path, work: Path) -> Result:
    """Measures the named rows of `HEAD_ROWS` in order; the run file plays no part here.

    Raises:
        BenchError: one of our own implementations could not be measured.
    """
    machine, date, began = describe_machine(), now(), time.monotonic()
    figures: list[Figure] = []
    with _scratch(work) as folder:
        bench = _Bench(settings, folder)
        for row in rows:
            print(f"head: {row} ...", flush=True)
            figures += HEAD_ROWS[row](bench)
    return Result(
        section="head",
        date=date,
        machine=machine,
        settings={"num_threads": NUM_THREADS, **msgspec.to_builtins(settings)},
        wall_s=time.monotonic() - began,
        figures=tuple(figures),
    )


@contextmanager
def _scratch(work: Path) -> Iterator[Path]:
    work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="head-", dir=work)).absolute()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def peers_python() -> Path:
    """The interpreter of the environment that `make bench` gives the peers."""
    return Path(os.environ.get("VENV", ".venv") + "-peers") / "bin" / "python"


class _Bench:
    """One run of the section: its rows."""

    def __init__(self, settings: HeadSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder

    def accuracy(self) -> list[Figure]:
        entries = [Entry(name, dtype) for dtype in MAX_GRADIENT_ERROR for name in ("naive", *OURS)]
        return list(accuracy_figures(self._measure("accuracy", entries, self._settings.accuracy_tokens)))

    def memory(self) -> list[Figure]:
        return [
            figure
            for num_tokens in self._settings.memory_tokens
            for figure in memory_figures(num_tokens, self._peaks([Entry("naive"), *map(Entry, OURS)], num_tokens))
        ]

    def time(self) -> list[Figure]:
        names = ("naive", *OURS)
        entries = [Entry(name, matmul=matmul) for matmul in MAX_TIME for name in names]
        measured = self._measure("time", entries, self._settings.time_tokens)
        return list(time_figures(measured, self._settings.time_tokens))

    def peers(self) -> list[Figure]:
        python = peers_python()
        entries = [Entry(name, dtype) for dtype in MAX_GRADIENT_ERROR for name in IMPLEMENTATIONS]
        if not python.is_file():
            reason = f"{python} is not there; make bench makes it"
            return [_absent(Entry(name), reason) for name in PEERS]
        settings = self._settings
        num_memory_tokens = settings.memory_tokens[0]
        accuracy = self._measure("accuracy", entries, settings.accuracy_tokens, python)
        seconds = self._measure("time", entries, settings.peer_tokens, python)
        # Ours are in the memory row.
        others = [Entry(name) for name in IMPLEMENTATIONS if name not in OURS]
        peaks = self._peaks(others, num_memory_tokens, python)
        return list(peer_figures(accuracy, seconds, peaks, settings.peer_tokens, num_memory_tokens))

    def _peaks(
        self, entries: Sequence[Entry], num_tokens: int, python: Path = Path(sys.executable)
    ) -> dict[Entry, Measured]:
        """One process each: what one leaves behind must not count as another's."""
        return {entry: self._measure("memory", [entry], num_tokens, python)[entry] for entry in entries}

    def _measure(
        self, kind: Kind, entries: Sequence[Entry], num_tokens: int, python: Path = Path(sys.executable)
    ) -> dict[Entry, Measured]:
        settings = self._settings
        job = Job(
            kind=kind,
            entries=tuple(entries),
            num_tokens=num_tokens,
            hidden_size=settings.hidden_size,
            vocabulary=settings.vocabulary,
            rounds=settings.rounds,
        )
        job_file, result_file = self._folder / "job.json", self._folder / "result.json"
        job_file.write_bytes(msgspec.json.encode(job))
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(NUM_THREADS))
        child = Child(
            f"head, {kind}",
            # Not resolved: the interpreter of an environment is a link, and finds its packages by where the link lies.
            [os.path.abspath(python), "-m", "bench.head_part", str(job_file), str(result_file)],
            log=self._folder / "part.log",
            environment={**threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        )
        try:
            deadline = time.monotonic() + PART_LIMIT_S
            while child.poll() is None:
                if time.monotonic() > deadline:
                    raise BenchError(f"head, {kind}: not done after {PART_LIMIT_S:g} s; {child.last_lines()}")
                time.sleep(0.05)
        finally:
            child.kill()
        if child.returncode:
            raise BenchError(f"head, {kind} {describe_status(child.returncode)}; its log ends:\n{child.last_lines()}")
        measured = msgspec.json.decode(result_file.read_bytes(), type=list[Measured])
        for one in measured:
            if one.reason:
                print(f"head: {one.entry}: not measured: {one.reason}", flush=True)
        return {one.entry: one for one in measured}


def accuracy_figures(measured: dict[Entry, Measured]) -> Iterator[Figure]:
    """The larger error of our two ways, against what is allowed."""
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
    """The median over the rounds of ours / naive, naive with torch's default library."""
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
    """The median over rounds; both of a round met the same neighbours."""
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
    """Time against the naive way of computing the same results, accuracy beside it; ours in the same processes."""
    for entry, timed in seconds.items():
        if entry.name not in (*PEERS, *OURS):
            continue
        if timed.reason:
            yield _absent(entry, timed.reason)
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
            goal=None,
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
            goal=None,
            details=msgspec.to_builtins(found),
        )
        if peak is not None and peak.peak_bytes is not None and naive_peak is not None:
            yield compare(
                f"{entry}: peak memory, {num_memory_tokens} tokens",
                unit="MB",
                measured=peak.peak_bytes / 1e6,
                reference=naive_peak / 1e6,
                reference_is=f"{naive_name}; both beyond the inputs, gradients included",
                goal=None,
            )


def _absent(entry: Entry, reason: str) -> Figure:
    return compare(
        f"{entry}: not measured",
        unit="",
        measured=None,
        reference=None,
        reference_is="",
        goal=None,
        details={"reason": reason},
    )


HEAD_ROWS: dict[str, Callable[[_Bench], list[Figure]]] = {
    "accuracy": _Bench.accuracy,
    "memory": _Bench.memory,
    "time": _Bench.time,
    "peers": _Bench.peers,
}
