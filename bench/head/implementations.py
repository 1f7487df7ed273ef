"""The heads that `part` measures, behind one signature. Needs torch alone, and for each peer the peer."""

from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.consumers.learning.head import selected_logprobs

TRL_CHUNK = 32768
"""Vocabulary of one chunk in TRL's trainers."""


class HeadProblem(NamedTuple):
    """hidden [N, H] and weight [V, H] are leaves; the loss is sum(to_logprobs * logprobs + to_entropy * entropy)."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    to_logprobs: Tensor
    to_entropy: Tensor

    def loss(self, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """Leaves the entropy's term out if an implementation does not compute it."""
        loss = (logprobs.to(self.to_logprobs.dtype) * self.to_logprobs).sum()
        return loss if entropy is None else loss + (entropy * self.to_entropy).sum()


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


Found = tuple[Tensor, Tensor | None]
Head = Callable[[HeadProblem], Found]
"""Logprobs [N] and entropy [N] (None where it has none), with a graph to hidden and weight."""


def _naive(problem: HeadProblem) -> Found:
    """Computes all logits at once, in float32 after the matmul."""
    log_p = torch.log_softmax((problem.hidden @ problem.weight.t()).float(), 1)
    return log_p.gather(1, problem.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def _naive_without_entropy(problem: HeadProblem) -> Found:
    return -F.cross_entropy((problem.hidden @ problem.weight.t()).float(), problem.targets, reduction="none"), None


def _recompute(problem: HeadProblem) -> Found:
    return selected_logprobs(problem.hidden, problem.weight, problem.targets)


def _in_forward(problem: HeadProblem) -> Found:
    return selected_logprobs(
        problem.hidden,
        problem.weight,
        problem.targets,
        token_grads=lambda part, *_: (problem.to_logprobs[part], problem.to_entropy[part]),
    )


def _make_torch() -> Head:
    options = torch.nn.LinearCrossEntropyOptions()

    def head(problem: HeadProblem) -> Found:
        loss = F.linear_cross_entropy(
            problem.hidden, problem.weight, problem.targets, reduction="none", options=options
        )
        return -loss, None

    return head


def _make_trl() -> Head:
    from trl.kernels import ChunkedLogProbFunction

    def head(problem: HeadProblem) -> Found:
        logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
            problem.hidden, problem.weight, None, problem.targets, 1.0, TRL_CHUNK, None, 1.0, ("entropy",)
        )
        return logprobs, entropy

    return head


def _make_cut_cross_entropy() -> Head:
    from cut_cross_entropy import linear_cross_entropy

    def head(problem: HeadProblem) -> Found:
        loss = linear_cross_entropy(
            problem.hidden, problem.weight, problem.targets, reduction="none", impl="torch_compile"
        )
        return -loss, None

    return head


class Implementation(NamedTuple):
    """package: the one whose version is named. naive: the naive way to the same results, its reference."""

    make: Callable[[], Head]
    package: str = "penstock"
    naive: str = "naive"


IMPLEMENTATIONS = {
    "naive": Implementation(lambda: _naive),
    "naive, no entropy": Implementation(lambda: _naive_without_entropy, naive="naive, no entropy"),
    "recompute": Implementation(lambda: _recompute),
    "in forward": Implementation(lambda: _in_forward),
    "TRL, chunked": Implementation(_make_trl, "trl"),
    "cut-cross-entropy, torch": Implementation(_make_cut_cross_entropy, "cut-cross-entropy", "naive, no entropy"),
    "torch, linear_cross_entropy": Implementation(_make_torch, "torch", "naive, no entropy"),
}
PEERS = ("TRL, chunked", "cut-cross-entropy, torch", "torch, linear_cross_entropy")


def package_version(name: str) -> str:
    package = IMPLEMENTATIONS[name].package
    return f"{package} {version(package)}"
