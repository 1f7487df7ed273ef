"""Several optimizer steps a batch, the two ratios apart, bypass, reference model, whole-batch corrections, replay."""

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

from penstock.consumers.learning.batch.batch import Batch
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.batch.trainable import check_trainable
from penstock.consumers.learning.interfaces import LossInputs, LossOutputs
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.step_report import NOTHING_TO_TRAIN
from penstock.consumers.learning.loss.importance import correct_packed
from penstock.consumers.learning.model.head_kernels import Head
from penstock.schemas.config import ConfigError, CorrectionConfig, ModelConfig, Plug, TrainerConfig
from penstock.schemas.rollout import RecordError, decode_group, encode_group, pack_ids
from training_groups import (
    VOCABULARY,
    configuration,
    group_of,
    lag_from,
    proximal_logprobs,
    random_group,
    segment,
    tiny_model,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(tmp_path / "tiny")
    return tmp_path / "tiny"


def _groups(count: int = 6, seed: int = 0, **changes: Any):
    return [random_group(i, seed, **changes) for i in range(1, count + 1)]


def _trainer(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"device": "cpu", "learning_rate": 1e-2, "max_grad_norm": 1e9} | changes)


def _weights(learner: Learner) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.module.named_parameters()}


@dataclass
class RecordingObjective:
    """REINFORCE that notes what it was given; the calls of `poison_at`, counted from 1, have a loss of NaN."""

    seen: list[LossInputs] = field(default_factory=list)
    poison_at: tuple[int, ...] = ()
    needs_reference: bool = False
    reads_behavior: bool = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        self.seen.append(inputs)
        gain = inputs.importance_weights * inputs.advantages * inputs.current_logprobs
        loss = -torch.where(inputs.loss_mask, gain, 0.0).sum() / inputs.denominator
        if len(self.seen) in self.poison_at:
            loss = loss * float("nan")
        return LossOutputs(loss=loss)


def _recording(config, **settings: Any) -> tuple[Learner, RecordingObjective]:
    learner, recorder = Learner(config), RecordingObjective(**settings)
    learner.scorer.objective = recorder
    return learner, recorder


def test_every_step_sees_the_proximal_policy_of_the_first_read(folder) -> None:
    config = configuration(folder, trainer=_trainer(num_epochs=2, num_minibatches=3))
    learner, recorder = _recording(config)
    batch = pack(_groups(), lag_from(7), config)
    first_read = proximal_logprobs(learner, batch)
    report = learner.step(batch)
    assert (report.num_optimizer_steps, learner.num_steps) == (6, 6)
    assert len(recorder.seen) == 6
    for n, inputs in enumerate(recorder.seen):
        assert torch.equal(inputs.proximal_logprobs, first_read[n % 3])
    assert torch.equal(recorder.seen[0].current_logprobs, first_read[0])
    for inputs in recorder.seen[1:]:
        assert not torch.allclose(inputs.current_logprobs, inputs.proximal_logprobs, atol=1e-4)
    denominators = [inputs.denominator for inputs in recorder.seen[:3]]
    assert sum(denominators) == sum(rollout.num_sampled_tokens for g in _groups() for rollout in g.rollouts)


