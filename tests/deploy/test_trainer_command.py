"""`penstock trainer` as a process: what it says of its server, what it stands by for, what it leaves on disk."""

import re
import signal
from collections.abc import Iterator

import msgspec
import pytest

from penstock.deploy import cli
from penstock.deploy.launch.start_checks import check, check_server
from penstock.schemas.config import (
    ConfigError,
    EnvironmentConfig,
    ModelConfig,
    RedisConfig,
    RunConfig,
    SamplingConfig,
    load_config,
)
from penstock.schemas.keys import Commit
from real_server import RealServer
from trainer_bench import TrainerBench
from trainer_process import TrainerProcesses, with_learner
from waiting import wait_for

OFTEN = """
import penstock.consumers.stream.leadership
penstock.consumers.stream.leadership.STANDBY_LOG_S = 0.2
Learner = ScriptedLearner
"""


@pytest.fixture
def bench(redis_url, tmp_path) -> Iterator[TrainerBench]:
    bench = TrainerBench(redis_url, tmp_path)
    bench.overrides = ["trainer.lease_s=3.0"]
    yield bench
    bench.close()


@pytest.fixture
def processes(bench) -> Iterator[TrainerProcesses]:
    started = TrainerProcesses(bench)
    yield started
    started.close()


@pytest.mark.redis
def test_a_standby_for_a_name_that_no_run_has_says_so_now_and_then_and_leaves_no_trace(bench, processes, redis_client):
    process = processes.start("standby", "--standby", "--name", "typo", program=with_learner(OFTEN))
    line = "standing by for run typo: no trainer has begun it"
    wait_for(lambda: processes.log("standby").count(line) >= 3)
    assert not (bench.runs / "typo").exists() and redis_client.keys("*typo*") == []
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not (bench.runs / "typo").exists()


@pytest.mark.redis
@pytest.mark.slow
def test_a_standby_names_who_holds_the_run_and_saves_its_own_settings_once_it_has_it(bench, processes, redis_client):
    bench.overrides.append("num_updates=4000")
    bench.producer()
    first = processes.start("first")
    wait_for(lambda: redis_client.exists(bench.keys.lease))
    file = bench.folder / "run.toml"
    wait_for(file.exists)
    bench.overrides.append("num_updates=5000")
    standby = processes.start("standby", "--standby")
    held_by = rf"standing by for run test: trainer \S+-{first.pid} holds it\n"
    wait_for(lambda: re.search(held_by, processes.log("standby")))
    assert load_config(file).num_updates == 4000
    first.kill()
    wait_for(lambda: load_config(file).num_updates == 5000)
    assert redis_client.hget(bench.keys.commit, Commit.EPOCH) == b"1"
    said = re.findall(r"standing by for run test: (.*)\n", processes.log("standby"))
    assert list(dict.fromkeys(said)) == [said[0], "no trainer holds it; it is taken over after 3 s of that"]
    standby.send_signal(signal.SIGTERM)
    assert standby.wait(60) == 0


@pytest.mark.redis
def test_a_trainer_that_the_run_refuses_leaves_no_run_file(bench, processes, redis_client, capsys):
    assert cli.main(["trainer", "run.toml", "--resume", "--standby"]) == 2
    assert "--resume --standby: expected one of them" in capsys.readouterr().err
    redis_client.hset(bench.keys.commit, Commit.EPOCH, 0)
    assert processes.start("refused").wait(60) == 2
    assert "this run exists; continue it with --resume" in processes.log("refused")
    assert not bench.folder.exists()


@pytest.fixture
def config(model_folder) -> RunConfig:
    environment = EnvironmentConfig(path="penstock.producers.environments.arithmetic:Arithmetic", kwargs={"width": 2})
    return RunConfig(name="r", model=ModelConfig(path=str(model_folder)), environment=environment)


SOUND = {"redis_version": "7.0.15", "maxmemory": 10**9, "maxmemory_policy": "noeviction"}


