"""Groups are packed into rows: every token finds its place, its target and its mask, or is left out and counted."""

import msgspec
import pytest
import torch

from penstock.consumers.learning.batch.batch import MicroBatch, Support
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.batch.trainable import check_trainable
from penstock.schemas.config import AdvantageConfig, RunConfig, TeacherConfig, TrainerConfig
from penstock.schemas.policy import FutureVersionError, UnknownVersionError
from penstock.schemas.rollout import RecordError, RolloutGroup, unpack_floats, unpack_ids
from training_groups import VOCABULARY, configuration, group_of, lag_from, random_group, segment

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
    groups = [random_group(i, 5) for i in range(1, 6)]
    batch = pack(groups, lag_from(7), configuration("none", max_lag=9))
    (microbatch,) = batch.microbatches
    wanted = []
    for group in groups:
        for rollout in group.rollouts:
            (own,) = rollout.segments
            ids, at = list(unpack_ids(own.token_ids)), [p for a, b in own.loss_mask for p in range(a, b)]
            versions = [s.version for s in own.version_spans for _ in range(s.start, s.end)]
            for p, b, v in zip(at, unpack_floats(own.behavior_logprobs), versions, strict=True):
                wanted.append((ids[p - 1], p - 1, ids[p], b, 7 - v, len(at)))
    m = microbatch
    got = zip(
        m.token_ids[m.predicting].tolist(),
        m.position_ids[m.predicting].tolist(),
        m.targets.tolist(),
        m.behavior_logprobs.tolist(),
        m.lag.tolist(),
        m.rollout_tokens.tolist(),
        strict=True,
    )
    assert sorted(got) == sorted(wanted)
    assert batch.minibatches[0].num_tokens == batch.num_tokens_trained == len(wanted)


def test_rows_hold_their_tokens_up_to_the_last_prediction() -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    # Two turns, then a tool's answer that nothing is sampled after.
    turns = segment(ids, [(2, 4), (5, 6)], [7, 7, 7])
    group = group_of(1, [[turns], [segment([1, 2, 9], [(2, 3)], [7])]], [1.0, 0.0])
    (microbatch,) = pack([group], lag_from(7), CONFIG).microbatches
    assert _rows(microbatch) == [[1, 2, 3, 4, 5], [1, 2]]
    assert microbatch.targets.tolist() == [3, 4, 6, 9]
    assert microbatch.row_ids.tolist() == [0, 0, 0, 1]


def test_a_context_that_siblings_share_is_packed_once() -> None:
    prompt = [4, 5, 6, 7]
    siblings = [[segment([*prompt, i, i], [(4, 6)], [7, 7])] for i in range(8)]
    group = group_of(1, siblings, [float(i) for i in range(8)])
    (microbatch,) = pack([group], lag_from(7), CONFIG).microbatches
    assert len(microbatch.token_ids) == 4 + 8
    assert _rows(microbatch) == [[*prompt, i] for i in range(8)]
    assert microbatch.token_ids[microbatch.predicting].tolist() == [t for i in range(8) for t in (7, i)]


def test_equal_contexts_of_different_groups_stay_apart() -> None:
    groups = [group_of(i, [[segment([1, 2, 3], [(2, 3)], [7])]] * 2, [0.0, 1.0]) for i in (1, 2)]
    (microbatch,) = pack(groups, lag_from(7), CONFIG).microbatches
    assert len(microbatch.token_ids) == 4


def test_tokens_past_the_lag_bound_are_masked_and_counted() -> None:
    batch = pack([_one_row(3, 4, 5, 6)], lag_from(7), CONFIG)
    (microbatch,) = batch.microbatches
    assert microbatch.lag.tolist() == [4, 3, 2, 1, 0]
    assert microbatch.loss_mask.tolist() == [False, False, True, True, True]
    assert (batch.minibatches[0].num_tokens, batch.num_tokens_trained, batch.num_tokens_masked_lag) == (5, 3, 2)
    assert batch.lag_histogram == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    assert microbatch.rollout_tokens.tolist() == [4, 4, 4, 4, 1]


def test_synchronous_mode_masks_everything_but_lag_0() -> None:
    config = configuration("none", max_lag=2, mode="synchronous")
    assert pack([_one_row(6, 7)], lag_from(7), config).num_tokens_masked_lag == 1


def test_a_row_that_is_masked_throughout_is_left_out_but_counted() -> None:
    batch = pack([_one_row(1, 1)], lag_from(7), CONFIG)
    assert batch.num_rows == 1
    assert (batch.minibatches[0].num_tokens, batch.num_tokens_masked_lag) == (3, 2)


def _lag_with_unknown(version: int) -> int:
    if version == -1:
        raise UnknownVersionError("version -1 is unknown")
    return 7 - version


