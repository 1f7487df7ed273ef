"""The trainer writes what a producer of another host needs to know of the run, and keeps it there."""

import msgspec
import pytest

from penstock.schemas.config import config_of
from penstock.schemas.description import RunDescription, decode_description
from trainer_bench import at_step

pytestmark = pytest.mark.redis


def described(client, bench) -> RunDescription:
    return decode_description(client.hgetall(bench.keys.description))


def test_a_run_describes_itself_anew_on_resume_and_to_a_redis_that_has_lost_it(bench, redis_client) -> None:
    assert not redis_client.exists(bench.keys.description)
    trainer = bench.trainer()
    before = described(redis_client, bench)
    assert config_of(msgspec.json.decode(before.run_file), bench.file) == bench.config
    trainer.close()
    bench.overrides = ["num_updates=13"]
    bench.producer()
    trainer = bench.trainer(resume=True)
    before = described(redis_client, bench)
    assert config_of(msgspec.json.decode(before.run_file), bench.file).num_updates == 13

    def return_older_state() -> None:
        redis_client.delete(bench.keys.description)
        trainer.leadership.scripts.connection.restarted = lambda: True

    after_loss = []
    at_step(trainer, 3, redis_client.flushall)
    at_step(trainer, 8, lambda: (after_loss.append(described(redis_client, bench)), return_older_state()))
    assert trainer.run()
    assert [*after_loss, described(redis_client, bench)] == [before] * 2