def test_a_server_is_sound_or_refused_with_value_and_expectation(config):
    long = msgspec.structs.replace(config, sampling=SamplingConfig(max_tokens=8192))
    for sound in (
        {"redis_version": "8.2.1"},
        {"redis_version": "7.2.4", "valkey_version": "9.1.2"},
        {"maxmemory": 0, "maxmemory_policy": "allkeys-lru"},  # nothing is ever evicted
    ):
        check_server(config, SOUND | sound, "Redis at h:1")
    for changes, message in (
        ({"redis_version": "6.2.14"}, "redis_version = 6.2.14, expected 7 or newer"),
        ({"redis_version": "7.2.4", "valkey_version": "6.0"}, "valkey_version = 6.0, expected 7 or newer"),
        ({"redis_version": None}, "redis_version = None, expected 7 or newer"),
        (
            {"maxmemory_policy": "allkeys-lru"},
            "maxmemory-policy = 'allkeys-lru' with maxmemory = 1000 MB, expected 'noeviction': an evicted entry is "
            "lost work",
        ),
        (
            {"maxmemory": 10**6},
            "maxmemory = 1 MB: the 96 groups that may wait take up to 77 MB; expected at least twice that, 153",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            check_server(long, SOUND | changes, "Redis at h:1")
        assert str(caught.value) == f"Redis at h:1: {message}"
    with pytest.raises(
        ConfigError, match=r"groups that may wait take up to 26. MB; expected at least twice that, 53.$"
    ):
        check_server(long, SOUND | {"maxmemory": 5 * 10**8}, "Redis at h:1", num_image_bytes=2 * 10**6)


@pytest.fixture
def evicting(server_binary) -> Iterator[RealServer]:
    server = RealServer(server_binary, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    yield server
    server.remove()


@pytest.mark.redis
def test_run_and_trainer_refuse_a_real_server_that_evicts(evicting, tmp_path, model_folder, monkeypatch, capsys):
    monkeypatch.setenv("REDIS_URL", evicting.url)
    bench = TrainerBench(evicting.url, tmp_path)
    processes = TrainerProcesses(bench)
    wrong = (
        f"Redis at {evicting.socket}: maxmemory-policy = 'allkeys-lru' with maxmemory = 67 MB, expected 'noeviction'"
    )
    try:
        assert processes.start("trainer").wait(60) == 2
        (line,) = processes.log("trainer").splitlines()
        assert wrong in line
        file = tmp_path / "whole.toml"
        file.write_text(
            f'name = "whole"\n[model]\npath = "{model_folder}"\n'
            '[environment]\npath = "penstock.producers.environments.arithmetic:Arithmetic"\nkwargs = { width = 2 }\n'
        )
        assert cli.main(["run", str(file), "--runs", str(tmp_path)]) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith(f"penstock: {wrong}") and shown.err.count("\n") == 1
        assert not (tmp_path / "whole").exists() and not bench.folder.exists()
        assert evicting.client.keys("*") == []
        evicting.client.config_set("maxmemory-policy", "noeviction")
        evicting.client.config_set("maxmemory", "10kb")
        assert cli.main(["run", str(file), "--runs", str(tmp_path)]) == 2
        assert "maxmemory = 0.01024 MB: the 96 groups that may wait" in capsys.readouterr().err
        evicting.client.execute_command("ACL", "SETUSER", "poor", "on", ">secret", "~*", "+exists", "+ping", "+select")
        monkeypatch.setenv("REDIS_URL", f"unix://poor:secret@{evicting.socket}")
        assert cli.main(["run", str(file), "--runs", str(tmp_path)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"penstock: Redis at {evicting.socket} does not answer INFO: ")
        assert error.count("\n") == 1 and "secret" not in error
    finally:
        processes.close()
        bench.close()


def test_the_limit_of_the_run_s_own_server_does_not_count_beside_redis_url(config, monkeypatch):
    long, small = SamplingConfig(max_tokens=8192), RedisConfig(maxmemory_mb=1)
    run = msgspec.structs.replace(config, sampling=long, redis=small)
    with pytest.raises(ConfigError, match=r"redis\.maxmemory_mb = 1: "):
        check(run)
    monkeypatch.setenv("REDIS_URL", "redis://h:1")
    assert check(run).warnings == []