def test_an_unknown_version_counts_as_the_rows_oldest_known_one() -> None:
    (microbatch,) = pack([_one_row(-1, 5, 6)], _lag_with_unknown, CONFIG).microbatches
    assert microbatch.lag.tolist() == [2, 2, 1, 0]


def test_a_row_of_unknown_versions_counts_as_the_lag_bound() -> None:
    (microbatch,) = pack([_one_row(-1, -1)], _lag_with_unknown, CONFIG).microbatches
    assert microbatch.lag.tolist() == [2, 2, 0]


def test_an_unknown_version_is_never_fresh() -> None:
    (microbatch,) = pack([_one_row(-1, 7)], _lag_with_unknown, CONFIG).microbatches
    assert microbatch.lag.tolist() == [1, 0, 0]
    batch = pack([_one_row(-1, -1)], _lag_with_unknown, configuration("none", max_lag=0))
    assert (batch.num_tokens_masked_lag, batch.num_tokens_trained) == (2, 1)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_a_temperature_that_nothing_is_sampled_at_is_refused(temperature) -> None:
    with pytest.raises(RecordError, match=r"group 1: sampled at temperature .*, expected a finite number of 0 or more"):
        check_trainable(random_group(1, 0, temperature=temperature), VOCABULARY)


def test_a_version_from_the_future_is_not_swallowed() -> None:
    def lag_of(version: int) -> int:
        raise FutureVersionError(f"version {version} is ahead")

    with pytest.raises(FutureVersionError):
        pack([_one_row(8)], lag_of, CONFIG)


def test_groups_without_variance_are_left_out_but_counted() -> None:
    flat = random_group(2, 0, rewards=[1.0] * 4)
    batch = pack([_one_row(7, 7), flat], lag_from(7), CONFIG)
    assert [any(own) for own in batch.group_advantages.values()] == [True, False]
    assert batch.minibatches[0].num_tokens == 3 + sum(rollout.num_sampled_tokens for rollout in flat.rollouts)
    assert (batch.minibatches[0].num_rollouts, batch.num_tokens_trained, batch.num_rows) == (6, 3, 2)
    assert batch.outcome["reward"] == pytest.approx(5 / 6)
    assert batch.indexes == (1, 2)


def test_a_rollout_of_each_group_without_variance_is_kept_for_the_metrics() -> None:
    def flat(index: int) -> RolloutGroup:
        siblings = [segment([1, 2, 3, 4][: 2 + n], [(1, 2 + n)], [2] + [7] * n) for n in range(3)]
        return group_of(index, [[sibling] for sibling in siblings], [0.1] * 3)

    config = configuration("none", max_lag=4)
    (minibatch,) = pack([_one_row(7), flat(3), flat(4), flat(5)], lag_from(7), config).minibatches
    (sample,) = minibatch.skipped
    # Of 1, 2 and 3 tokens, the first of each past the lag bound: nothing is left of sibling 0, so 1 and 2 take turns.
    assert sorted(sample.row_ids.bincount().tolist()) == [2, 3, 3]
    assert int(sample.loss_mask.sum()) * minibatch.skipped_scale == pytest.approx(3 * (1 + 2))
    assert not sample.advantages.any()
    assert len(minibatch.microbatches[0].targets) == 2


def test_the_lag_histogram_is_of_every_group() -> None:
    flat = group_of(2, [[segment([1, 2], [(1, 2)], [1])], [segment([1, 3], [(1, 2)], [6])]], [1.0, 1.0])
    batch = pack([_one_row(7), flat], lag_from(7), CONFIG)
    assert batch.lag_histogram == {0: 2, 1: 1, 6: 1}
    assert (batch.num_tokens_trained, batch.num_tokens_masked_lag) == (2, 1)


def test_every_row_is_trained_on_where_the_objective_asks_for_it() -> None:
    flat = random_group(2, 0, rewards=[0.1] * 3, siblings=3)
    batch = pack([_one_row(7, 7), flat], lag_from(7), CONFIG, every_row=True)
    (minibatch,) = batch.minibatches
    (microbatch,) = minibatch.microbatches
    assert minibatch.skipped == () and len(microbatch.targets) == minibatch.num_tokens
    assert batch.num_tokens_trained + batch.num_tokens_masked_lag == minibatch.num_tokens
    of_flat = torch.tensor([minibatch.places[0][row].group == 2 for row in microbatch.row_ids.tolist()])
    assert not microbatch.advantages[of_flat].any(), "0 to the bit, whatever the mean of 0.1 rounds to"


def test_advantages_and_temperature_are_their_rollouts() -> None:
    group = group_of(
        1, [[segment([1, 2, 3], [(1, 3)], [7, 7])], [segment([1, 5], [(1, 2)], [7])]], [1.0, 0.0], temperature=0.5
    )
    (microbatch,) = pack([group], lag_from(7), CONFIG).microbatches
    expected = 0.5 / (0.5**0.5 + 1e-4)
    torch.testing.assert_close(microbatch.advantages, torch.tensor([expected, expected, -expected]))
    assert microbatch.temperature.tolist() == [0.5] * 3


