"""A short run of one engine for the parity check: prompts sampled while weights are replaced, without a stream.

The engine is used as in a run, through `generate` and `load_weights` alone, so that the check's result holds for the
run too.
"""

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from penstock.producers.interfaces import NO_IMAGES, Completion, Engine, Environment, PlacedImages
from penstock.producers.rollout.episode import rollout_of, tokenize
from penstock.schemas.policy import WeightManifest
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import RolloutGroup, SamplingSettings, pack_ids, unpack_floats, unpack_ids

PRODUCER_ID = "probe"


class PosedPrompt(NamedTuple):
    """A prompt and the ids that the model is given for it: before an engine has expanded them, with one placeholder for
    each image."""

    prompt: Prompt
    token_ids: list[int]
    images: PlacedImages = NO_IMAGES

    async def expanded(self, engine: Engine) -> "PosedPrompt":
        """Returns it as the engine is given it.

        Raises:
            ValueError: the engine refuses its images.
        """
        if not engine.takes_images:
            return self
        ids, images = await engine.expand(self.token_ids, [part.data or b"" for part in self.prompt.images])
        return PosedPrompt(self.prompt, ids, images)


class WeightUpdate(NamedTuple):
    """A policy to load, and its safetensors file."""

    manifest: WeightManifest
    path: str


def pose(environments: Sequence[Environment], tokenizer: Any, num_prompts: int) -> list[PosedPrompt]:
    """Poses the first training tasks, of each environment in turn."""
    turns = [divmod(n, len(environments)) for n in range(num_prompts)]
    prompts = [environments[place].prompt(1 + number) for number, place in turns]
    return [PosedPrompt(prompt, tokenize(tokenizer, prompt)) for prompt in prompts]


async def probe(
    engine: Engine,
    prompts: Sequence[PosedPrompt],
    sampling: SamplingSettings,
    *,
    group_size: int,
    updates: Sequence[WeightUpdate] = (),
) -> list[RolloutGroup]:
    """Samples every prompt across each update, and once more after the last one.

    Prompts are sampled repeatedly until an update is loaded, and the groups in flight at that moment are kept. So rows
    hold tokens of two policies, however fast the engine is, and each policy samples every prompt again, whether or not
    the engine has cached it. If nothing was in flight, the first prompt's round before the update is kept.

    Returns:
        `len(prompts) * (len(updates) + 1)` groups, update after update, indexes from 1, rewards 0.

    Raises:
        ValueError: the engine refuses a prompt.
        WeightLoadError: it refuses an update.
        EngineError: it serves no longer.
    """
    waves: list[list[Completion]] = []
    prompts = [await each.expanded(engine) for each in prompts]
    for update in (*updates, None):
        wave = _Wave(engine, sampling, group_size)
        waves += await wave.sample(prompts, update)
    return [
        _group(index, posed, completions, sampling, engine)
        for index, (posed, completions) in enumerate(zip([*prompts] * (len(updates) + 1), waves, strict=True), 1)
    ]


class _Wave:
    """All prompts, sampled at once, with at most one update."""

    def __init__(self, engine: Engine, sampling: SamplingSettings, group_size: int) -> None:
        self._engine, self._sampling, self._group_size = engine, sampling, group_size
        self._updated = False
        self._before: list[Completion] = []
        """The first prompt's last round that ended before the update."""

    async def sample(self, prompts: Sequence[PosedPrompt], update: WeightUpdate | None) -> list[list[Completion]]:
        """Returns each prompt's siblings that were in flight during the update."""
        self._updated = update is None
        older = self._engine.policy_version
        try:
            async with asyncio.TaskGroup() as tasks:
                sampled = [
                    tasks.create_task(self._until_updated(posed, (n + 1) / len(prompts), keep=n == 0))
                    for n, posed in enumerate(prompts)
                ]
                if update is not None:
                    # A short request in the same batch returns once the others are being sampled.
                    await _sample(self._engine, prompts[0], self._shorter(0.25), 1)
                    await self._engine.load_weights(update.manifest, update.path)
                    self._updated = True
        except ExceptionGroup as error:  # several requests fail for one reason
            raise error.exceptions[0] from None
        found = [task.result() for task in sampled]
        versions = {completion.version_spans[0].version for siblings in found for completion in siblings}
        return [self._before, *found[1:]] if self._before and older not in versions else found

    async def _until_updated(self, posed: PosedPrompt, share: float, *, keep: bool) -> list[Completion]:
        # Before an update the first round of each prompt has another length: if all ended at the same moment, an
        # update then would find nothing in flight.
        sampling = self._sampling if self._updated else self._shorter(share)
        while True:
            found = await _sample(self._engine, posed, sampling, self._group_size)
            # On a busy machine, one that was in flight may arrive before the update is known to be done.
            if self._updated or any(len(completion.version_spans) > 1 for completion in found):
                return found
            if keep:
                self._before = found
            sampling = self._sampling
            await asyncio.sleep(0)  # an engine may answer without ever waiting

    def _shorter(self, share: float) -> SamplingSettings:
        return msgspec.structs.replace(self._sampling, max_tokens=max(1, round(self._sampling.max_tokens * share)))


