"""Replay with kept keys and values is what a cache that outlives an update computes, layer types and all; the objective
layer is of the newest version, by lag."""

import numpy as np
import pytest
import torch

from parity_bench import COLD, ParityBench, groups_of, prompts
from penstock.consumers.learning.batch.batch import MicroBatch
from penstock.consumers.learning.model.head import OutputHead
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.inference import EqualContexts, equal_contexts
from penstock.consumers.parity.replay import PolicyStore, Replay, ReplayPlan, as_labelled
from penstock.consumers.parity.sample import read_sample
from penstock.consumers.parity.tolerance import Yardstick
from penstock.schemas.policy import UnknownVersionError
from penstock.schemas.rollout import SamplingSettings, unpack_floats, unpack_ids
from training_groups import configuration, group_of, segment


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return ParityBench.make(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def groups(bench: ParityBench):
    answers = bench.engine().generate(prompts(6, 5), 4, 16, sampling=COLD, updates={6: 1, 11: 3})
    return groups_of(answers + bench.engine().generate(prompts(6, 5, 1), 4, 16, version=3, sampling=COLD))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_hidden_layers": 4, "num_key_value_heads": 1},
    ],
)
def test_kept_keys_are_those_of_the_models_own_attention(tmp_path, changes) -> None:
    bench = ParityBench.make(tmp_path, **changes)
    answers = bench.engine().generate(prompts(4, 9), 3, 20, version=3, updates={4: 1, 9: 2, 10: 0}, sampling=COLD)
    report = bench.check(groups_of(answers))
    assert report.verdict.status == "parity", report.verdict
    assert report.hypotheses[0].gap.mean < 2e-6


def test_a_check_runs_the_rows_of_one_policy_once(bench, monkeypatch) -> None:
    computed, forward = [], PackedModel.forward

    def counted(model: PackedModel, microbatch: MicroBatch) -> tuple[torch.Tensor, OutputHead]:
        computed.append(len(microbatch.targets))
        return forward(model, microbatch)

    monkeypatch.setattr(PackedModel, "forward", counted)
    yardstick = Yardstick(transformers=1e-7, packed=1e-7, num_tokens=100)
    answers = bench.engine().generate(prompts(6, 5), 4, 16, sampling=COLD)
    report = bench.check(groups_of(answers), yardstick=yardstick)
    assert report.verdict.status == "parity" and computed.count(report.num_tokens) == 1, "apart from the load's check"


def test_pieces_under_one_policy_are_the_whole_at_any_budget_and_logit_scale(bench, groups, monkeypatch) -> None:
    sample = read_sample(groups, 48, lambda version: True)
    one_policy = [row for row in sample.rows if not row.is_mixed][:9]
    policies = PolicyStore(configuration(bench.folder), bench.files.get, torch.device("cpu"))
    replay = Replay(sample, policies, 8192)
    labelled = replay.logprobs(as_labelled(row) for row in sample.rows)
    for budget in (1, 50):
        found = Replay(sample, policies, budget).logprobs(as_labelled(row) for row in sample.rows)
        torch.testing.assert_close(found, labelled, rtol=0, atol=5e-6)
    for scale in (1.0, 0.3):
        monkeypatch.setattr(policies.model(3), "_logit_scale", scale)
        whole = replay.logprobs(as_labelled(row) for row in one_policy)
        pieces = replay.logprobs(
            ReplayPlan(row, ((3, 0, 4), (3, 4, 5), (3, 5, int(row.sampled[-1])))) for row in one_policy
        )
        torch.testing.assert_close(pieces, whole, rtol=0, atol=5e-6, equal_nan=True)
        assert (~whole.isnan()).sum() == 9 * 16, "tokens without a plan have no logprob"


def test_lag_rows_are_of_the_newest_version_recomputed_whole(bench, groups) -> None:
    report = bench.check(groups)
    assert [(row.label, row.num_tokens) for row in report.lags] == [("0", 384), ("0-mixed", 120), ("2-3", 264)]
    assert {(point.position, point.lag) for point in report.points} >= {(0, 0), (0, 3), (15, 0)}
    assert len(report.points) == 12 * 4 * 16
    assert max(abs(point.engine - point.trainer) for point in report.points) < 1e-4
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

    def lag_of(version: int) -> int:
        if version == 1:
            raise UnknownVersionError("never announced")
        return {0: 9, 3: 1}[version]

    report = bench.check(groups, lag_of=lag_of)
    assert [row.label for row in report.lags] == ["1", "8+"]
    assert {point.lag for point in report.points} == {-1, 1, 9}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_first_logprobs_of_siblings_lie_on_the_grid_of_a_16_bit_head_and_not_of_a_float32_head(tmp_path, dtype) -> None:
    bench = ParityBench.make(tmp_path, dtype=dtype)
    for temperature in (0.3, 1.7):
        sampling = SamplingSettings(temperature=temperature, max_tokens=8)
        for head, count in ((dtype, 24), ("float32", 96)):
            answers = bench.engine(head=head).generate(prompts(count, 6), 8, 8, sampling=sampling)
            found = equal_contexts(read_sample(groups_of(answers, sampling), 48, lambda version: True), dtype)
            assert found.has_rounded_logits == (head == dtype), found
            assert found.num_pairs > count
    assert not EqualContexts(num_pairs=1000, num_on_grid=14, expected=10.0).has_rounded_logits, "by chance"
    assert not EqualContexts(num_pairs=6, num_on_grid=4, expected=0.06).has_rounded_logits

    ids = ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9, 4])
    logprobs = ([-1.0, -2.0], [-1.5, -3.0], [-4.0, -5.0])
    segments = [[segment(list(i), [(2, 4)], [7, 7], list(b))] for i, b in zip(ids, logprobs, strict=True)]
    found = equal_contexts(read_sample([group_of(1, segments, [0.0] * 3)], 23, lambda version: True))
    # After (1, 2): 3 and 9 differ, 3 was sampled twice. After (1, 2, 3): 4 and 5 differ. After (1, 2, 9): one only.
    assert (found.num_pairs, found.spread.num_tokens, found.spread.mean) == (2, 1, 0.5)
    assert (found.num_on_grid, found.has_rounded_logits) == (2, False), "two pairs prove nothing"