def test_segments_of_one_rollout_share_its_advantage_and_token_count() -> None:
    two = [segment([1, 2, 3], [(1, 3)], [7, 7]), segment([1, 2, 3, 4, 5], [(4, 5)], [7])]
    group = group_of(1, [two, [segment([1, 9], [(1, 2)], [7])]], [1.0, 0.0])
    batch = pack([group], lag_from(7), CONFIG)
    (microbatch,) = batch.microbatches
    assert batch.num_rows == 3
    assert batch.minibatches[0].num_rollouts == 2
    assert sorted(microbatch.rollout_tokens.tolist()) == [1, 3, 3, 3]


def test_a_segment_without_sampled_tokens_makes_no_row() -> None:
    group = group_of(
        1, [[segment([1, 2], [], []), segment([1, 2], [(1, 2)], [7])], [segment([1, 3], [(1, 2)], [7])]], [1.0, 0.0]
    )
    assert pack([group], lag_from(7), CONFIG).num_rows == 2


def test_micro_batches_keep_to_the_token_budget() -> None:
    groups = [random_group(i, 2) for i in range(1, 9)]
    config = configuration("none", max_lag=9, trainer=TrainerConfig(tokens_per_microbatch=24))
    batch = pack(groups, lag_from(7), config)
    whole = pack(groups, lag_from(7), configuration("none", max_lag=9))
    assert len(batch.microbatches) > 2
    assert all(len(m.token_ids) <= 24 for m in batch.microbatches)
    assert sum(len(m.targets) for m in batch.microbatches) == len(whole.microbatches[0].targets)


def test_a_row_longer_than_the_budget_makes_a_micro_batch_of_its_own() -> None:
    long = segment(list(range(20)), [(1, 20)], [7] * 19)
    group = group_of(1, [[long], [segment([0, 1], [(1, 2)], [7])]], [1.0, 0.0])
    config = configuration("none", trainer=TrainerConfig(tokens_per_microbatch=8))
    assert [len(m.token_ids) for m in pack([group], lag_from(7), config).microbatches] == [19, 1]


def test_mini_batches_split_the_groups_in_their_order_with_denominators_of_their_own() -> None:
    groups = [random_group(i, 2) for i in range(1, 7)] + [random_group(7, 2, rewards=[1.0] * 4)]
    config = configuration("none", mode="synchronous", trainer=TrainerConfig(num_minibatches=3))
    batch = pack(groups, lambda version: 0, config)
    assert [minibatch.indexes for minibatch in batch.minibatches] == [(1, 2), (3, 4), (5, 6, 7)]
    for minibatch in batch.minibatches:
        own = [group for group in groups if group.index in minibatch.indexes]
        alone = pack(own, lambda version: 0, configuration("none", mode="synchronous")).minibatches[0]
        assert (minibatch.num_tokens, minibatch.num_rollouts) == (alone.num_tokens, alone.num_rollouts)
        for got, wanted in zip(minibatch.microbatches, alone.microbatches, strict=True):
            assert torch.equal(got.targets, wanted.targets)
            assert torch.equal(got.row_ids, wanted.row_ids)
    assert batch.indexes == (1, 2, 3, 4, 5, 6, 7)
    assert [any(own) for own in batch.group_advantages.values()] == 6 * [True] + [False]


def test_fewer_groups_than_mini_batches_make_fewer_of_them() -> None:
    config = configuration("none", max_lag=9, trainer=TrainerConfig(num_minibatches=4))
    batch = pack([random_group(1, 2), random_group(2, 2)], lag_from(7), config)
    assert sorted(minibatch.indexes for minibatch in batch.minibatches) == [(1,), (2,)]


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
    alone = pack([random_group(i, 2) for i in (1, 2, 3)], lag_from(7), configuration("none", max_lag=9))
    assert alone.indexes == (1, 2, 3)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (group_of(3, [[segment([1, 2], [(0, 2)], [7, 7])]], [0.0]), "group 3: loss_mask starts at token 0"),
        (group_of(3, [[segment([1, VOCABULARY], [(1, 2)], [7])]], [0.0]), "token id 23, expected less than .* 23"),
    ],
)
def test_what_the_model_cannot_predict_is_refused(group, message) -> None:
    with pytest.raises(RecordError, match=message):
        check_trainable(group, VOCABULARY)


