"""The trainer's side of the weight log, on a real server."""

import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import penstock.consumers.weights.publisher as publisher_module
import penstock.consumers.weights.shard as shard_module
from penstock.consumers.stream.scripts import FencedError
from penstock.schemas.config import ConfigError
from penstock.schemas.keys import Field
from penstock.schemas.policy import make_version
from penstock.schemas.weights.log import decode_manifest
from penstock.schemas.weights.stores import REDIS, ChunkStoreError, FolderChunks, FsspecChunks, RedisChunks
from publishing_trainer import PublishingTrainer, RandomWalkMasters
from waiting import wait_for

pytestmark = pytest.mark.redis


@pytest.fixture
def start(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., PublishingTrainer]]:
    monkeypatch.setattr(publisher_module, "RETRY_S", 0.01)
    monkeypatch.setattr(shard_module, "MAX_PIECE_BYTES", 1024)  # several pieces of a tensor, several chunks of a policy
    monkeypatch.setattr(shard_module, "MAX_CHUNK_BYTES", 2048)
    started: list[PublishingTrainer] = []

    def begin(masters: RandomWalkMasters | None = None, epoch: int = 0, **settings: object) -> PublishingTrainer:
        masters = RandomWalkMasters(0) if masters is None else masters
        started.append(PublishingTrainer(redis_url, tmp_path, masters, epoch, **settings))
        return started[-1]

    yield begin
    for each in started:
        each.close()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_every_version_kept_is_read_bit_for_bit_along_a_walk_of_hundreds(start, tmp_path, redis_client, elsewhere):
    draw = random.Random(1)
    places = {"deltas": str(tmp_path / "deltas"), "anchors": str(tmp_path / "anchors")} if elsewhere else {}
    one = start(keep=5, **places)
    one.publish()
    kinds = set()
    for number in range(200):
        one.masters.walk(
            draw.choice([0.0, 0.001, 0.01, 0.03, 0.2 if number % 9 == 0 else 0.01, 1.0 if number % 40 == 0 else 0])
        )
        one.publish(steps=draw.choice([1, 1, 1, 2, 3]))
        if number % 10 == 0:
            one.settle()
            log = one.reader.log()
            kinds |= {manifest.delta_of is None for manifest in log.announced.values()}
            announced = sorted(log.announced)
            assert len(announced) >= min(5, number + 2)
            for version in {*announced[-5:], *log.anchors}:
                one.check(version)
            stored = set(FolderChunks(tmp_path / "deltas").keys()) | set(FolderChunks(tmp_path / "anchors").keys())
            assert (stored if elsewhere else one.chunks(redis_client)) == one.named()
        if number in (100, 150):  # killed, and continued: a fork
            one.settle()
            one = start(one.masters, one.epoch + 1, keep=5, after=one, **places)
            one.publish()
    one.settle()
    assert kinds == {True, False}
    assert sum(each.is_whole and each.changed_frac is None for each in one.publications) > 1, "anchors were written"
    assert redis_client.hlen(one.keys.chunks) == 0 or not elsewhere


def test_policies_in_a_bucket_are_read_bit_for_bit_and_what_is_old_is_gone(start, redis_client, s3_bucket: str) -> None:
    """A real S3 API server."""
    one = start(keep=3, anchors=f"{s3_bucket}/anchors", deltas=f"{s3_bucket}/deltas")
    one.publish()
    for number in range(12):
        one.masters.walk(1.0 if number == 6 else 0.02)
        one.publish()
    one.settle()
    log = one.reader.log()
    for version in sorted(log.announced)[-3:]:
        one.check(version)
    stored = {key for kind in ("anchors", "deltas") for key in FsspecChunks(f"{s3_bucket}/{kind}").keys()}  # noqa: SIM118
    assert stored == one.named() and redis_client.hlen(one.keys.chunks) == 0


def test_a_delta_is_announced_with_what_it_changes_and_an_epoch_begins_with_an_anchor(start, redis_client):
    one = start()
    one.publish()
    one.masters.walk(0.01)
    one.publish()
    one.settle()
    one.scripts.announce(1, b"{}", b"", 0)  # repeated: adds nothing
    entries = redis_client.xrange(one.keys.policy)
    assert [entry_id for entry_id, _ in entries] == [b"0-1", b"1-1"]
    first, second = (decode_manifest(fields[Field.MANIFEST], "") for _, fields in entries)
    assert (first.delta_of, first.parent_version, first.store) == (None, -1, REDIS)
    assert (second.delta_of, second.parent_version, second.store) == (0, 0, REDIS)
    assert all(re.fullmatch(r"1-delta-0-\d+", chunk.key) for chunk in second.chunks) and len(second.chunks) > 2
    assert redis_client.hkeys(one.keys.anchors) == [b"0"]
    before, after = one.expected[0], one.expected[1]
    differing = sum(int((before[name] != after[name]).sum()) for name in before)
    assert second.num_changed == differing
    whole, delta = one.publications
    assert (whole.is_whole, whole.changed_frac, whole.chain) == (True, 1.0, 0)
    assert (delta.is_whole, delta.chain) == (False, 1)
    assert delta.changed_frac == differing / second.num_elements
    assert delta.num_bytes == second.chunk_bytes
    assert delta.redis_bytes == sum(len(each) for each in redis_client.hvals(one.keys.chunks))


