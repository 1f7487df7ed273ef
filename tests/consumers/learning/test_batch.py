"""Groups are packed into rows: every token finds its place, its target and its mask, or is left out and counted."""

import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from penstock.consumers.learning.batch.batch import MicroBatch, Support
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.batch.trainable import check_trainable
from penstock.schemas.config import AdvantageConfig, TeacherConfig, TrainerConfig
from penstock.schemas.policy import FutureVersionError, UnknownVersionError
from penstock.schemas.rollout import RecordError, RolloutGroup, pack_ids, unpack_floats, unpack_ids
from training_groups import VOCABULARY, configuration, group_of, lag_from, random_group, random_groups, segment

CONFIG = configuration("none", max_lag=2)


def _one_row(*versions: int, prompt: int = 3) -> RolloutGroup:
    """Two siblings that differ in reward; the second holds one token of version 7."""
    ids = list(range(prompt + len(versions)))
    first = segment(ids, [(prompt, len(ids))], list(versions))
    second = segment([*ids[:prompt], 9], [(prompt, prompt + 1)], [7])
    return group_of(1, [[first], [second]], [1.0, 0.0])


def _rows(microbatch: MicroBatch) -> list[list[int]]:
    """Each row's token ids, read back through the attention layout by its positions."""
    rows = []
    for bucket in microbatch.layout.buckets:
        for row in bucket:
            positions = microbatch.position_ids[row]
            length = int((positions == torch.arange(len(row))).int().cumprod(0).sum())
            rows.append(microbatch.token_ids[row[:length]].tolist())
    return rows


def test_every_sampled_token_finds_its_prediction_its_target_and_its_numbers() -> None:
    groups = random_groups(5, 5, temperature=0.5)
    batch = pack(groups, lag_from(7), configuration("none", max_lag=9))
    (m,) = batch.microbatches
    wanted = []
    for group in groups:
        rewards = torch.tensor([rollout.reward.value for rollout in group.rollouts])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for rollout, advantage in zip(group.rollouts, advantages.tolist(), strict=True):
            (part,) = rollout.segments
            ids, at = list(unpack_ids(part.token_ids)), [p for a, b in part.loss_mask for p in range(a, b)]
            versions = [s.version for s in part.version_spans for _ in range(s.start, s.end)]
            for p, b, v in zip(at, unpack_floats(part.behavior_logprobs), versions, strict=True):
                wanted.append((ids[p - 1], p - 1, ids[p], b, 7 - v, len(at), pytest.approx(advantage, abs=1e-5)))
    columns = m.token_ids[m.predicting], m.position_ids[m.predicting], m.targets, m.behavior_logprobs, m.lag
    found = zip(*(column.tolist() for column in (*columns, m.rollout_tokens, m.advantages)), strict=True)
    assert sorted(found) == sorted(wanted, key=lambda token: token[:6])
    assert set(m.temperature.tolist()) == {0.5}
    assert batch.minibatches[0].num_tokens == batch.num_tokens_trained == len(wanted)


def test_rows_end_at_their_last_prediction_and_share_the_context_of_their_group_alone() -> None:
    # Two turns, then a tool's answer that nothing is sampled after.
    turns = segment([1, 2, 3, 4, 5, 6, 7, 8], [(2, 4), (5, 6)], [7, 7, 7])
    group = group_of(1, [[turns], [segment([1, 2, 9], [(2, 3)], [7])]], [1.0, 0.0])
    (microbatch,) = pack([group], lag_from(7), CONFIG).microbatches
    assert _rows(microbatch) == [[1, 2, 3, 4, 5], [1, 2]]
    assert (microbatch.targets.tolist(), microbatch.row_ids.tolist()) == ([3, 4, 6, 9], [0, 0, 0, 1])

    prompt = [4, 5, 6, 7]
    siblings = [[segment([*prompt, i, i], [(4, 6)], [7, 7])] for i in range(8)]
    group = group_of(1, siblings, [float(i) for i in range(8)])
    (microbatch,) = pack([group], lag_from(7), CONFIG).microbatches
    assert len(microbatch.token_ids) == 4 + 8
    assert _rows(microbatch) == [[*prompt, i] for i in range(8)]
    assert microbatch.token_ids[microbatch.predicting].tolist() == [t for i in range(8) for t in (7, i)]

    groups = [group_of(i, [[segment([1, 2, 3], [(2, 3)], [7])]] * 2, [0.0, 1.0]) for i in (1, 2)]
    (microbatch,) = pack(groups, lag_from(7), CONFIG).microbatches
    assert len(microbatch.token_ids) == 4, "equal contexts of different groups stay apart"


