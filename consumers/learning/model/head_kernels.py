"""The kernels of `head.selected_logprobs`: matmuls, the running log-normalizer, and the loops over tiles of logits."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.consumers.learning.batch.batch import Support


class TileSizes(NamedTuple):
    """The sizes of tiles of logits.

    tokens, vocabulary: of one tile. block_elements: elements of a tile that pass through all elementwise steps
    together; None for all of them. row_elements: logits held if forward computes the gradients, which need whole rows.
    """

    tokens: int
    vocabulary: int
    block_elements: int | None
    row_elements: int


CPU_TILES = TileSizes(1024, 4096, 1 << 17, 1 << 25)
"""Tiles of 16 MB: smaller ones make matmuls slower, larger ones no faster. Blocks of 512 KB, which stay in cache."""
CUDA_TILES = TileSizes(4096, 8192, None, 1 << 28)
"""Tiles of 128 MB. Calculated, not measured."""
CHOSEN_ELEMENTS = 2**22
"""Elements of the rows that `ChosenLogits` takes from the weight at a time."""
_MASKED = -1e30
"""Logit of a token outside the support: its exp() is 0, and the difference of two of them is not NaN."""

TokenGrads = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None]]
Needs = tuple[bool, bool]
"""Whether hidden and weight need a gradient."""


class Grads(NamedTuple):
    """d loss / d logprobs and d loss / d entropy of some tokens, [n] each; None means 0."""

    logprobs: Tensor | None
    entropy: Tensor | None


class Promise(NamedTuple):
    """Gradients that forward computed, and the derivatives they assume; all in the results' dtype."""

    grads: Grads
    hidden: Tensor | None
    weight: Tensor | None


class Results(NamedTuple):
    """[N] each, float32 or float64."""

    logprobs: Tensor
    entropy: Tensor
    log_normalizer: Tensor


