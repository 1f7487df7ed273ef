"""From one claim to a group: the prompt posed and tokenized, siblings sampled, decoded and scored."""

import asyncio
import logging
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from penstock.producers.interfaces import NO_IMAGES, Completion, Engine, EngineError, PlacedImages, RolloutFacts
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.observe.running_loop import running_s
from penstock.producers.rollout.adoption import UnusableProgressError, adopted
from penstock.producers.rollout.rewards import RewardError
from penstock.producers.rollout.run_environments import RunEnvironments, pose
from penstock.producers.rollout.sampling import Siblings, request_seed
from penstock.producers.rollout.scoring import RewardScorer
from penstock.producers.rollout.teacher import TeacherError
from penstock.producers.stream.context import Teacher
from penstock.producers.stream.in_flight import Claim, Dead
from penstock.producers.stream.spans import WEIGHTS, chat_span
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.images import ImagePlace
from penstock.schemas.policy import steps_behind
from penstock.schemas.process import clock
from penstock.schemas.process.plugins import ends_caller
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import (
    NOT_FINISHED,
    OVERDUE,
    PAST_LAG,
    Rollout,
    RolloutGroup,
    Segment,
    Timings,
    VersionSpan,
    one_line,
    pack_ids,
    shown_error,
    unpack_ids,
)
from penstock.schemas.spans import Span

log = logging.getLogger(__name__)

UNSCORED = Reward(value=math.nan)


@dataclass(frozen=True, eq=False)
class _GroupInFlight:
    """A group whose siblings are being sampled. context: the prompt's packed ids. places: of its images."""

    group: RolloutGroup
    context: bytes
    places: tuple[ImagePlace, ...]
    siblings: Siblings

    def so_far(self) -> RolloutGroup | None:
        """See `GroupInFlight.so_far`."""
        found = self.siblings.so_far()
        if found is None or not any(completion.token_ids for completion in found):
            return None
        rollouts = tuple(rollout_of(self.context, completion, UNSCORED, self.places) for completion in found)
        return replace(self.group, rollouts=rollouts)