def _lag_with_unknown(version: int) -> int:
    if version == -1:
        raise UnknownVersionError("version -1 is unknown")
    return 7 - version


def test_tokens_past_twice_max_lag_are_masked_and_counted_and_an_unknown_version_is_the_rows_oldest() -> None:
    for versions, changes, lags, num_masked in (
        ((2, 3, 4, 5), {}, [5, 4, 3, 2, 0], 1),
        ((3, 4, 5, 6), {"max_lag": 1}, [4, 3, 2, 1, 0], 2),
        ((6, 7), {"mode": "synchronous"}, [1, 0, 0], 1),
        ((-1, 5, 6), {}, [2, 2, 1, 0], 0),
        ((-1, -1), {}, [2, 2, 0], 0),  # none is known: the lag bound
        ((-1, 7), {}, [1, 0, 0], 0),  # never fresh
    ):
        config = configuration("none", **{"max_lag": 2} | changes)
        batch = pack([_one_row(*versions)], _lag_with_unknown, config)
        ((microbatch,), (minibatch,)) = batch.microbatches, batch.minibatches
        assert microbatch.lag.tolist() == lags, versions
        assert microbatch.loss_mask.tolist() == [lag <= config.oldest_lag for lag in lags], versions
        counts = minibatch.num_tokens, batch.num_tokens_trained, batch.num_tokens_masked_lag
        assert counts == (len(lags), len(lags) - num_masked, num_masked), versions
        assert batch.lag_histogram == {lag: lags.count(lag) for lag in lags}, versions
        assert microbatch.rollout_tokens.tolist() == [len(versions)] * len(versions) + [1], versions
    for versions, max_lag in (((1, 1), 2), ((-1, -1), 0)):  # a row that is masked throughout
        batch = pack([_one_row(*versions)], _lag_with_unknown, configuration("none", max_lag=max_lag))
        assert (batch.num_rows, batch.minibatches[0].num_tokens, batch.num_tokens_masked_lag) == (1, 3, 2)

    def from_the_future(version: int) -> int:
        raise FutureVersionError(f"version {version} is ahead")

    with pytest.raises(FutureVersionError):
        pack([_one_row(8)], from_the_future, CONFIG)


def test_groups_without_variance_are_left_out_but_counted() -> None:
    flat = group_of(2, [[segment([1, 2], [(1, 2)], [1])], [segment([1, 3], [(1, 2)], [6])]], [1.0, 1.0])
    batch = pack([_one_row(7, 7), flat], lag_from(7), CONFIG)
    assert [any(own) for own in batch.group_advantages.values()] == [True, False]
    assert (batch.minibatches[0].num_tokens, batch.minibatches[0].num_rollouts) == (5, 4)
    assert (batch.num_tokens_trained, batch.num_rows, batch.num_tokens_masked_lag) == (3, 2, 1)
    assert batch.lag_histogram == {0: 3, 1: 1, 6: 1}
    assert batch.outcome["reward"] == pytest.approx(3 / 4)
    assert batch.indexes == (1, 2)


def test_a_rollout_of_each_group_without_variance_is_kept_for_the_metrics() -> None:
    def flat(index: int) -> RolloutGroup:
        siblings = [segment([1, 2, 3, 4][: 2 + n], [(1, 2 + n)], [2] + [7] * n) for n in range(3)]
        return group_of(index, [[sibling] for sibling in siblings], [0.1] * 3)

    config = configuration("none", max_lag=2)
    (minibatch,) = pack([_one_row(7), flat(3), flat(4), flat(5)], lag_from(7), config).minibatches
    (sample,) = minibatch.skipped
    # Of 1, 2 and 3 tokens, the first of each too old: nothing is left of sibling 0, so 1 and 2 take turns.
    assert sorted(sample.row_ids.bincount().tolist()) == [2, 3, 3]
    assert int(sample.loss_mask.sum()) * minibatch.skipped_scale == pytest.approx(3 * (1 + 2))
    assert not sample.advantages.any()
    assert len(minibatch.microbatches[0].targets) == 2


def test_every_row_is_trained_on_where_the_objective_asks_for_it() -> None:
    flat = random_group(2, 0, rewards=[0.1] * 3, siblings=3)
    batch = pack([_one_row(7, 7), flat], lag_from(7), CONFIG, every_row=True)
    (minibatch,) = batch.minibatches
    (microbatch,) = minibatch.microbatches
    assert minibatch.skipped == () and len(microbatch.targets) == minibatch.num_tokens
    assert batch.num_tokens_trained + batch.num_tokens_masked_lag == minibatch.num_tokens
    of_flat = torch.tensor([minibatch.places[0][row].group == 2 for row in microbatch.row_ids.tolist()])
    assert not microbatch.advantages[of_flat].any(), "0 to the bit, whatever the mean of 0.1 rounds to"


