"""The measuring processes of the head section: the trainer's float32 head and the naive one, which holds all logits."""

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from bench.machine import reset_peak, status_bytes
from penstock.consumers.learning.model.head import selected_logprobs


class HeadProblem(NamedTuple):
    """hidden [N, H] and weight [V, H] are leaves; the loss is sum(to_logprobs * logprobs + to_entropy * entropy)."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    to_logprobs: Tensor
    to_entropy: Tensor

    def loss(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return (logprobs.to(self.to_logprobs.dtype) * self.to_logprobs).sum() + (entropy * self.to_entropy).sum()


def make_problem(num_tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype) -> HeadProblem:
    """Makes a seeded problem whose logits have a standard deviation of 2."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator)
    weight = torch.randn(vocabulary, hidden_size, generator=generator).mul_(2 * hidden_size**-0.5)
    upstream = torch.randn(2, num_tokens, generator=generator) / num_tokens
    return HeadProblem(
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        torch.randint(0, vocabulary, (num_tokens,), generator=generator),
        upstream[0],
        0.1 * upstream[1],
    )


def naive(problem: HeadProblem) -> tuple[Tensor, Tensor]:
    """Computes all logits at once, in the type of the inputs."""
    log_p = torch.log_softmax((problem.hidden @ problem.weight.t()).to(problem.to_logprobs.dtype), 1)
    return log_p.gather(1, problem.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def recompute(problem: HeadProblem) -> tuple[Tensor, Tensor]:
    """Computes the logits again in backward."""
    return selected_logprobs(problem.hidden, problem.weight, problem.targets)


def in_forward(problem: HeadProblem) -> tuple[Tensor, Tensor]:
    """Computes the gradients of a loss of tokens in forward."""
    return selected_logprobs(
        problem.hidden,
        problem.weight,
        problem.targets,
        token_grads=lambda part, *_: (problem.to_logprobs[part], problem.to_entropy[part]),
    )


HEADS: dict[str, Callable[[HeadProblem], tuple[Tensor, Tensor]]] = {
    "naive": naive,
    "recompute": recompute,
    "in forward": in_forward,
}
"""Each returns logprobs [N] and entropy [N], with a graph to hidden and weight."""


class HeadJob(msgspec.Struct, frozen=True, kw_only=True):
    """heads: names in HEADS."""

    heads: tuple[str, ...]
    num_tokens: int
    hidden_size: int
    vocabulary: int
    rounds: int = 1

    def problem(self) -> HeadProblem:
        return make_problem(self.num_tokens, self.hidden_size, self.vocabulary, torch.float32)


def run(name: str, problem: HeadProblem) -> tuple[Tensor, Tensor]:
    """Runs forward and backward."""
    problem.hidden.grad = problem.weight.grad = None
    found = HEADS[name](problem)
    problem.loss(*found).backward()
    return found


def measure_seconds(job: HeadJob) -> dict[str, list[float]]:
    """Returns each head's processor seconds by round. All take turns, so that other load affects all of them."""
    torch.set_num_threads(1)
    problem = job.problem()
    seconds: dict[str, list[float]] = {name: [] for name in job.heads}
    for n in range(job.rounds + 1):
        for name in job.heads:
            began = time.process_time()
            run(name, problem)
            if n:  # the first round warms up
                seconds[name].append(time.process_time() - began)
    return seconds


def measure_peak(job: HeadJob) -> int:
    """Returns the most bytes beyond the inputs during forward and backward, gradients included, of the one head: a
    process's peak cannot be divided among several."""
    torch.set_num_threads(1)
    (name,), problem = job.heads, job.problem()
    run(name, problem._replace(hidden=problem.hidden[:16].detach().requires_grad_(), targets=problem.targets[:16],
                               to_logprobs=problem.to_logprobs[:16], to_entropy=problem.to_entropy[:16]))  # fmt: skip
    problem.hidden.grad = problem.weight.grad = None
    reset_peak()
    before = status_bytes("VmRSS")
    run(name, problem)
    return status_bytes("VmHWM") - before
