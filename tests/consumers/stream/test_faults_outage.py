"""A Redis out of reach: waited for, given up with one line, and no reason not to stop when told to."""

import os
import signal
import threading
import time

import pytest
import redis

import penstock.consumers.__main__ as entry
import penstock.consumers.stream.connection
from penstock.consumers.stream.connection import TrainerConnection
from penstock.schemas.config import ConfigError
from penstock.schemas.process.outage import RedisGoneError
from trainer_bench import assert_settled_once, at_step, commit_at_once, tracebacks
from waiting import wait_for

pytestmark = pytest.mark.redis


def test_a_redis_out_of_reach_for_a_while_is_waited_for(bench, redis_client, caplog):
    with bench.proxy() as proxy:
        trainer = bench.trainer(url=proxy.url)
        bench.resilient_producer(url=proxy.url)

        def come_back() -> None:
            wait_for(lambda: "is away" in caplog.text)
            proxy.accept()

        back = threading.Thread(target=come_back, daemon=True)
        at_step(trainer, 5, lambda: (proxy.refuse(), back.start()))
        assert trainer.run()
        bench.close()
    assert_settled_once(bench, redis_client)
    assert len([text for text in caplog.messages if text.startswith("Redis at") and "is away" in text]) == 1
    assert not tracebacks(caplog)


def test_a_redis_that_stays_away_ends_the_trainer_with_one_line_and_its_work_is_done_again(
    bench, redis_client, monkeypatch, caplog
):
    bench.overrides = ["redis.outage_s=1.0"]
    open_trainer = entry.open_trainer

    def open_that_commits_at_once(*args, **settings):
        commit_at_once(trainer := open_trainer(*args, **settings))
        return trainer

    with bench.proxy() as proxy:
        monkeypatch.setenv("REDIS_URL", proxy.url)
        bench.resilient_producer()
        held = proxy.hold("announce", 6, "before")
        threading.Thread(target=lambda: (held.wait(), proxy.refuse(), held.release()), daemon=True).start()
        with monkeypatch.context() as patch:
            patch.setattr(entry, "open_trainer", open_that_commits_at_once)
            assert entry.main(bench.config, runs=bench.runs) == 1
        assert "has been away for" in caplog.messages[-1] and not tracebacks(caplog)
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == 4
    assert second.run()
    assert_settled_once(bench, redis_client)


def test_a_read_that_blocks_for_longer_than_the_socket_waits_is_no_outage_without_end(bench, redis_client, monkeypatch):
    # The margin between the two is what keeps this from happening; without it a waiting trainer must still go on.
    monkeypatch.setattr(penstock.consumers.stream.connection, "SOCKET_TIMEOUT_S", 0.3)
    assert penstock.consumers.stream.connection.BLOCK_S > 0.3
    trainer = bench.trainer()
    assert trainer.leadership.connection.client.connection_pool.connection_kwargs["socket_timeout"] == 0.3

    def feed() -> None:
        wait_for(lambda: trainer.leadership.connection.num_outages)
        bench.resilient_producer()

    threading.Thread(target=feed, daemon=True).start()
    assert trainer.run()
    assert trainer.leadership.connection.num_outages >= 1
    assert_settled_once(bench, redis_client)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_trainer_whose_redis_is_away(bench, redis_client, monkeypatch, caplog, number):
    bench.overrides = ["redis.outage_s=600.0"]
    with bench.proxy() as proxy:
        monkeypatch.setenv("REDIS_URL", proxy.url)
        bench.resilient_producer()

        def go_away_and_interrupt() -> None:
            fault.wait()
            proxy.refuse()
            fault.release()
            time.sleep(0.5)
            os.kill(os.getpid(), number)

        fault = proxy.hold("announce", 6, "before")
        thread = threading.Thread(target=go_away_and_interrupt, daemon=True)
        thread.start()
        began_s = time.monotonic()
        assert entry.main(bench.config, runs=bench.runs) == 1
        assert time.monotonic() - began_s < 60, "a tenth of the outage that is allowed"
        thread.join()
    assert "stopped while Redis is away" in caplog.messages[-1]
    assert not tracebacks(caplog)
    second = bench.trainer(resume=True)
    assert second.run()
    assert_settled_once(bench, redis_client)


@pytest.mark.slow
def test_a_signal_ends_a_trainer_whose_redis_is_frozen(bench, start_server):
    server = start_server()
    bench.url = server.url
    bench.resilient_producer()
    trainer = bench.trainer()

    def freeze() -> None:
        server.freeze()
        threading.Timer(1.0, trainer.stop).start()

    at_step(trainer, 5, freeze)
    began_s = time.monotonic()
    with pytest.raises(RedisGoneError, match="stopped while Redis is away"):
        trainer.run()
    assert time.monotonic() - began_s < 60
    server.thaw()
    bench.close()


def test_a_stop_is_carried_out_after_a_short_outage(bench, redis_client, monkeypatch):
    monkeypatch.setattr(penstock.consumers.stream.connection, "SHUTDOWN_TIMEOUT_S", 60.0)
    with bench.proxy() as proxy:
        trainer = bench.trainer(url=proxy.url)
        bench.resilient_producer()

        def stop() -> None:
            trainer.stop()
            proxy.refuse(0.5)

        at_step(trainer, 5, stop)
        assert trainer.run() is False
        assert len(bench.saved_training(redis_client)) == 24
        bench.close()


@pytest.mark.parametrize("message", ["MISCONF Errors writing to the AOF file", "NOREPLICAS Not enough good replicas"])
def test_an_answer_that_will_pass_is_waited_out(redis_url, message):
    connection = TrainerConnection(redis_url, outage_s=60)
    answers = [redis.ResponseError(message), redis.ReadOnlyError("You can't write against a read only replica")]

    def command(client):
        if answers:
            raise answers.pop()
        return "answer"

    assert connection.call(command) == "answer"
    connection.close()


def test_any_other_error_answer_ends_the_trainer_with_one_line(bench, redis_client, monkeypatch, caplog):
    redis_client.set(bench.keys.prompts, "no stream")
    monkeypatch.setenv("REDIS_URL", bench.url)
    assert entry.main(bench.config, runs=bench.runs) == 1
    assert "WRONGTYPE" in caplog.messages[-1] and not tracebacks(caplog)


def test_a_url_that_is_none_is_refused_without_quoting_it():
    with pytest.raises(ConfigError, match="no Redis URL; expected redis://") as caught:
        TrainerConnection("http://user:secret@host", outage_s=1)
    assert "secret" not in str(caught.value)
