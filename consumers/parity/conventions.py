"""Logprobs of the same tokens under each convention, all computed in one pass over chunks of logits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.consumers.learning.loss.scoring import head_logprobs
from penstock.consumers.learning.model.head import GREEDY_TEMPERATURE, OutputHead
from penstock.consumers.parity.replay import ForwardPass, Replay
from penstock.consumers.parity.sample import Sample, SampleRow

CHUNK_ELEMENTS = 1 << 22
"""Logits held at once, in float64: 32 MB; a convention needs a few times that."""
TILE_ELEMENTS = 1 << 24
"""Elements of the head's weight held in float64 at once: 128 MB."""


@dataclass(frozen=True)
class LogitChunk:
    """The logits of some tokens, by a plain head in float64.

    hidden: [n, H]. logits: [n, V], at temperature 1. targets: [n] int64.
    temperature: [n] float64, as recorded; 1 where sampling was greedy.
    support: [n, V] bool by the recorded sampling_mask, or None.
    rows, offsets: each token's row and its place among that row's sampled tokens.
    trainer: [n] float32, logprobs by the trainer's own head on the same hidden states.
    """

    hidden: Tensor
    head: OutputHead
    logits: Tensor
    targets: Tensor
    temperature: Tensor
    support: Tensor | None
    rows: Sequence[SampleRow]
    offsets: Sequence[int]
    trainer: Tensor

    def supported(self, logits: Tensor) -> Tensor:
        """Returns `logits` with -inf outside the recorded sampling_mask."""
        return logits if self.support is None else logits.masked_fill(~self.support, -torch.inf)

    def scaled(self, logits: Tensor) -> Tensor:
        return logits / self.temperature[:, None]

    def processed(self) -> Tensor:
        """Returns [n, V] logits at `temperature`, -inf outside the recorded sampling_mask."""
        return self.scaled(self.supported(self.logits))

    def at(self, by_recorded: Mapping[float, float]) -> "LogitChunk":
        """Returns the chunk with another temperature for each recorded one."""
        values = [by_recorded[row.sampling.temperature] for row in self.rows]
        return replace(self, temperature=self.temperature.new_tensor(values))

    def logprobs(self, logits: Tensor) -> Tensor:
        """Returns the [n] logprobs of the targets."""
        return logits.gather(1, self.targets[:, None])[:, 0] - logits.logsumexp(-1)


Convention = Callable[[LogitChunk], Tensor]
"""Logprobs [n] of a chunk's tokens, or other numbers about them, [n, k]."""

CONVENTIONS: dict[str, Convention] = {
    "trainer": lambda chunk: chunk.trainer,
    "processed": lambda chunk: chunk.logprobs(chunk.processed()),
    "raw": lambda chunk: chunk.logprobs(chunk.logits),
    "whole-vocabulary": lambda chunk: chunk.logprobs(chunk.scaled(chunk.logits)),
    "kept-support": lambda chunk: chunk.logprobs(_truncated(chunk, chunk.processed())),
    "penalties": lambda chunk: chunk.logprobs(_truncated(chunk, chunk.supported(chunk.scaled(_penalised(chunk))))),
    "engine-head": lambda chunk: chunk.logprobs(chunk.supported(chunk.scaled(_by_rounding_head(chunk)))),
    "moments": lambda chunk: _moments(_truncated(chunk, chunk.processed()), chunk.targets),
}
"""By the name of the hypothesis, if there is one.

trainer: by the trainer's own head. processed: as the trainer takes them, at the recorded temperature and over the
recorded sampling_mask. kept-support: over the tokens that top-k and top-p keep, recomputed, and the sampled one.
penalties: with the recorded penalties, temperature, top-k and top-p, in vLLM's order. engine-head: by a head with
16-bit inputs that rounds its logits to 16 bits. moments: `_moments` of the processed distribution.
"""


def at_temperatures(by_recorded: Mapping[float, float]) -> dict[str, Convention]:
    """Returns processed logprobs, and their moments, at another temperature for each recorded one."""
    return {
        "temperature": lambda chunk: chunk.logprobs(chunk.at(by_recorded).processed()),
        "moments": lambda chunk: _moments(chunk.at(by_recorded).processed(), chunk.targets),
    }


@torch.no_grad()
def under_conventions(
    replay: Replay, rows: Sequence[SampleRow], conventions: Mapping[str, Convention]
) -> dict[str, Tensor]:
    """Returns each convention's result for the tokens of `rows`, [M] or [M, k] float64 on CPU, NaN elsewhere."""
    found: dict[str, Tensor] = {}
    for tokens, chunk in chunks(replay, rows):
        for name, convention in conventions.items():
            values = convention(chunk).double().cpu()
            if name not in found:
                shape = (replay.sample.num_tokens, *values.shape[1:])
                found[name] = torch.full(shape, torch.nan, dtype=torch.float64)
            found[name][tokens] = values
    return found


