"""Taking over what an earlier holder of a prompt has sampled of its group, if it can be used.

All siblings are taken over or none: which of them are finished or old depends on their length, and to restart only some
would favor short or long answers.
"""

import itertools
import math
from collections.abc import Collection

from penstock.producers.interfaces import Completion
from penstock.schemas.policy import steps_behind
from penstock.schemas.rollout import Rollout, RolloutGroup, VersionSpan


class UnusableProgressError(ValueError):
    """Progress that cannot be continued; the message says why."""


def adopted(
    found: RolloutGroup, group: RolloutGroup, context: bytes, *, num_siblings: int, held: int, lag_bound: int
) -> list[Completion]:
    """Returns the siblings of `found`, to be continued.

    Tokens keep their versions. They may be newer than the policy held, by up to the lag bound like the policy of any
    claim, and older, like those of a straggler; but if all of them are past the bound, none would be trained. Policies
    of an earlier trainer epoch are left to the trainer, which alone knows their lag.

    Args:
        group: the group to be sampled here, with its prompt, engine and sampling.
        context: the prompt's token ids, packed.
        held: version of the policy that the engine holds.

    Raises:
        UnusableProgressError: it is of another prompt, engine or sampling, of another shape, or of policies that are
            too far from the one held.
    """
    check_origin(found, group)
    if found.prompt.images != group.prompt.images:  # two images of one size have the same tokens
        raise UnusableProgressError("other images in its prompt, expected those of this one")
    if len(found.rollouts) != num_siblings:
        raise UnusableProgressError(f"{len(found.rollouts)} siblings, expected {num_siblings}")
    completions = [_completion(found.rollouts[n], n, context, group) for n in range(num_siblings)]
    versions = {span.version for one in completions for span in one.version_spans}
    if not versions:
        raise UnusableProgressError("no token, expected at least one")
    check_versions(versions, held, lag_bound)
    return completions


def check_origin(found: RolloutGroup, group: RolloutGroup) -> None:
    """Raises UnusableProgressError: another engine or sampling."""
    for name in ("fingerprint", "sampling"):
        there, here = getattr(found, name), getattr(group, name)
        for field in here.__struct_fields__:
            if (theirs := getattr(there, field)) != (ours := getattr(here, field)):
                raise UnusableProgressError(f"{name}.{field} = {theirs!r}, expected {ours!r}")


def check_versions(versions: Collection[int], held: int, lag_bound: int) -> None:
    """Raises UnusableProgressError: the newest version is too far from the one held."""
    newest = max(versions, default=held)
    if steps_behind(held, newest) > lag_bound or lag_bound < steps_behind(newest, held) < math.inf:
        raise UnusableProgressError(
            f"newest token of policy {newest}, expected {held} or up to {lag_bound} steps from it"
        )


def _completion(rollout: Rollout, n: int, context: bytes, group: RolloutGroup) -> Completion:
    segment, start = rollout.segments[0], len(context) // 4
    if len(rollout.segments) > 1 or not segment.token_ids.startswith(context):
        raise UnusableProgressError(f"sibling {n} follows another prompt, expected the {start} tokens of this one")
    num_tokens = segment.num_tokens - start
    if list(itertools.chain(*segment.loss_mask)) != ([start, segment.num_tokens] if num_tokens else []):
        raise UnusableProgressError(f"sibling {n} with loss_mask {segment.loss_mask}, expected its {num_tokens} tokens")
    limit = group.sampling.max_tokens
    if num_tokens > limit or segment.finish_reason == "error":
        ended = f"{num_tokens} tokens and finish reason {segment.finish_reason!r}"
        raise UnusableProgressError(f"sibling {n} with {ended}, expected at most {limit} and no error")
    if (segment.sampling_mask is not None) != group.sampling.is_truncated and num_tokens:
        raise UnusableProgressError(f"sibling {n} with a sampling mask where none belongs, or without its own")
    if num_tokens and (segment.top_logprobs.count if segment.top_logprobs else 0) != (group.sampling.top_logprobs or 0):
        raise UnusableProgressError(f"sibling {n} without its top_logprobs, or with those of another number")
    return Completion(
        token_ids=segment.token_ids[len(context) :],
        behavior_logprobs=segment.behavior_logprobs,
        version_spans=tuple(
            VersionSpan(span.version, span.start - start, span.end - start) for span in segment.version_spans
        ),
        finish_reason=segment.finish_reason,
        sampling_mask=segment.sampling_mask,
        routes=segment.routes or None,
        top_logprobs=segment.top_logprobs or None,
    )