def test_the_gradient_of_a_later_step_keeps_the_two_ratios_apart(folder) -> None:
    config = configuration(folder, trainer=_trainer(num_epochs=2))
    groups = _groups(temperature=0.8)
    learner = Learner(config)
    before = AutoModelForCausalLM.from_pretrained(folder).double()
    steps: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    take = learner.optimizer.step

    def step() -> None:
        gradients = {name: p.grad.clone() for name, p in learner.model.module.named_parameters()}
        steps.append((_weights(learner), gradients))
        take()

    learner.optimizer.step = step
    report = learner.step(pack(groups, lag_from(7), config))
    after = AutoModelForCausalLM.from_pretrained(folder).double()
    after.load_state_dict({name: p.double() for name, p in steps[1][0].items()}, strict=False)
    after.tie_weights()
    total, count, clipped = torch.zeros((), dtype=torch.float64), 0, 0
    for group in groups:
        rewards = torch.tensor([r.reward.value for r in group.rollouts], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            for part in rollout.segments:
                ids = torch.frombuffer(bytearray(part.token_ids), dtype=torch.int32).long()
                at = torch.tensor([p for start, end in part.loss_mask for p in range(start, end)])
                behavior = torch.frombuffer(bytearray(part.behavior_logprobs), dtype=torch.float32).double()
                proximal, current = (
                    torch.log_softmax(model(input_ids=ids[None]).logits[0][at - 1] / 0.8, dim=1)
                    .gather(1, ids[at][:, None])
                    .squeeze(1)
                    for model in (before, after)
                )
                weight = (proximal.detach() - behavior).exp().clamp(max=2.0)
                ratio = (current - proximal.detach()).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                clipped += int((ratio * advantage > gain).sum())
                total = total - (weight * gain).sum()
                count += len(at)
    (total / count).backward()
    scale = math.sqrt(sum(float(p.grad.square().sum()) for p in after.parameters()))
    for name, wanted in after.named_parameters():
        assert (steps[1][1][name].double() - wanted.grad).norm() <= 2e-5 * scale, name
    assert clipped > 0
    # The first step clips nothing: its share is that of the second, over the tokens of both.
    assert report.metrics["policy_clipped_frac"] == pytest.approx(clipped / (2 * count))


def test_the_mismatch_is_that_of_the_first_read_however_many_steps_follow(folder) -> None:
    one = configuration(folder)
    many = configuration(folder, trainer=_trainer(num_epochs=3))
    reports = [Learner(config).step(pack(_groups(), lag_from(7), config)) for config in (one, many)]
    for name in ("rollout_correction/kl", "chi2", "ess_fraction"):
        assert reports[0].metrics[name] == pytest.approx(reports[1].metrics[name], rel=1e-6)


def test_a_mini_batch_that_is_not_finite_is_named_and_the_others_are_trained(folder) -> None:
    config = configuration(folder, trainer=_trainer(num_minibatches=3))
    learner, _ = _recording(config, poison_at=(2,))
    batch = pack(_groups(), lag_from(7), config)
    report = learner.step(batch)
    assert report.failed == dict.fromkeys(batch.minibatches[1].indexes, "loss is not finite")
    assert report.skipped_reason is None
    assert report.steps_skipped == {"loss is not finite": 1}
    assert (report.num_optimizer_steps, learner.num_steps) == (2, 2)
    assert math.isfinite(report.metrics["loss"])
    assert all(torch.isfinite(p).all() for p in learner.model.parameters())


MARK = -7.0
"""The behavior logprob of the group that has no finite loss."""


def _groups_with_a_culprit(index: int = 3):
    ids, runs = [1, 2, 3], [(1, 3)]
    rows = [[segment(ids, runs, [7, 7], [MARK, -1.0])], [segment(ids[:2], [(1, 2)], [7])]]
    return [group_of(n, rows, [1.0, 0.0]) if n == index else random_group(n, 0) for n in range(1, 7)]


@dataclass
class NanWhereMarked(RecordingObjective):
    """A loss of NaN wherever the mark is."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        loss = super().__call__(inputs).loss
        return LossOutputs(loss=loss * float("nan") if (inputs.behavior_logprobs == MARK).any() else loss)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_only_the_group_that_is_not_finite_fails_and_the_rest_of_its_mini_batch_is_spared(folder, minibatches) -> None:
    config = configuration(folder, trainer=_trainer(num_minibatches=minibatches, num_epochs=2))
    learner = Learner(config)
    learner.scorer.objective = NanWhereMarked()
    groups = _groups_with_a_culprit()
    groups[1] = random_group(2, 0, rewards=[1.0] * 4)
    batch = pack(groups, lag_from(7), config)
    beside = next({*minibatch.indexes} for minibatch in batch.minibatches if 3 in minibatch.indexes)
    report = learner.step(batch)
    assert report.failed == {3: "loss is not finite"}
    assert report.spared == beside - {2, 3}, "a group without variance has no part in it"
    assert report.skipped_reason == (None if minibatches == 2 else "loss is not finite")
    assert report.num_optimizer_steps == 2 * (minibatches - 1)
    assert all(torch.isfinite(p).all() for p in learner.model.parameters())
    assert all(p.grad is None for p in learner.model.parameters())


def test_a_mini_batch_that_fails_in_its_second_epoch_was_trained(folder) -> None:
    config = configuration(folder, trainer=_trainer(num_epochs=3, num_minibatches=2))
    learner, recorder = _recording(config, poison_at=(3,))
    report = learner.step(pack(_groups(), lag_from(7), config))
    assert report.failed == {}
    assert report.steps_skipped == {"loss is not finite": 1}
    assert report.num_optimizer_steps == 4
    assert len(recorder.seen) == 5


def test_a_mini_batch_without_variance_takes_no_step_beside_others_that_do(folder) -> None:
    config = configuration(folder, trainer=_trainer(num_minibatches=2))
    groups = [random_group(1, 0, rewards=[1.0] * 4), random_group(2, 0)]
    report = Learner(config).step(pack(groups, lag_from(7), config))
    assert report.num_optimizer_steps == 1
    assert report.skipped_reason is None
    assert report.steps_skipped == {NOTHING_TO_TRAIN: 1}
    assert report.failed == {}


@pytest.mark.parametrize("epochs", [1, 2])
def test_bypass_puts_the_behavior_policy_in_the_proximal_place_with_weights_of_1(folder, epochs) -> None:
    correction = CorrectionConfig(mode="none", bypass=True)
    config = configuration(folder, correction=correction, trainer=_trainer(num_epochs=epochs))
    learner, recorder = _recording(config)
    batch = pack(_groups(), lag_from(7), config)
    (current,) = proximal_logprobs(learner, batch)
    report = learner.step(batch)
    for inputs in recorder.seen:
        assert torch.equal(inputs.proximal_logprobs, batch.microbatches[0].behavior_logprobs)
        assert torch.equal(inputs.importance_weights, inputs.loss_mask.float())
    # What the engine and the lag did is reported all the same.
    gap = (batch.microbatches[0].behavior_logprobs - current)[batch.microbatches[0].loss_mask].mean()
    assert report.metrics["rollout_correction/kl"] == pytest.approx(gap.item(), rel=1e-5)


def test_an_objective_that_reads_the_behavior_policy_is_refused_beside_a_correction(folder, monkeypatch) -> None:
    module = types.ModuleType("plugged")
    module.ReadsBehavior = lambda: RecordingObjective(reads_behavior=True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plugged", module)
    path = "plugged:ReadsBehavior"
    for correction in (CorrectionConfig(mode="token_mask"), CorrectionConfig(mode="none", bypass=True)):
        config = configuration(folder, objective=Plug(path=path), correction=correction)
        with pytest.raises(ConfigError, match=r"ReadsBehavior.*counted twice; expected correction\.mode = 'none'"):
            Learner(config)
    Learner(configuration(folder, objective=Plug(path=path), correction=CorrectionConfig(mode="none")))


def test_a_reference_that_nothing_reads_is_refused(folder) -> None:
    config = configuration(folder, model=ModelConfig(path=str(folder), reference=str(folder)))
    with pytest.raises(ConfigError, match=r"model\.reference = .*has no KL term"):
        Learner(config)


def test_the_reference_is_the_frozen_base_model(folder, tmp_path) -> None:
    kl = Plug(path="penstock.consumers.learning.objectives.grpo:Grpo", kwargs={"kl_coefficient": 0.1})
    config = configuration(folder, objective=kl)
    learner = Learner(config)
    reports = [learner.step(pack(_groups(), lag_from(7), config)) for _ in range(3)]
    penalties = [report.metrics["reference_kl"] for report in reports]
    assert penalties[0] == pytest.approx(0, abs=1e-6)
    assert penalties[2] > penalties[1] > 1e-6
    other = tmp_path / "other"
    tiny_model(other, seed=5)
    config = configuration(folder, objective=kl, model=ModelConfig(path=str(folder), reference=str(other)))
    assert Learner(config).step(pack(_groups(), lag_from(7), config)).metrics["reference_kl"] > 0.1
    tiny_model(tmp_path / "smaller", vocab_size=VOCABULARY - 1)
    config = configuration(
        folder, objective=kl, model=ModelConfig(path=str(folder), reference=str(tmp_path / "smaller"))
    )
    with pytest.raises(ConfigError, match=r"model\.reference = .*a vocabulary of 22, expected the model's 23"):
        Learner(config)


def test_off_policy_rows_are_judged_by_the_policy_of_the_step(folder) -> None:
    correction = CorrectionConfig(mode="token_truncate", off_policy_delta=0.0)
    config = configuration(folder, correction=correction, trainer=_trainer(num_epochs=2, learning_rate=0.1))
    learner, recorder = _recording(config)
    learner.step(pack(_groups(), lag_from(7), config))
    for inputs in recorder.seen:
        for row in range(int(inputs.row_ids.max()) + 1):
            own = inputs.row_ids == row
            within = own & (inputs.lag <= 4)
            gap = (inputs.behavior_logprobs - inputs.current_logprobs.detach())[within].mean()
            dropped = bool(gap > 0 and inputs.advantages[own][0] < 0)
            assert bool(inputs.loss_mask[within].any()) != dropped
    assert not torch.equal(recorder.seen[0].loss_mask, recorder.seen[1].loss_mask)


@pytest.mark.parametrize("epochs", [1, 2])
def test_gradients_taken_in_the_forward_pass_are_those_recomputed_in_backward(folder, monkeypatch, epochs) -> None:
    config = configuration(
        folder,
        trainer=_trainer(tokens_per_microbatch=60, num_epochs=epochs),
        objective=Plug(path="penstock.consumers.learning.objectives.grpo:Grpo", kwargs={"entropy_coefficient": 0.01}),
    )
    recomputed = []
    backward = Head.backward
    monkeypatch.setattr(Head, "backward", lambda *args: recomputed.append(1) or backward(*args))
    results = []
    for token_level in (True, False):
        learner = Learner(config)
        monkeypatch.setattr(type(learner.scorer.objective), "token_level", token_level)
        gradients: list[dict[str, Tensor]] = []

        def note(learner=learner, gradients=gradients) -> None:
            gradients.append({name: p.grad.clone() for name, p in learner.model.module.named_parameters()})

        learner.optimizer.step = note
        learner.step(pack(_groups(), lag_from(7), config))
        results.append(gradients)
        # The promise holds in every micro-batch, or there is none.
        assert bool(recomputed) != token_level
    for in_forward, in_backward in zip(*results, strict=True):
        for name, wanted in in_backward.items():
            torch.testing.assert_close(in_forward[name], wanted, rtol=1e-4, atol=1e-7, msg=name)


def test_row_statistics_of_a_run_are_of_the_tokens_within_the_lag_bound(folder) -> None:
    correction = CorrectionConfig(mode="sequence_truncate")
    config = configuration(folder, correction=correction, max_lag=2)
    learner, recorder = _recording(config)
    batch = pack(_groups(), lag_from(7), config)
    (proximal,), (part,) = proximal_logprobs(learner, batch), batch.microbatches
    learner.step(batch)
    assert 0 < int(part.loss_mask.sum()) < len(part.loss_mask)
    expected = correct_packed(proximal, part.behavior_logprobs, part.loss_mask, part.lag, part.row_ids, correction)
    assert torch.equal(recorder.seen[0].loss_mask, expected.keep_mask)
    torch.testing.assert_close(recorder.seen[0].importance_weights, expected.weights, rtol=1e-5, atol=1e-7)


def test_the_new_old_divergence_is_of_the_policy_at_each_step(folder) -> None:
    config = configuration(folder, trainer=_trainer(num_minibatches=3))
    learner, recorder = _recording(config)
    batch = pack(_groups(), lag_from(7), config)
    metrics = learner.step(batch).metrics
    means = []
    for inputs, part in zip(recorder.seen, batch.microbatches, strict=True):
        x = (inputs.current_logprobs.detach() - inputs.behavior_logprobs).double()
        for row in range(int(part.row_ids.max()) + 1):
            own = x[(part.row_ids == row) & part.loss_mask]
            if len(own):
                means.append((own.exp() - own - 1).mean().item())
    assert metrics["kl_new_old"] == pytest.approx(sum(means) / len(means), rel=1e-4)


def test_bypass_measures_the_mismatch_at_the_first_read_too(folder) -> None:
    bypass = CorrectionConfig(mode="none", bypass=True)
    found = []
    for steps in (1, 3):
        config = configuration(folder, correction=bypass, trainer=_trainer(num_minibatches=steps))
        found.append(Learner(config).step(pack(_groups(), lag_from(7), config)).metrics["chi2"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("name", ["entropy", "loss", "num_tokens"])
def test_a_metric_of_the_objective_may_not_take_a_name_of_the_trainers(folder, name) -> None:
    class Greedy(RecordingObjective):
        def __call__(self, inputs: LossInputs) -> LossOutputs:
            return LossOutputs(loss=super().__call__(inputs).loss, metrics={name: torch.ones(())})

    config = configuration(folder)
    learner = Learner(config)
    learner.scorer.objective = Greedy()
    with pytest.raises(ConfigError, match=f"objective.path = .*its metric '{name}' has a name of the trainer's own"):
        learner.step(pack(_groups(), lag_from(7), config))


def test_tokens_of_a_step_that_was_not_finite_are_not_counted_as_trained(folder) -> None:
    config = configuration(folder, trainer=_trainer(num_minibatches=2))
    whole = Learner(config).step(pack(_groups(), lag_from(7), config)).num_tokens_trained
    learner, _ = _recording(config, poison_at=(1,))
    batch = pack(_groups(), lag_from(7), config)
    report = learner.step(batch)
    second = sum(int(part.loss_mask.sum()) for part in batch.minibatches[1].microbatches)
    assert report.num_tokens_trained == second < whole
    assert math.isfinite(report.metrics["entropy"])


def _masked_group(kept: list[list[int]], top_k: int = 3):
    own = [segment([1, 2, 5], [(1, 3)], [7, 7], [-1.0, -1.0]), segment([1, 8], [(1, 2)], [7], [-1.0])]
    masks = [tuple(pack_ids(ids) for ids in kept[:2]), (pack_ids(kept[2]),)]
    own = [msgspec.structs.replace(part, sampling_mask=mask) for part, mask in zip(own, masks, strict=True)]
    group = group_of(1, [[part] for part in own], [1.0, 0.0])
    return msgspec.structs.replace(group, sampling=msgspec.structs.replace(group.sampling, top_k=top_k))


def test_truncated_sampling_is_reproduced_over_the_ids_that_were_kept(folder) -> None:
    config = configuration(folder)
    kept = [[2, 3, 4], [5], [8, 9]]
    group = decode_group(encode_group(_masked_group(kept)))
    learner = Learner(config)
    check_trainable(group, learner.vocabulary)
    batch: Batch = pack([group], lag_from(7), config)
    (found,) = proximal_logprobs(learner, batch)
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    wanted = {}
    for ids, at, choices in (([1], 2, kept[0]), ([1, 2], 5, kept[1]), ([1], 8, kept[2])):
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        wanted[at] = (logits[at] - logits[choices].logsumexp(0)).item()
    targets = batch.microbatches[0].targets.tolist()
    assert found.tolist() == pytest.approx([wanted[target] for target in targets], abs=1e-6)
    assert wanted[5] == 0
    assert learner.step(batch).skipped_reason is None


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([[2], [5], [9]], r"segments\[0\]\.sampling_mask\[0\]: 1 ids without the sampled token 8"),
        ([[2], [5, -4], [8]], r"segments\[0\]\.sampling_mask\[1\]: id -4, expected 0 or more"),
        ([[2], [], [8]], r"segments\[0\]\.sampling_mask\[1\]: 0 ids without the sampled token 5"),
    ],
)
def test_a_mask_that_cannot_be_is_refused_when_decoded(kept, message) -> None:
    with pytest.raises(RecordError, match=message):
        decode_group(encode_group(_masked_group(kept)))


def test_truncated_sampling_without_its_masks_is_refused() -> None:
    with pytest.raises(RecordError, match="group 1: sampling_mask holds token id 23, expected less than"):
        check_trainable(_masked_group([[2, VOCABULARY], [5], [8]]), VOCABULARY)
    group = group_of(1, [[segment([1, 2], [(1, 2)], [7])]], [1.0])
    bare = msgspec.structs.replace(group, sampling=msgspec.structs.replace(group.sampling, top_k=5))
    with pytest.raises(RecordError, match="top_k 5 and no sampling_mask"):
        check_trainable(bare, VOCABULARY)


def _flat_groups(rewards: tuple[float, ...] = (1.0, 1.0)):
    """Groups whose siblings are one text, so that any of them stands for all."""
    found = []
    for index in range(11, 15):
        ids = random_group(index, 0).rollouts[0].segments[0]
        found.append(group_of(index, [[ids]] * len(rewards), list(rewards)))
    return found


def _every_token(learner: Learner, groups) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, proximal and behavior logprob of every token within the lag bound."""
    batch = pack(groups, lag_from(7), learner.config, every_row=True)
    found = [[], [], []]
    with torch.no_grad():
        for part in batch.microbatches:
            logprobs, entropy = learner.scorer.logprobs(part)
            for column, values in zip(found, (entropy, logprobs, part.behavior_logprobs), strict=True):
                column.append(values[part.loss_mask])
    return tuple(torch.cat(column) for column in found)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_entropy_and_mismatch_are_of_all_sampled_tokens(folder, minibatches) -> None:
    # Steps too small to change a weight: both halves see the same policy.
    config = configuration(folder, trainer=_trainer(num_minibatches=minibatches, learning_rate=1e-30))
    groups = [*_groups(), *_flat_groups()]
    learner = Learner(config)
    entropy, proximal, behavior = _every_token(learner, groups)
    metrics = learner.step(pack(groups, lag_from(7), config)).metrics
    assert metrics["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-5)
    assert metrics["rollout_correction/kl"] == pytest.approx((behavior - proximal).mean().item(), rel=1e-5)
    counts = [value for name, value in metrics.items() if name.startswith("num_tokens/lag_")]
    assert sum(counts) == pytest.approx(len(entropy))
    trained = Learner(config).step(pack(_groups(), lag_from(7), config)).metrics
    assert abs(trained["entropy"] - metrics["entropy"]) > 1e-3, "that of the groups with variance is another"


def test_each_environment_has_the_bias_of_its_own_tokens(folder) -> None:
    names = ("words", "sums")
    groups = [msgspec.structs.replace(group, environment=names[n % 2]) for n, group in enumerate(_groups(seed=3))]
    config = configuration(folder, max_lag=1, correction=CorrectionConfig(mode="token_mask", threshold=1.2))
    learner = Learner(config)
    by_name = {name: [group for group in groups if group.environment == name] for name in names}
    expected = {}
    for name, own in by_name.items():
        _, proximal, behavior = _every_token(learner, own)
        rho = (proximal - behavior).double().exp().numpy()
        lags = [
            (7 - span.version, span.end - span.start)
            for group in own
            for rollout in group.rollouts
            for segment in rollout.segments
            for span in segment.version_spans
        ]
        num_sampled, num_masked = sum(n for _, n in lags), sum(n for lag, n in lags if lag > config.lag_bound)
        assert num_masked and num_masked == num_sampled - len(rho)
        expected[name] = {
            "num_tokens": len(rho),
            "num_tokens_sampled": num_sampled,
            "lag_mean": sum(lag * count for lag, count in lags) / sum(count for _, count in lags),
            "chi2": (rho**2).mean() - 1,
            "ess_fraction": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
            "masked_frac": ((rho > 1.2).sum() + num_masked) / num_sampled,
        }
    found = learner.step(pack(groups, lag_from(7), config)).environments
    assert list(found) == ["sums", "words"]
    for name in names:
        assert {key: found[name][key] for key in expected[name]} == pytest.approx(expected[name], rel=1e-4)
    assert found["sums"]["chi2"] != pytest.approx(found["words"]["chi2"], rel=0.01)


def test_once_all_groups_have_collapsed_something_is_still_reported(folder) -> None:
    config = configuration(folder)
    learner = Learner(config)
    before = _weights(learner)
    entropy, _, _ = _every_token(learner, _flat_groups())
    report = learner.step(pack(_flat_groups(), lag_from(7), config))
    assert (report.skipped_reason, report.num_optimizer_steps, report.num_tokens_trained) == (NOTHING_TO_TRAIN, 0, 0)
    assert report.metrics["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-5)
    assert {"ess_fraction", "rollout_correction/k3_kl", "policy_clipped_frac"} <= report.metrics.keys()
    assert sum(report.lag_histogram.values()) > 0
    assert all(torch.equal(p, before[name]) for name, p in _weights(learner).items())


@pytest.mark.parametrize("correction", [CorrectionConfig(), CorrectionConfig(mode="sequence_mask")])
def test_what_is_scored_for_the_metrics_alone_leaves_the_training_as_it_is(folder, correction) -> None:
    config = configuration(folder, correction=correction, trainer=_trainer(num_epochs=2, num_minibatches=2))
    batch = pack([*_groups(), *_flat_groups()], lag_from(7), config)
    without = replace(batch, minibatches=tuple(replace(each, skipped=()) for each in batch.minibatches))
    learners = Learner(config), Learner(config)
    reports = [learner.step(each) for learner, each in zip(learners, (batch, without), strict=True)]
    assert all(torch.equal(p, _weights(learners[1])[name]) for name, p in _weights(learners[0]).items())
    assert reports[0].metrics["loss"] == reports[1].metrics["loss"]


def test_kl_and_entropy_act_on_every_row_in_full(folder, tmp_path) -> None:
    tiny_model(tmp_path / "base", seed=9)
    kwargs = {"kl_coefficient": 0.3, "entropy_coefficient": 0.2}
    model = ModelConfig(path=str(folder), reference=str(tmp_path / "base"))
    config = configuration(
        folder,
        model=model,
        objective=Plug(path="penstock.consumers.learning.objectives.grpo:Grpo", kwargs=kwargs),
        correction=CorrectionConfig(mode="none"),
        trainer=_trainer(),
        max_lag=9,
    )
    learner = Learner(config)
    assert learner.trains_every_row
    groups = [random_group(1, 0, rewards=[1.0] * 4), random_group(2, 0, rewards=[0.0] * 4)]
    rows = [(r.segments[0], g.sampling.temperature) for g in groups for r in g.rollouts]
    models = [AutoModelForCausalLM.from_pretrained(path).double() for path in (folder, tmp_path / "base")]
    kl = entropy = torch.zeros((), dtype=torch.float64)
    count = 0
    for part, temperature in rows:
        ids = torch.frombuffer(bytearray(part.token_ids), dtype=torch.int32).long()
        own, reference = ((m(ids[None]).logits[0] / temperature).log_softmax(-1) for m in models)
        for start, end in part.loss_mask:
            for at in range(start, end):
                x = reference[at - 1, ids[at]] - own[at - 1, ids[at]]
                kl = kl + x.exp() - x - 1
                entropy = entropy - (own[at - 1].exp() * own[at - 1]).sum()
                count += 1
    loss = (0.3 * kl - 0.2 * entropy) / count
    loss.backward()
    expected = dict(models[0].named_parameters())
    gradients: dict[str, Tensor] = {}
    learner.optimizer.step = lambda: gradients.update(
        {name: p.grad.clone() for name, p in learner.model.module.named_parameters()}
    )
    report = learner.step(pack(groups, lag_from(7), config, every_row=learner.trains_every_row))
    assert report.num_optimizer_steps == 1, "no group has variance, and the terms act all the same"
    assert report.metrics["loss"] == pytest.approx(loss.item(), abs=2e-5)
    assert report.metrics["reference_kl"] == pytest.approx(kl.item() / count, abs=2e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.double(), expected[name].grad, atol=2e-5, rtol=1e-4)
