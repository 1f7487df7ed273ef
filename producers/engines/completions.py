"""Packs vLLM's outputs into `Completion`s."""

import itertools
from typing import Any

from penstock.producers.interfaces import Completion, EngineError
from penstock.schemas.rollout import VersionSpan, pack_floats, pack_ids


def pack(output: Any, request_id: str, *, masked: bool) -> Completion:
    """Packs one finished sibling, a vLLM `CompletionOutput` with flat logprobs of the sampled tokens alone.

    masked: the engine reports the ids that each token was sampled from.

    Raises:
        EngineError: its parts are inconsistent.
    """
    kept = output.sampling_mask.token_ids if output.sampling_mask else []
    return _packed(output, list(map(pack_ids, kept)), request_id, masked)


def pack_unfinished(state: Any, request_id: str, *, masked: bool) -> Completion:
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
    return _packed(output, kept, request_id, masked)


def _packed(output: Any, kept: list[bytes], request_id: str, masked: bool) -> Completion:
    spans = tuple(VersionSpan(int(span.version), span.start, span.end) for span in output.weight_versions or ())
    num_tokens = len(output.token_ids)
    if not _tile(spans, num_tokens):
        raise EngineError(f"request {request_id}: version spans {spans} do not tile its {num_tokens} tokens")
    # With logprobs=0 the flat form holds one id per position: the sampled token's.
    if output.logprobs.token_ids != list(output.token_ids):
        raise EngineError(
            f"request {request_id}: {num_tokens} tokens, but logprobs of {len(output.logprobs.token_ids)}; "
            "expected the same tokens in both"
        )
    if len(kept) != masked * num_tokens:
        raise EngineError(
            f"request {request_id}: {num_tokens} tokens, but a sampling mask of {len(kept)}; expected one "
            f"{'of as many' if masked else 'of none'}"
        )
    return Completion(
        token_ids=pack_ids(output.token_ids),
        behavior_logprobs=pack_floats(output.logprobs.logprobs),
        version_spans=spans,
        finish_reason=output.finish_reason,
        sampling_mask=tuple(kept) if masked else None,
    )


def _tile(spans: tuple[VersionSpan, ...], num_tokens: int) -> bool:
    end = 0
    for span in spans:
        if span.start != end or span.end <= end:
            return False
        end = span.end
    return end == num_tokens
