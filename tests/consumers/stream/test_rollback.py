"""After a rollback: groups of policies that are lost, of the checkpoint's own and of its re-announcement."""

import itertools
import time
from collections import Counter

import pytest
from msgspec.structs import replace

from mini_producer import group_fields, make_group
from penstock.schemas.keys import Field
from penstock.schemas.policy import make_version
from penstock.schemas.rollout import Rollout, VersionSpan, encode_group
from scripted_learner import KilledError
from trainer_bench import assert_balanced, assert_settled_once
from waiting import wait_for

pytestmark = pytest.mark.redis


def kill_at(trainer, step: int) -> None:
    trainer.learner.fail_at[step] = KilledError()
    with pytest.raises(KilledError):
        trainer.run()


def steps_apart(version: int, steps: int) -> int:
    """The lag at `steps` optimizer steps after a rollback to policy 4, counted on paper."""
    if version >= make_version(1, 0):
        return steps - (version - make_version(1, 0))
    return abs(version - 4) + steps


def test_lag_is_counted_token_by_token_where_a_segment_was_in_flight_over_a_rollback(bench, redis_client):
    # Queued when the trainer is killed at policy 7: groups 29 to 34, of 5 to 7. In flight then: groups 35 to 40, whose
    # first tokens are of lost policies and whose last one is of the checkpoint's re-announcement.
    bench.overrides = ["max_lag=9"]
    first_line = itertools.cycle([(5, 6, 7), (4, 5, 5), (7, 7, 7)])
    over_the_fork = itertools.cycle([(6, 7, make_version(1, 0)), (4, 4, make_version(1, 0))])
    versions_of: dict[int, tuple[int, ...]] = {}

    def answer(index: int, version: int) -> dict:
        versions = (version,) * 3
        if 28 < index <= 40:
            wait_for(
                lambda: int(redis_client.hget(bench.keys.commit, "policy_version")) >= (7 if index < 35 else 10**9)
            )
            versions = next(first_line if index < 35 else over_the_fork)
        group = make_group(index, version)
        spans = tuple(VersionSpan(v, 3 + n, 4 + n) for n, v in enumerate(versions))
        rollouts = tuple(
            Rollout(segments=(replace(rollout.segments[0], version_spans=spans),), reward=rollout.reward)
            for rollout in group.rollouts
        )
        versions_of.setdefault(index, versions)
        return group_fields(index, version) | {Field.PAYLOAD: encode_group(replace(group, rollouts=rollouts))}

    bench.producer(answer)
    first = bench.trainer()
    update = first.run_log.update

    def update_and_die(*args, **times) -> None:
        update(*args, **times)
        if first.policy.version == 7:
            wait_for(lambda: b"34" in [entry[Field.INDEX] for _, entry in redis_client.xrange(bench.keys.rollouts)])
            raise KilledError

    first.run_log.update = update_and_die
    with pytest.raises(KilledError):
        first.run()
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == 4
    assert second.run()
    assert set(versions_of) >= set(range(29, 41))
    for steps, histogram in enumerate(second.learner.lags):
        batch = second.learner.trained[16 + 4 * steps :][:4]
        expected = Counter(steps_apart(v, steps) for index in batch for v in versions_of[index] for _ in range(2))
        assert histogram == expected, f"update {5 + steps}: groups of {[versions_of[index] for index in batch]}"
    assert_settled_once(bench, redis_client)


def test_a_rollback_of_fifty_steps_samples_stale_indexes_again_and_masks_no_token(bench, redis_client):
    bench.overrides = ["num_updates=60", "checkpoint.every=1000", "evaluation.num_prompts=0"]
    producer = bench.producer()
    first = bench.trainer()
    train = first.learner.step

    def step(batch):
        if first.learner.num_steps == 2:
            first.commits.begin()
            first.commits.complete(wait=True)
        return train(batch)

    first.learner.step = step
    kill_at(first, 52)
    before = Counter(producer.answers)
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == 2
    train_slowly = second.learner.step

    def step_slowly(batch):
        time.sleep(0.03)  # slower than sampling, as trainers are: what is released at once waits and gets old
        return train_slowly(batch)

    second.learner.step = step_slowly
    assert second.run()
    ledger = bench.ledger()
    assert ledger["num_groups_trained"] == 240 and ledger["num_tokens_masked_lag"] == 0
    again = ledger["num_groups_released_again"]["stale"]
    assert again >= 4 * 40, "the groups of some forty lost policies lie past the bound"
    assert max(lag for lags in second.learner.lags for lag in lags) <= bench.config.oldest_lag
    repeated = sum((producer.answers - before).values())
    assert repeated <= 2 * 240, f"{repeated} groups were sampled to train 240: what is released again is stale again"
    assert_settled_once(bench, redis_client)
    assert_balanced(bench, second)
