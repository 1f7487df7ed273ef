"""The start check that a model computes over a batch's rows what transformers computes row by row.

Two short rows of random tokens, a long one and a shorter one, go through the model in float32, packed behind the prefix
that they share or padded to a rectangle. Three comparisons of logprobs follow:

1. of two passes over both rows, which fails if dropout stays on;
2. of the second row with the first and alone, which fails if it sees the first: by a recurrence, or by attention that
   bypasses the packed one;
3. of the second row alone and transformers' own forward pass, which fails if anything else is not reproduced: a mask of
   another shape, a soft cap of the logits.

The rows of a vision-language model have images of two sizes, one in the prefix and one in the longer row.

Sliding windows, attention chunks and the context from which rotary frequencies change are narrowed for the check, so
that the long row exceeds them. A 16-bit run must also be able to compute a row in its `dtype`. Where that uses another
attention kernel than float32 does, the second comparison is repeated in `dtype`: there a leak has to exceed what
rounding to `dtype` changes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.consumers.learning.batch.batch import MicroBatch
from penstock.consumers.learning.batch.layout import Arrangement
from penstock.consumers.learning.batch.packing import pack_segments
from penstock.consumers.learning.model.head import OutputHead, selected_logprobs
from penstock.consumers.learning.model.loading import set_attention
from penstock.consumers.learning.model.vision import Vision, encoded
from penstock.schemas.config import ConfigError
from penstock.schemas.images import ImagePlace, digest_of
from penstock.schemas.rollout import Segment, VersionSpan, pack_ids

ALLOWED = 1e-3
"""Mean nats per token: equal computations in another order stay below 1e-5, known faults are above 1e-2."""
_PREFIX = 5
_LENGTHS = (13, 10)
"""Tokens of the rows, which begin with the same `_PREFIX` tokens."""
_WINDOW = 4
_WINDOWS = ("sliding_window", "attention_chunk_size")
_LIMIT, _CONTEXT = "original_max_position_embeddings", 11
"""Between the lengths."""

_WAYS = {"packed": "over packed rows", "whole": "over whole rows", "rectangles": "in rectangles"}

_FIRST_IMAGE, _SECOND_IMAGE = 2, 9
"""Tokens before the image in the prefix, and before that of the longer row."""
_IMAGE_SIZES = ((96, 64), (40, 112))
"""Width and height in pixels."""

Forward = Callable[[MicroBatch], tuple[Tensor, OutputHead]]


class _Row(NamedTuple):
    """A row of the check; with images, the first one is in its prefix."""

    token_ids: list[int]
    images: tuple[ImagePlace, ...] = ()

    @property
    def scored(self) -> list[tuple[int, int]]:
        """The runs of tokens after the prefix that stand for no image."""
        start, runs = _PREFIX, []
        for number, place in enumerate(self.images):
            if number == 0:
                start += place.end - place.start
            else:
                runs.append((start, place.start))
                start = place.end
        return [*runs, (start, len(self.token_ids))]


class ModelCheckError(ValueError):
    """The model cannot be trained in this way; the message completes a sentence that begins with its name."""


@torch.no_grad()
def check_model(
    module: Any,
    forward: Forward,
    in_dtype: Forward | None = None,
    *,
    is_other_kernel: bool = False,
    arrangement: Arrangement = "packed",
    vision: Vision | None = None,
) -> None:
    """Compares the logprobs of `forward`, which returns hidden states [N, H] and a head, with `module`'s own.

    in_dtype: `forward` in the type of training, if that is not float32. is_other_kernel: attention takes another path
    there. arrangement: of the rows. vision: checks rows with images.

    Raises:
        ModelCheckError: a comparison failed, which the message names, or the model cannot be run in this way.
    """
    head = module.get_output_embeddings().weight
    tokens = torch.randint(len(head), (2, max(_LENGTHS)), generator=torch.Generator().manual_seed(0))
    tokens[1, :_PREFIX] = tokens[0, :_PREFIX]
    rows = [_Row(row[:length]) for row, length in zip(tokens.tolist(), _LENGTHS, strict=True)]
    files: dict[str, bytes] = {}
    leak = "of a row beside another differ from those of the row alone: rows leak"

    def logprobs(rows: list[_Row], forward: Forward) -> Tensor:
        return _logprobs(rows, forward, head.device, arrangement, files)

    try:
        if vision is not None:
            rows, files = _with_images(rows, vision)
        with _narrowed(module):
            packed, again = (logprobs(rows, forward) for _ in range(2))
            _compare(
                packed, again, "differ between two passes over the same rows: something random (dropout?) stays on"
            )
            alone = logprobs(rows[1:], forward)
            _compare(packed[-len(alone) :], alone, leak)
            own = _own(rows[1], module, vision, files)
            _compare(alone, own, "differ from those of transformers' own forward pass")
            if in_dtype is not None:
                rounded = logprobs(rows[1:], in_dtype)
                if is_other_kernel:
                    allowed = ALLOWED + 2 * float((rounded - alone).abs().mean())
                    _compare(logprobs(rows, in_dtype)[-len(alone) :], rounded, leak, allowed)
    except (ModelCheckError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # an untried architecture may raise anything: it cannot be trained
        raise ModelCheckError(f"cannot be run {_WAYS[arrangement]}: {str(error) or type(error).__name__}") from error


@torch.no_grad()
def uncalled(
    layers: Mapping[str, nn.Module], forward: Forward, device: torch.device, arrangement: Arrangement
) -> list[str]:
    """Returns the names of the layers that a pass over a short row does not call. See `check_model`."""
    called: set[nn.Module] = set()
    hooks = [layer.register_forward_pre_hook(lambda layer, _: called.add(layer)) for layer in layers.values()]
    _logprobs([_Row(list(range(_PREFIX + 1)))], forward, device, arrangement)
    for hook in hooks:
        hook.remove()
    return [name for name, layer in layers.items() if layer not in called]


@torch.no_grad()
def check_range(module: Any, forward: Forward, named: str, *, arrangement: Arrangement) -> None:
    """Checks that a model's weights, and its activations on the check's rows, are finite in float16.

    forward: in float16. named: the run file's field and value, for messages.

    Raises:
        ConfigError: the message names the first tensor, or the first module in the order of computation.
    """
    limit = torch.finfo(torch.float16).max
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not tensor.half().isfinite().all():
            raise ConfigError(
                f"model.dtype = 'float16' with {named}: {name} has a weight of {_largest(tensor):g}, float16 ends at "
                f"{limit:g}; expected 'bfloat16' or 'float32'"
            )
    head = module.get_output_embeddings().weight
    rows = torch.randint(len(head), (2, max(_LENGTHS)), generator=torch.Generator().manual_seed(0)).tolist()
    found: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        def hook(_: Any, arguments: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor) and output.is_floating_point() and not output.isfinite().all():
                found.append(name)

        return hook

    hooks = [each.register_forward_hook(noting(name)) for name, each in module.named_modules() if name]
    try:
        logprobs = _logprobs([_Row(row) for row in rows], forward, head.device, arrangement)
    finally:
        for hook in hooks:
            hook.remove()
    if found or not logprobs.isfinite().all():
        raise ConfigError(
            f"model.dtype = 'float16' with {named}: activations exceed float16, which ends at {limit:g}, first in "
            f"{found[0] if found else 'the head'}; expected 'bfloat16' or 'float32'"
        )


def _largest(tensor: Tensor) -> float:
    """Returns the element of the largest size; NaN if there is one."""
    return float(tensor.flatten()[tensor.abs().argmax()])


def _compare(found: Tensor, expected: Tensor, what: str, allowed: float | None = None) -> None:
    gap, allowed = float((found - expected).abs().mean()), ALLOWED if allowed is None else allowed
    if not gap <= allowed:
        raise ModelCheckError(
            f"is refused by the check at start: logprobs {what}, by {gap:.2g} nats a token (expected {allowed:.2g} at "
            "most)"
        )


def _with_images(rows: list[_Row], vision: Vision) -> tuple[list[_Row], dict[str, bytes]]:
    """Returns the rows with the placeholders of images, and the images by digest."""
    noise = torch.Generator().manual_seed(0)
    images = [
        encoded(torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=noise).numpy())
        for width, height in _IMAGE_SIZES
    ]
    files = {digest_of(image): image for image in images}
    found = []
    for row, digests in zip(rows, (list(files), list(files)[:1]), strict=True):
        token_ids, places = list(row.token_ids), []
        for digest, before in zip(digests, (_FIRST_IMAGE, _SECOND_IMAGE), strict=False):
            start = before + len(token_ids) - len(row.token_ids)
            num_tokens = vision.num_tokens(digest, files[digest])
            token_ids[start:start] = [vision.token] * num_tokens
            places.append(ImagePlace(digest, start, start + num_tokens))
        found.append(_Row(token_ids, tuple(places)))
    return found, files


def _logprobs(
    rows: list[_Row],
    forward: Forward,
    device: torch.device,
    arrangement: Arrangement,
    files: Mapping[str, bytes] | None = None,
) -> Tensor:
    """Returns the logprobs of the scored tokens, those of the first row first."""
    segments = [(0, _segment(row), 1.0) for row in rows]
    budget = len(rows) * max(len(row.token_ids) for row in rows)
    ((microbatch, _),) = pack_segments(segments, budget, arrangement=arrangement, files=files)
    microbatch = microbatch.to(device)
    hidden, head = forward(microbatch)
    states = F.embedding(microbatch.predicting, hidden)
    logprobs, _ = selected_logprobs(states, head.weight, microbatch.targets, softcap=head.softcap)
    return logprobs


def _segment(row: _Row) -> Segment:
    scored = row.scored
    return Segment(
        token_ids=pack_ids(row.token_ids),
        behavior_logprobs=bytes(4 * sum(end - start for start, end in scored)),
        loss_mask=tuple(scored),
        version_spans=tuple(VersionSpan(0, start, end) for start, end in scored),
        images=row.images,
    )


def _own(row: _Row, module: Any, vision: Vision | None, files: Mapping[str, bytes]) -> Tensor:
    """Returns one row's logprobs by transformers: eager attention, its masks and head, in evaluation mode."""
    training, attention = [each for each in module.modules() if each.training], module.config._attn_implementation
    token_ids = torch.tensor(row.token_ids, device=module.get_output_embeddings().weight.device)
    of_images = vision.own_arguments(row.token_ids, [files[place.digest] for place in row.images]) if vision else {}
    set_attention(module.eval(), "eager")
    try:
        logits = module(input_ids=token_ids[None], use_cache=False, **of_images).logits[0]
    finally:
        set_attention(module, attention)
        for each in training:
            each.training = True
    scored = torch.cat([torch.arange(start, end) for start, end in row.scored]).to(token_ids.device)
    return logits[scored - 1].log_softmax(-1).gather(1, token_ids[scored, None])[:, 0]


@contextmanager
def _narrowed(module: Any) -> Iterator[None]:
    """Sets attention windows and chunks to `_WINDOW` tokens, in the configuration and in the modules, and the context
    of rotary frequencies to `_CONTEXT`, in the configuration."""
    configs = {id(each.config): each.config for each in module.modules() if hasattr(each, "config")}
    holders = [
        (holder, name, value)
        for holder in chain(configs.values(), module.modules())
        for name in _WINDOWS
        if isinstance(value := getattr(holder, name, None), int) and value > _WINDOW
    ]
    tables = [(table, table[_LIMIT]) for config in configs.values() for table in _rope_tables(config)]
    for holder, name, _ in holders:
        setattr(holder, name, _WINDOW)
    for table, _ in tables:
        table[_LIMIT] = _CONTEXT
    try:
        yield
    finally:
        for holder, name, value in holders:
            setattr(holder, name, value)
        for table, value in tables:
            table[_LIMIT] = value


def _rope_tables(config: Any) -> list[dict[str, Any]]:
    """Returns the dictionaries of rotary parameters, one or one per layer type, that name a limited context."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [table for table in (parameters, *parameters.values()) if isinstance(table, dict) and _LIMIT in table]
