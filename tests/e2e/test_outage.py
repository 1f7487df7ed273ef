"""A server that is unreachable for half a minute, with claims in flight that others may take over meanwhile."""

import time
from pathlib import Path

import pytest

import penstock.consumers.__main__ as entry
from producer_thread import ProducerThread, VariedTasks
from real_server import RealServer
from scripted_learner import ScriptedLearner
from trainer_bench import TrainerBench, assert_settled_once, at_step, tracebacks

AWAY_S = 30.0


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_half_a_minute_without_redis_loses_nothing_and_trains_nothing_twice(
    server_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(entry, "load_learner", ScriptedLearner)
    server = RealServer(server_binary, "--appendfsync", "everysec")
    bench = TrainerBench(server.url, tmp_path)
    # When the server is back, every claim may be taken over by another producer.
    bench.overrides = ["producers.claim_idle_s=4"]
    producers = [
        ProducerThread(bench.config, server.url, tmp_path, tasks=VariedTasks(), producer_id=f"producer-{n}")
        for n in range(2)
    ]
    trainer = bench.trainer()

    def go_away() -> None:
        server.stop()
        time.sleep(AWAY_S)
        server.start()

    at_step(trainer, 5, go_away)
    for producer in producers:
        producer.start()
    assert trainer.run()
    for producer in producers:
        producer.finish()
        assert producer.problem is None
    assert_settled_once(bench, server.client)
    assert not tracebacks(caplog)
    bench.close()
    server.remove()