class Head:
    """One call's tensors, and the loops over their tiles.

    hidden: [N, H]. weight: [V, H]. targets: [N]. inverse_temperature: [N] in the results' dtype, None if all are 1.
    support: of [N] tokens, or None. softcap: c in c tanh(logit / c), or None. The results are float64 if hidden or
    weight is, float32 otherwise.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        inverse_temperature: Tensor | None,
        support: Support | None,
        softcap: float | None = None,
    ) -> None:
        self._softcap, self._inverse = softcap, None if softcap is None else inverse_temperature
        if softcap is not None:
            inverse_temperature = None  # it follows the cap
        self._dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
        self._hidden, self._weight, self._targets, self._support = hidden, weight, targets, support
        on_cuda = hidden.device.type == "cuda"
        if on_cuda and hidden.dtype == weight.dtype == torch.bfloat16:
            self._operands: _Operands = _BfloatOperands(hidden, weight, inverse_temperature)
        else:
            self._operands = _Operands(hidden, weight, inverse_temperature, self._dtype)
        self._sizes = CUDA_TILES if on_cuda else CPU_TILES
        # A vocabulary smaller than a tile makes room for more tokens.
        self._tile_tokens = self._sizes.tokens * self._sizes.vocabulary // min(self._sizes.vocabulary, len(weight))
        self._vocabulary_tiles = _slices(len(weight), self._sizes.vocabulary)

    def forward(self) -> Results:
        running = _Running(len(self._targets), self._hidden, self._dtype)
        token_tiles = _slices(len(self._targets), self._tile_tokens)
        buffer, scratch = self._buffer(self._tile_tokens), self._scratch(1)
        for vocabulary in self._vocabulary_tiles:
            weight = self._operands.weight_tile(vocabulary)
            for tokens in token_tiles:
                logits = _view(buffer, tokens, vocabulary)
                self._fill(logits, tokens, vocabulary, weight)
                running.fold(tokens, vocabulary.start, self._targets[tokens], logits, scratch)
        return running.results(slice(None))

    def backward(self, grads: Grads, results: Results, needs: Needs) -> tuple[Tensor | None, Tensor | None]:
        """Computes the gradients of hidden and weight, in their dtypes.

        The vocabulary is the outer loop: a tile of the weight's gradient is complete before the next one begins, so
        that no wide copy of all of it is needed.
        """
        grad_hidden = self._zeros(self._hidden) if needs[0] else None
        grad_weight = torch.empty_like(self._weight) if needs[1] else None
        token_tiles = _slices(len(self._targets), self._tile_tokens)
        buffer, scratch = self._buffer(self._tile_tokens), self._scratch(1)
        for vocabulary in self._vocabulary_tiles:
            weight = self._operands.weight_tile(vocabulary)
            to_weight = self._zeros(weight) if needs[1] else None
            for tokens in token_tiles:
                logits = _view(buffer, tokens, vocabulary)
                self._fill(logits, tokens, vocabulary, weight)
                part = Grads(*(None if grad is None else grad[tokens] for grad in grads))
                part_results = Results(*(result[tokens] for result in results))
                self._to_grad_logits(logits, scratch[0], tokens, vocabulary.start, part, part_results)
                self._operands.add_gradients(logits, tokens, weight, grad_hidden, to_weight)
            if grad_weight is not None and to_weight is not None:
                grad_weight[vocabulary] = to_weight
        if grad_hidden is not None:
            grad_hidden = self._operands.finish(grad_hidden).to(self._hidden.dtype)
        return grad_hidden, grad_weight

    def forward_with_gradients(self, token_grads: TokenGrads, needs: Needs) -> tuple[Results, Promise]:
        """Computes the results, and the gradients for the derivatives that `token_grads` returns.

        The tokens are the outer loop: the logits of a token are kept until its normalizer is known.
        """
        running = _Running(len(self._targets), self._hidden, self._dtype)
        grad_hidden = self._zeros(self._hidden) if needs[0] else None
        grad_weight = self._zeros(self._weight) if needs[1] else None
        # The weight's gradient is read and written once per slice of tokens, so the budget does not make slices tiny:
        # rows may take a quarter of that gradient's size.
        size = min(self._tile_tokens, max(self._sizes.row_elements // len(self._weight), self._hidden.shape[1] // 4, 1))
        rows = [self._buffer(size, vocabulary) for vocabulary in self._vocabulary_tiles]
        scratch = self._scratch(2)
        promised: list[Grads] = []
        for tokens in _slices(len(self._targets), size):
            for vocabulary, buffer in zip(self._vocabulary_tiles, rows, strict=True):
                logits = _view(buffer, tokens, vocabulary)
                self._fill(logits, tokens, vocabulary, self._operands.weight_tile(vocabulary))
                running.fold(tokens, vocabulary.start, self._targets[tokens], logits, scratch)
            results = running.results(tokens)
            found = token_grads(tokens, results.logprobs, results.entropy)
            part = Grads(*(None if grad is None else grad.detach().to(self._dtype) for grad in found))
            promised.append(part)
            for vocabulary, buffer in zip(self._vocabulary_tiles, rows, strict=True):
                logits = _view(buffer, tokens, vocabulary)
                self._to_grad_logits(logits, scratch[0], tokens, vocabulary.start, part, results)
                to_weight = None if grad_weight is None else grad_weight[vocabulary]
                weight = self._operands.weight_tile(vocabulary)
                self._operands.add_gradients(logits, tokens, weight, grad_hidden, to_weight)
        if grad_hidden is not None:
            grad_hidden = self._operands.finish(grad_hidden)
        columns = zip(*promised, strict=True) if promised else (None, None)
        joined = Grads(*(torch.cat(column) if column and column[0] is not None else None for column in columns))
        return running.results(slice(None)), Promise(joined, grad_hidden, grad_weight)

    def _fill(self, logits: Tensor, tokens: slice, vocabulary: slice, weight: Tensor) -> None:
        self._operands.logits(tokens, weight, logits)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        if self._inverse is not None:
            logits.mul_(self._inverse[tokens, None])
        if self._support is not None:
            logits.masked_fill_(~self._support.mask(tokens, vocabulary), _MASKED)

    def _to_grad_logits(
        self, logits: Tensor, scratch: Tensor, tokens: slice, start: int, grads: Grads, results: Results
    ) -> None:
        """Turns a tile of z [n, v], the logits over the temperature, into d loss / d z; with a cap, into the derivative
        by the logits before it.

        g_l (onehot - p) - g_H p (log p + H) = p (-g_l - g_H H - g_H log p) + g_l onehot
        """
        cap_slope = None if self._softcap is None else self._cap_slope(logits, tokens, self._softcap)
        constant, slope = None, grads.entropy
        if slope is not None:
            constant = -slope * results.entropy
        if grads.logprobs is not None:
            constant = -grads.logprobs if constant is None else constant - grads.logprobs
        assert constant is not None
        for rows, block, p in _blocks(logits, scratch):
            log_p = block.sub_(results.log_normalizer[rows, None])
            torch.exp(log_p, out=p)
            if slope is None:
                torch.mul(p, constant[rows, None], out=block)
            else:
                torch.addcmul(constant[rows, None], log_p, slope[rows, None], value=-1.0, out=block).mul_(p)
        if grads.logprobs is not None:
            place, inside = _inside(self._targets[tokens], start, logits.shape[1])
            logits.scatter_add_(1, place, torch.where(inside, grads.logprobs, 0.0)[:, None])
        if cap_slope is not None:
            logits.mul_(cap_slope)

    def _cap_slope(self, logits: Tensor, tokens: slice, softcap: float) -> Tensor:
        """Returns dz / d logit [n, v], by d c tanh(x / c) / dx = 1 - tanh(x / c)^2."""
        inverse = 1.0 if self._inverse is None else self._inverse[tokens, None]
        tanh = (logits / (softcap * inverse)).clamp_(-1.0, 1.0)  # outside the support it is no tanh
        return (1.0 - tanh.square_()) * inverse

    def _buffer(self, num_tokens: int, vocabulary: slice | None = None) -> Tensor:
        """Allocates a tile of `num_tokens`, by the vocabulary of the widest tile unless another is given."""
        widest = vocabulary or self._vocabulary_tiles[0]
        elements = min(num_tokens, len(self._targets)) * (widest.stop - widest.start)
        return torch.empty(elements, dtype=self._dtype, device=self._hidden.device)

    def _scratch(self, count: int) -> list[Tensor]:
        """Allocates `count` blocks of a tile; on CUDA `count` tiles."""
        width = self._vocabulary_tiles[0].stop
        tile = min(self._tile_tokens, max(1, len(self._targets))) * width
        block = self._sizes.block_elements
        elements = tile if block is None else min(tile, max(block, width))
        return [torch.empty(elements, dtype=self._dtype, device=self._hidden.device) for _ in range(count)]

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=self._dtype, device=like.device)


class ChosenLogits(torch.autograd.Function):
    """hidden [N, H] and weight [V, H] at ids [N, K] -> logits [N, K], float32 or float64; a slice of tokens at a time,
    as each takes K rows of the weight."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, ids)
        dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
        found = torch.empty(ids.shape, dtype=dtype, device=hidden.device)
        for part in _slices(len(ids), max(1, CHOSEN_ELEMENTS // (ids.shape[1] * weight.shape[1]))):
            torch.bmm(weight[ids[part]].to(dtype), hidden[part, :, None].to(dtype), out=found[part, :, None])
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, ids = ctx.saved_tensors
        to_hidden = torch.empty(hidden.shape, dtype=grad.dtype, device=grad.device)
        to_weight = torch.zeros(weight.shape, dtype=grad.dtype, device=grad.device)
        for part in _slices(len(ids), max(1, CHOSEN_ELEMENTS // (ids.shape[1] * weight.shape[1]))):
            own, wide = grad[part, None, :], weight[ids[part]].to(grad.dtype)
            to_hidden[part] = torch.bmm(own, wide)[:, 0]
            to_weight.index_add_(0, ids[part].flatten(), (grad[part, :, None] * hidden[part, None, :]).flatten(0, 1))
        return to_hidden.to(hidden.dtype), to_weight.to(weight.dtype), None


class _Operands:
    """The matmuls in the results' dtype: hidden states over the temperature, weights converted tile by tile."""

    def __init__(self, hidden: Tensor, weight: Tensor, inverse_temperature: Tensor | None, dtype: torch.dtype) -> None:
        self._weight, self._inverse, self._dtype = weight, inverse_temperature, dtype
        wide = hidden.to(dtype)
        self._hidden = wide if inverse_temperature is None else wide * inverse_temperature[:, None]

    def weight_tile(self, vocabulary: slice) -> Tensor:
        return self._weight[vocabulary].to(self._dtype)

    def logits(self, tokens: slice, weight: Tensor, out: Tensor) -> None:
        """Writes the logits over the temperature, [n, v]."""
        torch.mm(self._hidden[tokens], weight.t(), out=out)

    def add_gradients(
        self, grad_logits: Tensor, tokens: slice, weight: Tensor, to_hidden: Tensor | None, to_weight: Tensor | None
    ) -> None:
        """Adds a tile's part [n, v] to to_hidden [N, H] and to_weight [v, H]; may overwrite grad_logits."""
        if to_hidden is not None:
            to_hidden[tokens].addmm_(grad_logits, weight)
        if to_weight is not None:
            to_weight.addmm_(grad_logits.t(), self._hidden[tokens])

    def finish(self, to_hidden: Tensor) -> Tensor:
        """Applies, in place, the factor that `add_gradients` left out."""
        return to_hidden if self._inverse is None else to_hidden.mul_(self._inverse[:, None])


class _BfloatOperands(_Operands):
    """bfloat16 operands accumulated in float32, on CUDA; the gradient of the logits is rounded to bfloat16."""

    def __init__(self, hidden: Tensor, weight: Tensor, inverse_temperature: Tensor | None) -> None:
        super().__init__(hidden, weight, None, torch.bfloat16)
        self._scale = inverse_temperature

    def logits(self, tokens: slice, weight: Tensor, out: Tensor) -> None:
        torch.mm(self._hidden[tokens], weight.t(), out_dtype=torch.float32, out=out)
        if self._scale is not None:
            out.mul_(self._scale[tokens, None])

    def add_gradients(
        self, grad_logits: Tensor, tokens: slice, weight: Tensor, to_hidden: Tensor | None, to_weight: Tensor | None
    ) -> None:
        if self._scale is not None:
            grad_logits.mul_(self._scale[tokens, None])
        narrow = grad_logits.to(torch.bfloat16)
        if to_hidden is not None:
            into = to_hidden[tokens]
            torch.addmm(into, narrow, weight, out_dtype=torch.float32, out=into)
        if to_weight is not None:
            torch.addmm(to_weight, narrow.t(), self._hidden[tokens], out_dtype=torch.float32, out=to_weight)


class _Running:
    """Each token's largest logit m, sum exp(z - m), sum exp(z - m)(z - m) and z_target, over the tiles so far."""

    def __init__(self, num_tokens: int, like: Tensor, dtype: torch.dtype) -> None:
        self._max = torch.full((num_tokens,), _MASKED, dtype=dtype, device=like.device)
        self._sum, self._weighted, self._target = (torch.zeros_like(self._max) for _ in range(3))

    def fold(self, tokens: slice, start: int, targets: Tensor, logits: Tensor, scratch: list[Tensor]) -> None:
        """Adds a tile [n, v] whose vocabulary begins at `start`; overwrites it unless there are two scratch buffers."""
        place, inside = _inside(targets, start, logits.shape[1])
        self._target[tokens] = torch.where(inside, logits.gather(1, place).squeeze(1), self._target[tokens])
        old_max, old_sum = self._max[tokens], self._sum[tokens]
        new_max = torch.maximum(old_max, logits.amax(1))
        tile_sum, tile_weighted = torch.empty_like(new_max), torch.empty_like(new_max)
        for rows, block, exp, *rest in _blocks(logits, *scratch):
            relative = torch.sub(block, new_max[rows, None], out=rest[0] if rest else block)
            torch.exp(relative, out=exp)
            torch.sum(exp, 1, out=tile_sum[rows])
            torch.sum(relative.mul_(exp), 1, out=tile_weighted[rows])
        # Relative to the new maximum, every earlier z - m moves by the shift.
        shift = old_max - new_max
        decay = shift.exp()
        self._weighted[tokens] = (self._weighted[tokens] + shift * old_sum) * decay + tile_weighted
        self._sum[tokens] = old_sum * decay + tile_sum
        self._max[tokens] = new_max

    def results(self, tokens: slice) -> Results:
        """Returns the results of tokens to which every tile was added."""
        log_sum = self._sum[tokens].log()
        return Results(
            (self._target[tokens] - self._max[tokens]) - log_sum,
            log_sum - self._weighted[tokens] / self._sum[tokens],
            self._max[tokens] + log_sum,
        )


def _inside(targets: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns each target's column in a tile [n, 1], 0 if it is in another, and whether it is in this one [n]."""
    place = targets - start
    inside = (place >= 0) & (place < width)
    return torch.where(inside, place, 0)[:, None], inside


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _blocks(tile: Tensor, *scratch: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yields (rows, the tile's rows, a view of that shape of each scratch buffer), as many rows as fit the buffers."""
    num_rows, width = tile.shape
    for rows in _slices(num_rows, max(1, scratch[0].numel() // width)):
        shape = (rows.stop - rows.start, width)
        yield rows, tile[rows], *(buffer[: shape[0] * width].view(shape) for buffer in scratch)


def _view(buffer: Tensor, tokens: slice, vocabulary: slice) -> Tensor:
    """Returns the front of a flat buffer as a contiguous tile."""
    shape = (tokens.stop - tokens.start, vocabulary.stop - vocabulary.start)
    return buffer[: shape[0] * shape[1]].view(shape)