def test_what_a_crash_has_left_is_gone_after_the_next_start(start, redis_client, tmp_path):
    places = {"anchors": str(tmp_path / "anchors")}
    one = start(**places)
    one.publish()
    one.settle()
    left = ["1-delta-0-0", "1-delta-0-1"]
    redis_client.hset(one.keys.chunks, mapping=dict.fromkeys(left, b"chunk"))
    store = FolderChunks(tmp_path / "anchors")
    store.put("1-whole-0-7", b"chunk")
    (tmp_path / "anchors" / "1-whole-0-8.partial-123").write_bytes(b"chu")
    (tmp_path / "anchors" / "notes.txt").write_text("of somebody else")
    theirs = f"{make_version(2, 0)}-whole-0-0"
    store.put(theirs, b"of a newer trainer")
    two = start(one.masters, 1, after=one, **places)
    two.publish()
    two.settle()
    assert two.chunks(redis_client) | set(store.keys()) == {*two.named(), "notes.txt", theirs}
    two.check(0)
    two.check(two.version)


def test_a_fenced_trainer_takes_its_chunks_away(start, redis_client):
    one = start()
    one.publish()
    one.settle()
    two = start(one.masters, 1, after=one)
    two.publish()
    two.settle()
    one.masters.walk(0.02)
    one.publish()
    with pytest.raises(FencedError):
        one.settle()
    with pytest.raises(FencedError):
        one.publisher.check()
    with pytest.raises(FencedError):
        one.publisher.publish(9, 8)
    assert two.chunks(redis_client) == two.named()
    two.check(two.version)


def test_what_redis_loses_is_written_again_from_memory_and_without_a_loss_nothing_is(start, redis_client, caplog):
    one = start()
    one.publisher.announce_again()  # nothing yet
    one.publish()
    one.settle()
    redis_client.delete(one.keys.chunks)  # of the first policy alone
    one.publisher.announce_again()
    one.settle()
    one.check(0)
    for loss in ((), (one.keys.policy,), (one.keys.chunks,), (one.keys.anchors,), ("*",)):
        for _ in range(3):
            one.masters.walk(0.02)
            one.publish()
            one.settle()
        before = redis_client.hgetall(one.keys.chunks), redis_client.xrange(one.keys.policy)
        if loss:
            redis_client.delete(*(redis_client.keys() if loss == ("*",) else loss))
        caplog.clear()
        one.publisher.announce_again(thoroughly=not loss)
        one.settle()
        one.check(one.version)
        assert one.versions()[-1] == one.version, loss
        if not loss:
            assert (redis_client.hgetall(one.keys.chunks), redis_client.xrange(one.keys.policy)) == before
            assert not caplog.text
    one.publish()
    one.settle()
    one.check(one.version)


def test_deltas_that_redis_has_no_room_for_go_where_the_anchors_are(start, redis_client, tmp_path):
    one = start(anchors=str(tmp_path / "anchors"), redis_bytes=2500, keep=50)
    for _ in range(12):
        one.publish()
        one.masters.walk(0.03)
    one.settle()
    stores = {manifest.store for manifest in one.reader.log().announced.values() if manifest.delta_of is not None}
    assert stores == {REDIS, str(tmp_path / "anchors")}
    assert sum(map(len, redis_client.hvals(one.keys.chunks))) <= 2500
    for version in one.versions():
        one.check(version)


def test_redis_without_room_for_all_that_is_to_be_kept_keeps_the_newest(start, redis_client, caplog):
    one = start(anchors=REDIS, redis_bytes=17_000, keep=100)  # two policies of 7 kB and some deltas
    for number in range(40):
        one.publish()
        one.masters.walk(0.03 if number % 7 else 0.5)
        one.settle()
        assert sum(map(len, redis_client.hvals(one.keys.chunks))) <= 17_000
        one.check(one.version)
    assert one.chunks(redis_client) == one.named()
    assert "are dropped: weights.redis_mb has no room for more" in caplog.text
    assert len(one.versions()) < 40


