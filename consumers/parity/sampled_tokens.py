"""Hypotheses on the sampled tokens: drawn from another distribution, or encoded again from text.

Under the distribution p that a token is drawn from, E[log p(token) + H(p)] = 0, with H the entropy. Its sum along a
completion is a martingale, so no stopping rule changes its mean. Two records can hold equal logprobs for different
reasons (raw logprobs of tokens drawn at temperature 0.7; tokens drawn at temperature 1 and labelled 0.7): only this
test distinguishes them.

Text has many tokenizations; an engine that returns text loses the one it sampled. The recorded logprobs are still those
of the sampled ids, in order. So the sampled ids are rebuilt from the first token that is off: among the vocabulary
entries that the remaining text begins with, the one whose logprob under the model is the recorded one.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.learning.model.head import GREEDY_TEMPERATURE
from penstock.consumers.parity.conventions import chunks, plain_logits
from penstock.consumers.parity.replay import Replay, run_sequence
from penstock.consumers.parity.report import ParityError
from penstock.consumers.parity.sample import SampleRow
from penstock.consumers.parity.tolerance import TOLERANCES
from penstock.consumers.parity.verdict import Candidate
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import RolloutGroup

SUSPICIOUS_Z = 6.0
"""Standard errors beyond which tokens count as drawn from another distribution. Groups that finish early are read
first, so the beginning of a stream is no fair sample and 3 is too few."""
SUSPICIOUS_SHARE = 0.1
"""The share of the entropy that the excess must also reach: many tokens make any small excess significant."""
SUSPICIOUS_DEFICIT = 0.3
"""The same for tokens that are less likely than expected: completions that end early are read first, and their ends
are unlikely."""
DECISIVE_Z = 3.0
"""Standard errors that distinguish two temperatures."""
_FIT_ELEMENTS = 1 << 23
"""Logits held for the fit of a temperature, in float64: 64 MB."""
_FIT_TOKENS = 512
MAX_ROWS = 16
"""The most rows that are examined."""
MAX_STEPS = 64
"""The most tokens rebuilt per row."""
_FOUND = 0.9
"""The least share of the examined tokens for which an entry must fit."""
_PROMPTS = 32


@dataclass(frozen=True)
class SamplingTest:
    """A test of tokens against one distribution.

    excess: mean of logprob + entropy. z: its standard errors from 0. entropy: the mean.
    """

    excess: float
    z: float
    entropy: float

    @property
    def is_suspicious(self) -> bool:
        share = SUSPICIOUS_SHARE if self.excess > 0 else SUSPICIOUS_DEFICIT
        return abs(self.z) >= SUSPICIOUS_Z and abs(self.excess) >= share * self.entropy

    def __str__(self) -> str:
        return f"logprob + entropy {self.excess:+.2g} nats a token, z = {self.z:+.1f}"


def fits_better(one: SamplingTest | None, other: SamplingTest | None) -> bool:
    """Returns whether the tokens are a fair sample of the first distribution and not of the second."""
    return one is not None and other is not None and abs(other.z) >= DECISIVE_Z and 2 * abs(one.z) < abs(other.z)


def sampling_test(moments: Tensor, logprobs: Tensor, rows: Sequence[SampleRow]) -> SamplingTest | None:
    """Tests the tokens of `rows` by `moments`, [M, 2], and the logprobs of the same distribution, [M].

    The standard error is the larger of two: from the distributions, and from the spread over groups, since siblings
    that an engine drew with equal noise are one draw. None if nothing can be tested: greedy sampling, or penalties,
    which the moments leave out.
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
    return SamplingTest(total / num_tokens, total / error if error > 0 else 0.0, entropy / num_tokens)


@torch.no_grad()
def fitted_temperatures(replay: Replay, rows: Sequence[SampleRow]) -> dict[float, float]:
    """Returns for each recorded temperature the one at which the recorded logprobs are closest to the model's."""
    return {
        recorded: _fit(*_some(replay, [row for row in rows if row.sampling.temperature == recorded]))
        for recorded in sorted({row.sampling.temperature for row in rows})
    }


