"""On-policy distillation: a token's advantage is its log-probability under a teacher relative to the policy.

Formula, of a sampled token t, c = `teacher.coefficient`, with the rollout's advantage A of `[advantage]` unless the
teacher is alone::

    A_t = c * (teacher_t - proximal_t)  [ + A ]

It is constant over the optimizer steps on its batch. The divergence of later tokens is not credited to a token (a
discount of 0).

The policy's logprob is the proximal one, not the behavior policy's. The expectation over tokens that the behavior
policy sampled, under importance weights proximal / behavior, is the one over the proximal policy p, and the gradient of
KL(p || teacher) there is E_p[grad log p * (log p - log teacher)], as E_p[grad log p] = 0. With behavior logprobs in
this formula it would be that of KL(p || teacher) - KL(p || behavior): lag would push the policy away from what sampled
it. At lag 0 the two agree but for the engine's rounding.

Both logprobs are of the processed distribution: the teacher's logits are divided by the same temperature, and
restricted to the ids that the sampler kept. The teacher's own distribution at that temperature is what is learned.

Sources: Thinking Machines, "On-Policy Distillation" (2025), with the behavior policy's logprobs for the proximal one's;
MiniLLM (Gu et al., arXiv 2306.08543) and GKD (Agarwal et al., arXiv 2306.13649) for the reverse KL on the student's own
samples. Peers: tinker-cookbook's `kl_penalty_coef` with a discount of 0; slime's `--use-opd`, `--opd-kl-coef`, which
take the trainer's logprobs unless told otherwise.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.config import ConfigError, RunConfig, TeacherConfig
from penstock.schemas.rollout import one_line


def teacher_advantages(
    rewarded: Tensor, teacher_logprobs: Tensor, proximal_logprobs: Tensor, config: TeacherConfig
) -> Tensor:
    """Returns the advantages of M tokens, [M] float32. rewarded: [M], by their rollouts' rewards; 0 with
    `teacher.alone`."""
    return rewarded + config.coefficient * (teacher_logprobs - proximal_logprobs)


def open_teacher(config: RunConfig, model: PackedModel, device: torch.device, ranks: Ranks) -> PackedModel | None:
    """Opens the teacher that the trainer holds, frozen; returns None if the run has none, or one on a server.

    Raises:
        ConfigError: no such model, or one of another vocabulary.
    """
    if config.teacher is None or config.teacher.model is None:
        return None
    check_vocabularies(config.model.path, config.teacher.model)
    path, trainer = config.teacher.model, config.trainer
    teacher = PackedModel(
        path, config.model.dtype, device, ranks, compiled=trainer.compile, frozen=True, field="teacher.model",
        max_model_len=config.engine.max_model_len, by_expert=trainer.expert_parallel,
        per_pass=trainer.context_parallel,
    )  # fmt: skip
    if teacher.vocabulary < model.vocabulary:
        # More rows are padding: each size of a model rounds its head up differently.
        raise ConfigError(
            f"teacher.model = {path!r}: a head of {teacher.vocabulary} rows, expected the {model.vocabulary} of "
            f"model.path = {config.model.path!r} or more"
        )
    return teacher


def check_vocabularies(student: str, teacher: str) -> None:
    """Raises ConfigError unless the tokenizers in two models' folders have the same tokens under the same ids."""
    own, other = _vocabulary(student, "model.path"), _vocabulary(teacher, "teacher.model")
    differ = sorted((token_id, token) for token, token_id in own.items() ^ other.items())
    if differ:
        token = differ[0][1]
        raise ConfigError(
            f"teacher.model = {teacher!r}: another vocabulary than that of model.path = {student!r}, {len(other):,} "
            f"tokens there and {len(own):,} here; the first that differs, {token!r}, has the id "
            f"{other.get(token, 'none')} there and {own.get(token, 'none')} here; expected a teacher with the same "
            "tokens"
        )


def _vocabulary(path: str, field: str) -> dict[str, int]:
    if not Path(path).is_dir():
        raise ConfigError(f"{field} = {path!r}: no such folder; expected a transformers model")
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{field} = {path!r}: no tokenizer that transformers can load: {one_line(str(error))}"
        ) from None
    return dict(tokenizer.get_vocab())
