"""Spans of a claimed prompt, from its release to its group; names as in `penstock.schemas.spans`."""

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.producers.interfaces import Completion
from penstock.producers.stream.in_flight import Claim, Dead
from penstock.schemas.process import clock
from penstock.schemas.rollout import MAX_ITEMS, EngineFingerprint, RolloutGroup
from penstock.schemas.spans import QUEUE, REWARD, SAMPLE, ProducerSpans, Span, Value

WEIGHTS = "penstock.weights"
"""The wait for weights that are fresh enough, or for its turn alone."""


def group_spans(claim: Claim, outcome: RolloutGroup | Dead, producer_id: str) -> ProducerSpans:
    """Returns the spans of a claim with its outcome, which is known now: the first `MAX_ITEMS`."""
    group, error = (outcome, "") if isinstance(outcome, RolloutGroup) else (outcome.group, outcome.reason)
    now = clock.steady_s()
    generated_s, scored_s = (
        (now, now) if group is None or error else (group.timings.generated_s, group.timings.appended_s)
    )
    rollouts = () if group is None else group.rollouts
    sampling = f"{claim.entry_id.decode()}:{claim.attempt}:{producer_id}"
    about: dict[str, Value] = {"rl.environment.name": claim.environment, "penstock.attempt": claim.attempt}
    sampled: dict[str, Value] = {
        "rl.sample.batch_size": len(rollouts),
        "rl.sample.output_tokens": sum(rollout.num_sampled_tokens for rollout in rollouts),
        "penstock.tries_lost": claim.num_tries_lost,
        "penstock.sampled_by": claim.sampled_by,
    }
    spans = [
        Span(QUEUE, claim.released_s, claim.claimed_s, about),
        Span(SAMPLE, claim.claimed_s, generated_s, about | sampled, id=sampling, error=error),
    ]
    if not error:
        score = sum(rollout.reward.value for rollout in rollouts) / max(1, len(rollouts))
        spans.append(Span(REWARD, generated_s, scored_s, about | {"rl.reward.score": score}))
    spans += [replace(span, parent=span.parent or sampling) for span in claim.spans]
    named = (span if span.id else replace(span, id=f"{sampling}:{n}") for n, span in enumerate(spans[:MAX_ITEMS]))
    return ProducerSpans(producer_id, tuple(named))


def chat_span(
    fingerprint: EngineFingerprint,
    began_s: float,
    ended_s: float,
    num_prompt_tokens: int,
    completions: Sequence[Completion],
    *,
    parent: str = "",
) -> Span:
    """Returns the span of one request to the engine; its completions are siblings."""
    about: dict[str, Value] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": fingerprint.engine,
        "gen_ai.request.model": fingerprint.model,
        "gen_ai.request.choice.count": len(completions),
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(one.num_tokens for one in completions),
        "gen_ai.response.finish_reasons": [one.finish_reason for one in completions],
        "penstock.policy_versions": sorted({span.version for one in completions for span in one.version_spans}),
    }
    return Span(f"chat {fingerprint.model.rpartition('/')[2]}", began_s, ended_s, about, parent=parent)
