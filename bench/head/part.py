"""The measuring processes of the head section, in either environment."""

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Literal

import msgspec
import torch
from torch import Tensor

from bench.head.implementations import IMPLEMENTATIONS, PEERS, Head, HeadProblem, make_problem, package_version
from bench.machine import reset_peak, status_bytes
from penstock.consumers.learning.device import onednn_matmul
from penstock.schemas.config import ConfigError

SLOW_S = 5.0
"""A peer that has run this long is not timed again."""
Dtype = Literal["float32", "bfloat16"]
Matmul = Literal["default", "onednn"]
Kind = Literal["accuracy", "time", "memory"]


class Entry(msgspec.Struct, frozen=True):
    """One implementation on one type of inputs and one library of matmuls."""

    name: str
    dtype: Dtype = "float32"
    matmul: Matmul = "default"

    def __str__(self) -> str:
        extra = [part for part in (self.dtype, self.matmul) if part not in ("float32", "default")]
        return ", ".join([self.name, *extra])


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement that one process makes of some implementations."""

    kind: Kind
    entries: tuple[Entry, ...]
    num_tokens: int
    hidden_size: int
    vocabulary: int
    rounds: int = 1
    num_threads: int = 1


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Against float64 from the same inputs: largest difference of results, relative norm of gradients' differences.

    The gradients are those of the loss that the implementation can compute, with entropy or without.
    """

    logprobs: float
    entropy: float | None
    grad_hidden: float
    grad_weight: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement of one entry; only `reason` if a peer does not run here."""

    entry: Entry
    package: str = ""
    reason: str = ""
    accuracy: Accuracy | None = None
    seconds: tuple[float, ...] = ()
    """Forward and backward, of each round: processor time on one thread, which other load hardly lengthens."""
    wall_seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    """Most memory beyond the inputs during forward and backward; gradients included."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure(job: Job) -> list[Measured]:
    """Measures every entry of the job; a peer that cannot run is reported, any other failure is raised."""
    torch.set_num_threads(job.num_threads)
    return {"accuracy": _accuracy, "time": _times, "memory": _memory}[job.kind](job)


def _accuracy(job: Job) -> list[Measured]:
    results = []
    for entry in job.entries:
        problem = _problem(job, entry)
        head, reason = _ready(entry, problem)
        if head is None:
            results.append(Measured(entry=entry, reason=reason))
            continue
        found = _run(head, problem)
        gradients = problem.hidden.grad, problem.weight.grad
        exact = HeadProblem(*(tensor.detach().double() if tensor.is_floating_point() else tensor for tensor in problem))
        exact.hidden.requires_grad_(), exact.weight.requires_grad_()
        expected = _exact(exact)
        exact.loss(expected[0], None if found[1] is None else expected[1]).backward()
        accuracy = Accuracy(
            logprobs=_largest_difference(found[0], expected[0]),
            entropy=None if found[1] is None else _largest_difference(found[1], expected[1]),
            grad_hidden=_relative(gradients[0], exact.hidden.grad),
            grad_weight=_relative(gradients[1], exact.weight.grad),
        )
        results.append(Measured(entry=entry, package=package_version(entry.name), accuracy=accuracy))
    return results


def _exact(problem: HeadProblem) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(problem.hidden @ problem.weight.t(), 1)
    return log_p.gather(1, problem.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def _times(job: Job) -> list[Measured]:
    """Measures every entry once in each round, so that other load on the machine affects all of them."""
    problems = {entry.dtype: _problem(job, entry) for entry in job.entries}
    ready = {entry: _ready(entry, problems[entry.dtype]) for entry in job.entries}
    seconds: dict[Entry, list[float]] = {entry: [] for entry in job.entries}
    wall: dict[Entry, list[float]] = {entry: [] for entry in job.entries}
    for _ in range(job.rounds):
        for entry, (head, _) in ready.items():
            if head is None or (entry.name in PEERS and sum(wall[entry]) > SLOW_S):
                continue
            with _matmul(entry):
                began, wall_began = time.process_time(), time.perf_counter()
                _run(head, problems[entry.dtype])
                wall[entry].append(time.perf_counter() - wall_began)
                seconds[entry].append(time.process_time() - began)
    return [
        Measured(entry=entry, reason=reason)
        if head is None
        else Measured(
            entry=entry,
            package=package_version(entry.name),
            seconds=tuple(seconds[entry]),
            wall_seconds=tuple(wall[entry]),
        )
        for entry, (head, reason) in ready.items()
    ]


def _memory(job: Job) -> list[Measured]:
    """Measures the peak of the one entry: a process's peak cannot be divided among several."""
    (entry,) = job.entries
    problem = _problem(job, entry)
    head, reason = _ready(entry, problem)
    if head is None:
        return [Measured(entry=entry, reason=reason)]
    problem.hidden.grad = problem.weight.grad = None
    reset_peak()
    before = status_bytes("VmRSS")
    with _matmul(entry):
        _run(head, problem)
    peak = status_bytes("VmHWM") - before
    return [Measured(entry=entry, package=package_version(entry.name), peak_bytes=peak)]


def _ready(entry: Entry, problem: HeadProblem) -> tuple[Head | None, str]:
    """Returns the implementation, warmed up on a few tokens (compiled, libraries loaded), or the reason why it cannot
    run."""
    few = HeadProblem(
        problem.hidden[:16].detach().requires_grad_(), problem.weight, *(tensor[:16] for tensor in problem[2:])
    )
    try:
        with _matmul(entry):
            head = IMPLEMENTATIONS[entry.name].make()
            _run(head, few)
    except ConfigError as error:
        return None, str(error)
    except Exception as error:  # a peer's failure is a finding about the peer, and the others are still measured
        if entry.name not in PEERS:
            raise
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return head, ""


def _run(head: Head, problem: HeadProblem) -> tuple[Tensor, Tensor | None]:
    """Runs forward and backward."""
    problem.hidden.grad = problem.weight.grad = None
    found = head(problem)
    problem.loss(*found).backward()
    return found


@contextlib.contextmanager
def _matmul(entry: Entry) -> Iterator[None]:
    with onednn_matmul() if entry.matmul == "onednn" else contextlib.nullcontext():
        yield


def _problem(job: Job, entry: Entry) -> HeadProblem:
    return make_problem(job.num_tokens, job.hidden_size, job.vocabulary, getattr(torch, entry.dtype))


def _largest_difference(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact.detach()).abs().max())


def _relative(found: Tensor | None, exact: Tensor | None) -> float:
    assert found is not None and exact is not None
    return float((found.double() - exact).norm() / exact.norm())
