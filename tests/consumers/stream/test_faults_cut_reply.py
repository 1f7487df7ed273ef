"""A connection cut at any reply of the trainer's: nothing lost, nothing trained twice, nothing told twice."""

import pytest

from mini_producer import dead_fields, group_fields
from penstock.schemas.keys import Field, Kind
from trainer_bench import assert_settled_once

pytestmark = pytest.mark.redis

COMMANDS = {
    # The nth of each that is cut; chosen within the run below.
    "open_epoch": [1],
    "announce": [1, 6, 11],
    "release": [1, 5],
    "release_again": [1],
    "evaluate": [1, 3],
    "dead_letter": [1, 2],
    "commit": [1, 3],
    "finish": [1],
    "XREAD": [1, 4, 9],
    "XRANGE": [1, 3],
    "INFO": [1, 3],
    "HGET": [1],
}


@pytest.mark.parametrize("when", ["before", "reply", "within"])
@pytest.mark.parametrize(("command", "nth"), [(name, nth) for name, all_nth in COMMANDS.items() for nth in all_nth])
def test_a_cut_connection_changes_nothing(bench, redis_client, caplog, command, nth, when):
    stale_once = set()

    def answer(index: int, version: int) -> dict:
        if index == 7:
            return dead_fields(7, "reward: boom")
        if index == 21 and index not in stale_once:
            stale_once.add(index)
            return group_fields(index, 0)  # as old as policy 0: sampled again
        return group_fields(index, version)

    redis_client.xadd(bench.keys.rollouts, {Field.KIND: Kind.GROUP, Field.PAYLOAD: b"a record that names no index"})
    with bench.proxy() as proxy:
        fault = proxy.cut(command, nth, when)
        trainer = bench.trainer(url=proxy.url)
        producer = bench.resilient_producer(answer)
        assert trainer.run()
        assert fault.happened.is_set(), proxy.num_seen
        bench.close()
    assert_settled_once(bench, redis_client, dead={7})
    assert bench.ledger()["num_groups_trained"] == 48
    repeated = {index: count for index, count in producer.answers.items() if count > 1}
    assert repeated.keys() <= {21} and repeated[21] <= 3, f"released more than once: {repeated}"
    letters = sorted(fields[Field.INDEX] for _, fields in redis_client.xrange(bench.keys.dead))
    assert letters == [b"", b"7"]
    versions = [entry_id for entry_id, _ in redis_client.xrange(bench.keys.policy)]
    assert len(versions) == 8, "one announcement for each of the last eight policies"
    manifests = [fields[Field.MANIFEST] for _, fields in redis_client.xrange(bench.keys.policy)]
    assert len(set(manifests)) == len(manifests)
    assert [line["update"] for line in bench.lines("evaluations.jsonl")] == [0, 5, 10, 12]
    assert redis_client.xlen(bench.keys.rollouts) == redis_client.xlen(bench.keys.prompts) == 0
    assert redis_client.hget(bench.keys.commit, "finished") == b"1"
    assert not [record for record in caplog.records if record.exc_info], "an expected fault is a line, no traceback"


def test_a_connection_cut_again_and_again_still_ends_with_everything_trained_once(bench, redis_client):
    with bench.proxy() as proxy:
        for nth in range(3, 90, 7):
            proxy.cut("XREAD", nth, "within")
        for command in ("announce", "commit", "release"):
            for nth in (1, 2, 3):
                proxy.cut(command, nth, "reply", away_s=0.05)
        trainer = bench.trainer(url=proxy.url)
        bench.resilient_producer()
        assert trainer.run()
        assert proxy.num_cuts >= 9
        bench.close()
    assert_settled_once(bench, redis_client)
