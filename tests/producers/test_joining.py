"""A producer on a host of its own: it sees neither the run's folder nor its model, and serves."""

import signal
from pathlib import Path

import pytest

from isolated_host import IsolatedHost, has_namespaces
from penstock.schemas.description import describe, encode_description
from penstock.schemas.heartbeat import decode_heartbeat
from penstock.schemas.rollout import decode_group
from waiting import wait_for

pytestmark = [pytest.mark.redis, pytest.mark.skipif(not has_namespaces(), reason="no mount namespaces for this user")]

PROGRAM = """
import sys
import penstock.producers.__main__ as produce
import scripted_engine
from penstock.deploy.cli import main
produce.start_vllm = scripted_engine.start
sys.exit(main(sys.argv[1:]))
"""


def test_a_host_that_shares_nothing_but_redis_serves_the_run(
    redis_server, make_config, hand_trainer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server, config = redis_server(), make_config()
    trainer = hand_trainer(server.client, config, tmp_path)
    server.client.hset(trainer.keys.commit, "epoch", 0)
    server.client.hset(trainer.keys.description, mapping=encode_description(describe(config)))
    everything = tmp_path_factory.getbasetemp()
    assert Path(config.model.path).is_relative_to(everything)
    host = IsolatedHost(server.url, [everything])
    try:
        host.start("-c", PROGRAM, "producer", "--join", host.url, "--run", "test", "--id", "far")
        trainer.announce(0)
        trainer.release(1, 8)
        groups = wait_for(lambda: trainer.read(8), process=host.process, log=host.log.read_text)
        assert {decode_group(fields[b"payload"]).producer_id for fields in groups} == {"far"}
        trainer.announce(1)
        beat = lambda: decode_heartbeat(server.client.get(trainer.keys.producer("far")))  # noqa: E731
        wait_for(lambda: beat().policy_version == 1, process=host.process, log=host.log.read_text)
        host.process.send_signal(signal.SIGTERM)
        assert host.process.wait(60) == 0, host.log.read_text()
        own = {file.name for file in host.folder.glob("penstock-*/test/*")}
        assert {"producers", "metrics"} < own and any(name.startswith("model-") for name in own)
    finally:
        host.close()
    assert list(tmp_path.iterdir()) == []