class Episodes:
    """Runs claims, many concurrently: they share nothing but the engine, the tokenizer and the scorers.

    tokenizer: a transformers tokenizer of the model.
    teacher: scores what is trained on; None in a run without a teacher's server.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        producer_id: str,
        metrics: ProducerMetrics,
        environments: RunEnvironments,
        tokenizer: Any,
        engine: Engine,
        teacher: Teacher | None = None,
    ) -> None:
        self._config = config
        self._environments = environments
        self._tokenizer = tokenizer
        self._engine = engine
        self._scorers = {each.name: RewardScorer(each.rewards, config.reward) for each in environments}
        self._teacher = teacher
        self._producer_id = producer_id
        self._metrics = metrics
        self._deadline_s = config.producers.generation_deadline_s
        self._group_size = config.group_size
        self._num_requests = 0
        self.num_tokens = 0
        """Tokens sampled since the start."""

    async def run(self, claim: Claim, found: RolloutGroup | None = None) -> RolloutGroup | Dead:
        """Samples and scores the siblings of one claim; for an evaluation with the settings of held-out prompts.

        found: the group as far as an earlier holder of the prompt sampled it.

        Returns the group, or the reason for having none.

        Raises:
            EngineError: the engine serves no longer.
        """
        claim.generating_since, claim.has_begun = running_s(), True
        claim.spans.append(Span(WEIGHTS, claim.claimed_s, clock.steady_s()))
        evaluation = claim.evaluation_id is not None
        group = None
        try:
            async with asyncio.timeout(self._deadline_s) as claim.deadline:
                try:
                    source = self._environments.named(claim.environment)
                    prompt = pose(source.environment, claim.task, held_out=evaluation)
                    asked, files = prompt.without_files()
                    group = RolloutGroup(
                        index=0 if evaluation else claim.index,
                        prompt=asked,
                        rollouts=(),
                        producer_id=self._producer_id,
                        fingerprint=self._engine.fingerprint,
                        sampling=source.evaluation_sampling if evaluation else source.sampling,
                        timings=Timings(claimed_s=claim.claimed_s),
                        evaluation_id=claim.evaluation_id,
                        environment=source.name,
                        task=claim.task,
                        images=files or UNSET,
                    )
                    prompt_ids, images = await placed(self._engine, self._tokenizer, prompt)
                except BaseException as error:  # the environment and the chat template are the user's
                    if ends_caller(error):
                        raise
                    return Dead.of("prompt", error, group)
                num_tokens, room = len(prompt_ids), self._engine.max_model_len
                if not 0 < num_tokens < room:
                    expected = f"fewer than the model's context of {room}" if num_tokens else "at least one"
                    return Dead(f"prompt: {num_tokens or 'no'} tokens, expected {expected}", None, group)
                try:
                    num_siblings = source.num_samples if evaluation else self._group_size
                    completions = await self._sample(claim, group, prompt_ids, images, num_siblings, found)
                except EngineError:
                    raise
                except Exception as error:  # the engine refuses this request and serves on
                    return Dead(f"engine: {shown_error(error)}", None, group)
                generated_s, context = clock.steady_s(), pack_ids(prompt_ids)
                rollouts = tuple(rollout_of(context, one, UNSCORED, images.places) for one in completions)
                lost, sampled_by = claim.num_tries_lost, claim.sampled_by
                group = replace(group, rollouts=rollouts, num_tries_lost=lost, sampled_by=sampled_by)
                for n, completion in enumerate(completions):
                    if completion.finish_reason == "error":
                        return Dead(f"engine: completion {n} finished with 'error'", None, group)
                limit = min(group.sampling.max_tokens, room - num_tokens)
                facts = [facts_of(one, num_tokens, limit) for one in completions]
                rewards = await self._scorers[source.name].score(prompt, self._decode(completions), facts)
                scored = zip(group.rollouts, rewards, strict=True)
                group = replace(group, rollouts=tuple(replace(rollout, reward=reward) for rollout, reward in scored))
                if self._teacher is not None and not evaluation:
                    group = await self._teacher(group)
                return replace(group, timings=claim.timings(generated_s))
        except TeacherError as error:
            return Dead(f"teacher: {error}", error.__cause__, group)
        except RewardError as error:
            self._metrics.reward_errors.inc()
            return Dead(f"reward: {error}", error.__cause__, group)
        except TimeoutError:
            if claim.past_lag is not None:
                found, lag = claim.past_lag
                self._metrics.tokens_aborted.inc(sum(one.num_sampled_tokens for one in found.rollouts))
                bound = f"more than max_lag = {self._config.lag_bound} (producers.abort_past_lag)"
                return Dead(f"{PAST_LAG}: {NOT_FINISHED} {lag:g} optimizer steps, {bound}", None, found)
            await self._engine.check()  # no prompt is to blame for an engine that stands still
            reason = f"{OVERDUE}: {NOT_FINISHED} {self._deadline_s:g} s (producers.generation_deadline_s)"
            return Dead(reason, None, group)
        finally:
            claim.generating_since, claim.in_flight = None, None

    def abort_past_lag(self, claim: Claim, version: int) -> None:
        """Gives up a group that is being sampled if the trainer, at `version` or later, is further ahead of its oldest
        token than the lag bound."""
        group = claim.in_flight.so_far() if claim.in_flight and claim.evaluation_id is None else None
        if group is None or claim.deadline is None or claim.deadline.expired():
            return
        segments = [rollout.segments[-1] for rollout in group.rollouts]
        oldest = min(span.version for segment in segments for span in segment.version_spans)
        lag = steps_behind(oldest, version)
        if self._config.lag_bound < lag < math.inf and any(each.finish_reason == "abort" for each in segments):
            claim.past_lag = group, lag
            claim.deadline.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()

    async def _sample(
        self,
        claim: Claim,
        group: RolloutGroup,
        prompt_ids: list[int],
        images: PlacedImages,
        num_siblings: int,
        found: RolloutGroup | None,
    ) -> list[Completion]:
        # The number of requests is part of it because an emptied Redis may reuse an entry id.
        self._num_requests += 1
        request_id = f"{claim.stream}:{claim.entry_id.decode()}:{claim.attempt}:{self._num_requests}"
        seed, context = request_seed(self._config, claim.index, claim.attempt), pack_ids(prompt_ids)
        before = [] if found is None else self._adopted(claim, found, group, context, num_siblings)
        siblings = Siblings(
            self._engine, prompt_ids, group.sampling, num_siblings, request_id, seed=seed, images=images, adopted=before
        )
        if found is None or not before:
            claim.num_lost_before, claim.sampled_by = None, ()
        else:
            claim.num_lost_before, claim.sampled_by = found.num_tries_lost, found.samplers
        group = replace(group, num_tries_lost=claim.num_tries_lost, sampled_by=claim.sampled_by)
        claim.in_flight = _GroupInFlight(group, context, images.places, siblings)
        began_s = clock.steady_s()
        try:
            completions = await siblings.sample()
        except ValueError as error:
            if not before:
                raise
            log.warning("%s starts again, the engine refuses to continue its progress: %s", claim, error)
            return await self._sample(claim, group, prompt_ids, images, num_siblings, None)
        claim.spans.append(chat_span(group.fingerprint, began_s, clock.steady_s(), len(prompt_ids), completions))
        num_tokens = _num_tokens(completions) - _num_tokens(before)
        self.num_tokens += num_tokens
        self._metrics.tokens_generated.inc(num_tokens)
        return completions

    def _adopted(
        self, claim: Claim, found: RolloutGroup, group: RolloutGroup, context: bytes, num_siblings: int
    ) -> list[Completion]:
        """Returns what an earlier holder of the prompt has sampled, if it can be used here."""
        num_tokens = sum(rollout.num_sampled_tokens for rollout in found.rollouts)
        held, lag_bound = self._engine.policy_version, self._config.lag_bound
        try:
            before = adopted(found, group, context, num_siblings=num_siblings, held=held, lag_bound=lag_bound)
        except UnusableProgressError as error:
            self._metrics.progress_tokens.labels("ignored").inc(num_tokens)
            log.warning(
                "%s starts again, %d tokens of %s cannot be used: %s", claim, num_tokens, found.producer_id, error
            )
            return []
        self._metrics.progress_tokens.labels("adopted").inc(num_tokens)
        num_finished = sum(one.finish_reason != "abort" for one in before)
        counts = num_tokens, found.producer_id, num_finished, num_siblings
        log.info("%s goes on from %d tokens of %s, %d of %d siblings finished", claim, *counts)
        return before

    def _decode(self, completions: list[Completion]) -> list[str]:
        return self._tokenizer.batch_decode(
            [unpack_ids(completion.token_ids).tolist() for completion in completions],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )


def _num_tokens(completions: list[Completion]) -> int:
    return sum(completion.num_tokens for completion in completions)


def tokenize(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Returns the token ids of a prompt, with one placeholder for each image."""
    if prompt.messages is None:
        return tokenizer.encode(prompt.text, add_special_tokens=False)
    messages = [message.for_template for message in prompt.messages]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


