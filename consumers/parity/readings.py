"""What the recorded logprobs may mean: one pass over chunks of logits gives every reading of the same tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from penstock.consumers.learning.head import GREEDY_TEMPERATURE
from penstock.consumers.learning.scoring import head_logprobs
from penstock.consumers.parity.replay import Pass, Replay, as_labelled
from penstock.consumers.parity.sample import Sample, SampleRow
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 22
"""Logits held at once, in float64: 32 MB; a reading takes a few times that."""
_TILE_ELEMENTS = 1 << 24
"""Of the head's weight in float64 at once: 128 MB."""


@dataclass(frozen=True)
class Chunk:
    """Some tokens' logits by a plain head in float64.

    hidden: [n, H]. head: [V, H]. logits: [n, V], at temperature 1. targets: [n] int64.
    temperature: [n] float64, the recorded one; 1 where sampling was greedy.
    support: [n, V] bool by the recorded sampling_mask, or None.
    rows, offsets: of each token its row and its place there.
    trainer: [n] float32, logprobs by the trainer's own head on the same hidden states.
    """

    hidden: Tensor
    head: Tensor
    logits: Tensor
    targets: Tensor
    temperature: Tensor
    support: Tensor | None
    rows: Sequence[SampleRow]
    offsets: Sequence[int]
    trainer: Tensor

    @property
    def scaled(self) -> Tensor:
        """[n, V] at the recorded temperature, nothing left out."""
        return self.logits / self.temperature[:, None]

    @property
    def unscaled(self) -> Tensor:
        """`logits`, -inf outside the recorded sampling_mask."""
        return self.logits if self.support is None else self.logits.masked_fill(~self.support, -torch.inf)

    @property
    def kept(self) -> Tensor:
        """`scaled`, -inf outside the recorded sampling_mask."""
        return self.unscaled / self.temperature[:, None]


Reader = Callable[[Chunk], Tensor]
"""[n] or [n, k] of a chunk."""


@torch.no_grad()
def read(sample: Sample, replay: Replay, rows: Sequence[SampleRow], readers: Mapping[str, Reader]) -> dict[str, Tensor]:
    """Each reader's answer for the tokens of `rows`, [M] or [M, k] float64 on CPU, NaN elsewhere."""
    found: dict[str, Tensor] = {}
    for tokens, chunk in chunks(sample, replay, rows):
        for name, reader in readers.items():
            values = reader(chunk).double().cpu()
            if name not in found:
                found[name] = torch.full((sample.num_tokens, *values.shape[1:]), torch.nan, dtype=torch.float64)
            found[name][tokens] = values
    return found


