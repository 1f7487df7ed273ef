"""Packs vLLM's outputs into `Completion`s."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from penstock.producers.interfaces import Completion, EngineError
from penstock.schemas.rollout import TopLogprobs, VersionSpan, pack_floats, pack_ids
from penstock.schemas.routes import Routes


class Reported(NamedTuple):
    """What the engine reports with each token.

    masks: the ids that it was sampled from. routes: the experts of its computation, as ids of this kind; None if not.
    """

    masks: bool
    routes: str | None


def pack(output: Any, request_id: str, reported: Reported) -> Completion:
    """Packs one finished sibling, a vLLM `CompletionOutput` with flat logprobs: of each sampled token, then of the
    likeliest ids if the request asked for any.

    Raises:
        EngineError: its parts are inconsistent.
    """
    kept = output.sampling_mask.token_ids if output.sampling_mask else []
    return _packed(output, list(map(pack_ids, kept)), output.routed_experts, request_id, reported)


def pack_unfinished(state: Any, request_id: str, reported: Reported) -> Completion:
    """Packs a sibling as far as it is sampled, vLLM's `RequestState`, as an aborted one; otherwise as `pack`."""
    output = state._new_completion_output([], None, None)
    output.finish_reason, output.weight_versions = "abort", state._weight_version_spans()
    # For a finished output vLLM makes a list per position, which takes twenty times as long.
    kept: list[bytes] = []
    for chunk in state.sampling_mask_chunks:  # `SamplingMaskLists`, int32; without offsets of one position
        ids = chunk.token_ids.tobytes()
        if chunk.offsets is None:
            kept.append(ids)
        else:
            kept += (ids[start:end] for start, end in itertools.pairwise((4 * chunk.offsets).tolist()))
    chunks = state.routed_experts_chunks
    return _packed(output, kept, np.concatenate(chunks) if chunks else None, request_id, reported)


def _packed(
    output: Any, kept: list[bytes], experts: np.ndarray | None, request_id: str, reported: Reported
) -> Completion:
    spans = tuple(VersionSpan(int(span.version), span.start, span.end) for span in output.weight_versions or ())
    num_tokens = len(output.token_ids)
    if not _tile(spans, num_tokens):
        raise EngineError(f"request {request_id}: version spans {spans} do not tile its {num_tokens} tokens")
    ids, logprobs = output.logprobs.token_ids, output.logprobs.logprobs
    # A position of the flat form holds the sampled id, then the likeliest ones, whether or not it is among them.
    width = len(ids) // num_tokens if num_tokens else 1
    if len(ids) != width * num_tokens or ids[::width] != list(output.token_ids):
        raise EngineError(
            f"request {request_id}: {num_tokens} tokens, but logprobs of {len(ids)}; expected the same tokens in both"
        )
    if len(kept) != reported.masks * num_tokens:
        raise EngineError(
            f"request {request_id}: {num_tokens} tokens, but a sampling mask of {len(kept)}; expected one "
            f"{'of as many' if reported.masks else 'of none'}"
        )
    routes = None
    if reported.routes is not None and num_tokens:
        if experts is None or len(experts) < num_tokens:
            raise EngineError(
                f"request {request_id}: {num_tokens} tokens, but experts of {0 if experts is None else len(experts)}; "
                "expected those of the prompt and of each token but the last (model.replay_routes)"
            )
        _, num_layers, per_token = experts.shape
        routes = Routes(num_layers, per_token, reported.routes, experts.astype(f"<{reported.routes}").tobytes())
    top = None
    if width > 1:
        table = np.array(ids, "<i4").reshape(-1, width)[:, 1:], np.array(logprobs, "<f4").reshape(-1, width)[:, 1:]
        top = TopLogprobs(width - 1, *(part.tobytes() for part in table))
    return Completion(
        token_ids=pack_ids(output.token_ids),
        behavior_logprobs=pack_floats(logprobs[::width]),
        version_spans=spans,
        finish_reason=output.finish_reason,
        sampling_mask=tuple(kept) if reported.masks else None,
        routes=routes,
        top_logprobs=top,
    )


def _tile(spans: tuple[VersionSpan, ...], num_tokens: int) -> bool:
    end = 0
    for span in spans:
        if span.start != end or span.end <= end:
            return False
        end = span.end
    return end == num_tokens