def test_segments_of_one_rollout_share_its_token_count_and_one_without_sampled_tokens_makes_no_row() -> None:
    empty, longer = segment([1, 2], [], []), segment([1, 2, 3, 4, 5], [(4, 5)], [7])
    turns = [empty, segment([1, 2, 3], [(1, 3)], [7, 7]), longer]
    batch = pack([group_of(1, [turns, [segment([1, 9], [(1, 2)], [7])]], [1.0, 0.0])], lag_from(7), CONFIG)
    assert (batch.num_rows, batch.minibatches[0].num_rollouts) == (3, 2)
    assert sorted(batch.microbatches[0].rollout_tokens.tolist()) == [1, 3, 3, 3]


def test_micro_batches_keep_to_the_token_budget_and_a_longer_row_is_one_of_its_own() -> None:
    groups = random_groups(8, 2)
    config = configuration("none", max_lag=9, trainer=TrainerConfig(tokens_per_microbatch=24))
    batch, whole = pack(groups, lag_from(7), config), pack(groups, lag_from(7), configuration("none", max_lag=9))
    assert len(batch.microbatches) > 2
    assert all(len(m.token_ids) <= 24 for m in batch.microbatches)
    assert sum(len(m.targets) for m in batch.microbatches) == len(whole.microbatches[0].targets)
    long = segment(list(range(20)), [(1, 20)], [7] * 19)
    group = group_of(1, [[long], [segment([0, 1], [(1, 2)], [7])]], [1.0, 0.0])
    config = configuration("none", trainer=TrainerConfig(tokens_per_microbatch=8))
    assert [len(m.token_ids) for m in pack([group], lag_from(7), config).microbatches] == [19, 1]


def test_mini_batches_split_the_groups_in_their_order_with_denominators_of_their_own() -> None:
    groups = [*random_groups(6, 2), random_group(7, 2, rewards=[1.0] * 4)]
    config = configuration("none", mode="synchronous", trainer=TrainerConfig(num_minibatches=3))
    batch = pack(groups, lambda version: 0, config)
    assert [minibatch.indexes for minibatch in batch.minibatches] == [(1, 2), (3, 4), (5, 6, 7)]
    for minibatch in batch.minibatches:
        part = [group for group in groups if group.index in minibatch.indexes]
        alone = pack(part, lambda version: 0, configuration("none", mode="synchronous")).minibatches[0]
        assert (minibatch.num_tokens, minibatch.num_rollouts) == (alone.num_tokens, alone.num_rollouts)
        for got, wanted in zip(minibatch.microbatches, alone.microbatches, strict=True):
            assert torch.equal(got.targets, wanted.targets) and torch.equal(got.row_ids, wanted.row_ids)
    assert batch.indexes == (1, 2, 3, 4, 5, 6, 7)
    config = configuration("none", max_lag=9, trainer=TrainerConfig(num_minibatches=4))
    fewer = pack(random_groups(2, 2), lag_from(7), config)
    assert sorted(minibatch.indexes for minibatch in fewer.minibatches) == [(1,), (2,)]


def test_mini_batches_of_an_asynchronous_batch_are_drawn_by_seed_and_batch() -> None:
    def split(seed: int, first: int = 1) -> list[tuple[int, ...]]:
        groups = [random_group(i, 2) for i in range(first, first + 6)]
        config = configuration("none", max_lag=9, seed=seed, trainer=TrainerConfig(num_minibatches=2))
        batch = pack(groups, lag_from(7), config)
        assert sorted(batch.indexes) == [group.index for group in groups]
        return [minibatch.indexes for minibatch in batch.minibatches]

    assert split(0) == split(0)
    # By chance alone all of these would be equal once in 6 ** 5 times or less.
    assert len({str(sorted(split(seed)[0])) for seed in range(6)}) > 1
    assert len({str([index - first for index in split(0, first)[0]]) for first in range(1, 7)}) > 1


