"""On-policy distillation, against transformers and arithmetic in float64, and against the divergence itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM

from fp64_oracle import sampled_logprobs
from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.loss.teacher import check_vocabularies, teacher_advantages
from penstock.consumers.learning.objectives.grpo import Grpo
from penstock.schemas.config import ConfigError, CorrectionConfig, LoraConfig, TeacherConfig, TrainerConfig
from penstock.schemas.rollout import RolloutGroup, Segment, pack_floats
from training_groups import (
    VOCABULARY,
    assert_near,
    configuration,
    gradients_of,
    group_of,
    lag_from,
    random_group,
    segment,
    tiny_model,
    tiny_tokenizer,
)

NONE = CorrectionConfig(mode="none")
SERVED = {"model": None, "url": "http://127.0.0.1:1/v1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A student and a teacher of another size."""
    root = tmp_path_factory.mktemp("models")
    tiny_model(root / "student")
    tiny_model(root / "teacher", seed=9, hidden_size=24, vocab_size=VOCABULARY + 3)
    for name in ("student", "teacher"):
        tiny_tokenizer(root / name)
    return str(root / "student"), str(root / "teacher")


def _config(folders: tuple[str, str], *, steps: int = 1, lora: LoraConfig | None = None, **changes: Any):
    teacher = {"model": folders[1], "coefficient": 0.5} | changes.pop("teacher", {})
    trainer = TrainerConfig(device="cpu", num_minibatches=steps, max_grad_norm=1e9, tokens_per_microbatch=60)
    fields = {"correction": NONE, "trainer": trainer, "max_lag": 9, "lora": lora} | changes
    return configuration(folders[0], teacher=TeacherConfig(**teacher), **fields)


@pytest.mark.parametrize(("steps", "alone"), [(1, False), (2, True)])
def test_the_gradient_is_that_of_the_teachers_advantages(folders, steps: int, alone: bool) -> None:
    groups = [random_group(n, 1, temperature=0.8) for n in range(1, 4)] + [random_group(4, 1, rewards=[1.0] * 4)]
    learner = Learner(_config(folders, steps=steps, teacher={"alone": alone}))
    gradients, batch = gradients_of(learner), learner.pack(groups, lag_from(7))
    report = learner.step(batch)
    student, teacher = (AutoModelForCausalLM.from_pretrained(each).double() for each in folders)
    gains: dict[int, Tensor] = {}
    divergences = []
    for group in groups:
        rewards = torch.tensor([rollout.reward.value for rollout in group.rollouts], dtype=torch.float64)
        rewarded = (rewards - rewards.mean()) / (rewards.std() + 1e-4) * (not alone)
        gains[group.index] = torch.zeros((), dtype=torch.float64)
        for of_rollout, rollout in zip(rewarded, group.rollouts, strict=True):
            for part in rollout.segments:
                current, taught = (sampled_logprobs(m, part, group.sampling.temperature) for m in (student, teacher))
                divergences.append((current - taught).detach())
                gains[group.index] = gains[group.index] + ((of_rollout - 0.5 * divergences[-1]) * current).sum()
    assert report.metrics["teacher_kl"] == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-4)
    assert (report.num_groups_skipped, len(gradients)) == (0, steps)
    for minibatch, found in zip(batch.minibatches, gradients, strict=True):
        student.zero_grad()
        gain = torch.stack([gains[index] for index in minibatch.indexes]).sum()
        (-gain / minibatch.num_tokens).backward(retain_graph=True)
        assert_near(found, student, 1e-4)


def _expected_gradient(logits: Tensor, behavior: Tensor, teacher: Tensor, student_logprobs: Tensor) -> Tensor:
    """The gradient of the loss's expectation over every token that the behavior policy may sample, with exact
    importance weights."""
    leaf = logits.clone().requires_grad_()
    current = leaf.log_softmax(0)
    proximal = current.detach()
    advantages = teacher_advantages(torch.zeros_like(proximal), teacher, student_logprobs, TeacherConfig(model="t"))
    whole = torch.zeros(())
    for token in range(len(logits)):
        one = slice(token, token + 1)
        inputs = LossInputs(
            current_logprobs=current[one],
            proximal_logprobs=proximal[one],
            behavior_logprobs=behavior[one],
            importance_weights=(proximal - behavior)[one].exp(),
            advantages=advantages[one],
            loss_mask=torch.ones(1, dtype=torch.bool),
            entropy=torch.zeros(1),
            row_ids=torch.zeros(1, dtype=torch.int64),
            rollout_tokens=torch.ones(1),
            denominator=1.0,
            num_rollouts=1,
        )
        whole = whole + behavior[token].exp() * Grpo()(inputs).loss
    (gradient,) = torch.autograd.grad(whole, leaf)
    return gradient


def test_the_expected_gradient_is_that_of_the_reverse_kl_whatever_policy_has_sampled() -> None:
    torch.manual_seed(3)
    logits = torch.randn(7, dtype=torch.float64)
    behavior, teacher = (torch.randn(7, dtype=torch.float64).log_softmax(0) for _ in range(2))
    leaf = logits.clone().requires_grad_()
    current = leaf.log_softmax(0)
    (current.exp() * (current - teacher)).sum().backward()
    found = _expected_gradient(logits, behavior, teacher, logits.log_softmax(0))
    torch.testing.assert_close(found, leaf.grad)
    # With the behavior policy's logprobs it is another divergence's: the module's docstring says which.
    other = logits.clone().requires_grad_()
    current = other.log_softmax(0)
    (current.exp() * (behavior - teacher)).sum().backward()
    torch.testing.assert_close(_expected_gradient(logits, behavior, teacher, behavior), other.grad)
    assert (leaf.grad - other.grad).norm() > 0.1 * leaf.grad.norm()


