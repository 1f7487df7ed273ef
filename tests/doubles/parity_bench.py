"""A model, its published versions and an engine in transformers, for tests of the parity check."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.consumers.parity.check import check_parity
from penstock.consumers.parity.report import ParityReport
from penstock.schemas.config import ModelConfig
from penstock.schemas.rollout import RolloutGroup, SamplingSettings, pack_floats, unpack_floats
from training_groups import configuration, tiny_model
from transformers_engine import TransformersAnswer, TransformersEngine, group_of, publish_perturbed

VOCABULARY = 48
COLD = SamplingSettings(temperature=0.7, max_tokens=16)


@dataclass
class ParityBench:
    """A model's folder. files: published weights by version. dtype: of the engine's body, the weights and the
    trainer."""

    folder: Path
    files: Mapping[int, Path]
    dtype: str = "float32"

    @classmethod
    def make(
        cls, folder: Path, *, dtype: str = "float32", tied: bool = False, seed: int = 0, **changes: Any
    ) -> "ParityBench":
        settings: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "initializer_range": 0.15,
        } | changes
        tiny_model(folder / "model", tied=tied, seed=seed, **settings)
        files = publish_perturbed(folder / "weights", folder / "model", [0, 1, 2, 3], dtype=dtype)
        return cls(folder / "model", files, dtype)

    def engine(self, **settings: Any) -> TransformersEngine:
        return TransformersEngine(self.folder, self.files, dtype=self.dtype, **settings)

    def check(self, groups: Sequence[RolloutGroup], **arguments: Any) -> ParityReport:
        config = configuration(self.folder, model=ModelConfig(path=str(self.folder), dtype=self.dtype))
        return check_parity(groups, **{"config": config, "weights": self.files.get} | arguments)


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(count)]


def groups_of(
    answers: Sequence[TransformersAnswer], sampling: SamplingSettings = COLD, **settings: Any
) -> list[RolloutGroup]:
    return [group_of(n, answer, sampling, **settings) for n, answer in enumerate(answers, 1)]


def with_sampling(groups: Sequence[RolloutGroup], **changes: Any) -> list[RolloutGroup]:
    """Returns the groups with other sampling settings in their records."""
    return [
        msgspec.structs.replace(group, sampling=msgspec.structs.replace(group.sampling, **changes)) for group in groups
    ]


def with_logprobs(groups: Sequence[RolloutGroup], change: Any) -> list[RolloutGroup]:
    """Returns the groups with other logprobs: `change` maps the siblings' lists of logprobs of one group."""
    return [
        _changed(group, change([list(unpack_floats(_only(r).behavior_logprobs)) for r in group.rollouts]))
        for group in groups
    ]


def _only(rollout: Any) -> Any:
    (segment,) = rollout.segments
    return segment


def _changed(group: RolloutGroup, logprobs: Sequence[Sequence[float]]) -> RolloutGroup:
    rollouts = tuple(
        msgspec.structs.replace(
            rollout, segments=(msgspec.structs.replace(_only(rollout), behavior_logprobs=pack_floats(own)),)
        )
        for rollout, own in zip(group.rollouts, logprobs, strict=True)
    )
    return msgspec.structs.replace(group, rollouts=rollouts)
