"""Proximal logprobs under the version that sampled each token: `correction.proximal = "sampled_version"`.

With behavior b, proximal p and current policy c, p is recomputed with the published weights that sampled the token::

    p / b    the engine's mismatch alone: the importance weight
    c / p    all of the lag, and the steps on this batch: the policy ratio
    (p / b) * (c / p) = c / b

Source: arXiv 2605.12070. With "consumed", p is the policy before the first step on the batch: p / b holds lag too.

One forward pass runs per micro-batch and older version in it, over the rows with tokens of that version. Tokens of lag
0 need none: their version is the policy before the first step.

What is exact: a row that one version sampled. In a row that met an update, a token after the first segment was sampled
with keys and values of older weights for the tokens before it (unless the engine clears its cache); here its version
computes the whole row. Such a token's p / b holds that difference, so that the engine's gap is read from rows of one
version only (`MicroBatch.is_pure`).

Not recomputed, and left to the policy before the first step: tokens outside the loss mask, and those of an unknown
version.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.consumers.learning.batch.batch import MicroBatch, idle_microbatch
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.learning.ranks import Ranks

Policies = Callable[[int], Sequence[Tensor] | None]
"""Returns this rank's elements of each published tensor of a version, [count] each, in the order of
`PackedModel.published_parts`; None if the version is no longer kept."""


class PolicyGoneError(LookupError):
    """A policy that sampled tokens of the batch is no longer kept on every rank."""


class Recomputed(NamedTuple):
    """logprobs: [M] float32, under the version of each token. known: [M] bool, True where it was recomputed."""

    logprobs: Tensor
    known: Tensor

    def instead_of(self, logprobs: Tensor, part: slice) -> Tensor:
        """Replaces the recomputed ones among the logprobs of the tokens of `part`."""
        return torch.where(self.known[part], self.logprobs[part], logprobs)


class SampledVersions:
    """Recomputes logprobs under older policies, on all ranks together.

    logprobs: of a micro-batch on the device, under the model's present weights. Masters change in between: nobody may
    read them.
    """

    def __init__(
        self, model: PackedModel, ranks: Ranks, device: torch.device, logprobs: Callable[[MicroBatch], Tensor]
    ) -> None:
        self.policies: Policies = lambda version: None
        """Set on every rank by those who publish; without them no version is kept."""
        self.before_change: Callable[[], object] = lambda: None
        """Called before the masters change."""
        model.check_replaceable()
        self._model, self._ranks, self._device, self._logprobs = model, ranks, device, logprobs

    @torch.no_grad()
    def recompute(self, microbatches: Sequence[MicroBatch]) -> list[Recomputed | None]:
        """Returns the results for each micro-batch, of which every rank has the same number; None for an idle one.

        Raises:
            PolicyGoneError: names the version.
        """
        needed = self._ranks.gather([frozenset(each.older) for each in microbatches])
        by_pass = [frozenset().union(*of_ranks) for of_ranks in zip(*needed, strict=True)]
        found = [None if each.is_idle else _none_of(each, self._device) for each in microbatches]
        versions = sorted(frozenset().union(*by_pass))
        if not versions:
            return found
        self.before_change()
        with self._model.replaced() as replace:
            for version in versions:
                replace(self._policy(version))
                for number, microbatch in enumerate(microbatches):
                    if version in by_pass[number]:
                        self._recompute(version, microbatch, found[number])
        return found

    def _policy(self, version: int) -> Sequence[Tensor]:
        policy = self.policies(version)
        if not all(self._ranks.gather(policy is not None)) or policy is None:
            raise PolicyGoneError(f"policy {version}, which sampled tokens of this batch, is not kept on every rank")
        return policy

    def _recompute(self, version: int, microbatch: MicroBatch, found: Recomputed | None) -> None:
        rows = microbatch.older.get(version)
        logprobs = self._logprobs((idle_microbatch() if rows is None else rows).to(self._device))
        if rows is not None and found is not None:
            # Both hold the version's tokens in the same order. The places are found on the host, which so never waits.
            there, here = ((each.versions == version).nonzero()[:, 0].to(self._device) for each in (rows, microbatch))
            found.logprobs.index_copy_(0, here, logprobs[there])
            found.known.index_fill_(0, here, True)


def _none_of(microbatch: MicroBatch, device: torch.device) -> Recomputed:
    count = len(microbatch.targets)
    return Recomputed(torch.zeros(count, device=device), torch.zeros(count, dtype=torch.bool, device=device))
