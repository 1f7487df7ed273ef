"""A run's own server: who may talk to it, what outlives it."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from penstock.deploy.launch import server_binary
from penstock.deploy.launch.redis_server import RedisServer, ServerError
from penstock.deploy.launch.start_checks import check_redis
from penstock.schemas.config import ConfigError, EnvironmentConfig, ModelConfig, RedisConfig, RunConfig
from penstock.schemas.keys import Keys
from penstock.schemas.process.redis_url import connection_file
from waiting import wait_for

pytestmark = pytest.mark.redis


def make_config(**fields: object) -> RunConfig:
    return RunConfig(name="r", model=ModelConfig(path="m"), environment=EnvironmentConfig(path="a:B"), **fields)


def test_a_platform_without_a_server_is_told_to_name_one(monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setattr(server_binary.platform, "machine", lambda: "pdp11")
    with pytest.raises(ConfigError, match=r"no server for this platform \(pdp11\); set REDIS_URL to"):
        check_redis(make_config(), resume=False)


def test_server_answers_on_a_private_socket_only_hides_its_password_and_keeps_its_data(tmp_path):
    server = RedisServer(tmp_path, maxmemory_mb=64)
    try:
        info = server.client.info()
        assert "valkey_version" in info
        assert info["tcp_port"] == 0
        assert info["maxmemory"] == 64 * 1024 * 1024 and info["maxmemory_policy"] == "noeviction"
        assert info["aof_enabled"] == 1
        assert server.client.config_get("appendfsync") == {"appendfsync": "everysec"}
        socket = Path(json.loads(connection_file(tmp_path).read_text())["socket"])
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        assert stat.S_IMODE(connection_file(tmp_path).stat().st_mode) == 0o600
        with (
            redis.Redis(unix_socket_path=str(socket), protocol=2) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        password = server.client.get_connection_kwargs()["password"]
        assert len(password) >= 32
        assert password.encode() not in Path(f"/proc/{server.child.pid}/cmdline").read_bytes()
        assert password not in server.child.log.read_text()
        server.client.xadd("s", {"a": 1})
    finally:
        server.stop()
    assert not connection_file(tmp_path).exists()
    again = RedisServer(tmp_path, maxmemory_mb=64)
    try:
        assert again.client.xlen("s") == 1
    finally:
        again.stop()


@pytest.mark.parametrize("is_tmpdir_long", [False, True])
def test_a_run_folder_with_a_long_name_gets_its_socket_elsewhere(tmp_path, monkeypatch, is_tmpdir_long):
    folder = tmp_path / ("long" * 30) / 'with "quotes" and spaces'
    if is_tmpdir_long:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 30)))
    server = RedisServer(folder, maxmemory_mb=64)
    socket = Path(json.loads(connection_file(folder).read_text())["socket"])
    try:
        assert server.client.ping()
        assert folder not in socket.parents
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        with redis.Redis.from_url(server.url, protocol=2) as client:
            assert client.ping()
    finally:
        server.child.kill()
        wait_for(lambda: server.child.poll() is not None)
        server.client.close()
    assert socket.parent.exists()
    again = RedisServer(folder, maxmemory_mb=64)
    try:
        assert not socket.parent.exists(), "what its killed predecessor left"
    finally:
        again.stop()
    assert (folder / "redis" / "appendonlydir").is_dir()


def test_a_server_that_cannot_start_shows_its_log(tmp_path):
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "appendonlydir").write_text("in the way")
    with pytest.raises(
        ServerError, match=r"redis ended with status 1 at start; the end of .*redis\.log:\n(?s:.)*append"
    ):
        RedisServer(tmp_path, maxmemory_mb=64)
    assert not connection_file(tmp_path).exists()


def test_server_dies_with_the_process_that_started_it(tmp_path):
    program = (
        "import pathlib, os, signal, sys; from penstock.deploy.launch.redis_server import RedisServer\n"
        "server = RedisServer(pathlib.Path(sys.argv[1]), maxmemory_mb=64)\n"
        "server.client.set('k', 'v'); print(server.child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    pid = int(killed.stdout)
    stat = Path(f"/proc/{pid}/stat")
    wait_for(lambda: not stat.exists() or "Z" in stat.read_text().split()[2])
    again = RedisServer(tmp_path, maxmemory_mb=64)
    try:
        assert again.client.get("k") == b"v"
    finally:
        again.stop()


def test_redis_url_comes_first_and_must_be_one_that_answers(monkeypatch):
    asked = make_config(redis=RedisConfig(url="redis://elsewhere"))
    for url, error, said in (
        ("redis://:hidden@127.0.0.1:1/0", ServerError, "REDIS_URL: no Redis answers: (?!.*hidden)"),
        ("http://x", ConfigError, "REDIS_URL is no Redis URL; expected redis://"),
    ):
        monkeypatch.setenv("REDIS_URL", url)
        with pytest.raises(error, match=said):
            check_redis(asked, resume=False)


def test_a_redis_that_holds_the_run_already_is_refused_without_resume(redis_url, redis_client):
    config = make_config(redis=RedisConfig(url=redis_url))
    check_redis(config, resume=False)
    redis_client.hset(Keys("r").commit, "epoch", 0)
    with pytest.raises(ConfigError, match=r"redis\.url holds a run of this name already.*--resume.*--name"):
        check_redis(config, resume=False)
    check_redis(config, resume=True)