def test_a_truncated_distribution_is_refused() -> None:
    group = random_group(4, 0)
    nucleus = msgspec.structs.replace(group, sampling=msgspec.structs.replace(group.sampling, top_p=0.9))
    with pytest.raises(RecordError, match=r"group 4: sampled with top_p 0\.9"):
        check_trainable(nucleus, VOCABULARY)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_distribution_with_penalties_is_refused(penalty) -> None:
    group = random_group(4, 0)
    changed = msgspec.structs.replace(group, sampling=msgspec.structs.replace(group.sampling, **{penalty: 0.5}))
    with pytest.raises(RecordError, match=rf"group 4: sampled with .*{penalty} 0\.5.*; the trainer reproduces"):
        check_trainable(changed, VOCABULARY)


def test_a_group_without_the_logprobs_of_its_teachers_server_is_refused() -> None:
    group = random_group(4, 0)
    check_trainable(group, VOCABULARY)
    with pytest.raises(RecordError, match=r"group 4: no teacher_logprobs, which its producer should have requested"):
        check_trainable(group, VOCABULARY, needs_teacher=True)
    served = configuration("none", teacher=TeacherConfig(url="http://127.0.0.1:1/v1"))
    with pytest.raises(RecordError, match=r"group 4: no teacher_logprobs"):
        pack([group], lag_from(7), served)


def test_a_tile_of_a_support_is_that_of_its_tokens_and_ids() -> None:
    support = Support(torch.tensor([3, 1, 2, 0]), torch.tensor([1, 0, 2, 1]))
    whole = torch.tensor([[0, 0, 0, 1, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    for tokens in (slice(0, 1), slice(1, 3), slice(2, 9), slice(0, 4), slice(2, 2)):
        for ids in (slice(0, 5), slice(0, 2), slice(2, 5), slice(1, 3)):
            assert torch.equal(support.mask(tokens, ids), whole[tokens, ids])
    for target in range(5):
        assert torch.equal(support.holds(torch.full((4,), target)), whole[:, target])


def _two_groups() -> list[RolloutGroup]:
    """Rewards 1, 0, 0 and 1, 0: the second rollout of the first group and all of the second group are truncated."""
    one = segment([1, 2, 3], [(2, 3)], [7])
    cut = msgspec.structs.replace(segment([1, 2, 4, 5, 6], [(2, 5)], [7, 7, 7]), finish_reason="length")
    turns = [msgspec.structs.replace(one, finish_reason="length"), segment([9, 8], [(1, 2)], [7])]
    return [group_of(1, [[one], [cut], turns], [1.0, 0.0, 0.0]), group_of(2, [[cut], [cut]], [1.0, 0.0])]


def _truncated(setting: str, **fields) -> RunConfig:
    plain = AdvantageConfig(truncated=setting, kwargs={"normalize_std": False}, **fields)  # type: ignore[arg-type]
    return configuration("none", max_lag=2, advantage=plain)


def test_truncated_rollouts_are_trained_on_as_they_are_unless_the_run_file_says_otherwise() -> None:
    batch = pack(_two_groups(), lag_from(7), _truncated("train"))
    assert (batch.minibatches[0].num_tokens, batch.minibatches[0].num_rollouts, batch.num_tokens_trained) == (12, 5, 12)
    assert batch.outcome["truncated_rollouts"] == 3, "a turn that ended at the limit before the last does not count"
    assert batch.group_advantages[2] == (0.5, -0.5)


def test_truncated_rollouts_that_are_masked_leave_the_loss_and_its_denominators_but_not_their_siblings_mean() -> None:
    batch = pack(_two_groups(), lag_from(7), _truncated("mask"))
    (microbatch,) = batch.microbatches
    assert (batch.minibatches[0].num_tokens, batch.minibatches[0].num_rollouts, batch.num_tokens_trained) == (3, 2, 3)
    assert sorted(microbatch.targets.tolist()) == [3, 3, 8] and microbatch.loss_mask.all()
    assert batch.group_advantages[1] == pytest.approx((2 / 3, -1 / 3, -1 / 3))
    assert batch.outcome["truncated_rollouts"] == 3 and batch.outcome["truncated_frac"] == 0.6


def test_truncated_rollouts_that_are_penalized_have_the_advantages_of_that_reward() -> None:
    batch = pack(_two_groups(), lag_from(7), _truncated("penalize", truncated_reward=-2.0))
    assert batch.group_advantages[1] == pytest.approx((4 / 3, -5 / 3, 1 / 3))
    assert batch.group_advantages[2] == (0.0, 0.0), "both have the same reward now"
    assert batch.outcome["reward"] == pytest.approx(0.4), "what they earned"
    assert batch.minibatches[0].num_tokens == 12 and batch.num_tokens_trained == 6


def test_a_row_without_context_never_packs() -> None:
    group = group_of(3, [[segment([1, 2], [(0, 2)], [7, 7])], [segment([1, 2], [(1, 2)], [7])]], [0.0, 1.0])
    with pytest.raises(RecordError, match="group 3"):
        pack([group], lag_from(7), CONFIG)
