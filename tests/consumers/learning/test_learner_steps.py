"""Several optimizer steps a batch, the two ratios apart, failed steps, bypass, reference model, figures of a batch."""

import math
import sys
import types
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fp64_oracle import logprobs_and_entropy, sampled_logprobs
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.batch.trainable import check_trainable
from penstock.consumers.learning.interfaces import LossInputs, LossOutputs
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.step_report import NOTHING_TO_TRAIN
from penstock.consumers.learning.model.head_kernels import Head
from penstock.schemas.config import ConfigError, CorrectionConfig, ModelConfig, Plug, RunConfig, TrainerConfig
from penstock.schemas.rollout import RecordError, decode_group, encode_group, pack_ids, unpack_floats, unpack_ids
from training_groups import (
    VOCABULARY,
    assert_near,
    configuration,
    gradients_of,
    group_of,
    lag_from,
    proximal_logprobs,
    random_group,
    random_groups,
    segment,
    tiny_model,
    weights_of,
)

GRPO = "penstock.consumers.learning.objectives.grpo:Grpo"
BYPASS = CorrectionConfig(mode="none", bypass=True)
NOT_FINITE = "loss is not finite"
MARK = -7.0
"""The behavior logprob of the group that has no finite loss."""


def _config(folder: Path, *, trainer: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    settings = {"device": "cpu", "learning_rate": 1e-2, "max_grad_norm": 1e9} | (trainer or {})
    return configuration(folder, **{"trainer": TrainerConfig(**settings)} | changes)


def _step(learner: Learner, groups: list):
    return learner.step(learner.pack(groups, lag_from(7)))


@dataclass
class RecordingObjective:
    """REINFORCE that notes what it was given; its loss is NaN in the calls of `poison_at`, counted from 1, and wherever
    the mark is. metrics: reports a metric of this name."""

    seen: list[LossInputs] = field(default_factory=list)
    poison_at: tuple[int, ...] = ()
    metrics: str = ""
    needs_reference: bool = False
    reads_behavior: bool = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        self.seen.append(inputs)
        gain = inputs.importance_weights * inputs.advantages * inputs.current_logprobs
        loss = -torch.where(inputs.loss_mask, gain, 0.0).sum() / inputs.denominator
        if len(self.seen) in self.poison_at or (inputs.behavior_logprobs == MARK).any():
            loss = loss * float("nan")
        return LossOutputs(loss=loss, metrics={self.metrics: torch.ones(())} if self.metrics else {})


def _recording(config: RunConfig, **settings: Any) -> tuple[Learner, RecordingObjective]:
    learner, recorder = Learner(config), RecordingObjective(**settings)
    learner.scorer.objective = recorder
    return learner, recorder


def test_every_step_sees_the_proximal_policy_of_the_first_read(folder) -> None:
    learner, recorder = _recording(_config(folder, trainer={"num_epochs": 2, "num_minibatches": 3}))
    batch = learner.pack(random_groups(6), lag_from(7))
    first_read = proximal_logprobs(learner, batch)
    report = learner.step(batch)
    assert (report.num_optimizer_steps, learner.num_steps, len(recorder.seen)) == (6, 6, 6)
    for n, inputs in enumerate(recorder.seen):
        assert torch.equal(inputs.proximal_logprobs, first_read[n % 3])
        assert torch.allclose(inputs.current_logprobs, inputs.proximal_logprobs, atol=1e-4) == (n == 0)
    denominators = [inputs.denominator for inputs in recorder.seen[:3]]
    assert sum(denominators) == sum(rollout.num_sampled_tokens for g in random_groups(6) for rollout in g.rollouts)


def test_the_gradient_of_a_later_step_keeps_the_two_ratios_apart(folder) -> None:
    learner, groups = Learner(_config(folder, trainer={"num_epochs": 2})), random_groups(6, temperature=0.8)
    before, after = (AutoModelForCausalLM.from_pretrained(folder).double() for _ in range(2))
    steps: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def keep(*_: Any) -> None:
        gradients = {name: p.grad.clone() for name, p in learner.model.module.named_parameters()}
        steps.append((weights_of(learner), gradients))

    learner.optimizer.register_step_pre_hook(keep)
    report = _step(learner, groups)
    after.load_state_dict({name: p.double() for name, p in steps[1][0].items()}, strict=False)
    after.tie_weights()
    total, count, clipped = torch.zeros((), dtype=torch.float64), 0, 0
    for group in groups:
        rewards = torch.tensor([r.reward.value for r in group.rollouts], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            (part,) = rollout.segments
            behavior = torch.tensor(unpack_floats(part.behavior_logprobs), dtype=torch.float64)
            proximal, current = sampled_logprobs(before, part, 0.8).detach(), sampled_logprobs(after, part, 0.8)
            weight, ratio = (proximal - behavior).exp().clamp(max=2.0), (current - proximal).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            gain = gain if advantage > 0 else gain.maximum(3 * advantage)
            clipped += int((ratio * advantage > gain).sum())
            total = total - (weight * gain).sum()
            count += len(current)
    (total / count).backward()
    assert_near(steps[1][1], after, 2e-5)
    assert clipped > 0
    # The first step clips nothing: its share is that of the second, over the tokens of both.
    assert report.metrics["policy_clipped_frac"] == pytest.approx(clipped / (2 * count))


def test_the_mismatch_is_that_of_the_first_read_however_many_steps_follow(folder) -> None:
    for correction in (CorrectionConfig(), BYPASS):
        found = []
        for trainer in ({}, {"num_epochs": 3}, {"num_minibatches": 3}):
            metrics = _step(Learner(_config(folder, correction=correction, trainer=trainer)), random_groups(6)).metrics
            found.append({name: metrics[name] for name in ("rollout_correction/kl", "chi2", "ess_fraction")})
        assert found[1] == pytest.approx(found[0], rel=1e-5)
        assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_the_new_old_divergence_is_of_the_policy_at_each_step(folder) -> None:
    learner, recorder = _recording(_config(folder, trainer={"num_minibatches": 3}))
    batch = learner.pack(random_groups(6), lag_from(7))
    metrics, means = learner.step(batch).metrics, []
    for inputs, part in zip(recorder.seen, batch.microbatches, strict=True):
        x = (inputs.current_logprobs.detach() - inputs.behavior_logprobs).double()
        rows = [x[(part.row_ids == row) & part.loss_mask] for row in range(int(part.row_ids.max()) + 1)]
        means += [(row.exp() - row - 1).mean().item() for row in rows if len(row)]
    assert metrics["kl_new_old"] == pytest.approx(sum(means) / len(means), rel=1e-4)


def test_a_mini_batch_that_is_not_finite_is_named_and_the_others_are_trained_and_counted(folder) -> None:
    learner, _ = _recording(_config(folder, trainer={"num_minibatches": 3}), poison_at=(2,))
    batch = learner.pack(random_groups(6), lag_from(7))
    report = learner.step(batch)
    assert report.failed == dict.fromkeys(batch.minibatches[1].indexes, NOT_FINITE)
    assert (report.skipped_reason, report.steps_skipped) == (None, {NOT_FINITE: 1})
    assert (report.num_optimizer_steps, learner.num_steps) == (2, 2)
    trained = [part for n in (0, 2) for part in batch.minibatches[n].microbatches]
    assert report.num_tokens_trained == sum(int(part.loss_mask.sum()) for part in trained) < batch.num_tokens_trained
    assert math.isfinite(report.metrics["loss"]) and math.isfinite(report.metrics["entropy"])
    assert all(torch.isfinite(p).all() for p in learner.model.parameters())
    # One that fails in its second epoch was trained.
    learner, recorder = _recording(_config(folder, trainer={"num_epochs": 3, "num_minibatches": 2}), poison_at=(3,))
    report = _step(learner, random_groups(6))
    assert (report.failed, report.steps_skipped) == ({}, {NOT_FINITE: 1})
    assert (report.num_optimizer_steps, len(recorder.seen)) == (4, 5)
    # And one without variance takes no step beside one that does.
    learner = Learner(_config(folder, trainer={"num_minibatches": 2}))
    report = _step(learner, [random_group(1, 0, rewards=[1.0] * 4), random_group(2, 0)])
    assert (report.num_optimizer_steps, report.skipped_reason, report.failed) == (1, None, {})
    assert report.steps_skipped == {NOTHING_TO_TRAIN: 1}


@pytest.mark.parametrize("minibatches", [1, 2])
def test_only_the_group_that_is_not_finite_fails_and_the_rest_of_its_mini_batch_is_spared(folder, minibatches) -> None:
    learner, _ = _recording(_config(folder, trainer={"num_minibatches": minibatches, "num_epochs": 2}))
    groups = random_groups(6)
    culprit = [segment([1, 2, 3], [(1, 3)], [7, 7], [MARK, -1.0])], [segment([1, 2], [(1, 2)], [7])]
    groups[1], groups[2] = random_group(2, 0, rewards=[1.0] * 4), group_of(3, list(culprit), [1.0, 0.0])
    batch = learner.pack(groups, lag_from(7))
    beside = next({*minibatch.indexes} for minibatch in batch.minibatches if 3 in minibatch.indexes)
    report = learner.step(batch)
    assert report.failed == {3: NOT_FINITE}
    assert report.spared == beside - {2, 3}, "a group without variance has no part in it"
    assert report.skipped_reason == (None if minibatches == 2 else NOT_FINITE)
    assert report.num_optimizer_steps == 2 * (minibatches - 1)
    assert all(torch.isfinite(p).all() and p.grad is None for p in learner.model.parameters())


def test_bypass_puts_the_behavior_policy_in_the_proximal_place_with_weights_of_1(folder) -> None:
    learner, recorder = _recording(_config(folder, correction=BYPASS, trainer={"num_epochs": 2}))
    batch = learner.pack(random_groups(6), lag_from(7))
    (current,), (part,) = proximal_logprobs(learner, batch), batch.microbatches
    report = learner.step(batch)
    for inputs in recorder.seen:
        assert torch.equal(inputs.proximal_logprobs, part.behavior_logprobs)
        assert torch.equal(inputs.importance_weights, inputs.loss_mask.float())
    # What the engine and the lag did is reported all the same.
    gap = (part.behavior_logprobs - current)[part.loss_mask].mean()
    assert report.metrics["rollout_correction/kl"] == pytest.approx(gap.item(), rel=1e-5)


def test_what_does_not_go_together_is_refused(folder, tmp_path, monkeypatch) -> None:
    module = types.ModuleType("plugged")
    module.ReadsBehavior = lambda: RecordingObjective(reads_behavior=True)  # type: ignore[attr-defined]
    module.NoShare = type("NoShare", (RecordingObjective,), {"full_rate_ess": 1.5})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plugged", module)
    reads, kl = Plug(path="plugged:ReadsBehavior"), Plug(path=GRPO, kwargs={"kl_coefficient": 0.1})
    tiny_model(tmp_path, vocab_size=VOCABULARY - 1)
    smaller = ModelConfig(path=str(folder), reference=str(tmp_path))
    for message, changes in (
        (r"ReadsBehavior.*counted twice; expected correction\.mode = 'none'", {"objective": reads}),
        (r"ReadsBehavior.*counted twice", {"objective": reads, "correction": BYPASS}),
        (r"NoShare'.*full_rate_ess is 1\.5, expected a share", {"objective": Plug(path="plugged:NoShare")}),
        (r"model\.reference = .*has no KL term", {"model": ModelConfig(path=str(folder), reference=str(folder))}),
        (r"model\.reference = .*a vocabulary of 22, expected the model's 23", {"objective": kl, "model": smaller}),
    ):
        with pytest.raises(ConfigError, match=message):
            Learner(_config(folder, **changes))
    Learner(_config(folder, objective=reads, correction=CorrectionConfig(mode="none")))
    for name in ("entropy", "loss", "num_tokens"):
        learner, _ = _recording(_config(folder), metrics=name)
        with pytest.raises(ConfigError, match=f"objective.path = .*its metric '{name}' has a name of the trainer's"):
            _step(learner, random_groups())


def test_the_reference_is_the_frozen_base_model(folder, tmp_path) -> None:
    kl = Plug(path=GRPO, kwargs={"kl_coefficient": 0.1})
    learner = Learner(_config(folder, objective=kl))
    penalties = [_step(learner, random_groups(6)).metrics["reference_kl"] for _ in range(3)]
    assert penalties[0] == pytest.approx(0, abs=1e-6)
    assert penalties[2] > penalties[1] > 1e-6


def test_off_policy_rows_are_judged_by_the_policy_of_the_step(folder) -> None:
    correction = CorrectionConfig(mode="token_truncate", off_policy_delta=0.0)
    learner, recorder = _recording(
        _config(folder, correction=correction, trainer={"num_epochs": 2, "learning_rate": 0.1})
    )
    _step(learner, random_groups(6))
    for inputs in recorder.seen:
        for row in range(int(inputs.row_ids.max()) + 1):
            of_row = inputs.row_ids == row
            within = of_row & (inputs.lag <= 4)
            gap = (inputs.behavior_logprobs - inputs.current_logprobs.detach())[within].mean()
            assert bool(inputs.loss_mask[within].any()) != bool(gap > 0 and inputs.advantages[of_row][0] < 0)
    assert not torch.equal(recorder.seen[0].loss_mask, recorder.seen[1].loss_mask)


def test_gradients_taken_in_the_forward_pass_are_those_recomputed_in_backward(folder, monkeypatch) -> None:
    entropy = Plug(path=GRPO, kwargs={"entropy_coefficient": 0.01})
    config = _config(folder, trainer={"tokens_per_microbatch": 60, "num_epochs": 2}, objective=entropy)
    recomputed, results, backward = [], [], Head.backward
    monkeypatch.setattr(Head, "backward", lambda *args: recomputed.append(1) or backward(*args))
    for token_level in (True, False):
        learner = Learner(config)
        monkeypatch.setattr(type(learner.scorer.objective), "token_level", token_level)
        results.append(gradients_of(learner))
        _step(learner, random_groups(6))
        # The promise holds in every micro-batch, or there is none.
        assert bool(recomputed) != token_level
    for in_forward, in_backward in zip(*results, strict=True):
        for name, wanted in in_backward.items():
            torch.testing.assert_close(in_forward[name], wanted, rtol=1e-4, atol=1e-7, msg=name)


def _masked_group(kept: list[list[int]]):
    parts = [segment([1, 2, 5], [(1, 3)], [7, 7], [-1.0, -1.0]), segment([1, 8], [(1, 2)], [7], [-1.0])]
    masks = [tuple(pack_ids(ids) for ids in kept[:2]), (pack_ids(kept[2]),)]
    parts = [msgspec.structs.replace(part, sampling_mask=mask) for part, mask in zip(parts, masks, strict=True)]
    group = group_of(1, [[part] for part in parts], [1.0, 0.0])
    return msgspec.structs.replace(group, sampling=msgspec.structs.replace(group.sampling, top_k=3))


def test_truncated_sampling_is_reproduced_over_the_ids_that_were_kept(folder) -> None:
    kept, learner = [[2, 3, 4], [5], [8, 9]], Learner(_config(folder))
    group = decode_group(encode_group(_masked_group(kept)))
    check_trainable(group, learner.vocabulary)
    batch = learner.pack([group], lag_from(7))
    (found,) = proximal_logprobs(learner, batch)
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    wanted = {}
    for ids, at, choices in (([1], 2, kept[0]), ([1, 2], 5, kept[1]), ([1], 8, kept[2])):
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        wanted[at] = (logits[at] - logits[choices].logsumexp(0)).item()
    expected = [wanted[target] for target in batch.microbatches[0].targets.tolist()]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert wanted[5] == 0 and learner.step(batch).skipped_reason is None
    for ids, message in (
        ([[2], [5], [9]], r"sampling_mask\[0\]: 1 ids without the sampled token 8"),
        ([[2], [5, -4], [8]], r"sampling_mask\[1\]: id -4, expected 0 or more"),
        ([[2], [], [8]], r"sampling_mask\[1\]: 0 ids without the sampled token 5"),
    ):
        with pytest.raises(RecordError, match=rf"segments\[0\]\.{message}"):
            decode_group(encode_group(_masked_group(ids)))


def _flat_groups() -> list:
    """Groups whose siblings are one text, so that any of them stands for all."""
    texts = {index: random_group(index, 0).rollouts[0].segments[0] for index in range(11, 15)}
    return [group_of(index, [[text], [text]], [1.0, 1.0]) for index, text in texts.items()]


def _every_token(learner: Learner, groups: list) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, proximal and behavior logprob of every token within the lag bound."""
    found = []
    for part in pack(groups, lag_from(7), learner.config, every_row=True).microbatches:
        with torch.no_grad():
            logprobs, entropy = learner.scorer.logprobs(part)
        found.append(torch.stack([entropy, logprobs, part.behavior_logprobs])[:, part.loss_mask])
    entropy, proximal, behavior = torch.cat(found, 1)
    return entropy, proximal, behavior


def test_entropy_and_mismatch_are_of_all_sampled_tokens(folder) -> None:
    # Steps too small to change a weight: both halves see the same policy.
    trainer = {"num_minibatches": 2, "learning_rate": 1e-30}
    for groups in ([*random_groups(6), *_flat_groups()], _flat_groups()):
        learner = Learner(_config(folder, trainer=trainer))
        entropy, proximal, behavior = _every_token(learner, groups)
        metrics = _step(learner, groups).metrics
        assert metrics["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-5)
        assert metrics["rollout_correction/kl"] == pytest.approx((behavior - proximal).mean().item(), rel=1e-5)
        counts = [value for name, value in metrics.items() if name.startswith("num_tokens/lag_")]
        assert sum(counts) == pytest.approx(len(entropy))


def test_each_environment_has_the_bias_of_its_own_tokens(folder) -> None:
    names = ("words", "sums")
    groups = [msgspec.structs.replace(g, environment=names[n % 2]) for n, g in enumerate(random_groups(6, 3))]
    learner = Learner(_config(folder, max_lag=1, correction=CorrectionConfig(mode="token_mask", threshold=1.2)))
    expected = {}
    for name in names:
        of_name = [group for group in groups if group.environment == name]
        _, proximal, behavior = _every_token(learner, of_name)
        rho = (proximal - behavior).double().exp().numpy()
        spans = [s for g in of_name for r in g.rollouts for part in r.segments for s in part.version_spans]
        lags = [7 - span.version for span in spans for _ in range(span.start, span.end)]
        num_masked = sum(lag > 2 for lag in lags)
        assert num_masked and num_masked == len(lags) - len(rho)
        expected[name] = {
            "num_tokens": len(rho),
            "num_tokens_sampled": len(lags),
            "lag_mean": sum(lags) / len(lags),
            "chi2": (rho**2).mean() - 1,
            "ess_fraction": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
            "masked_frac": ((rho > 1.2).sum() + num_masked) / len(lags),
        }
    found = _step(learner, groups).environments
    assert list(found) == ["sums", "words"]
    for name in names:
        assert {key: found[name][key] for key in expected[name]} == pytest.approx(expected[name], rel=1e-4)
    assert found["sums"]["chi2"] != pytest.approx(found["words"]["chi2"], rel=0.01)


@pytest.mark.parametrize("correction", [CorrectionConfig(), CorrectionConfig(mode="sequence_mask")])
def test_what_is_scored_for_the_metrics_alone_leaves_the_training_as_it_is(folder, correction) -> None:
    config = _config(folder, correction=correction, trainer={"num_epochs": 2, "num_minibatches": 2})
    learners = Learner(config), Learner(config)
    batch = learners[0].pack([*random_groups(6), *_flat_groups()], lag_from(7))
    without = replace(batch, minibatches=tuple(replace(part, skipped=()) for part in batch.minibatches))
    reports = [learner.step(part) for learner, part in zip(learners, (batch, without), strict=True)]
    assert all(torch.equal(p, weights_of(learners[1])[name]) for name, p in weights_of(learners[0]).items())
    assert reports[0].metrics["loss"] == reports[1].metrics["loss"]


def test_kl_and_entropy_act_on_every_row_in_full(folder, tmp_path) -> None:
    tiny_model(tmp_path, seed=9)
    terms = Plug(path=GRPO, kwargs={"kl_coefficient": 0.3, "entropy_coefficient": 0.2})
    model = ModelConfig(path=str(folder), reference=str(tmp_path))
    correction = CorrectionConfig(mode="none")
    learner = Learner(_config(folder, model=model, objective=terms, correction=correction, max_lag=9))
    assert learner.trains_every_row
    groups = [random_group(1, 0, rewards=[1.0] * 4), random_group(2, 0, rewards=[0.0] * 4)]
    student, reference = (AutoModelForCausalLM.from_pretrained(path).double() for path in (folder, tmp_path))
    kl = entropy = torch.zeros((), dtype=torch.float64)
    count = 0
    for part in (r.segments[0] for g in groups for r in g.rollouts):
        ids = torch.tensor(list(unpack_ids(part.token_ids)))
        at = torch.tensor([place for start, end in part.loss_mask for place in range(start, end)])
        current, entropies = logprobs_and_entropy(student(input_ids=ids[None]).logits[0][at - 1], ids[at], 1.0)
        x = sampled_logprobs(reference, part).detach() - current
        kl, entropy, count = kl + (x.exp() - x - 1).sum(), entropy + entropies.sum(), count + len(at)
    loss = (0.3 * kl - 0.2 * entropy) / count
    loss.backward()
    gradients = gradients_of(learner)
    report = _step(learner, groups)
    assert report.num_optimizer_steps == 1, "no group has variance, and the terms act all the same"
    assert report.metrics["loss"] == pytest.approx(loss.item(), abs=2e-5)
    assert report.metrics["reference_kl"] == pytest.approx(kl.item() / count, abs=2e-5)
    assert_near(gradients[0], student, 1e-4)
