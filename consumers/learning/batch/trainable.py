"""Checks that the trainer can reproduce a group's logprobs."""

import math

import numpy as np

from penstock.consumers.learning.batch.images import Sees
from penstock.schemas.images import ImageError
from penstock.schemas.rollout import RecordError, RolloutGroup, Segment
from penstock.schemas.routes import UNKNOWN, Routes


def check_trainable(
    group: RolloutGroup,
    vocabulary: int,
    *,
    needs_teacher: bool = False,
    experts: tuple[int, int, int] | None = None,
    top_logprobs: int = 0,
    sees: Sees | None = None,
) -> None:
    """Raises RecordError, naming the group, if the trainer cannot reproduce a decoded group's logprobs.

    Args:
        vocabulary: rows of the model's head; token ids must be below it.
        needs_teacher: requires a teacher's logprobs, from its server.
        experts: requires routes for a model of so many layers, experts, and experts per token.
        top_logprobs: requires so many of the likeliest ids with each sampled token.
        sees: the model, if it can be shown images.
    """
    sampling = group.sampling
    if not 0 <= sampling.temperature < math.inf:
        raise RecordError(
            f"group {group.index}: sampled at temperature {sampling.temperature}, expected a finite number of 0 or more"
        )
    if sampling.has_penalties:
        raise RecordError(
            f"group {group.index}: sampled with presence_penalty {sampling.presence_penalty}, frequency_penalty "
            f"{sampling.frequency_penalty} and repetition_penalty {sampling.repetition_penalty}; the trainer "
            "reproduces 0.0, 0.0 and 1.0 only"
        )
    for rollout in group.rollouts:
        for segment in rollout.segments:
            if needs_teacher:
                check_taught(group, segment)
            if segment.images:
                _check_images(group, segment, sees)
            if experts is not None and segment.loss_mask:
                _check_routed(group, segment.routes or None, *experts)
            top = segment.top_logprobs or None
            if top_logprobs and segment.loss_mask and (top is None or top.count != top_logprobs):
                raise RecordError(
                    f"group {group.index}: {0 if top is None else top.count} likeliest ids with each sampled token, "
                    f"expected sampling.top_logprobs = {top_logprobs}"
                )
            largest = np.frombuffer(segment.token_ids + (top.ids if top else b""), dtype=np.int32).max(initial=0)
            if largest >= vocabulary:
                raise RecordError(
                    f"group {group.index}: token id {largest}, expected less than the model's vocabulary of "
                    f"{vocabulary}"
                )
            if sampling.is_truncated and segment.sampling_mask is None:
                raise RecordError(
                    f"group {group.index}: sampled with top_p {sampling.top_p} and top_k {sampling.top_k} and no "
                    "sampling_mask; the trainer reproduces top_p 1.0 and top_k 0 only, or needs the ids that were kept"
                )
            kept = np.frombuffer(b"".join(segment.sampling_mask or ()), dtype=np.int32).max(initial=0)
            if kept >= vocabulary:
                raise RecordError(
                    f"group {group.index}: sampling_mask holds token id {kept}, expected less than the model's "
                    f"vocabulary of {vocabulary}"
                )
            if segment.loss_mask and segment.loss_mask[0][0] == 0:
                raise RecordError(
                    f"group {group.index}: loss_mask starts at token 0, which has no context to be sampled from"
                )


def _check_images(group: RolloutGroup, segment: Segment, sees: Sees | None) -> None:
    if sees is None:
        raise RecordError(
            f"group {group.index}: images, which a model of the trainer cannot be shown: model.path, "
            "model.reference or teacher.model"
        )
    token_ids, files = np.frombuffer(segment.token_ids, dtype=np.int32), group.images or {}
    for digest, start, end in ((place.digest, place.start, place.end) for place in segment.images or ()):
        where = f"group {group.index}: the image {digest[:12]} at tokens ({start}, {end})"
        try:
            expected = sees.num_tokens(digest, files[digest])
        except ImageError as error:
            raise RecordError(f"{where}: {error}") from error
        if (found := int((token_ids[start:end] == sees.token).sum())) != expected:
            raise RecordError(
                f"{where} has {found} placeholders, expected the {expected} that the trainer's image processor makes "
                "of it; the engine's may have other settings of its size"
            )


def check_taught(group: RolloutGroup, segment: Segment) -> None:
    """Raises RecordError if a group's segment lacks the logprobs from a teacher's server."""
    if segment.loss_mask and not segment.teacher_logprobs:
        raise RecordError(
            f"group {group.index}: no teacher_logprobs, which its producer should have requested from teacher.url"
        )


def _check_routed(
    group: RolloutGroup, routes: Routes | None, num_layers: int, num_experts: int, per_token: int
) -> None:
    where = f"group {group.index}: routes"
    if routes is None:
        raise RecordError(f"{where}: none, expected those of every token (model.replay_routes = true)")
    if (found := (routes.num_layers, routes.per_token)) != (wanted := (num_layers, per_token)):
        raise RecordError(f"{where} of {found} layers and experts per token, expected the model's {wanted}")
    ids = np.frombuffer(routes.ids, dtype=f"<{routes.kind}")
    largest = ids[ids != UNKNOWN[routes.kind]].max(initial=0)
    if largest >= num_experts:
        raise RecordError(f"{where} with expert {largest}, expected less than the model's {num_experts}")
