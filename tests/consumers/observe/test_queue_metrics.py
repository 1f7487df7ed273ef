"""The trainer's queue metrics: as full as the queue was before the batch made room, and fresh while it waits."""

import threading

import pytest

from mini_producer import dead_fields
from trainer_bench import TrainerBench, at_step
from trainer_thread import TrainerThread
from waiting import wait_for

pytestmark = pytest.mark.redis

CREDIT = 12


def test_a_queue_at_its_bound_is_seen_before_the_batch_makes_room(bench: TrainerBench, redis_client) -> None:
    trainer, producer = bench.trainer(), bench.producer()
    value, seen = bench.metrics.registry.get_sample_value, []

    def fill_the_queue() -> None:
        wait_for(lambda: not redis_client.xlen(bench.keys.prompts))
        producer.stop.set()  # what is released from now on stays where it is
        producer.join()

    def look_and_go_on() -> None:
        seen.append((value("penstock_groups_open"), value("penstock_prompts_open")))
        bench.producer()

    at_step(trainer, 3, fill_the_queue)
    at_step(trainer, 4, look_and_go_on)
    assert trainer.run()
    assert seen == [(CREDIT, 0)]
    assert value("penstock_credit_groups") == CREDIT
    assert value("penstock_lag_bound_steps") == 2


def test_a_trainer_that_waits_in_vain_shows_where_the_groups_are_and_how_many_agents_have_abandoned(bench) -> None:
    trainer, over = bench.trainer(), threading.Event()
    value = bench.metrics.registry.get_sample_value

    def abandon(index: int, version: int) -> dict:
        if index > CREDIT:
            over.wait(60)
        return dead_fields(index, "abandoned: nothing was heard of the agents")

    thread = TrainerThread(trainer)
    wait_for(lambda: (value("penstock_groups_open"), value("penstock_prompts_open")) == (CREDIT, CREDIT))
    producer = bench.producer(abandon)
    wait_for(lambda: value("penstock_abandoned_groups") == CREDIT)
    trainer.stop()
    thread.join(60)
    producer.stop.set()
    over.set()
    assert thread.outcome is False