def chunks(replay: Replay, rows: Sequence[SampleRow]) -> Iterator[tuple[Tensor, LogitChunk]]:
    """Yields some tokens of `rows`, [n] int64 on CPU, and their chunk, until all are done."""
    for each in replay.labelled(rows):
        trainer, _ = head_logprobs(each.hidden, each.head, each)
        size = max(1, CHUNK_ELEMENTS // len(each.head.weight))
        for start in range(0, len(each.tokens), size):
            part = slice(start, start + size)
            yield each.tokens[part], _chunk(replay.sample, each, trainer[part], part)


def _chunk(sample: Sample, each: ForwardPass, trainer: Tensor, part: slice) -> LogitChunk:
    tokens = each.tokens[part].tolist()
    rows = [sample.rows[n] for n in sample.rows_of[tokens].tolist()]
    hidden = F.embedding(each.predicting[part], each.hidden)
    temperature = each.temperature[part].double()
    return LogitChunk(
        hidden=hidden,
        head=each.head,
        logits=plain_logits(hidden, each.head),
        targets=each.targets[part],
        temperature=torch.where(temperature < GREEDY_TEMPERATURE, 1.0, temperature),
        support=None if each.support is None else each.support.mask(part, slice(0, len(each.head.weight))),
        rows=rows,
        offsets=[token - row.first for token, row in zip(tokens, rows, strict=True)],
        trainer=trainer,
    )


def plain_logits(hidden: Tensor, head: OutputHead, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the head's logits in float64, [n, V], with its weight rounded to `dtype` first; computes them tile by
    tile."""
    tiles = head.weight.split(max(1, TILE_ELEMENTS // head.weight.shape[1]))
    logits = torch.cat([hidden.double() @ tile.to(dtype or tile.dtype).double().t() for tile in tiles], dim=1)
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def _penalised(chunk: LogitChunk) -> Tensor:
    logits = chunk.logits.clone()
    for n, (row, offset) in enumerate(zip(chunk.rows, chunk.offsets, strict=True)):
        settings, ids = row.sampling, row.token_ids
        counts = np.bincount(ids[row.sampled[:offset]], minlength=logits.shape[1])
        seen = counts > 0
        seen[ids[: row.start]] = True
        counted = torch.from_numpy(counts).to(logits)
        line, factor = logits[n], settings.repetition_penalty
        repeated = torch.where(line > 0, line / factor, line * factor)
        line = torch.where(torch.from_numpy(seen).to(logits.device), repeated, line)
        line = line - settings.frequency_penalty * counted
        logits[n] = line - settings.presence_penalty * (counted > 0)
    return logits


def _by_rounding_head(chunk: LogitChunk) -> Tensor:
    dtype = torch.float16 if chunk.head.weight.dtype is torch.float16 else torch.bfloat16
    return plain_logits(chunk.hidden.to(dtype), chunk.head, dtype).float().to(dtype).double()


def _moments(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns [n, 2]: logprob + entropy and the variance of the logprob.

    For a token drawn from the distribution the first is 0 in expectation, with the second as its variance.
    """
    logprobs = logits.log_softmax(-1)
    p = logprobs.exp()
    finite = torch.where(p > 0, logprobs, 0.0)
    mean, square = (p * finite).sum(-1), (p * finite.square()).sum(-1)
    selected = logprobs.gather(1, targets[:, None])[:, 0]
    return torch.stack([selected - mean, square - mean.square()], dim=1)


def _truncated(chunk: LogitChunk, scaled: Tensor) -> Tensor:
    """Returns `scaled` with -inf where top-k and top-p, as vLLM applies them, drop a token, for rows without a mask."""
    wanted = [n for n, row in enumerate(chunk.rows) if row.lacks_mask]
    if not wanted:
        return scaled
    out = scaled.clone()
    for n in wanted:
        settings, line = chunk.rows[n].sampling, scaled[n].clone()
        if settings.top_k > 0:
            line[line < line.topk(min(settings.top_k, len(line))).values[-1]] = -torch.inf
        ascending, order = line.sort()
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - settings.top_p
        dropped[-1] = False
        line[order[dropped]] = -torch.inf
        line[chunk.targets[n]] = scaled[n, chunk.targets[n]]
        out[n] = line
    return out