def test_a_tile_of_a_support_is_that_of_its_tokens_and_ids() -> None:
    support = Support(torch.tensor([3, 1, 2, 0]), torch.tensor([1, 0, 2, 1]))
    whole = torch.tensor([[0, 0, 0, 1, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    for tokens in (slice(0, 1), slice(1, 3), slice(2, 9), slice(0, 4), slice(2, 2)):
        for ids in (slice(0, 5), slice(0, 2), slice(2, 5), slice(1, 3)):
            assert torch.equal(support.mask(tokens, ids), whole[tokens, ids])
    for target in range(5):
        assert torch.equal(support.holds(torch.full((4,), target)), whole[:, target])


def _cut_off_groups() -> list[RolloutGroup]:
    """Rewards 1, 0, 0 and 1, 0: the second rollout of the first group and all of the second group are truncated."""
    one = segment([1, 2, 3], [(2, 3)], [7])
    cut = replace(segment([1, 2, 4, 5, 6], [(2, 5)], [7, 7, 7]), finish_reason="length")
    turns = [replace(one, finish_reason="length"), segment([9, 8], [(1, 2)], [7])]
    return [group_of(1, [[one], [cut], turns], [1.0, 0.0, 0.0]), group_of(2, [[cut], [cut]], [1.0, 0.0])]


def test_truncated_rollouts_are_trained_on_masked_or_penalized_as_the_run_file_says() -> None:
    """Masked ones leave the loss and its denominators, but not their siblings' mean."""
    for truncated, fields, counts, num_trained, advantages in (
        ("train", {}, (12, 5), 12, ((2 / 3, -1 / 3, -1 / 3), (0.5, -0.5))),
        ("mask", {}, (3, 2), 3, ((2 / 3, -1 / 3, -1 / 3), (0.5, -0.5))),
        ("penalize", {"truncated_reward": -2.0}, (12, 5), 6, ((4 / 3, -5 / 3, 1 / 3), (0.0, 0.0))),
    ):
        advantage = AdvantageConfig(truncated=truncated, kwargs={"normalize_std": False}, **fields)
        batch = pack(_cut_off_groups(), lag_from(7), configuration("none", max_lag=2, advantage=advantage))
        (minibatch,) = batch.minibatches
        assert (minibatch.num_tokens, minibatch.num_rollouts, batch.num_tokens_trained) == (*counts, num_trained)
        assert [pytest.approx(own) for own in batch.group_advantages.values()] == list(advantages), truncated
        # What they earned; a turn that ended at the limit before the last does not count.
        assert batch.outcome["reward"] == pytest.approx(0.4) and batch.outcome["truncated_rollouts"] == 3
        if truncated == "mask":
            assert sorted(batch.microbatches[0].targets.tolist()) == [3, 3, 8]
            assert batch.microbatches[0].loss_mask.all()


def _sampled(**settings: Any) -> RolloutGroup:
    group = random_group(4, 0)
    return replace(group, sampling=replace(group.sampling, **settings))


def test_what_the_trainer_cannot_reproduce_is_refused_by_group_and_value() -> None:
    without_context = group_of(3, [[segment([1, 2], [(0, 2)], [7, 7])], [segment([1, 2], [(1, 2)], [7])]], [0.0, 1.0])
    masked = replace(segment([1, 2], [(1, 2)], [7]), sampling_mask=(pack_ids([2, VOCABULARY]),))
    of_top_k = replace(group_of(3, [[masked]], [1.0]), sampling=_sampled(top_k=3).sampling)
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    for group, message in (
        *((_sampled(temperature=t), "sampled at temperature .* 0 or more") for t in (-1.0, math.nan, math.inf)),
        (_sampled(top_p=0.9), r"sampled with top_p 0\.9 and top_k 0 and no sampling_mask"),
        (_sampled(top_k=5), "top_k 5 and no sampling_mask"),
        *((_sampled(**{name: 0.5}), rf"{name} 0\.5.*; the trainer reproduces") for name in penalties),
        (without_context, "loss_mask starts at token 0"),
        (group_of(3, [[segment([1, VOCABULARY], [(1, 2)], [7])]], [0.0]), "token id 23, expected less than .* 23"),
        (of_top_k, "sampling_mask holds token id 23, expected less than"),
    ):
        with pytest.raises(RecordError, match=f"group {group.index}: .*{message}"):
            check_trainable(group, VOCABULARY)
    with pytest.raises(RecordError, match="group 3"):
        pack([without_context], lag_from(7), CONFIG)
    group = random_group(4, 0)
    check_trainable(group, VOCABULARY)
    with pytest.raises(RecordError, match=r"group 4: no teacher_logprobs, which its producer should have requested"):
        check_trainable(group, VOCABULARY, needs_teacher=True)
    with pytest.raises(RecordError, match=r"group 4: no teacher_logprobs"):
        pack([group], lag_from(7), configuration("none", teacher=TeacherConfig(url="http://127.0.0.1:1/v1")))
