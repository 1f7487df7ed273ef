"""Images that their entries have no room for: read with them, kept as long as they, and removed with them."""

import uuid

import pytest
from msgspec.structs import replace

from mini_producer import make_group
from penstock.consumers.checkpoints.state import ReleasedTask
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.reader import Reader
from penstock.consumers.stream.scripts import Scripts
from penstock.schemas.images import digest_of
from penstock.schemas.keys import Field, Keys, Kind
from penstock.schemas.prompt import ImagePart, Message, Prompt
from penstock.schemas.record_reader import Record
from penstock.schemas.rollout import encode_group
from scripted_learner import KilledError
from trainer_bench import assert_settled_once

pytestmark = pytest.mark.redis

KEYS = Keys("test")


def entry(client, index: int, version: int = 0, *, gone: bool = False) -> dict:
    """Stores a group's image; returns the fields of its entry."""
    file, name = b"image %d" % index, uuid.uuid4().hex
    prompt = Prompt(messages=(Message(role="user", content=(ImagePart(digest=digest_of(file)),)),))
    group = replace(make_group(index, version), prompt=prompt, images={digest_of(file): b""})
    if not gone:
        client.hset(KEYS.images, f"{name}/{digest_of(file)}", file)
    payload = {Field.INDEX: index, Field.KIND: Kind.GROUP, Field.PAYLOAD: encode_group(group)}
    return payload | {Field.IMAGES: f"{name} {digest_of(file)}"}


@pytest.fixture
def scripts(redis_url):
    connection = TrainerConnection(redis_url, outage_s=5)
    scripts = Scripts(connection, KEYS)
    scripts.open_epoch(0)
    yield scripts
    connection.close()


@pytest.fixture
def reader(scripts):
    ledger = Ledger()
    for number in range(1, 4):
        ledger.release(ReleasedTask("main", number))
    return Reader(scripts.connection, KEYS, ledger, 2, renew=scripts.renew)


def read(reader: Reader) -> list[dict[str, bytes]]:
    reader.read_to_end(LagTable(0, {}, {}))
    return [ready.group.images for ready in reader.ready.values()]


def test_an_entry_s_images_are_read_and_removed_with_it_whatever_became_of_it(reader, scripts, redis_client):
    first, again = (redis_client.xadd(KEYS.rollouts, entry(redis_client, 1)) for _ in range(2))
    second = redis_client.xadd(KEYS.rollouts, entry(redis_client, 2))
    another_run = redis_client.xadd(KEYS.rollouts, entry(redis_client, 3) | {Field.RUN_ID: "other"})
    assert read(reader) == [{digest_of(file): file} for file in (b"image 1", b"image 2")]
    for keep, num_left in ((first, 4), (again, 3), (second, 2), (another_run, 1), (b"9" * 18 + b"-0", 0)):
        scripts.commit("c", keep, 0, reader.images_before(keep))
        reader.forget_trimmed(keep)
        assert (redis_client.hlen(KEYS.images), redis_client.xlen(KEYS.rollouts)) == (num_left, num_left)


def test_a_group_whose_image_is_gone_is_dead_and_the_others_are_read(reader, redis_client):
    for index in (1, 2):
        redis_client.xadd(KEYS.rollouts, entry(redis_client, index, gone=index == 1))
    assert read(reader) == [{digest_of(b"image 2"): b"image 2"}]
    (refused,) = reader.take_refused()
    gone = f"poison: group 1: prompt: the bytes of the image '{digest_of(b'image 1')}' are gone"
    assert refused.index == 1 and refused.reason.startswith(gone)


def test_a_stream_that_is_made_anew_leaves_no_images(reader, redis_client):
    redis_client.xadd(KEYS.rollouts, entry(redis_client, 1), id=f"{2**64 - 1}-{2**64 - 1}")
    assert read(reader) == [{digest_of(b"image 1"): b"image 1"}]
    assert not redis_client.exists(KEYS.rollouts, KEYS.images)


def test_images_outlive_a_trainer_that_dies_before_it_commits_and_then_are_in_the_record_alone(bench, redis_client):
    dies_of = {5}

    def answer(index: int, version: int) -> dict:
        return entry(redis_client, index, version, gone=index in dies_of)

    bench.producer(answer)
    first = bench.trainer(fail_at={7: KilledError()})
    with pytest.raises(KilledError):
        first.run()
    assert redis_client.hlen(KEYS.images) > 0
    assert bench.trainer(resume=True).run()
    assert_settled_once(bench, redis_client, dead=dies_of)
    assert redis_client.hlen(KEYS.images) == redis_client.xlen(KEYS.rollouts) == 0
    record = Record(bench.folder)
    groups = [record.group(at).decode() for at in record.groups() if at.entry.outcome == "trained"]
    assert {group.index: list(group.images.values()) for group in groups} == {
        index: [b"image %d" % index] for index in range(1, 50) if index not in dies_of
    }
