"""The engine's forward pass: signs of a 16-bit head in the record, and each part of the model against the trainer's.

Under body noise of 1e-2 a gap does not show the head. But the logits of a 16-bit head lie on a grid. For two
different tokens after one context the log-normalizer cancels, so (b_i - b_j) T is a difference of two logits: a
multiple of 2^-10 (bfloat16) or 2^-13 (float16) for all but the smallest ones, which a float32 head hits about once in
a hundred times, or in fifteen.

An error of one layer changes every layer after it. So with captured hidden states the trainer's layers do not run on
each other's outputs: hooks give each attention, MLP and norm, and the head, the engine's residual stream as input, and
the output of each is compared with the engine's. An error then shows only where it arises.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.consumers.learning.model.head import GREEDY_TEMPERATURE, selected_logprobs
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.replay import run_sequence
from penstock.consumers.parity.report import AS_SERVED, LayerGap, ParityError
from penstock.consumers.parity.sample import Sample, SampleRow
from penstock.consumers.parity.tolerance import Gap
from penstock.consumers.parity.verdict import NO_GAP, gap_of
from penstock.schemas import hidden_states as names

_GRIDS = {"bfloat16": 2.0**-10, "float16": 2.0**-13}
"""By type: the unit of its numbers from 1/8 to 1/4."""
_ROUNDING = 2.0**-22
"""Error of a difference of recorded logprobs, relative to the sizes of the logprobs and their logits."""
_TYPICAL_LOGIT = 8.0
_MIN_HITS = 5
_MIN_SHARE = 0.5
"""The least share of the differences that must lie on the grid."""
_MAX_CHANCE = 1e-6
"""The largest probability of the hits under a float32 head."""
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
"""Relative error of one part's output, by the type that the trainer's body computes with."""
ALLOWED_AS_SERVED = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 1.2e-2}
"""Relative error of the whole body, in which the rounding errors of all layers add up."""
_REROUTED = 0.05
"""Share of the tokens of a layer of experts that are left out; 0.7 to 1.9% choose others in bfloat16."""
ALLOWED_HEAD = 1e-5
"""Relative error of the logprobs. The head computes in float32 in any case: a head of bfloat16 is off by 1e-4 and more,
one of float16 by 2e-5."""


@dataclass(frozen=True)
class EqualContexts:
    """Statistics of tokens sampled after equal contexts.

    spread: the engine against itself, over pairs of siblings that sampled the same token after the same context.
    num_pairs: differences of two different tokens after one context. num_on_grid: those that logits of `dtype` can
        have. expected: how many of these chance would give.
    """

    spread: Gap = NO_GAP
    num_pairs: int = 0
    num_on_grid: int = 0
    expected: float = 0.0
    dtype: str = "bfloat16"

    @property
    def has_rounded_logits(self) -> bool:
        if self.num_on_grid < max(_MIN_HITS, _MIN_SHARE * self.num_pairs):
            return False
        # Markov's bound on exp(n) of independent hits (Chernoff): P(X >= k) <= exp(k - m - k ln(k / m)).
        k, m = self.num_on_grid, max(self.expected, 1e-9)
        return k - m - k * math.log(k / m) <= math.log(_MAX_CHANCE)

    def __str__(self) -> str:
        return (
            f"{self.num_on_grid} of {self.num_pairs} differences of first logprobs after one context are those of "
            f"{self.dtype} logits, {self.expected:.1f} would be by chance"
        )


def equal_contexts(sample: Sample, dtype: str = "bfloat16") -> EqualContexts:
    """Returns the statistics over rows of one policy without penalties, which show the engine's head and batching.

    dtype: the 16-bit type that the logits may have.
    """
    grid = _GRIDS[dtype]
    first, second, pairs, hits, expected = [], [], 0, 0, 0.0
    for entries in _by_context(sample.rows):
        by_target: dict[int, list[float]] = defaultdict(list)
        for row, offset, target in entries:
            by_target[target].append(float(sample.engine[row.first + offset]))
        for values in by_target.values():
            first += values[1:]
            second += values[:1] * (len(values) - 1)
        temperature = entries[0][0].sampling.temperature
        temperature = 1.0 if temperature < GREEDY_TEMPERATURE else temperature
        one, *others = (values[0] for values in by_target.values())
        for other in others:
            allowed = _ROUNDING * (_TYPICAL_LOGIT + (abs(one) + abs(other)) * temperature)
            difference = (one - other) * temperature
            pairs += 1
            hits += abs(difference - grid * round(difference / grid)) <= allowed
            expected += min(1.0, 2 * allowed / grid)
    return EqualContexts(gap_of(torch.tensor(first), torch.tensor(second)), pairs, hits, expected, dtype)


def _by_context(rows: Sequence[SampleRow]) -> list[list[tuple[SampleRow, int, int]]]:
    """Returns (row, offset, token id) of tokens by context, for contexts that two or more rows of a group share."""
    found: dict[tuple[int, int, bytes], list[tuple[SampleRow, int, int]]] = defaultdict(list)
    by_group: dict[tuple[int, int], list[SampleRow]] = defaultdict(list)
    for row in rows:
        if not row.is_mixed and not row.sampling.has_penalties:
            by_group[row.group, int(row.versions[0])].append(row)
    for (group, version), members in by_group.items():
        ids = {row.first: row.token_ids for row in members}
        # After their first difference siblings have no equal contexts.
        alive = [(row, 0) for row in members]
        while len(alive) > 1:
            same: dict[bytes, list[tuple[SampleRow, int]]] = defaultdict(list)
            for row, offset in alive:
                same[row.segment.token_ids[: 4 * int(row.sampled[offset])]].append((row, offset))
            alive = []
            for context, entries in same.items():
                if len(entries) > 1:
                    found[group, version, context] = [
                        (row, offset, int(ids[row.first][row.sampled[offset]])) for row, offset in entries
                    ]
                    alive += [(row, offset + 1) for row, offset in entries if offset + 1 < len(row.sampled)]
    return list(found.values())


@torch.no_grad()
def compare_layers(model: PackedModel, capture: Path | str) -> tuple[LayerGap, ...]:
    """Returns the distance of engine and trainer in each part of the model on equal input, in computation order.

    With e the engine's output and t the trainer's, over all tokens, the error is |e - t| / |t| (2-norms). In 16 bits
    the tokens of a layer of experts that differ most are left out: two computations of its router choose other
    experts where scores are close, also on equal input.

    Args:
        model: with the weights of the version that the capture names (`captured_version`).
        capture: a file in the format of `penstock.schemas.hidden_states`.

    Returns:
        "embedding"; "layers.<i>.attention" and "layers.<i>.mlp", each with the norm before it; "norm", the final one;
        "head", logprobs of the sequence's own tokens; "as served", the engine's final hidden state as it serves
        requests (compiled) against the one it recorded, which is the engine against itself.

    Raises:
        ParityError: the file is no capture, or one of another model; or the trainer's model has other parts.
    """
    tensors, num_layers = _read(capture)
    body: Any = model.body
    layers = getattr(body, "layers", ())
    if len(layers) != num_layers:
        raise ParityError(f"{capture}: hidden states of {num_layers} layers, the trainer's model has {len(layers)}")
    token_ids = tensors[names.TOKEN_IDS]
    if int(token_ids.max()) >= model.vocabulary:
        raise ParityError(f"{capture}: token {int(token_ids.max())}, the vocabulary ends at {model.vocabulary - 1}")
    device = next(model.module.parameters()).device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    found: list[LayerGap] = []
    with ExitStack() as hooks:
        _replace_inputs(body, layers, tensors, found, hooks)
        norm, head = run_sequence(model, token_ids.to(device))
    if norm.shape != tensors[names.NORM].shape:
        raise ParityError(
            f"{capture}: hidden states {tuple(tensors[names.NORM].shape)}, the trainer's are {tuple(norm.shape)}"
        )
    found.append(_gap("norm", tensors[names.NORM], norm, ALLOWED))
    hidden = tensors[names.NORM].to(norm.dtype)
    logprobs, _ = selected_logprobs(
        model.scaled(hidden[:-1]), head.weight, tensors[names.TOKEN_IDS][1:], softcap=head.softcap
    )
    error = _error(tensors[names.LOGPROBS], logprobs)
    found.append(LayerGap(name="head", error=error, allowed=ALLOWED_HEAD))
    found.append(_gap(AS_SERVED, tensors[names.AS_SERVED], hidden[-1], ALLOWED_AS_SERVED))
    return tuple(found)


def captured_version(capture: Path | str) -> int:
    """Returns the policy version whose weights a capture was made with.

    Raises:
        ParityError: the file is no capture.
    """
    return int(_metadata(capture)["policy_version"])


def _replace_inputs(
    body: Any, layers: Any, tensors: dict[str, Tensor], found: list[LayerGap], hooks: ExitStack
) -> None:
    """Hooks the trainer's model: each part gets the engine's input, and its output is compared with the engine's."""
    add = hooks.enter_context
    for index, layer in enumerate(layers):
        own = {name: getattr(layer, name, None) for name in ("self_attn", "post_attention_layernorm", "mlp")}
        if missing := [name for name, part in own.items() if part is None]:
            raise ParityError(
                f"layers are compared of models with self_attn, post_attention_layernorm and mlp; "
                f"{type(layer).__name__} has no {', '.join(missing)}"
            )
        before = _swapping(names.layer(index, names.INPUT), tensors, None if index else found)
        add(layer.register_forward_pre_hook(before, with_kwargs=True))
        middle = _swapping(names.layer(index, names.MIDDLE), tensors)
        add(layer.post_attention_layernorm.register_forward_pre_hook(middle, with_kwargs=True))
        for part, name in ((layer.self_attn, names.ATTENTION), (layer.mlp, names.MLP)):
            add(part.register_forward_hook(_comparing(names.layer(index, name), tensors, found)))
    add(body.norm.register_forward_pre_hook(_swapping(names.STREAM, tensors), with_kwargs=True))


