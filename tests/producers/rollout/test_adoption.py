"""Progress that cannot be used: the log says why, and the rollout starts again."""

import pytest
from msgspec.structs import replace

from penstock.producers.interfaces import Completion
from penstock.producers.rollout.adoption import UnusableProgressError, adopted
from penstock.producers.rollout.episode import UNSCORED, rollout_of
from penstock.schemas.policy import make_version
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import RolloutGroup, SamplingSettings, TopLogprobs, pack_ids
from scripted_engine import FINGERPRINT, completion_of

CONTEXT = pack_ids([9, 8])
HERE = RolloutGroup(
    index=1,
    prompt=Prompt(text="p"),
    rollouts=(),
    producer_id="b",
    fingerprint=FINGERPRINT,
    sampling=SamplingSettings(max_tokens=4),
)


def sibling(num_tokens: int, version: int = 5, reason: str = "abort") -> Completion:
    return completion_of([1] * num_tokens, version, reason=reason)


def found(*siblings: Completion, context: bytes = CONTEXT, **changes) -> RolloutGroup:
    rollouts = tuple(rollout_of(context, one, UNSCORED) for one in siblings or (sibling(2), sibling(0)))
    return replace(HERE, rollouts=rollouts, producer_id="a", **changes)


def taken(group: RolloutGroup, held: int = 5) -> list[Completion]:
    return adopted(group, HERE, CONTEXT, num_siblings=2, held=held, lag_bound=2)


def test_what_fits_is_taken_over_as_it_was_sampled() -> None:
    siblings = [sibling(3, reason="stop"), sibling(0)]
    assert taken(found(*siblings)) == siblings
    sampling = replace(HERE.sampling, top_logprobs=2)
    siblings[0] = replace(siblings[0], top_logprobs=TopLogprobs(2, bytes(24), bytes(24)))
    here = replace(HERE, sampling=sampling)
    group = found(*siblings, sampling=sampling)
    assert adopted(group, here, CONTEXT, num_siblings=2, held=5, lag_bound=2) == siblings


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    for group, message in [
        (found(fingerprint=replace(FINGERPRINT, version="2")), "fingerprint.version = '2', expected '1'"),
        (found(sampling=SamplingSettings(max_tokens=4, temperature=0.5)), "sampling.temperature = 0.5, expected 1.0"),
        (found(sibling(1)), "1 siblings, expected 2"),
        (found(context=pack_ids([9, 7])), "sibling 0 follows another prompt, expected the 2 tokens of this one"),
        (found(context=pack_ids([9, 8, 7])), r"sibling 0 with loss_mask \(\(3, 5\),\), expected its 3 tokens"),
        (found(sibling(0), sibling(0)), "no token, expected at least one"),
        (found(sibling(5), sibling(0)), "sibling 0 with 5 tokens and finish reason 'abort', expected at most 4"),
        (found(sibling(1), sibling(1, reason="error")), "sibling 1 with 1 tokens and finish reason 'error'"),
        (
            found(replace(sibling(1), sampling_mask=(pack_ids([1]),)), sibling(0)),
            "sibling 0 with a sampling mask where",
        ),
        (
            found(replace(sibling(1), top_logprobs=TopLogprobs(1, bytes(4), bytes(4))), sibling(0)),
            "sibling 0 without its top_logprobs, or with those of another number",
        ),
    ]:
        with pytest.raises(UnusableProgressError, match=message):
            taken(group)


def test_progress_may_be_newer_and_older_by_up_to_the_lag_bound() -> None:
    for versions, held, is_taken in [
        ((5, 5), 7, True),
        ((5, 5), 8, False),
        ((1, 6), 8, True),  # a straggler: the trainer masks what is past the bound
        ((5, 7), 5, True),
        ((5, 8), 5, False),
        ((5, 5), make_version(1, 0), True),  # lag through a fork is the trainer's to know
        ((make_version(1, 0), 5), 5, False),
    ]:
        group = found(*(sibling(2, version) for version in versions))
        if is_taken:
            assert [one.version_spans[0].version for one in taken(group, held)] == list(versions)
        else:
            expected = f"newest token of policy {max(versions)}, expected {held} or up to 2 steps from it"
            with pytest.raises(UnusableProgressError, match=expected):
                taken(group, held)
