import uuid
from pathlib import Path

import fakeredis
import fsspec
import pytest
import redis

from penstock.schemas.config import ConfigError
from penstock.schemas.keys import Keys
from penstock.schemas.weights.stores import ChunkMissingError, ChunkStore, ChunkStoreError, open_store

KEYS = Keys("run")


@pytest.fixture(params=["redis", "folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkStore:
    client = fakeredis.FakeRedis()
    place = {"redis": "redis", "folder": str(tmp_path / "new" / "chunks"), "memory": f"memory://{uuid.uuid4()}/run"}
    opened = open_store(place[request.param], KEYS, lambda command: command(client))
    assert opened.place == place[request.param]
    return opened


def test_a_store_gives_back_what_was_put(store: ChunkStore) -> None:
    assert store.keys() == []
    store.put("1-a", b"\0one")
    store.put("2-b", b"two" * 1000)
    assert store.get("1-a") == b"\0one" and store.get("2-b") == b"two" * 1000
    assert sorted(store.keys()) == ["1-a", "2-b"]
    store.put("1-a", b"one again")
    assert store.get("1-a") == b"one again"
    store.delete(["1-a", "never-there"])
    assert store.keys() == ["2-b"]
    with pytest.raises(ChunkMissingError, match=r"1-a"):
        store.get("1-a")


def test_what_a_store_does_not_take_names_the_place_the_bytes_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("AccessDenied")

    class Full:
        def hset(self, *arguments: object) -> None:
            raise redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", refuse)
    (tmp_path / "file").touch()
    for place, message in (
        ("redis", r"Redis \{run\}:chunks does not take 3-d \(4 bytes\): command not allowed"),
        (str(tmp_path / "file" / "folder"), r"file/folder does not take 3-d \(4 bytes\): Not a directory"),
        ("memory://bucket/run", r"memory://bucket/run does not take 3-d \(4 bytes\): RuntimeError: Acc"),
    ):
        with pytest.raises(ChunkStoreError, match=message):
            open_store(place, KEYS, lambda command: command(Full())).put("3-d", b"1234")
    for url in ("ftpx://host/folder", "s9://bucket"):
        with pytest.raises(ConfigError, match=rf"'{url}': no file system for this URL is installed"):
            open_store(url, KEYS, lambda command: command(None))


def test_an_s3_bucket_that_is_not_there_is_named(s3_bucket: str) -> None:
    """That a bucket keeps what is put, with credentials from the environment, the tests of the publisher show."""
    nowhere = open_store("s3://no-such-bucket/runs", KEYS, lambda command: command(None))
    with pytest.raises(ChunkStoreError, match="s3://no-such-bucket/runs does not take 1-a"):
        nowhere.put("1-a", b"data")
    with pytest.raises(ChunkMissingError, match="1-a"):
        open_store(f"{s3_bucket}/runs", KEYS, lambda command: command(None)).get("1-a")
