"""A producer on a host of its own, in a mount namespace: it sees neither the run's folder nor its model, and serves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.schemas.description import describe, encode_description
from penstock.schemas.heartbeat import decode_heartbeat
from penstock.schemas.rollout import decode_group
from waiting import wait_for

pytestmark = pytest.mark.redis

ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--mount", "--map-root-user"]
ALONE = """
mount -t tmpfs none "$1" && mount -t tmpfs none /dev/shm && cd "$1" && [ -z "$(ls)" ] && shift && exec "$@"
"""
PROGRAM = """
import sys
import penstock.producers.__main__ as produce
import scripted_engine
from penstock.deploy.cli import main
produce._start_vllm = scripted_engine.start
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(subprocess.run([*NAMESPACE, "true"]).returncode != 0, reason="no mount namespaces for this user")
def test_a_host_that_shares_nothing_but_redis_serves_the_run(
    redis_server, make_config, hand_trainer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server, config = redis_server(), make_config()
    trainer = hand_trainer(server.client, config, tmp_path)
    server.client.hset(trainer.keys.commit, "epoch", 0)
    server.client.hset(trainer.keys.description, mapping=encode_description(describe(config)))
    everything = tmp_path_factory.getbasetemp()
    assert tmp_path.is_relative_to(everything) and Path(config.model.path).is_relative_to(everything)
    assert not server.socket.is_relative_to(everything)
    join = ["producer", "--join", server.url, "--run", "test", "--id", "far"]
    command = [*NAMESPACE, "sh", "-c", ALONE, "sh", str(everything), sys.executable, "-c", PROGRAM, *join]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'doubles'}",
        "TMPDIR": str(everything),
        "PENSTOCK_LOG": "text",
    }
    log = tmp_path / "far.log"
    with log.open("wb") as output:
        producer = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        trainer.announce(0)
        trainer.release(1, 8)
        groups = wait_for(lambda: trainer.read(8), process=producer, log=log.read_text)
        assert {decode_group(fields[b"payload"]).producer_id for fields in groups} == {"far"}
        trainer.announce(1)
        beat = lambda: decode_heartbeat(server.client.get(trainer.keys.producer("far")))  # noqa: E731
        wait_for(lambda: beat().policy_version == 1, process=producer, log=log.read_text)
        producer.send_signal(signal.SIGTERM)
        assert producer.wait(60) == 0, log.read_text()
    finally:
        producer.kill()
        producer.wait()
    assert [file.name for file in tmp_path.iterdir()] == ["far.log"]
