"""TVPO: a row that has left the neighbourhood of its sampler trains only on what draws it back (VACO's filter).

Formula: that of `trust_region.py` here, with r = exp(current - behavior) and one divergence for the row i of a token::

    D_t = mean over i's unmasked tokens of |r - 1|

Its expectation is twice the total variation between the two policies, averaged over the row's contexts. A single token
may move by any amount as long as its row stays near. The objective forms current / behavior itself: the run's
correction must be off (`reads_behavior`).

Source: VACO (arXiv 2603.01365), whose filter this is, without its realigned advantages, which need a value function;
per row as in TVPO, the name that one of its authors gives it for language models (open-instruct's pull request 1681,
`rho_mask_tv_divergence`). Read there; the paper's equations and its bound are not verified. The default is DPPO's.

Departures: r is the current policy's, at every optimizer step on a batch, where open-instruct filters once, by the
policy before the first of them; a row is one token sequence, so that a rollout of several segments has a divergence for
each.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.loss.rows import Rows, clamped
from penstock.consumers.learning.objectives.terms import PolicyObjective, number
from penstock.consumers.learning.objectives.trust_region import trusted_gain


@dataclass(frozen=True, kw_only=True)
class Tvpo(PolicyObjective):
    """See the module's docstring. Metrics: those of `trusted_gain`, and `reference_kl`."""

    token_level: ClassVar[bool] = False
    reads_behavior: ClassVar[bool] = True

    bound: float = number(0.2, above=0)
    """Largest mean of |current / behavior - 1| of a row."""

    def gain(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = clamped((inputs.current_logprobs.detach() - inputs.behavior_logprobs).double())
        far = Rows(inputs.row_ids, inputs.loss_mask).mean(torch.expm1(log_ratio).abs())
        return trusted_gain(inputs, far, low=self.bound, high=self.bound)
