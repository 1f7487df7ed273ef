"""The proximal policy recomputed under the version that sampled each token: engine and lag are two factors."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.interfaces import LossInputs, LossOutputs, check_objective
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.learning.loss.sampled_version import PolicyGoneError
from penstock.consumers.learning.objectives.decoupled_ppo import DecoupledPpo
from penstock.consumers.parity.producers import ProducerGaps
from penstock.schemas.config import ConfigError, CorrectionConfig, LoraConfig, ModelConfig, RunConfig, TrainerConfig
from penstock.schemas.policy import UnknownVersionError
from penstock.schemas.rollout import RolloutGroup
from training_groups import configuration, group_of, proximal_logprobs, random_groups, segment

EXACT = CorrectionConfig("token_truncate", 1e6, proximal="sampled_version")
NEWEST = 3
ROWS = ([3, 3, 3, 3], [1, 1, 1, 1, 1], [0, 0, 2, 2, 3], [2, 2, 2], [-1, -1], [0, 0, 0])
"""The version of each sampled token of six siblings."""
PURE = (0, 1, 3, 5)
"""The siblings that one known version sampled."""


def _config(folder: Path, **changes: Any) -> RunConfig:
    trainer = TrainerConfig(device="cpu", learning_rate=2e-2, max_grad_norm=1e9)
    return configuration(folder, **{"correction": EXACT, "trainer": trainer} | changes)


def _lag(version: int) -> int:
    if version < 0:
        raise UnknownVersionError(f"version {version} is unknown")
    return NEWEST - version


def _group(rows: tuple[list[int], ...], behavior: list[Tensor] | None = None) -> RolloutGroup:
    rng = torch.Generator().manual_seed(1)
    segments = []
    for r, versions in enumerate(rows):
        ids = torch.randint(0, 23, (3 + len(versions),), generator=rng).tolist()
        logprobs = None if behavior is None else behavior[r].tolist()
        segments.append([segment([1, 2, 3, *ids[3:]], [(3, len(ids))], versions, logprobs)])
    return group_of(50, segments, [float(r % 2) for r in range(len(rows))])


@dataclass
class Walk:
    """A learner after three updates. policies: what was published of each version. now: by version, the trainer's own
    logprobs of each sibling at the time. seen: the objective's inputs."""

    learner: Learner
    rows: tuple[list[int], ...]
    policies: dict[int, list[Tensor]] = field(default_factory=dict)
    now: dict[int, list[Tensor]] = field(default_factory=dict)
    seen: list[LossInputs] = field(default_factory=list)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        self.seen.append(inputs)
        gain = inputs.importance_weights * inputs.advantages * inputs.current_logprobs
        return LossOutputs(loss=-torch.where(inputs.loss_mask, gain, 0.0).sum() / inputs.denominator)

    @property
    def sampled(self) -> list[Tensor]:
        """Each sibling's logprobs by the version of each token; an unknown one is version 2."""
        return [
            torch.stack([self.now[v if v >= 0 else 2][r][t] for t, v in enumerate(versions)])
            for r, versions in enumerate(self.rows)
        ]

    def by_sibling(self, name: str, call: int = 0) -> list[Tensor]:
        inputs = self.seen[call]
        found = [getattr(inputs, name)[inputs.row_ids == row].detach() for row in range(len(self.rows))]
        return [found[self.places.index(r)] for r in range(len(self.rows))]

    def step(self, behavior: list[Tensor]) -> StepReport:
        batch = pack([_group(self.rows, behavior)], _lag, self.learner.config)
        (places,) = batch.minibatches[0].places
        self.places = [place.rollout for place in places]
        self.seen.clear()
        return self.learner.step(batch)