def _swapping(name: str, tensors: dict[str, Tensor], embedding: list[LayerGap] | None = None) -> Callable[..., Any]:
    """Returns a hook that replaces a module's hidden states, [1, N, H], by the engine's.

    embedding: gets the distance of the two, which is that of the embedding before the first layer.
    """
    theirs = tensors[name]

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        ours = arguments[0] if arguments else keywords["hidden_states"]
        if ours[0].shape != theirs.shape:
            raise ParityError(
                f"{name}: the engine's hidden states are {tuple(theirs.shape)}, the trainer's "
                f"{tuple(ours[0].shape)}; expected captures of the same model"
            )
        if embedding is not None:
            embedding.append(_gap("embedding", theirs, ours[0], ALLOWED))
        swapped = theirs.to(ours.dtype)[None]
        if arguments:
            return (swapped, *arguments[1:]), keywords
        return arguments, keywords | {"hidden_states": swapped}

    return hook


def _comparing(name: str, tensors: dict[str, Tensor], found: list[LayerGap]) -> Callable[..., None]:
    """Returns a hook that compares a module's output with the engine's."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        ours = (output[0] if isinstance(output, tuple) else output).reshape(tensors[name].shape)
        theirs = tensors[name]
        if hasattr(module, "experts") and ours.dtype != torch.float32:
            nearest = (theirs.double() - ours.double()).norm(dim=1).argsort()[: -math.ceil(_REROUTED * len(ours))]
            theirs, ours = theirs[nearest], ours[nearest]
        found.append(_gap(name, theirs, ours, ALLOWED))

    return hook


def _gap(name: str, engine: Tensor, trainer: Tensor, allowed: dict[torch.dtype, float]) -> LayerGap:
    return LayerGap(name=name, error=_error(engine, trainer), allowed=allowed[trainer.dtype])


def _error(engine: Tensor, trainer: Tensor) -> float:
    """Returns |engine - trainer| / |trainer|, 2-norms over all elements; 0 if both are zero."""
    difference = float((engine.double() - trainer.double()).norm())
    return difference / float(trainer.double().norm()) if difference else 0.0


def _metadata(capture: Path | str) -> dict[str, str]:
    try:
        with safe_open(capture, framework="pt") as file:
            metadata = file.metadata() or {}
    except Exception as error:  # safetensors raises types of its own, OSError among them
        raise ParityError(f"{capture}: no hidden states can be read from it: {error}") from error
    if metadata.get("format") != names.FORMAT:
        raise ParityError(f"{capture}: format {metadata.get('format')!r}, expected {names.FORMAT!r}")
    return metadata


def _read(capture: Path | str) -> tuple[dict[str, Tensor], int]:
    """Returns the tensors of a capture and its number of layers."""
    num_layers, tensors = int(_metadata(capture)["num_layers"]), load_file(capture)
    parts = (names.INPUT, names.ATTENTION, names.MIDDLE, names.MLP)
    expected = {names.layer(index, part) for index in range(num_layers) for part in parts}
    expected |= {names.TOKEN_IDS, names.STREAM, names.NORM, names.LOGPROBS, names.AS_SERVED}
    if missing := expected - set(tensors):
        raise ParityError(f"{capture}: lacks {sorted(missing)[:3]}, expected every tensor of {names.FORMAT}")
    num_tokens = len(tensors[names.TOKEN_IDS])
    if num_tokens < 2:
        raise ParityError(f"{capture}: a sequence of {num_tokens} tokens, expected 2 or more")
    return tensors, num_layers
