"""GSPO: PPO's clip on one ratio per sequence, the geometric mean of its tokens' ratios.

Formula, for the tokens t of the row i, n_i of them unmasked::

    s_i  = exp( mean over i's unmasked tokens of (current - proximal) )
    loss = aggregate(- w_t * min(s_i * A_t, clip(s_i, 1 - clip_low, 1 + clip_high) * A_t))

`gradient = "sequence"` differentiates s_i as written: every token of the row carries 1 / n_i of its gradient.
`gradient = "token"` is the paper's GSPO-token: the same value, but a token's gain has its gradient through that token
alone, s_it = stop(s_i) * exp(current - stop(current)). The two agree where all tokens of a row have one weight,
advantage and aggregation; with importance weights by token they do not.

Source: GSPO (arXiv 2507.18071, eq. 5 and 7; GSPO-token eq. 13 and 14). The bounds are the paper's, 3e-4 and 4e-4; they
are of another magnitude than a token ratio's.

Departures from the paper: the importance weight w. Tokens masked by the lag bound or the correction count neither in
s_i nor in n_i. A row is one token sequence: a rollout of several segments has a ratio for each. log s_i is clamped to
+-20.

Peers: verl and ms-swift's `sequence_token` are `gradient = "token"`; ms-swift's and TRL's `sequence`, NeMo RL, slime
and AReaL are `gradient = "sequence"`. The paper, verl, TRL, ms-swift, NeMo RL and slime take every sequence alike
(`aggregation = "sequence"`, the default here); AReaL and PipelineRL weigh it by its length (`aggregation = "token"`).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.loss.rows import Rows
from penstock.consumers.learning.objectives.clip import ClippedObjective
from penstock.consumers.learning.objectives.terms import AGGREGATIONS, bounded_exp, choice, number


@dataclass(frozen=True, kw_only=True)
class Gspo(ClippedObjective):
    """See the module's docstring.

    Metrics: those of `ClippedObjective.clipped`, counted in tokens, and `reference_kl`.
    """

    token_level: ClassVar[bool] = False
    bypasses: ClassVar[bool] = True

    clip_low: float = number(3e-4, above=0, at_most=1)
    clip_high: float = number(4e-4, above=0)
    aggregation: str = choice("sequence", AGGREGATIONS)
    gradient: str = choice("sequence", ("sequence", "token"))
    """"sequence" or "token"."""

    def gain(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = inputs.current_logprobs - inputs.proximal_logprobs
        mean = Rows(inputs.row_ids, inputs.loss_mask).mean(log_ratio).to(log_ratio.dtype)
        if self.gradient == "token":
            mean = mean.detach() + (inputs.current_logprobs - inputs.current_logprobs.detach())
        return self.clipped(bounded_exp(mean), inputs.advantages)