@pytest.mark.parametrize("how", ["stop", "end"])
def test_a_policy_that_does_not_fit_into_redis_waits_until_the_trainer_ends_and_says_what_to_set(start, caplog, how):
    one = start(anchors=REDIS, redis_bytes=2000)
    one.publish()
    wait_for(lambda: "training waits" in caplog.text)
    message = (
        r"policy 0 cannot be written: Redis has no room for a policy of [78],\d+ bytes beside the 0 bytes of chunks"
    )
    assert re.search(rf"{message} there: weights.redis_mb = 0, .* as weights.anchors", caplog.messages[-1])
    one.connection.stop() if how == "stop" else one.publisher.end()
    with pytest.raises(OSError, match=message):
        one.publisher.wait()
    assert how == "end" or one.versions() == []


def test_a_full_store_holds_the_next_policy_until_there_is_room(start, redis_client, monkeypatch, caplog):
    one = start()
    one.publish()
    one.settle()
    is_full, put, keys = threading.Event(), RedisChunks.put, []

    def refuse(self, key, data):
        if is_full.is_set() and key.endswith("-1"):
            raise ChunkStoreError(f"Redis chunks do not take {key} ({len(data):,} bytes): OOM")
        keys.append(key)
        put(self, key, data)

    monkeypatch.setattr(RedisChunks, "put", refuse)
    is_full.set()
    one.masters.walk(0.02)
    one.publish()
    wait_for(lambda: "training waits" in caplog.text)
    assert re.search(r"policy 1 cannot be written: .*1-delta-0-1 \(\d+ bytes\): OOM", caplog.messages[-1])
    one.publisher.wait_for_snapshot()  # the optimizer may go on
    next_one = threading.Thread(target=one.publish)
    next_one.start()
    next_one.join(0.1)
    assert next_one.is_alive() and one.versions() == [0]
    is_full.clear()
    next_one.join(60)
    one.settle()
    assert one.versions() == [0, 1, 2]
    assert keys.count("1-delta-0-0") == 1, "what was put stays"
    one.check(1)
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_an_anchor_that_cannot_be_written_is_tried_with_the_next_policy(start, tmp_path, monkeypatch, caplog):
    anchors = tmp_path / "anchors"
    one = start(anchors=str(anchors))
    one.publish()
    one.settle()
    put, is_full = FolderChunks.put, True

    def refuse(self, key, data):
        if is_full:
            raise ChunkStoreError(f"folder {anchors} does not take {key}: No space left on device")
        put(self, key, data)

    monkeypatch.setattr(FolderChunks, "put", refuse)
    while "anchor of policy" not in caplog.text:
        one.masters.walk(0.05)
        one.publish()
        one.settle()
    is_full = False
    one.masters.walk(0.01)
    one.publish()
    one.settle()
    assert set(one.reader.log().anchors) == {0, one.version}
    for version in one.versions():
        one.check(version)


def test_the_optimizer_waits_for_the_snapshot_and_for_nothing_else(start, monkeypatch):
    one = start()
    one.publish()
    one.settle()
    copied, stored = threading.Event(), threading.Event()
    collect, put = one.masters.parts, RedisChunks.put

    def collect_late():
        parts = collect()
        return lambda: [copied.wait(60), parts()][1]

    def put_late(self, key, data):
        assert stored.wait(60)
        put(self, key, data)

    monkeypatch.setattr(one.masters, "parts", collect_late)
    monkeypatch.setattr(RedisChunks, "put", put_late)
    one.masters.walk(0.02)
    one.publish()
    stepping = threading.Thread(target=one.publisher.wait_for_snapshot)
    stepping.start()
    stepping.join(0.1)
    assert stepping.is_alive(), "the masters are not copied yet"
    copied.set()
    stepping.join(60)
    assert one.versions() == [0]
    one.masters.walk(1.0)  # the optimizer's step
    stored.set()
    one.settle()
    one.check(1)
    assert one.publisher.take_blocked_s() >= 0.1
    assert one.publisher.take_blocked_s() == 0.0


def test_a_snapshot_that_fails_and_a_store_that_nothing_installed_knows_are_told(start, monkeypatch):
    one = start()

    def fail():
        raise RuntimeError("no memory to pin")

    monkeypatch.setattr(one.masters, "parts", lambda: fail)
    one.publish()
    for wait in (one.publisher.wait_for_snapshot, one.publisher.wait):
        with pytest.raises(RuntimeError, match="no memory to pin"):
            wait()
    for epoch, field in enumerate(("deltas", "anchors"), 1):
        with pytest.raises(ConfigError, match=rf"weights\.{field} = 'nowhere://bucket': no file system .* installed"):
            start(epoch=epoch, **{field: "nowhere://bucket"})


