"""Prompts in, prompt groups out: posed, sampled, scored and recorded as a producer does it."""

from collections.abc import Sequence
from typing import Any

from penstock.producers.environments.arithmetic import Arithmetic
from penstock.schemas.config import RunConfig
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import (
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Segment,
    VersionSpan,
    decode_group,
    encode_group,
    pack_floats,
    pack_ids,
)

from bench.study.sampler import Sampled, StudySampler

PRODUCER_ID = "study"


class StudyRecorder:
    """Turns task indexes into the groups that the trainer would read off the stream.

    tokenizer: a transformers tokenizer of the model.
    """

    def __init__(self, config: RunConfig, environment: Arithmetic, tokenizer: Any, sampler: StudySampler) -> None:
        self._config = config
        self._environment = environment
        self._tokenizer = tokenizer
        self._sampler = sampler

    def groups(self, indexes: Sequence[int], version: int, seed: int) -> list[RolloutGroup]:
        """One group an index, sampled by the weights that the sampler holds and labelled `version`.

        Each went through the wire format: what is returned was decoded from bytes.
        """
        settings = self._config.sampling
        sampling = SamplingSettings(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            stop_token_ids=settings.stop_token_ids,
        )
        prompts = [self._environment.prompt(index) for index in indexes]
        contexts = self._tokenize(prompts)
        siblings = self._sampler.sample(contexts, self._config.group_size, sampling, seed)
        groups = []
        for index, prompt, context, completions in zip(indexes, prompts, contexts, siblings, strict=True):
            group = RolloutGroup(
                index=index,
                prompt=prompt,
                rollouts=tuple(self._rollout(prompt, context, completion, version) for completion in completions),
                producer_id=PRODUCER_ID,
                fingerprint=self._sampler.fingerprint,
                sampling=sampling,
            )
            groups.append(decode_group(encode_group(group)))
        return groups

    def held_out_accuracy(self) -> float:
        """Share of the held-out problems that the sampler's weights answer exactly, greedily."""
        environment = self._environment
        prompts = [environment.evaluation_prompt(n) for n in range(1, environment.num_evaluation_prompts + 1)]
        greedy = SamplingSettings(temperature=0.0, max_tokens=self._config.sampling.max_tokens)
        answers = self._sampler.sample(self._tokenize(prompts), 1, greedy, seed=0)
        exact = [
            environment.reward(prompt, self._decode(answer)).parts["exact"]
            for prompt, [answer] in zip(prompts, answers, strict=True)
        ]
        return sum(exact) / len(exact)

    def _rollout(self, prompt: Prompt, context: list[int], completion: Sampled, version: int) -> Rollout:
        start, end = len(context), len(context) + len(completion.token_ids)
        segment = Segment(
            token_ids=pack_ids(context + completion.token_ids),
            behavior_logprobs=pack_floats(completion.behavior_logprobs),
            loss_mask=((start, end),),
            version_spans=(VersionSpan(version, start, end),),
            finish_reason=completion.finish_reason,
        )
        return Rollout(segments=(segment,), reward=self._environment.reward(prompt, self._decode(completion)))

    def _tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [self._tokenizer.encode(prompt.text, add_special_tokens=False) for prompt in prompts]

    def _decode(self, completion: Sampled) -> str:
        return self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
