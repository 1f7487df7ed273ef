"""Replay with kept keys and values is what a cache that outlives an update computes, layer types and all."""

import pytest
import torch

from parity_bench import COLD, ParityBench, groups_of, prompts
from penstock.consumers.learning.batch.packing import pack, pack_segments
from penstock.consumers.parity.replay import PolicyStore, Replay, ReplayPlan, as_labelled
from penstock.consumers.parity.sample import read_sample
from training_groups import configuration, group_of, random_group, segment


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


def replay_of(bench: ParityBench, budget: int = 8192):
    answers = bench.engine().generate(prompts(3, 9), 3, 12, version=1, sampling=COLD)
    sample = read_sample(groups_of(answers), 48, lambda version: True)
    policies = PolicyStore(configuration(bench.folder), bench.files.get, torch.device("cpu"))
    return sample, Replay(sample, policies, budget)


@pytest.mark.parametrize("logit_scale", [1.0, 0.3])
def test_pieces_under_one_policy_are_the_whole(tmp_path, monkeypatch, logit_scale) -> None:
    sample, replay = replay_of(ParityBench.make(tmp_path))
    monkeypatch.setattr(replay.policies.model(1), "_logit_scale", logit_scale)
    whole = replay.logprobs(as_labelled(row) for row in sample.rows)
    pieces = replay.logprobs(
        ReplayPlan(row, ((1, 0, 5), (1, 5, 6), (1, 6, int(row.sampled[-1])))) for row in sample.rows
    )
    torch.testing.assert_close(pieces, whole, rtol=0, atol=5e-6)


def test_the_budget_of_a_pass_changes_nothing(tmp_path) -> None:
    bench = ParityBench.make(tmp_path)
    answers = bench.engine().generate(prompts(3, 9), 3, 12, version=1, updates={5: 2}, sampling=COLD)
    sample = read_sample(groups_of(answers), 48, lambda version: True)
    found = []
    for budget in (1, 50, 8192):
        policies = PolicyStore(configuration(bench.folder), bench.files.get, torch.device("cpu"))
        replay = Replay(sample, policies, budget)
        found.append(replay.logprobs(as_labelled(row) for row in sample.rows))
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=5e-6)
    torch.testing.assert_close(found[1], found[2], rtol=0, atol=5e-6)


def test_tokens_without_a_plan_have_no_logprob(tmp_path) -> None:
    sample, replay = replay_of(ParityBench.make(tmp_path))
    found = replay.logprobs(as_labelled(row) for row in sample.rows[:2])
    assert (~found.isnan()).nonzero()[:, 0].tolist() == list(range(24))


def test_segments_pack_as_the_trainer_packs_them_and_without_reward_variance_too() -> None:
    groups = [random_group(n, 5) for n in range(1, 6)]
    config = configuration("none", max_lag=9)
    (theirs,) = pack(groups, lambda version: 0, config).microbatches
    segments = [(g, r.segments[0], 1.0) for g, group in enumerate(groups) for r in group.rollouts]
    ((ours, places),) = pack_segments(segments, config.trainer.tokens_per_microbatch)
    for name in ("token_ids", "position_ids", "predicting", "targets", "behavior_logprobs", "temperature", "row_ids"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert sorted(places) == list(range(len(segments)))
    tokens = [b for place in places for b in segments[place][1].behavior_logprobs]
    assert bytes(tokens) == ours.behavior_logprobs.numpy().tobytes()
    flat = group_of(1, [[segment([1, 2, 3], [(1, 3)], [7, 7])]] * 2, [1.0, 1.0])
    assert pack([flat], lambda version: 0, config).microbatches == ()
    assert sum(len(m.targets) for m, _ in pack_segments([(0, flat.rollouts[0].segments[0], 1.0)], 100)) == 2
