"""The model's own yardstick: how much exact computations of it differ in its dtype.

The gap of a sound engine depends on depth, width and dtype: 2e-7 nats for a model of 320,000 parameters in float32,
1e-5 for one of 135M, 3e-2 for that one in bfloat16. So it is measured, on rows that the run sampled: the trainer's
packed pass against transformers' own eager and sdpa attention, row by row, with the weights in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from penstock.consumers.learning.batch.batch import MicroBatch
from penstock.consumers.learning.batch.packing import pack_segments, segment_images, segment_routes
from penstock.consumers.learning.loss.scoring import head_logprobs
from penstock.consumers.learning.model.head import OutputHead
from penstock.consumers.learning.model.loading import set_attention
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.sample import Sample, evenly
from penstock.consumers.parity.tolerance import Yardstick
from penstock.schemas.rollout import Segment, VersionSpan, unpack_ids

MAX_TOKENS = 1024
"""Of the rows that are measured, with their contexts; one row may be longer."""
MIN_SAMPLED = 128
"""If the rows have fewer sampled tokens, those of their contexts are measured too."""
RECURRENT = 6e-6
"""The least, in nats, of a model whose rows are not packed. Most have recurrences, which transformers computes in
one way, by chunks, and an engine by steps too: small Mamba-2 hybrids in float32 differ by 3e-6 to 1.7e-5."""
EAGER_TOKENS = 1024
"""The longest row that eager attention computes: its memory grows with the square."""


@torch.no_grad()
def measure_yardstick(sample: Sample, model: PackedModel, budget: int) -> Yardstick | None:
    """Computes some rows of `sample` in each way; returns None if transformers' own attention cannot run the model.

    If several ranks share the model, each of them has to call it. budget: tokens of a packed pass.
    """
    rows = [sample.rows[n] for n in evenly([len(row.token_ids) for row in sample.rows], MAX_TOKENS)]
    is_short = sum(len(row.sampled) for row in rows) < MIN_SAMPLED
    segments = [_with_context(row.segment) if is_short else row.segment for row in rows]
    longest = max(len(row.token_ids) for row in rows)
    names = [name for name in ("eager", "sdpa") if _has(model, name) and (name == "sdpa" or longest <= EAGER_TOKENS)]
    if not names:
        return None
    found: dict[str, list[Tensor]] = {name: [] for name in ("packed", *names)}
    triples = [(row.group, segment, row.sampling.temperature) for row, segment in zip(rows, segments, strict=True)]
    files = {digest: file for row in rows for digest, file in row.files.items()}
    for microbatch, places in pack_segments(triples, budget, arrangement=model.arrangement, files=files):
        microbatch = microbatch.to(model.parameters()[0].device)
        found["packed"].append(head_logprobs(*model.forward(microbatch), microbatch)[0])
        for name in names:
            with _attention(model, name):
                found[name].append(_row_by_row(model, microbatch, [segments[place] for place in places], files))
    packed, *others = (torch.cat(logprobs).double() for logprobs in found.values())
    least = 0.0 if model.arrangement == "packed" else RECURRENT
    return Yardstick(
        transformers=_mean_gap(*others) if len(others) == 2 else float("nan"),
        packed=max(*(_mean_gap(packed, other) for other in others), least),
        num_tokens=len(packed),
    )


def _row_by_row(
    model: PackedModel, microbatch: MicroBatch, segments: Sequence[Segment], files: Mapping[str, bytes]
) -> Tensor:
    """Returns the logprobs of a micro-batch's tokens, [M], with each of its segments in a pass of its own."""
    parts, head, device = [], OutputHead(torch.empty(0)), microbatch.token_ids.device
    for segment in segments:
        token_ids = torch.tensor(list(unpack_ids(segment.token_ids)), device=device)
        routes = segment_routes(segment)
        forced = None if routes is None else torch.from_numpy(routes).to(device)
        positions, images = torch.arange(len(token_ids), device=device), segment_images(segment, files)
        hidden, head = model.run(token_ids, positions, None, forced, images)
        parts += [hidden[start - 1 : end - 1] for start, end in segment.loss_mask]
    hidden = model.scaled(torch.cat(parts))
    return head_logprobs(hidden, head, replace(microbatch, predicting=torch.arange(len(hidden), device=device)))[0]


def _mean_gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().mean())


def _with_context(segment: Segment) -> Segment:
    """Returns the segment as if all its tokens but the first had been sampled."""
    end = len(segment.token_ids) // 4
    spans = (VersionSpan(segment.version_spans[0].version, 1, end),)
    logprobs = bytes(4 * (end - 1))
    return msgspec.structs.replace(
        segment, behavior_logprobs=logprobs, loss_mask=((1, end),), version_spans=spans, sampling_mask=None
    )


def _has(model: PackedModel, name: str) -> bool:
    """Returns whether transformers has this attention for the model, and computes the model with it: its sdpa ignores a
    cap of the scores."""
    if name == "sdpa" and getattr(model.module.config.get_text_config(), "attn_logit_softcapping", None):
        return False
    try:
        with _attention(model, name):
            return True
    except ValueError:
        return False


@contextmanager
def _attention(model: PackedModel, name: str) -> Iterator[None]:
    """Within the context the model attends by transformers' own `name`, uncompiled. Raises ValueError: it cannot."""
    attention = model.attention
    try:
        with torch.compiler.set_stance("force_eager"):
            set_attention(model.module, name)
            yield
    finally:
        set_attention(model.module, attention)
