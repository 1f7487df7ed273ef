"""Passwords come from a file or the environment; whatever goes wrong, they show up nowhere else."""

import os
import secrets
import signal
from pathlib import Path

import pytest

from forked_programs import ForkedProgram
from penstock.deploy.launch.run_folder import save_run_file
from penstock.deploy.security.acl import acl_file, user_names
from penstock.schemas.config import EvaluationConfig, RedisConfig
from penstock.schemas.keys import Field
from real_server import RealServer
from waiting import wait_for

pytestmark = pytest.mark.redis


def places_that_hold(marker: str, folder: Path, *known: Path) -> list[str]:
    """Files under `folder` and command lines of this machine that contain the marker."""
    found = [
        str(file)
        for file in folder.rglob("*")
        if file.is_file() and file not in known and marker.encode() in file.read_bytes()
    ]
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in line.read_bytes():
                found.append(str(line))
        except OSError:
            continue  # it has ended meanwhile
    return found


@pytest.mark.slow
def test_no_error_shows_a_password(server_binary, make_config, hand_trainer, start_producer, tmp_path: Path) -> None:
    marker = f"marker{secrets.token_hex(8)}"
    users, password = tmp_path / "users.acl", tmp_path / "password"
    users.write_text(acl_file(["test"], dict.fromkeys(user_names(["test"]), marker)))
    password.write_text(marker)
    server = RealServer(server_binary, "--aclfile", str(users))
    server.client.close()
    server.client = _client(server, "admin", marker)
    config = make_config(redis=RedisConfig(outage_s=60.0), evaluation=EvaluationConfig(num_prompts=0))
    save_run_file(config, config.folder(tmp_path))
    trainer = hand_trainer(server.client, config, tmp_path)
    trainer.announce(0)
    trainer.release(1, 4)
    from_file = {"REDIS_PASSWORD_FILE": str(password)}

    def url(user: str, secret: str = "") -> str:
        return f"unix://{user}{f':{secret}' if secret else ''}@{server.socket}"

    try:
        serving = start_producer(config, url("test-producer"), "serving", environment=from_file)
        assert {int(fields[Field.INDEX]) for fields in trainer.read(4)} == {1, 2, 3, 4}
        assert places_that_hold(marker, tmp_path, password) == [], "while everything is well"
        server.stop()
        wait_for(lambda: "is away" in start_producer.log("serving"))
        server.start()
        wait_for(lambda: "is back" in start_producer.log("serving"))
        ending = {
            "wrong": (url("test-producer", f"{marker}x"), {}, 1, "refuses the credentials"),
            "forbidden": (url("test-observer"), from_file, 1, "refuses a command"),
            "broken": (f"redis://test-producer:{marker}/x@host", {}, 2, "REDIS_URL is no Redis URL"),
        }
        processes = {
            name: (start_producer(config, address, name, environment=environment), status, message)
            for name, (address, environment, status, message) in ending.items()
        }
        for name, (process, status, message) in processes.items():
            assert process.wait(timeout=120) == status
            assert message in start_producer.log(name) and "Traceback" not in start_producer.log(name)
        for name, (address, environment, _, _) in ending.items():
            output = _trainer_output(tmp_path, address, environment, tmp_path / f"trainer-{name}.log")
            assert "Traceback" not in output, output
        assert places_that_hold(marker, tmp_path, password) == []
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(timeout=90) == 0
        assert places_that_hold(marker, tmp_path, password) == []
        assert str(server.socket) in start_producer.log("wrong"), "where it was refused is said"
    finally:
        server.remove()


def _client(server: RealServer, user: str, password: str):
    import redis

    return redis.Redis.from_url(f"unix://{user}:{password}@{server.socket}", protocol=2)


def _trainer_output(runs: Path, url: str, environment: dict[str, str], log: Path) -> str:
    """The log of a trainer that ends at once."""
    program = "import sys; from penstock.deploy.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["trainer", str(runs / "test" / "run.toml"), "--runs", str(runs)]
    trainer = ForkedProgram(program, arguments, {**os.environ, "REDIS_URL": url, **environment}, log)
    assert trainer.wait(120) in (1, 2), log.read_text()
    return log.read_text()