def _by_sibling(learner: Learner, rows: tuple[list[int], ...]) -> list[Tensor]:
    """The learner's present logprobs of each sibling's tokens."""
    batch = pack([_group(rows)], lambda version: 0, learner.config)
    (places,) = batch.minibatches[0].places
    (logprobs,), (microbatch,) = proximal_logprobs(learner, batch), batch.microbatches
    order = {place.rollout: row for row, place in enumerate(places)}
    return [logprobs[microbatch.row_ids == order[r]] for r in range(len(rows))]


def _walk(config: RunConfig, rows: tuple[list[int], ...] = ROWS) -> Walk:
    walk = Walk(Learner(config), rows)
    walk.learner.scorer.objective = walk
    for version in range(NEWEST + 1):
        walk.policies[version] = [part.values.to(part.dtype).clone() for part in walk.learner.published_parts()()]
        walk.now[version] = _by_sibling(walk.learner, rows)
        if version < NEWEST:
            walk.learner.step(pack(random_groups(3, version), lambda version: 0, config))
    walk.learner.follow_versions(walk.policies.get)
    return walk


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=64.0)])
def test_with_an_exact_engine_the_weight_is_1_and_the_policy_ratio_is_all_of_the_lag(folder, lora) -> None:
    """At both steps on the batch."""
    walk = _walk(_config(folder, lora=lora, trainer=TrainerConfig(device="cpu", learning_rate=2e-2, num_epochs=2)))
    masters: list[list[Tensor]] = []
    walk.learner.before_update = lambda: masters.append([p.detach().clone() for p in walk.learner.model.parameters()])
    report = walk.step(walk.sampled)
    first, second = walk.seen
    assert torch.equal(first.proximal_logprobs, second.proximal_logprobs)
    for r, versions in enumerate(ROWS):
        expected = torch.stack([walk.now[v if v >= 0 else NEWEST][r][t] for t, v in enumerate(versions)])
        assert (walk.by_sibling("proximal_logprobs")[r] - expected).abs().max() < 1e-6, r
    proximal, current, behavior = (
        torch.cat(walk.by_sibling(f"{name}_logprobs")) for name in ("proximal", "current", "behavior")
    )
    product = (proximal - behavior).double().exp() * (current - proximal).double().exp()
    torch.testing.assert_close(product, (current - behavior).double().exp(), rtol=1e-6, atol=0)
    known = torch.tensor([version >= 0 for versions in ROWS for version in versions])
    assert ((proximal - behavior)[known].abs() < 1e-6).all()
    assert (current - proximal).abs().max() > 0.1 < (proximal - behavior)[~known].abs().max()
    assert all(map(torch.equal, masters[0], masters[1])), "the masters are what they were"
    assert report.gaps[50].num_tokens == sum(len(ROWS[r]) for r in PURE)
    assert report.gaps[50].mean < 1e-6


def test_the_engine_moves_the_first_factor_alone_and_lag_the_second_and_the_metrics_tell_them_apart(folder) -> None:
    rows = tuple([version] * 5 for version in (0, 1, 2, 3))
    torch.manual_seed(0)
    noise = [0.2 * torch.randn(len(versions)) for versions in rows]
    found = {}
    for name, proximal in (("exact", "sampled_version"), ("noisy", "sampled_version"), ("consumed", "consumed")):
        walk = _walk(_config(folder, correction=CorrectionConfig("token_truncate", 1e6, proximal=proximal)), rows)
        behavior = walk.sampled if name != "noisy" else [a + b for a, b in zip(walk.sampled, noise, strict=True)]
        found[name] = walk, walk.step(behavior)
    (exact, report), (noisy, noisy_report), (_, consumed_report) = found.values()
    assert torch.equal(exact.seen[0].proximal_logprobs, noisy.seen[0].proximal_logprobs)
    weights = torch.cat(noisy.by_sibling("importance_weights"))
    torch.testing.assert_close(weights, (-torch.cat(noise)).exp(), rtol=1e-5, atol=1e-6)
    squares = torch.cat(noise).double().mul(-2).exp().mean().item() - 1
    lag = report.metrics["policy_chi2"]
    assert lag > 0.01 < consumed_report.metrics["chi2"] and report.metrics["policy_ess_fraction"] < 1
    for metrics, engine, policy in (
        (report.metrics, pytest.approx(0, abs=1e-6), lag),
        (noisy_report.metrics, pytest.approx(squares, rel=1e-4), pytest.approx(lag, rel=1e-6)),
        (consumed_report.metrics, consumed_report.metrics["chi2"], pytest.approx(0, abs=1e-12)),
    ):
        assert (metrics["chi2"], metrics["policy_chi2"]) == (engine, policy)
    assert report.metrics["ess_fraction"] == pytest.approx(1, abs=1e-9)
    gaps = noisy_report.gaps[50]
    assert (gaps.num_tokens, gaps.abs_sum) == (4 * 5, pytest.approx(torch.cat(noise).abs().sum().item(), rel=1e-4))
    assert consumed_report.gaps[50].num_tokens == 5, "lag 0 alone"