async def _sample(
    engine: Engine, posed: PosedPrompt, sampling: SamplingSettings, num_siblings: int
) -> list[Completion]:
    request_id = f"{PRODUCER_ID}-{uuid.uuid4()}"
    return await engine.generate(posed.token_ids, sampling, num_siblings, request_id, images=posed.images)


class BatchDependence(NamedTuple):
    """Greedy completions decoded alone and all together: |difference| of the logprobs, over the tokens before the first
    at which the two texts differ. It is the engine's own noise, not a fault."""

    num_tokens: int
    mean: float
    max: float
    num_texts: int
    num_parted: int

    def __str__(self) -> str:
        return (
            f"batch size: greedy logprobs of {self.num_tokens} tokens, decoded alone and with {self.num_texts - 1} "
            f"others, differ by {self.mean:.1e} in the mean and {self.max:.1e} at most; {self.num_parted} of "
            f"{self.num_texts} texts diverged"
        )


async def batch_dependence(engine: Engine, prompts: Sequence[PosedPrompt], max_tokens: int = 64) -> BatchDependence:
    """Measures how much an engine's logprobs depend on the rest of its batch. Nothing else may use the engine.

    Raises:
        ValueError, EngineError: as `probe`.
    """
    greedy = SamplingSettings(temperature=0.0, max_tokens=max_tokens)
    prompts = [await each.expanded(engine) for each in prompts]
    alone = [await _sample(engine, each, greedy, 1) for each in prompts]
    together = await asyncio.gather(*(_sample(engine, each, greedy, 1) for each in prompts))
    differences, num_parted = [], 0
    for (single,), (twin,) in zip(alone, together, strict=True):
        one, two = (np.array(unpack_ids(completion.token_ids)) for completion in (single, twin))
        shared = min(len(one), len(two))
        parted = np.flatnonzero(one[:shared] != two[:shared])
        num_parted += len(parted) > 0 or len(one) != len(two)
        end = int(parted[0]) if len(parted) else shared
        logprobs = [np.array(unpack_floats(completion.behavior_logprobs))[:end] for completion in (single, twin)]
        differences.append(np.abs(logprobs[0] - logprobs[1]))
    found = np.concatenate(differences)
    mean, largest = (float(found.mean()), float(found.max())) if len(found) else (float("nan"), float("nan"))
    return BatchDependence(len(found), mean, largest, len(prompts), int(num_parted))


def _group(
    index: int, posed: PosedPrompt, completions: list[Completion], sampling: SamplingSettings, engine: Engine
) -> RolloutGroup:
    context, nothing = pack_ids(posed.token_ids), Reward(value=0.0)
    prompt, files = posed.prompt.without_files()
    return RolloutGroup(
        index=index,
        prompt=prompt,
        rollouts=tuple(rollout_of(context, completion, nothing, posed.images.places) for completion in completions),
        producer_id=PRODUCER_ID,
        fingerprint=engine.fingerprint,
        sampling=sampling,
        images=files or UNSET,
    )
