"""Were the tokens drawn from the distribution that their logprobs are of? And at which temperature do they fit?

Under the distribution p that a token is drawn from, E[log p(token) + H(p)] = 0, H its entropy. Summed along a
completion that is a martingale, so no stopping rule moves its mean. Two records can hold equal logprobs for different
reasons (raw logprobs of tokens drawn at temperature 0.7; tokens drawn at temperature 1 and labelled 0.7): only this
tells them apart.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from penstock.consumers.learning.head import GREEDY_TEMPERATURE
from penstock.consumers.parity.readings import chunks
from penstock.consumers.parity.replay import Replay
from penstock.consumers.parity.sample import Sample, SampleRow
from torch import Tensor

SUSPICIOUS_Z = 6.0
"""Standard errors beyond which tokens count as drawn from another distribution. Groups that finish early are the first
to be seen, so a stream's beginning is no fair draw: 3 would not do."""
SUSPICIOUS_SHARE = 0.1
"""And the excess must be so large a share of the entropy, since many tokens make any trifle significant."""
SUSPICIOUS_DEFICIT = 0.3
"""The same where the tokens are less likely than they should be: completions that end early are seen first, and their
ends are unlikely ones."""
TELLING_Z = 3.0
"""Standard errors that tell one of two temperatures from the other."""
_FIT_ELEMENTS = 1 << 23
"""Logits held for the fit of a temperature, in float64: 64 MB."""
_FIT_TOKENS = 512
_GRID = tuple(2.0 ** (n / 4) for n in range(-20, 21))
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Draw:
    """Tokens held against one distribution: mean of logprob + entropy, its standard errors from 0, mean entropy."""

    excess: float
    z: float
    entropy: float

    @property
    def is_suspicious(self) -> bool:
        share = SUSPICIOUS_SHARE if self.excess > 0 else SUSPICIOUS_DEFICIT
        return abs(self.z) >= SUSPICIOUS_Z and abs(self.excess) >= share * self.entropy

    def __str__(self) -> str:
        return f"logprob + entropy {self.excess:+.2g} nats a token, z = {self.z:+.1f}"


def draw(sample: Sample, moments: Tensor, logprobs: Tensor, rows: Sequence[SampleRow]) -> Draw | None:
    """The draw of `rows` by `readings.moments`, [M, 2], and the logprobs of the same distribution, [M].

    The standard error is the larger of what the distributions say and what the spread over groups says: siblings that
    an engine drew with equal noise are one draw. None where nothing was drawn: greedy sampling, or penalties, which
    the moments leave out.
    """
    drawn = [
        row
        for row in rows
        if row.sampling.temperature >= GREEDY_TEMPERATURE
        and not row.sampling.has_penalties
        and not moments[row.tokens].isnan().any()
    ]
    if not drawn:
        return None
    by_group: dict[int, float] = defaultdict(float)
    variance, entropy, num_tokens = 0.0, 0.0, 0
    for row in drawn:
        excess, spread = moments[row.tokens].sum(0).tolist()
        by_group[row.group] += excess
        variance += spread
        entropy += excess - float(logprobs[row.tokens].sum())
        num_tokens += len(row.sampled)
    sums = torch.tensor(list(by_group.values()), dtype=torch.float64)
    over_groups = float(sums.var()) * len(sums) if len(sums) > 1 else 0.0
    error = max(variance, over_groups) ** 0.5
    total = float(sums.sum())
    return Draw(total / num_tokens, total / error if error > 0 else 0.0, entropy / num_tokens)


@torch.no_grad()
def fitted_temperatures(sample: Sample, replay: Replay, rows: Sequence[SampleRow]) -> dict[float, float]:
    """By recorded temperature the one at which the recorded logprobs are closest to the model's, on some tokens."""
    return {
        recorded: _fit(*_some(sample, replay, [row for row in rows if row.sampling.temperature == recorded]))
        for recorded in sorted({row.sampling.temperature for row in rows})
    }


def _some(sample: Sample, replay: Replay, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor, Tensor]:
    """Of some tokens: logits over the sampling_mask [n, V], targets [n], recorded logprobs [n]."""
    longest = max(len(row.sampled) for row in rows)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    held = 0
    for tokens, chunk in chunks(sample, replay, rows[:: max(1, len(rows) * longest // _FIT_TOKENS)]):
        parts.append((chunk.unscaled, chunk.targets, sample.engine[tokens].to(chunk.logits.device)))
        held += chunk.logits.numel()
        if held >= _FIT_ELEMENTS:
            break
    logits, targets, engine = (torch.cat(part) for part in zip(*parts, strict=True))
    return logits, targets, engine


def _fit(logits: Tensor, targets: Tensor, engine: Tensor) -> float:
    """Minimises the mean gap over a grid of temperatures, then by golden section around the best."""

    def gap(log_temperature: float) -> float:
        scaled = logits / math.exp(log_temperature)
        selected = scaled.gather(1, targets[:, None])[:, 0] - scaled.logsumexp(-1)
        return float((selected - engine).abs().mean())

    best = min(_GRID, key=lambda t: gap(math.log(t)))
    low, high = math.log(best) - math.log(2) / 4, math.log(best) + math.log(2) / 4
    while high - low > 1e-7:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if gap(left) <= gap(right):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)