def test_a_bfloat16_policy_of_an_older_version_is_the_one_that_was_published(folder) -> None:
    walk = _walk(_config(folder, model=ModelConfig(path=str(folder), dtype="bfloat16")), tuple([1] * n for n in (4, 6)))
    walk.step(walk.sampled)
    assert torch.equal(torch.cat(walk.by_sibling("proximal_logprobs")), torch.cat(walk.sampled))
    assert not torch.equal(torch.cat(walk.by_sibling("current_logprobs")), torch.cat(walk.sampled))


def test_a_policy_that_is_no_longer_kept_is_an_error_that_names_it_and_the_masters_stay(folder) -> None:
    walk = _walk(_config(folder))
    del walk.policies[1]
    before = [p.detach().clone() for p in walk.learner.model.parameters()]
    with pytest.raises(PolicyGoneError, match="policy 1, which sampled tokens of this batch, is not kept"):
        walk.step(walk.sampled)
    assert all(map(torch.equal, before, walk.learner.model.parameters()))


def test_a_producer_of_noisy_weights_is_named_within_five_groups_of_any_lag_and_a_sound_one_never(folder) -> None:
    """5% noise in every tensor of one of two producers, and every row one to three updates old; three runs."""
    rows = tuple([version] * 8 for version in (0, 1, 2, 2))
    for seed in range(3):
        walk = _walk(_config(folder), rows)
        torch.manual_seed(seed)
        noisy = {v: [p * (1 + 0.05 * torch.randn_like(p)) for p in own] for v, own in walk.policies.items()}
        odd = []
        with walk.learner.model.replaced() as replace:
            for r, versions in enumerate(rows):
                replace(noisy[versions[0]])
                odd.append(_by_sibling(walk.learner, rows)[r])
        judge, named = ProducerGaps(walk.learner.config), {}
        walk.learner.optimizer.step = lambda: None  # the same policy reads every group
        for n in range(1, 13):
            for name, behavior in (("sound", walk.sampled), ("odd", odd)):
                report = walk.step(behavior)
                group = msgspec.structs.replace(_group(rows), sampled_by=(name,))
                assert report.metrics["mismatch_lag0"] == pytest.approx(report.gaps[50].mean)
                for instance in judge.observe([group], report.gaps):
                    named.setdefault(instance, n)
        assert named == {"odd": 5}, seed
        assert judge.table()["sound"].gap < 1e-6 < 1e-3 < judge.table()["odd"].gap


def test_what_forms_the_whole_ratio_itself_is_refused(folder) -> None:
    with pytest.raises(ValueError, match=r"proximal = 'sampled_version' with bypass = True"):
        CorrectionConfig("none", bypass=True, proximal="sampled_version")
    config = _config(folder, correction=CorrectionConfig("none", proximal="sampled_version"))
    with pytest.raises(ConfigError, match=r"correction.proximal = 'sampled_version' with objective.path"):
        check_objective(config, DecoupledPpo(proximal="loglinear", total_weight_cap=2.0))
