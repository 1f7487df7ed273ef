"""The objective layer: the recorded logprobs against the trainer at its newest version, by lag."""

import numpy as np
import pytest
import torch

from parity_bench import COLD, ParityBench, groups_of, prompts
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.replay import LoadedPolicy
from penstock.schemas.policy import UnknownVersionError
from penstock.schemas.rollout import unpack_floats, unpack_ids


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return ParityBench.make(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def groups(bench: ParityBench):
    answers = bench.engine().generate(prompts(6, 5), 4, 16, sampling=COLD, updates={6: 1, 11: 3})
    return groups_of(answers + bench.engine().generate(prompts(6, 5, 1), 4, 16, version=3, sampling=COLD))


def test_lag_rows_are_of_the_newest_version_recomputed_whole(bench, groups) -> None:
    report = bench.check(groups)
    assert [(row.label, row.num_tokens) for row in report.lags] == [("0", 384), ("0-mixed", 120), ("2-3", 264)]
    model = bench.engine()
    model.load(3)
    gaps = {"pure": [], 0: [], 2: [], 3: []}
    for group in groups:
        for rollout in group.rollouts:
            (own,) = rollout.segments
            ids = list(unpack_ids(own.token_ids))
            logprobs = (model.logits(ids) / COLD.temperature).log_softmax(-1)
            versions = [s.version for s in own.version_spans for _ in range(s.start, s.end)]
            for n, (version, recorded) in enumerate(zip(versions, unpack_floats(own.behavior_logprobs), strict=True)):
                at = own.loss_mask[0][0] + n
                gaps["pure" if versions[0] == 3 else 3 - version].append(float(logprobs[at - 1, ids[at]]) - recorded)
    for row, own in zip(report.lags, map(np.array, (gaps["pure"], gaps[0], gaps[2] + gaps[3])), strict=True):
        assert row.mean == pytest.approx(np.abs(own).mean(), rel=1e-3, abs=1e-7)
        assert row.kl == pytest.approx(-own.mean(), rel=1e-3, abs=1e-6)
        assert row.chi2 == pytest.approx((np.exp(own) ** 2).mean() - 1, rel=1e-3, abs=1e-6)
        assert row.ratio_deviation == pytest.approx(np.abs(np.exp(own) - 1).mean() * 1e4, rel=1e-3, abs=1e-3)
    pure, mixed, old = report.lags
    assert pure.mean < 1e-6 < 1e-4 < mixed.mean < old.mean, "the keys and values of the older policy, no engine's fault"


def test_lags_may_come_from_the_trainer(bench, groups) -> None:
    def lag_of(version: int) -> int:
        if version == 1:
            raise UnknownVersionError("never announced")
        return {0: 9, 3: 1}[version]

    report = bench.check(groups, lag_of=lag_of)
    assert [row.label for row in report.lags] == ["1", "8+"]
    assert {point.lag for point in report.points} == {-1, 1, 9}


def test_points_are_the_tokens_themselves(bench, groups) -> None:
    report = bench.check(groups)
    assert len(report.points) == 12 * 4 * 16
    assert max(abs(point.engine - point.trainer) for point in report.points) < 1e-4
    assert {point.position for point in report.points} == set(range(16))
    assert {point.lag for point in report.points} == {0, 2, 3}


def test_a_loaded_model_is_used_and_left_as_it_was(bench, groups) -> None:
    model = PackedModel(str(bench.folder), "float32", torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    answers = bench.engine().generate(prompts(6, 5), 4, 16, sampling=COLD)
    report = bench.check(groups_of(answers), weights=lambda version: None, loaded=LoadedPolicy(0, model))
    assert report.verdict.status == "parity"
    report = bench.check(groups + groups_of(answers), loaded=LoadedPolicy(0, model))
    assert report.verdict.status == "parity"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
