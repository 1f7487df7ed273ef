"""Makes random prompt groups, tiny models and run configurations for tests of the trainer's numerics."""

import random
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from penstock.consumers.learning.batch.batch import Batch
from penstock.consumers.learning.learner.learner import Learner
from penstock.deploy.demo.char_tokenizer import build_tokenizer
from penstock.schemas.config import CorrectionConfig, EnvironmentConfig, ModelConfig, RunConfig, TrainerConfig
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import (
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Segment,
    TopLogprobs,
    VersionSpan,
    pack_floats,
    pack_ids,
)
from wire_examples import FINGERPRINT

VOCABULARY = 23


def tiny_model(folder: Path, *, tied: bool = True, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Saves a random Qwen3 of two layers with grouped queries and returns it."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
    } | changes
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**settings))
    model.save_pretrained(folder)
    return model


def configuration(model_folder: Path | str, **changes: Any) -> RunConfig:
    """Returns the configuration of a float32 run on CPU, with importance weights; keywords replace whole fields of the
    run file."""
    fields: dict[str, Any] = {
        "name": "test",
        "model": ModelConfig(path=str(model_folder)),
        "environment": EnvironmentConfig(path="none:None"),
        "trainer": TrainerConfig(device="cpu", learning_rate=1e-2),
        "correction": CorrectionConfig("token_truncate"),
        "max_lag": 4,
    } | changes
    return RunConfig(**fields)


def segment(
    token_ids: list[int], runs: list[tuple[int, int]], versions: list[int], logprobs: list[float] | None = None
) -> Segment:
    """Returns a segment. versions: one per sampled token."""
    positions = [position for start, end in runs for position in range(start, end)]
    spans = tuple(VersionSpan(v, p, p + 1) for p, v in zip(positions, versions, strict=True))
    return Segment(
        token_ids=pack_ids(token_ids),
        behavior_logprobs=pack_floats(logprobs if logprobs is not None else [-2.5] * len(positions)),
        loss_mask=tuple(runs),
        version_spans=spans,
    )


def group_of(index: int, segments: list[list[Segment]], rewards: list[float], temperature: float = 1.0) -> RolloutGroup:
    """Returns a group. segments: a list per sibling."""
    return RolloutGroup(
        index=index,
        prompt=Prompt(text="?"),
        rollouts=tuple(
            Rollout(segments=tuple(own), reward=Reward(value=reward))
            for own, reward in zip(segments, rewards, strict=True)
        ),
        producer_id="producer-0",
        fingerprint=FINGERPRINT,
        sampling=SamplingSettings(temperature=temperature),
    )


def random_group(
    index: int, seed: int, *, siblings: int = 4, temperature: float = 1.0, rewards: list[float] | None = None
) -> RolloutGroup:
    """Returns siblings of one prompt of 1 to 6 tokens: one or two turns, 1 to 9 sampled tokens per turn, versions 3 to
    7."""
    rng = random.Random(seed * 1000 + index)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]

    prompt = tokens(1, 6)
    rollouts = []
    for _ in range(siblings):
        answer = tokens(1, 9)
        ids, runs = prompt + answer, [(len(prompt), len(prompt) + len(answer))]
        if rng.random() < 0.4:
            tool, second, rest = tokens(1, 3), tokens(1, 4), tokens(0, 2)
            start = len(ids) + len(tool)
            runs.append((start, start + len(second)))
            ids = ids + tool + second + rest
        count = sum(end - start for start, end in runs)
        versions = sorted(rng.randint(3, 7) for _ in range(count))
        rollouts.append([segment(ids, runs, versions, [-rng.uniform(0.5, 5.0) for _ in range(count)])])
    if rewards is None:
        rewards = [float(s == 0) if s < 2 else rng.random() for s in range(siblings)]
    return group_of(index, rollouts, rewards, temperature)


def random_groups(count: int = 5, seed: int = 0, **changes: Any) -> list[RolloutGroup]:
    """Returns random groups of the indexes 1 to `count`."""
    return [random_group(index, seed, **changes) for index in range(1, count + 1)]


def with_top(group: RolloutGroup, k: int) -> RolloutGroup:
    """Returns the group with the k likeliest ids at each token, of a sampler of its own."""

    def recorded(segment: Segment) -> Segment:
        generator = torch.Generator().manual_seed(segment.num_sampled_tokens)
        sampler = torch.randn(segment.num_sampled_tokens, VOCABULARY, generator=generator)
        top = torch.log_softmax(sampler, 1).topk(k, 1)
        ids, logprobs = (each.flatten().tolist() for each in (top.indices, top.values))
        return replace(segment, top_logprobs=TopLogprobs(k, pack_ids(ids), pack_floats(logprobs)))

    rollouts = tuple(replace(one, segments=tuple(map(recorded, one.segments))) for one in group.rollouts)
    return replace(group, rollouts=rollouts)


def lag_from(current: int) -> Any:
    """Returns the lag by version, without a rollback."""
    return lambda version: current - version


@torch.no_grad()
def proximal_logprobs(learner: Learner, batch: Batch) -> list[torch.Tensor]:
    """Returns the learner's present logprobs of each micro-batch's sampled tokens."""
    return [learner.scorer.logprobs(each)[0] for each in batch.microbatches]


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    """Returns a copy of the masters by their names."""
    return {name: parameter.detach().clone() for name, parameter in learner.model.module.named_parameters()}


def gradients_of(learner: Learner) -> list[dict[str, torch.Tensor]]:
    """Replaces the optimizer's step, so that every step is at the same weights; returns the list that takes the
    gradients of each."""
    found: list[dict[str, torch.Tensor]] = []
    learner.optimizer.step = lambda: found.append(  # type: ignore[method-assign, misc, assignment]
        {name: p.grad.clone() for name, p in learner.model.module.named_parameters() if p.grad is not None}
    )
    return found


def assert_near(found: dict[str, torch.Tensor], expected: torch.nn.Module, relative: float) -> None:
    """Compares gradients with those of a float64 model, each to a part of the norm of all."""
    wanted = {name: parameter.grad for name, parameter in expected.named_parameters()}
    assert found.keys() == wanted.keys()
    scale = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    for name, gradient in wanted.items():
        assert (found[name].double() - gradient).norm() <= relative * scale, name


def tiny_tokenizer(folder: Path, *more: str) -> None:
    """Saves a tokenizer with one token per character, and the special tokens `more`, in a model's folder."""
    build_tokenizer(64, special=more).save_pretrained(folder)