def chunks(sample: Sample, replay: Replay, rows: Sequence[SampleRow]) -> Iterator[tuple[Tensor, Chunk]]:
    """The tokens of `rows`, [n] int64 on CPU, and their chunk."""
    for each in replay.passes(as_labelled(row) for row in rows):
        trainer, _ = head_logprobs(each.hidden, each.head, each)
        size = max(1, _CHUNK_ELEMENTS // len(each.head))
        for start in range(0, len(each.tokens), size):
            part = slice(start, start + size)
            yield each.tokens[part], _chunk(sample, each, trainer[part], part)


def _chunk(sample: Sample, each: Pass, trainer: Tensor, part: slice) -> Chunk:
    tokens = each.tokens[part].tolist()
    rows = [sample.rows[n] for n in sample.rows_of[tokens].tolist()]
    hidden = F.embedding(each.predicting[part], each.hidden)
    temperature = each.temperature[part].double()
    return Chunk(
        hidden=hidden,
        head=each.head,
        logits=plain_logits(hidden, each.head),
        targets=each.targets[part],
        temperature=torch.where(temperature < GREEDY_TEMPERATURE, 1.0, temperature),
        support=None if each.support is None else each.support.part(part).mask(len(each.head)),
        rows=rows,
        offsets=[token - row.first for token, row in zip(tokens, rows, strict=True)],
        trainer=trainer,
    )


def plain_logits(hidden: Tensor, head: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """hidden @ head.T in float64, [n, V], of a head rounded to `dtype` first; a tile of the head at a time."""
    tiles = head.split(max(1, _TILE_ELEMENTS // head.shape[1]))
    return torch.cat([hidden.double() @ tile.to(dtype or tile.dtype).double().t() for tile in tiles], dim=1)


def by_trainer(chunk: Chunk) -> Tensor:
    return chunk.trainer


def processed(chunk: Chunk) -> Tensor:
    """As the trainer means it: at the recorded temperature, over the recorded sampling_mask."""
    return _selected(chunk.kept, chunk.targets)


def raw(chunk: Chunk) -> Tensor:
    return _selected(chunk.logits, chunk.targets)


def whole_vocabulary(chunk: Chunk) -> Tensor:
    return _selected(chunk.scaled, chunk.targets)


def at_temperatures(by_recorded: Mapping[float, float]) -> Reader:
    """As processed at another temperature for each recorded one."""

    def reader(chunk: Chunk) -> Tensor:
        return _selected(chunk.unscaled / _replaced(chunk, by_recorded)[:, None], chunk.targets)

    return reader


def kept_support(chunk: Chunk) -> Tensor:
    """Over what top-k and top-p keep, computed anew, the sampled token always among it."""
    return _selected(_truncated(chunk, chunk.kept), chunk.targets)


def penalised(chunk: Chunk) -> Tensor:
    """With the recorded penalties, temperature, top-k and top-p, in vLLM's order."""
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
    scaled = logits / chunk.temperature[:, None]
    if chunk.support is not None:
        scaled = scaled.masked_fill(~chunk.support, -torch.inf)
    return _selected(_truncated(chunk, scaled), chunk.targets)


def bfloat16_head(chunk: Chunk) -> Tensor:
    """As processed by a head that takes bfloat16 and rounds its logits to it."""
    logits = plain_logits(chunk.hidden.bfloat16(), chunk.head, torch.bfloat16).float().bfloat16().double()
    scaled = logits / chunk.temperature[:, None]
    if chunk.support is not None:
        scaled = scaled.masked_fill(~chunk.support, -torch.inf)
    return _selected(scaled, chunk.targets)


def moments(by_recorded: Mapping[float, float] | None = None) -> Reader:
    """[n, 2]: logprob + entropy and the variance of the logprob, of the processed distribution or at other
    temperatures.

    A token that was drawn from the distribution has the first at 0 in expectation, with the second as its variance.
    """

    def reader(chunk: Chunk) -> Tensor:
        if by_recorded is None:
            logits = _truncated(chunk, chunk.kept)
        else:
            logits = chunk.unscaled / _replaced(chunk, by_recorded)[:, None]
        logprobs = logits.log_softmax(-1)
        p = logprobs.exp()
        finite = torch.where(p > 0, logprobs, 0.0)
        mean, square = (p * finite).sum(-1), (p * finite.square()).sum(-1)
        selected = logprobs.gather(1, chunk.targets[:, None])[:, 0]
        return torch.stack([selected - mean, square - mean.square()], dim=1)

    return reader


def _selected(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def _replaced(chunk: Chunk, by_recorded: Mapping[float, float]) -> Tensor:
    values = [by_recorded[row.sampling.temperature] for row in chunk.rows]
    return torch.tensor(values, dtype=torch.float64, device=chunk.logits.device)


def _truncated(chunk: Chunk, scaled: Tensor) -> Tensor:
    """`scaled` with -inf where top-k and top-p, as vLLM applies them, drop a token of a row without sampling_mask."""
    wanted = [row.sampling.is_truncated and row.segment.sampling_mask is None for row in chunk.rows]
    if not any(wanted):
        return scaled
    out = scaled.clone()
    for n in (n for n, yes in enumerate(wanted) if yes):
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
