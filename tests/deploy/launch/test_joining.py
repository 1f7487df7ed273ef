"""`penstock producer --join`: what it finds in Redis, which model it takes, and what it refuses in which words."""

import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

import penstock.producers.__main__ as produce
from penstock.deploy import cli
from penstock.deploy.launch import joining
from penstock.schemas.config import EnvironmentConfig, LoraConfig, ModelConfig, RunConfig
from penstock.schemas.description import describe, encode_description
from penstock.schemas.keys import Keys
from penstock.schemas.model_digest import model_digest
from real_server import free_port

pytestmark = pytest.mark.redis

KEYS = Keys("far")
ARITHMETIC = EnvironmentConfig(path="penstock.producers.environments.arithmetic:Arithmetic", kwargs={"width": 2})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model on the trainer's host."""
    folder = tmp_path / "trainers" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "model.safetensors").write_bytes(b"weights of the base model")
    return folder


@pytest.fixture(autouse=True)
def on_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory and a temporary folder of its own; REDIS_URL is as before afterwards."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr("tempfile.tempdir", str(here))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(cli, "limit_threads", lambda count: None)
    monkeypatch.setattr(joining, "WAIT_S", 0.01)
    for name in ("REDIS_URL", "REDIS_PASSWORD_FILE"):
        monkeypatch.setenv(name, "")
    return here


@pytest.fixture
def run(redis_client: redis.Redis, model: Path) -> Callable[..., RunConfig]:
    """A run that a trainer has begun: `run(seed=3)`."""

    def begin(**changes: Any) -> RunConfig:
        fields = {"name": "far", "model": ModelConfig(path=str(model)), "environment": ARITHMETIC} | changes
        config = RunConfig(**fields)
        redis_client.hset(KEYS.commit, "epoch", 0)
        redis_client.hset(KEYS.description, mapping=encode_description(describe(config)))
        return config

    return begin


@pytest.fixture
def join(redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., tuple[int, str, list]]:
    """`join("--model", "x")`: exit status, standard error, and the (configuration, runs) of the producer started."""

    def command(*arguments: str, run: str = "far", url: str = redis_url) -> tuple[int, str, list]:
        started: list[tuple[RunConfig, Path]] = []

        def start(config: RunConfig, *, runs: Path, producer_id: str | None) -> int:
            assert os.environ["REDIS_URL"] == url
            started.append((config, runs))
            return 0

        monkeypatch.setattr(produce, "main", start)
        status = cli.main(["producer", "--join", url, "--run", run, *arguments])
        return status, capsys.readouterr().err, started

    return command


def test_configuration_and_model_come_from_redis_alone(run, join, model: Path, on_another_host: Path) -> None:
    config, digest = run(seed=3), model_digest(model)
    shutil.rmtree(model)
    status, error, [(joined, runs)] = join("--set", "producers.groups_in_flight=5")
    assert (status, error) == (0, "")
    assert joined.seed == config.seed == 3 and joined.producers.groups_in_flight == 5
    assert runs == on_another_host / f"penstock-{os.getuid()}" and runs.stat().st_mode & 0o077 == 0
    folder = Path(joined.model.path)
    assert folder == runs / "far" / f"model-{digest}"
    assert {file.name for file in folder.iterdir()} == {"config.json", "tokenizer.json"}
    assert (folder / "config.json").read_text() == '{"model_type": "qwen3"}' and folder.stat().st_mode & 0o077 == 0
    _, _, [(_, given)] = join("--runs", "elsewhere")
    assert given == Path("elsewhere") and (given / "far").is_dir()


def test_the_runs_own_path_is_taken_if_the_same_model_is_there(run, join, model: Path) -> None:
    config = run()
    _, error, [(joined, _)] = join()
    assert joined == config and not error
    digest = model_digest(model)
    (model / "model.safetensors").write_bytes(b"weights of another model")
    _, error, [(joined, _)] = join()
    assert Path(joined.model.path).name == f"model-{digest}"
    assert f"is another model on this host (digest {model_digest(model)}, the run's {digest})" in error


def test_a_base_model_may_be_given_and_has_to_be_the_runs(run, join, model: Path, on_another_host: Path) -> None:
    run()
    copy = Path(shutil.copytree(model, on_another_host / "copy"))
    _, _, [(joined, _)] = join("--model", "copy")
    assert joined.model.path == "copy"
    (copy / "tokenizer.json").write_text('{"version": "2.0"}')
    status, error, started = join("--model", "copy")
    assert (status, started) == (2, [])
    assert f"--model copy: digest {model_digest(copy)}" in error and f"has {model_digest(model)}" in error


