"""The address of Redis, the options of its URL, and the sources of its password."""

from pathlib import Path

import pytest
import redis

from penstock.schemas.config import ConfigError, EnvironmentConfig, ModelConfig, RedisConfig, RunConfig
from penstock.schemas.process.redis_url import configured_url, redis_url, server_of


def config(url: str | None = None) -> RunConfig:
    return RunConfig(
        name="r", model=ModelConfig(path="m"), environment=EnvironmentConfig(path="a:B"), redis=RedisConfig(url=url)
    )


def test_the_environment_comes_before_the_run_file_and_both_before_the_runs_own_server(monkeypatch, tmp_path) -> None:
    assert configured_url(config()) is None and configured_url(None) is None
    assert configured_url(config("redis://there")) == "redis://there"
    monkeypatch.setenv("REDIS_URL", "redis://here:7/2")
    assert configured_url(config("redis://there")) == redis_url(config(), tmp_path) == "redis://here:7/2"
    monkeypatch.delenv("REDIS_URL")
    with pytest.raises(ConfigError, match=r"no Redis: REDIS_URL and redis\.url are not set"):
        redis_url(config(), tmp_path)


def test_a_password_file_completes_a_url_without_a_password(monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("a/b?c#d@e:f%g é\n")
    monkeypatch.setenv("REDIS_PASSWORD_FILE", str(file))
    for url, expected in [
        ("redis://host", "redis://:{}@host"),
        ("redis://user@host:1/3", "redis://user:{}@host:1/3"),
        ("rediss://user@[::1]:1?ssl_check_hostname=false", "rediss://user:{}@[::1]:1?ssl_check_hostname=false"),
        ("unix:///run/redis.sock?db=1", "unix://:{}@/run/redis.sock?db=1"),
        ("unix://user@/run/redis.sock", "unix://user:{}@/run/redis.sock"),
    ]:
        monkeypatch.setenv("REDIS_URL", url)
        found = configured_url(None)
        assert found == expected.format("a%2Fb%3Fc%23d%40e%3Af%25g%20%C3%A9")
        with redis.Redis.from_url(found) as client:
            assert client.get_connection_kwargs()["password"] == "a/b?c#d@e:f%g é"


def test_a_server_has_one_spelling() -> None:
    same = [
        "redis://localhost", "redis://127.0.0.1", "redis://127.0.0.1/", "redis://localhost:6379/0", "redis://[::1]?db=0",
        "redis://user:secret@LOCALHOST:6379",
    ]  # fmt: skip
    assert {server_of(url) for url in same} == {"localhost:6379/0"}
    assert server_of("unix:///run/redis.sock") == server_of("unix://:secret@/run/../run/redis.sock?db=0")
    others = ["redis://localhost:6380", "redis://localhost/1", "redis://elsewhere", "redis://localhost?db=2"]
    assert len({server_of(url) for url in (*others, same[0])}) == 5


def test_a_password_file_that_cannot_be_used_is_named(monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    monkeypatch.setenv("REDIS_PASSWORD_FILE", str(file))
    for content, message in [
        (None, "cannot be read: No such file or directory"),
        (b"\n", "the file is empty"),
        (b"\xff", "not UTF-8"),
    ]:
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"REDIS_PASSWORD_FILE = '{file}': .*{message}"):
            configured_url(config("redis://host"))


URLS = (
    "http://user:marker@host", "redis://user:mar/ker@host:1", "redis://:12/marker@host", "redis://:mark#er@host",
    "redis://:mark?er@host", "redis://user:12?marker@host", "redis://user:marker@host:port",
    "redis://user:marker@host:99999", "redis://user:marker@", "redis://user:marker@host/name", "unix://user:marker@",
    "unix://marker/redis.sock", "redis://[marker", "marker",
)  # fmt: skip
"""None is the URL of a Redis."""


def test_a_url_that_is_none_is_refused_without_quoting_it(monkeypatch) -> None:
    for url in URLS:
        monkeypatch.setenv("REDIS_URL", url)
        with pytest.raises(ConfigError, match="REDIS_URL") as caught:
            configured_url(None)
        error = caught.value
        assert "mark" not in str(error) and (error.__context__ is None or error.__suppress_context__), url
        monkeypatch.delenv("REDIS_URL")
        with pytest.raises(ConfigError, match=r"redis\.url"):
            configured_url(config(url))


def test_a_url_cannot_undo_what_this_program_sets_itself() -> None:
    # A socket timeout of 1 s would break every blocking read, which waits longer than that.
    for option in ("socket_timeout=1", "protocol=3", "retry_on_timeout=true", "password=marker"):
        with pytest.raises(ConfigError, match=f"redis.url: option '{option.partition('=')[0]}', expected only db and"):
            configured_url(config(f"redis://host?{option}"))


def test_a_certificate_that_is_not_there_is_named_before_anything_connects(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    with pytest.raises(ConfigError, match=f"redis.url: ssl_ca_certs = '{file}': no such file, or not readable"):
        configured_url(config(f"rediss://host?ssl_ca_certs={file}"))
    file.touch()
    assert configured_url(config(f"rediss://host?ssl_ca_certs={file}"))
