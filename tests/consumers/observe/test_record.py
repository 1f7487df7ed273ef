"""The record of a batch equals what a computation beside the trainer finds, token by token."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.batch.packing import pack, pack_segments
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.observe.record import Taken, records_of
from penstock.schemas.config import CorrectionConfig, TrainerConfig
from penstock.schemas.record import sampled_tokens
from penstock.schemas.record_reader import Record
from penstock.schemas.rollout import encode_group
from recorded_training import RecordedTraining, settings
from training_groups import configuration, group_of, random_group, random_groups, segment

CURRENT = 7
THRESHOLD = 1.5


def taken_of(groups, config, *, learner=None):
    lag_of = LagTable(CURRENT, {}, {})
    batch = pack(groups, lag_of, config)
    return Taken(0, 0, groups, batch, (learner or Learner(config)).step(batch), lag_of)


@pytest.mark.parametrize(("budget", "minibatches"), [(30, 3), (8192, 1)])
def test_every_token_is_recorded_with_the_trainers_own_numbers(folder, budget, minibatches):
    config = configuration(
        folder,
        max_lag=3,
        correction=CorrectionConfig(threshold=THRESHOLD, mode="token_mask"),
        trainer=TrainerConfig(device="cpu", tokens_per_microbatch=budget, num_minibatches=minibatches),
    )
    groups = [*random_groups(6, 5), random_group(7, 5, rewards=[1.0] * 4)]
    before = Learner(config)
    num_masked = num_kept = 0
    head, recorded = records_of(taken_of(groups, config), config)
    assert [entry.index for entry in head.groups] == [1, 2, 3, 4, 5, 6, 7]
    for group, entry, found in zip(groups, head.groups, recorded, strict=True):
        assert found.payload == encode_group(group)
        rewards = np.array([rollout.reward.value for rollout in group.rollouts])
        assert entry.advantages == pytest.approx((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4))
        for rollout, findings in zip(group.rollouts, found.findings, strict=True):
            (part,), (scores,) = rollout.segments, findings
            tokens = sampled_tokens(part, scores)
            assert [token.lag for token in tokens] == [CURRENT - token.version for token in tokens]
            if group.index == 7 or min(token.lag for token in tokens) > config.oldest_lag:
                assert all(token.proximal_logprob is None and token.is_kept is None for token in tokens)
                continue
            ((microbatch, _),) = pack_segments([(0, part, 1.0)], 8192)
            with torch.no_grad():
                expected = before.scorer.logprobs(microbatch)[0].tolist()
            # The first mini-batch's step has not moved what the proximal policy says of the others.
            assert [token.proximal_logprob for token in tokens] == pytest.approx(expected, abs=2e-5)
            for token in tokens:
                ratio = math.exp(token.proximal_logprob - token.behavior_logprob)
                is_kept = token.lag <= config.oldest_lag and ratio <= THRESHOLD
                assert token.is_kept == is_kept
                assert token.importance_weight == pytest.approx(ratio if is_kept else 0.0, rel=1e-5)
                num_kept += is_kept
                num_masked += not is_kept
    assert num_kept > 20 and num_masked > 20
    skipped = head.groups[6]
    assert (skipped.outcome, skipped.num_masked, skipped.ess_fraction, skipped.max_weight) == ("skipped",) + (None,) * 3
    assert head.groups[0].outcome == "trained"


def test_a_group_in_short_says_what_its_tokens_say(folder):
    config = configuration(folder, max_lag=3, correction=CorrectionConfig("token_truncate", 1.2))
    groups = [random_group(n, 9) for n in range(1, 5)]
    head, recorded = records_of(taken_of(groups, config), config)
    for group, entry, found in zip(groups, head.groups, recorded, strict=True):
        tokens = [
            token
            for rollout, findings in zip(group.rollouts, found.findings, strict=True)
            for token in sampled_tokens(rollout.segments[0], findings[0])
        ]
        scored = [token for token in tokens if token.proximal_logprob is not None]
        ratios = [math.exp(token.proximal_logprob - token.behavior_logprob) for token in scored]
        assert entry.ess_fraction == pytest.approx(sum(ratios) ** 2 / len(ratios) / sum(r * r for r in ratios))
        assert entry.max_weight == max(token.importance_weight for token in scored) <= np.float32(1.2)
        assert entry.num_masked == sum(not token.is_kept for token in tokens)
        assert (entry.min_version, entry.max_version) == (
            min(t.version for t in tokens),
            max(t.version for t in tokens),
        )
        assert (entry.min_lag, entry.max_lag) == (min(t.lag for t in tokens), max(t.lag for t in tokens))
        assert sum(entry.num_sampled_tokens) == len(tokens)
        assert entry.finish_reasons == ("stop",) * 4


def test_an_unknown_version_is_recorded_with_the_lag_that_it_was_counted_with(folder):
    config = configuration(folder, max_lag=4)
    parts = [segment([1, 2, 3, 4], [(1, 4)], [-1, 5, 5]), segment([1, 2, 3], [(1, 3)], [7, 7])]
    group = group_of(1, [[part] for part in parts], [1.0, 0.0])
    _, (recorded,) = records_of(taken_of([group], config), config)
    assert [token.lag for token in sampled_tokens(parts[0], recorded.findings[0][0])] == [2, 2, 2]


def test_a_group_that_a_failed_step_spares_is_recorded_as_that_and_a_run_without_record_keeps_no_tokens(folder):
    taken = taken_of(random_groups(3, 1), configuration(folder))
    report = replace(taken.report, failed={1: "loss is not finite"}, spared=frozenset({2}))
    head, _ = records_of(taken._replace(report=report), configuration(folder))
    assert [(entry.index, entry.outcome) for entry in head.groups] == [(1, "dead"), (2, "spared"), (3, "trained")]
    assert taken.report.findings
    assert taken_of(random_groups(1, 1), configuration(folder, record=False)).report.findings == {}


def test_what_a_recorder_wrote_is_read_with_its_settings(tmp_path, folder):
    training = RecordedTraining(tmp_path / "run", folder)
    training.train(3)
    record = Record(tmp_path / "run")
    assert [record.head(at).metrics for at in record.batches] == [report.metrics for report in training.reports]
    assert record.header.config["trainer"]["num_minibatches"] == settings(folder).trainer.num_minibatches
    assert len(record.header.model_digest) == 32