async def placed(engine: Engine, tokenizer: Any, prompt: Prompt) -> tuple[list[int], PlacedImages]:
    """Returns the token ids of a prompt as the engine is given them, and the places of its images.

    Raises:
        ValueError: an image that the model cannot be given, or that its chat template leaves out.
    """
    files = [part.data or b"" for part in prompt.images]
    if files and not engine.takes_images:
        raise ValueError("the prompt holds an image, expected text: the policy is a model of text")
    ids = tokenize(tokenizer, prompt)
    return await engine.expand(ids, files) if engine.takes_images else (ids, NO_IMAGES)


def facts_of(completion: Completion, num_prompt_tokens: int, max_tokens: int) -> RolloutFacts:
    return RolloutFacts(
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=completion.num_tokens,
        max_tokens=max_tokens,
        finish_reason=completion.finish_reason,
    )


def rollout_of(context: bytes, completion: Completion, reward: Reward, places: tuple[ImagePlace, ...] = ()) -> Rollout:
    """Returns a rollout of one segment: the prompt's packed ids, then what was sampled after them."""
    start = len(context) // 4
    end = start + completion.num_tokens
    segment = Segment(
        token_ids=context + completion.token_ids,
        behavior_logprobs=completion.behavior_logprobs,
        loss_mask=((start, end),) if end > start else (),
        version_spans=tuple(
            VersionSpan(span.version, span.start + start, span.end + start) for span in completion.version_spans
        ),
        finish_reason=completion.finish_reason,
        sampling_mask=completion.sampling_mask,
        routes=completion.routes or UNSET,
        top_logprobs=completion.top_logprobs or UNSET,
        images=places or UNSET,
    )
    return Rollout(segments=(segment,), reward=reward)


def load_tokenizer(config: RunConfig) -> Any:
    """Loads the model's own tokenizer, whose chat template has the run's variables (`model.chat_template_kwargs`).

    Raises:
        ConfigError: no such folder, or no tokenizer in it.
    """
    if not Path(config.model.path).is_dir():
        raise ConfigError(f"model.path = {config.model.path!r}: no such folder; expected a transformers model")
    # Its import takes seconds: the cheap check comes first.
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path = {config.model.path!r}: no tokenizer that transformers can load: {one_line(str(error))}"
        ) from None
    if variables := config.model.chat_template_kwargs:
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **variables)
    return tokenizer