def test_what_cannot_be_joined_is_refused_with_one_line(
    run, join, redis_client: redis.Redis, on_another_host: Path
) -> None:
    run()
    folder = on_another_host / f"penstock-{os.getuid()}"
    folder.symlink_to(on_another_host)
    status, error, _ = join()
    assert status == 2 and f"{folder}: another user's; expected --runs DIR" in error
    folder.unlink()
    run(environment=EnvironmentConfig(path="no_lab.tasks:Capitals"))
    environment = (
        "environment.path = 'no_lab.tasks:Capitals': cannot import 'no_lab.tasks': No module named 'no_lab'; a "
        "producer that joins needs the run's modules, and the files they read, on its own host: in the working "
        f"directory {os.getcwd()} or on PYTHONPATH"
    )
    for arguments, message in [
        (["--set", "name=x"], "name = 'x': expected that of --run, 'far'"),
        (["--set", "num_updates=many"], "num_updates = 'many'"),
        (["RUN.toml"], "expected --run NAME, and neither RUN.toml nor --name"),
        ([], environment),
    ]:
        status, error, started = join(*arguments)
        assert (status, started) == (2, []) and message in error and len(error.splitlines()) == 1, error
    run()
    status, error, started = join("--model", "no/such/place")
    assert (status, started) == (2, []) and "--model no/such/place: no config.json there" in error
    redis_client.hset(KEYS.commit, "finished", "1")
    status, error, started = join()
    assert (status, started) == (0, []) and "--run 'far': this run has ended" in error


def test_a_redis_without_such_a_run_is_told_from_one_whose_run_cannot_be_read(
    run, join, redis_client: redis.Redis
) -> None:
    status, error, _ = join()
    assert status == 2 and "holds no such run; expected one whose trainer has begun" in error
    assert "'far': Redis at" in error and "holds no such run yet; waiting for its trainer to begin" in error
    status, error, _ = join(run="f r")
    assert status == 2 and "--run: run name 'f r': expected letters" in error
    run()
    redis_client.hset(KEYS.description, "model_files", "of something else")
    status, error, _ = join()
    assert status == 2 and "{far}:run in Redis at" in error and "describes no run" in error
    redis_client.delete(KEYS.description)
    redis_client.set(KEYS.description, "of another program")
    status, error, _ = join()
    assert status == 1 and "gives nothing of run 'far': WRONGTYPE" in error


def test_a_producer_that_is_there_first_waits_for_the_trainer(run, join, monkeypatch: pytest.MonkeyPatch) -> None:
    # The trainer begins while the producer waits to look again.
    monkeypatch.setattr(joining, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: run()))
    status, error, started = join()
    assert status == 0 and len(started) == 1 and error.count("waiting for its trainer to begin") == 1


def test_what_does_not_answer_as_a_redis_ends_with_status_1(join) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        place = f"127.0.0.1:{server.getsockname()[1]}"
        status, error, _ = join(url=f"redis://{place}")
        thread.join()
    assert status == 1 and f"Redis at {place} gives nothing of run 'far': " in error
    port = free_port()
    status, error, _ = join(url=f"redis://127.0.0.1:{port}")
    assert status == 1 and "Connection refused" in error
    status, error, _ = join(url=f"redis://:sesame@127.0.0.1:{port}?timeout=3")
    assert status == 2 and "--join: option 'timeout'" in error and "sesame" not in error


def test_the_password_may_come_with_the_url_or_from_a_file_and_is_never_shown(
    run, join, redis_client: redis.Redis, redis_url: str, on_another_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    redis_client.execute_command(
        "ACL", "SETUSER", "guest", "reset", "on", ">sesame/", "~*", "+hget", "+hgetall", "+select"
    )
    try:
        url = f"unix://guest@{redis_url.partition('@')[2]}"
        (on_another_host / "password").write_text("sesame/\n")
        monkeypatch.setenv("REDIS_PASSWORD_FILE", str(on_another_host / "password"))
        assert join(url=url)[0] == 0
        monkeypatch.setenv("REDIS_PASSWORD_FILE", "")
        assert join(url=url.replace("guest@", "guest:sesame%2F@"))[0] == 0
        status, error, _ = join(url=url.replace("guest@", "guest:sesame%2E@"))
        assert status == 1 and "invalid username-password pair" in error and "sesame" not in error
    finally:
        redis_client.execute_command("ACL", "DELUSER", "guest")


def test_files_of_the_hub_that_nothing_reads_are_not_downloaded(
    run, join, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    def pretend(name: str, *, ignore_patterns: list[str]) -> str:
        files = ["config.json", "model-1.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja"]
        other = ["pytorch_model.bin", "consolidated.00.pth", "original/params.json", "onnx/model.onnx", "x.gguf"]
        assert list(filter_repo_objects(files + other, ignore_patterns=ignore_patterns)) == files
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", pretend)
    run()
    status, _, [(joined, _)] = join("--model", "lab/tiny")
    assert status == 0 and joined.model.path == str(model)


def test_a_run_of_adapters_needs_its_base_on_this_host(run, join, model: Path, on_another_host: Path) -> None:
    run(lora=LoraConfig())
    assert [started for _, _, started in (join(),)] != [[]], "the run's own path has it"
    copy = Path(shutil.copytree(model, on_another_host / "copy"))
    shutil.rmtree(model)
    status, error, started = join()
    assert (status, started) == (2, [])
    assert (
        f"publishes adapters ([lora]) to the model {str(model)!r}, whose weights are neither on this host nor" in error
    )
    assert "expected --model FOLDER or OWNER/NAME" in error
    status, _, [(joined, _)] = join("--model", "copy")
    assert status == 0 and joined.model.path == copy.name
