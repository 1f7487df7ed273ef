"""Where a record's engine departs from the settings under which engine and trainer agree."""

from collections.abc import Iterator, Sequence

from penstock.schemas.config import RunConfig
from penstock.schemas.rollout import EngineFingerprint, RolloutGroup


def departures(groups: Sequence[RolloutGroup], config: RunConfig) -> tuple[str, ...]:
    """One line per setting of the fingerprints that can move a logprob and is off the parity recipe."""
    found: dict[str, None] = {}
    fingerprints: list[EngineFingerprint] = []
    for group in groups:
        if group.fingerprint not in fingerprints:
            fingerprints.append(group.fingerprint)
            found |= dict.fromkeys(_departures(group.fingerprint, config))
    several = [f"{len(fingerprints)} different engine fingerprints among the groups"] * (len(fingerprints) > 1)
    return (*several, *found)


def _departures(engine: EngineFingerprint, config: RunConfig) -> Iterator[str]:
    if engine.logprobs_mode != "processed_logprobs":
        yield f"the engine reports logprobs_mode = {engine.logprobs_mode!r}, the recipe is 'processed_logprobs'"
    if engine.dtype != config.model.dtype:
        yield f"the engine reports dtype = {engine.dtype!r}, the trainer computes in {config.model.dtype!r}"
    if engine.head_dtype != "float32":
        yield f"the engine reports head_dtype = {engine.head_dtype!r}, the trainer's head is 'float32'"
    if engine.prefix_caching:
        yield "the engine reports prefix_caching = true: a hit may reuse keys and values of older weights"
    if engine.async_scheduling:
        yield "the engine reports async_scheduling = true"