def test_a_teacher_alone_teaches_groups_of_one_sibling_and_of_equal_rewards(folders) -> None:
    learner = Learner(_config(folders, group_size=1))
    groups = [random_group(n, 2, siblings=1) for n in range(1, 5)] + [random_group(5, 2, rewards=[0.0] * 4)]
    batch = learner.pack(groups, lag_from(7))
    assert not any(minibatch.skipped for minibatch in batch.minibatches)
    report = learner.step(batch)
    assert all(report.teaches(group.index) for group in groups)
    assert report.num_tokens_trained == sum(r.num_sampled_tokens for group in groups for r in group.rollouts)


def test_an_adapter_learns_from_a_teacher(folders) -> None:
    learner = Learner(_config(folders, lora=LoraConfig(rank=2, alpha=2.0)))
    whole = Learner(_config(folders))
    groups = [random_group(n, 2) for n in range(1, 4)]
    reports = [each.step(each.pack(groups, lag_from(7))) for each in (learner, whole)]
    assert reports[0].metrics["teacher_kl"] == pytest.approx(reports[1].metrics["teacher_kl"], rel=1e-5)
    assert reports[0].num_optimizer_steps == 1


def _taught(group: RolloutGroup, logprobs: Callable[[Segment], list[float]]) -> RolloutGroup:
    """The group with these logprobs of a teacher's server."""

    def taught(part: Segment) -> Segment:
        return replace(part, teacher_logprobs=pack_floats(logprobs(part)))

    rollouts = (replace(each, segments=tuple(map(taught, each.segments))) for each in group.rollouts)
    return replace(group, rollouts=tuple(rollouts))


def test_masks_and_diagnostics_by_the_advantages_sign_go_by_the_teachers(folders) -> None:
    """Every advantage is negative, then every one positive; those of the rewards are 0."""
    correction = CorrectionConfig(mode="none", off_policy_delta=0.0)
    learner = Learner(_config(folders, correction=correction, teacher=SERVED))
    rejected = []
    for logprob, sign, other in ((-60.0, "negative", "positive"), (0.0, "positive", "negative")):

        def of_each(part: Segment, logprob: float = logprob) -> list[float]:
            return [logprob] * part.num_sampled_tokens

        groups = [_taught(random_group(n, 2), of_each) for n in range(1, 4)]
        report = learner.step(learner.pack(groups, lag_from(7)))
        rejected.append(report.num_tokens_rejected)
        names = {name.partition("/")[0] for name in report.metrics}
        assert f"rejected_frac_{sign}" in names and f"rejected_frac_{other}" not in names
    assert rejected[0] > rejected[1]


def test_a_teachers_server_and_a_teacher_in_the_trainer_make_the_same_step(folders) -> None:
    held, served = Learner(_config(folders, steps=2)), Learner(_config(folders, steps=2, teacher=SERVED))
    teacher = AutoModelForCausalLM.from_pretrained(folders[1])
    groups = [random_group(n, 2) for n in range(1, 4)]
    with_logprobs = [_taught(group, lambda part: sampled_logprobs(teacher, part).tolist()) for group in groups]
    gradients = gradients_of(held), gradients_of(served)
    reports = held.step(held.pack(groups, lag_from(7))), served.step(served.pack(with_logprobs, lag_from(7)))
    assert reports[1].metrics["teacher_kl"] == pytest.approx(reports[0].metrics["teacher_kl"], abs=1e-5)
    for one, other in zip(*gradients, strict=True):
        for name, gradient in one.items():
            torch.testing.assert_close(other[name], gradient, atol=2e-5, rtol=1e-4)


def test_groups_are_spared_and_failed_with_a_teacher_as_without(folders) -> None:
    learner = Learner(_config(folders, correction=CorrectionConfig()))
    culprit = group_of(2, [[segment([1, 2], [(1, 2)], [7], [float("nan")])]], [1.0])
    report = learner.step(learner.pack([random_group(1, 1), culprit, random_group(3, 1)], lag_from(7)))
    assert set(report.failed) == {2} and report.spared == {1, 3}


def test_a_teacher_of_another_vocabulary_or_without_a_model_is_refused(folders, tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path, "<think>")
    with pytest.raises(ConfigError) as refused:
        check_vocabularies(folders[0], str(tmp_path))
    assert str(refused.value) == (
        f"teacher.model = '{tmp_path}': another vocabulary than that of model.path = '{folders[0]}', 99 tokens there "
        "and 98 here; the first that differs, '\\n', has the id 3 there and 2 here; expected a teacher with the same "
        "tokens"
    )
    with pytest.raises(ConfigError, match=r"teacher.model = '.*/nowhere': no such folder; expected a transformers"):
        check_vocabularies(folders[0], str(tmp_path / "nowhere"))
    tiny_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=rf"teacher.model = '{tmp_path}': expected a folder with a transformers"):
        Learner(_config((folders[0], str(tmp_path))))
    tiny_model(tmp_path, vocab_size=VOCABULARY - 1)
    with pytest.raises(ConfigError, match=r"a head of 22 rows, expected the 23 of model.path = .* or more"):
        Learner(_config((folders[0], str(tmp_path))))