def test_a_store_that_is_slow_shows_how_far_the_writing_is(start, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(publisher_module, "FULL_LOG_S", 0.05)
    put, may_go_on = RedisChunks.put, threading.Event()

    def put_late(self, key, data):
        if key.endswith("-2"):
            assert may_go_on.wait(60)
        put(self, key, data)

    monkeypatch.setattr(RedisChunks, "put", put_late)
    one = start()
    one.publish()
    waiting = threading.Thread(target=one.settle)
    waiting.start()
    wait_for(lambda: re.search(r"of policy 0 2 of \d chunks \([\d,]+ bytes\) are in redis", caplog.text))
    may_go_on.set()
    waiting.join(60)
    one.check(0)


@pytest.fixture
def limit_memory(redis_client) -> Iterator[Callable[[int], None]]:
    """Leaves so many bytes below the server's limit; fewer than none, since what the server uses goes up and down."""
    before = redis_client.config_get("maxmemory")["maxmemory"]
    yield lambda room: redis_client.config_set("maxmemory", redis_client.info("memory")["used_memory"] + room)
    redis_client.config_set("maxmemory", before)


def test_at_the_memory_limit_of_redis_deltas_go_where_the_anchors_are_or_wait(
    start, redis_client, tmp_path, limit_memory, caplog
):
    one = start(anchors=str(tmp_path / "anchors"))
    one.publish()
    one.settle()
    limit_memory(-200_000)
    one.masters.walk(0.02)
    one.publish()
    one.settle()
    manifest = one.reader.log().announced[1]
    assert (manifest.delta_of, manifest.store) == (0, str(tmp_path / "anchors"))
    one.check(1)
    limit_memory(1 << 20)

    two = start(one.masters, 1, after=one, anchors=REDIS)
    two.publish()
    two.settle()
    limit_memory(-200_000)
    two.masters.walk(0.02)
    two.publish()
    wait_for(lambda: "training waits" in caplog.text)
    assert re.search(r"cannot be written: Redis .* does not take \d+-delta-0-0 \(\d+ bytes\): .*maxmemory", caplog.text)
    assert two.versions()[-1] == two.version - 1
    limit_memory(1 << 20)
    two.settle()
    two.check(two.version)


def test_a_chunk_with_other_bytes_is_found_by_reading_it_back(start, redis_client, caplog):
    one = start()
    one.publish()
    one.masters.walk(0.02)
    one.publish()
    one.settle()
    key = "1-delta-0-0"
    redis_client.hset(one.keys.chunks, key, b"?" * redis_client.hstrlen(one.keys.chunks, key))
    one.publisher.announce_again()
    one.settle()
    assert redis_client.hkeys(one.keys.anchors) == [b"0"] and not caplog.text, "it exists"
    one.publisher.announce_again(thoroughly=True)
    one.settle()
    assert "XXH3 digest" in caplog.text and "policy 1 is announced again" in caplog.text
    one.check(1)


def test_anchors_that_redis_has_lost_are_made_again_in_the_end(start, redis_client):
    one = start(keep=3)
    one.publish()
    one.settle()
    redis_client.delete(one.keys.anchors)
    one.publisher.announce_again()
    for _ in range(30):
        one.masters.walk(0.05)
        one.publish()
        one.settle()
    assert redis_client.hlen(one.keys.anchors) and len(one.versions()) < 20
    one.check(one.version)


def test_the_policies_that_may_have_sampled_a_token_are_in_memory_and_after_a_resume_read_from_the_log(start, caplog):
    def assert_held(trainer: PublishingTrainer, *versions: int) -> None:
        for version in versions:
            found, expected = trainer.shard.policy(version), trainer.expected[version]
            assert found is not None, version
            for values, (name, tensor) in zip(found, expected.items(), strict=True):
                assert values.dtype == tensor.dtype and torch.equal(values, tensor.flatten()), (version, name)

    one = start(keep=3, num_kept=4)
    for _ in range(7):
        one.publish()
        one.settle()
        one.masters.walk(0.02)
    assert_held(one, 3, 4, 5, 6)
    assert sorted(one.shard.snapshots._buffers) == [3, 4, 5, 6]
    two = start(one.masters, 1, after=one, keep=3, num_kept=4)
    two.publish()
    two.settle()
    assert_held(two, make_version(1, 0), 5, 6, 5)
    assert not caplog.text
    two.masters.walk(0.02)
    two.publish()
    two.settle()
    assert_held(two, 6, make_version(1, 0), make_version(1, 1))
    assert two.shard.policy(77) is None is two.shard.policy(77)
    assert caplog.text.count("policy 77 cannot be read from the weight log") == 1