def _some(replay: Replay, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns for some tokens of `rows` logits over the sampling_mask [n, V], targets [n], recorded logprobs [n]."""
    longest = max(len(row.sampled) for row in rows)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    held = 0
    for tokens, chunk in chunks(replay, rows[:: max(1, len(rows) * longest // _FIT_TOKENS)]):
        logits = chunk.supported(chunk.logits)
        parts.append((logits, chunk.targets, replay.sample.engine[tokens].to(logits.device)))
        held += logits.numel()
        if held >= _FIT_ELEMENTS:
            break
    logits, targets, engine = (torch.cat(part) for part in zip(*parts, strict=True))
    return logits, targets, engine


def _fit(logits: Tensor, targets: Tensor, engine: Tensor) -> float:
    """Returns the temperature of the smallest mean gap, from a grid and then finer grids around the best."""

    def gap(log_temperature: float) -> float:
        scaled = logits / math.exp(log_temperature)
        selected = scaled.gather(1, targets[:, None])[:, 0] - scaled.logsumexp(-1)
        return float((selected - engine).abs().mean())

    best, width, steps = 0.0, 5 * math.log(2), 20
    while width > 1e-7:
        best = min((best + width * n / steps for n in range(-steps, steps + 1)), key=gap)
        width, steps = width / steps, 5
    return math.exp(best)


def check_tokenizer(groups: Sequence[RolloutGroup], tokenizer: Any) -> None:
    """Raises ParityError if no group's decoded ids contain the text of its prompt: another model's tokenizer."""
    asked = [group for group in groups if group.prompt.text or group.prompt.messages][:_PROMPTS]
    for group in asked:
        segment = group.rollouts[0].segments[0]
        end = segment.loss_mask[0][0] if segment.loss_mask else segment.num_tokens
        ids = np.frombuffer(segment.token_ids, dtype=np.int32)[:end].tolist()
        try:
            decoded = tokenizer.decode(ids)
        except (IndexError, OverflowError, TypeError):
            continue  # the tokenizer does not know an id
        if _asked(group.prompt).strip() in decoded:
            return
    if asked:
        raise ParityError(
            f"the tokenizer does not match the token ids: group {asked[0].index} was asked "
            f"{_asked(asked[0].prompt)[:60]!r}, and no prompt is in what its ids decode to; expected the tokenizer of "
            "the model that the rollouts were sampled from"
        )


def _asked(prompt: Prompt) -> str:
    return prompt.messages[-1].text if prompt.messages else prompt.text or ""


def retokenized(replay: Replay, baseline: Tensor, tokenizer: Any) -> Candidate | None:
    """Rebuilds the sampled ids of rows that are off; None if no row of one policy and one turn is off.

    baseline: [M] float64, as the trainer computes it.
    """
    gaps, tolerance = (replay.sample.engine - baseline).abs(), TOLERANCES[replay.policies.dtype]
    vocabulary = _Vocabulary(replay, tokenizer, tolerance.max or tolerance.p99)
    rows = [
        row
        for row in replay.sample.rows
        if not row.is_mixed
        and len(row.segment.loss_mask) == 1
        and gaps[row.tokens].mean() > tolerance.mean
        and gaps[row.tokens].max() > vocabulary.allowed
    ][:MAX_ROWS]
    if not rows:
        return None
    found = torch.full_like(baseline, torch.nan)
    num_found = num_stuck = 0
    example = ""
    for row in rows:
        first = int((gaps[row.tokens] > vocabulary.allowed).nonzero()[0])
        path, logprobs, stuck = vocabulary.rebuild(row, first)
        start, end = row.first + first, row.first + first + len(path)
        found[row.first : start] = baseline[row.first : start]
        found[start:end] = torch.tensor(logprobs, dtype=torch.float64)
        found[end : end + stuck] = baseline[end : end + stuck]
        num_found, num_stuck = num_found + len(path), num_stuck + stuck
        if path and not example:
            recorded, sampled = (vocabulary.entries.get(n) for n in (int(row.token_ids[row.sampled[first]]), path[0]))
            example = f"{sampled!r} was sampled where {recorded!r} is recorded"
    return Candidate(
        "retokenized",
        found,
        possible=num_found >= _FOUND * (num_found + num_stuck),
        note=f"{num_found} ids found again in {len(rows)} rows that are off; in {num_stuck} of them none fits",
        detail=example,
    )


class _Vocabulary:
    """Finds sampled ids. `allowed`: the largest gap of a single token that counts as equal."""

    def __init__(self, replay: Replay, tokenizer: Any, allowed: float) -> None:
        self._replay, self.allowed = replay, allowed
        self._ids: dict[str, int] = tokenizer.get_vocab()
        self.entries = {number: entry for entry, number in self._ids.items()}
        self._longest = max(map(len, self._ids))

    @torch.no_grad()
    def rebuild(self, row: SampleRow, first: int) -> tuple[list[int], list[float], bool]:
        """Returns the sampled ids from sampled token `first` on, their logprobs, and whether one was not found."""
        ids = row.token_ids[: row.sampled[first]].tolist()
        text = "".join(self.entries.get(n, "\0") for n in row.token_ids[row.sampled[first] :].tolist())
        path: list[int] = []
        logprobs: list[float] = []
        for offset in range(first, min(len(row.sampled), first + MAX_STEPS)):
            entries = [text[:size] for size in range(1, min(self._longest, len(text)) + 1) if text[:size] in self._ids]
            if not entries:
                return path, logprobs, bool(text)
            choices = torch.tensor([self._ids[entry] for entry in entries])
            fitting = self._next(row, ids + path)[choices]
            gaps = (fitting - self._replay.sample.engine[row.first + offset]).abs()
            best = int(gaps.argmin())
            if gaps[best] > self.allowed:
                return path, logprobs, True
            path.append(int(choices[best]))
            logprobs.append(float(fitting[best]))
            text = text[len(entries[best]) :]
        return path, logprobs, False

    def _next(self, row: SampleRow, ids: list[int]) -> Tensor:
        """Returns [V] float64 on CPU: log-softmax after `ids` under the row's policy, at its temperature."""
        model = self._replay.policies.model(int(row.versions[0]))
        hidden, head = run_sequence(model, torch.tensor(ids, device=self._replay.policies.device))
        logits = plain_logits(model.scaled(hidden[-1:]), head)
        temperature = 1.0 if row.sampling.temperature < GREEDY_TEMPERATURE else row.sampling.temperature
        return (logits / temperature).log_softmax(-1)[0].cpu()
