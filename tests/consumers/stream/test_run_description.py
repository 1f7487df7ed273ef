"""The trainer writes what a producer of another host needs to know of the run, and keeps it there."""

import msgspec
import pytest

from penstock.schemas.config import RunConfig, config_of
from penstock.schemas.description import RunDescription, decode_description
from trainer_bench import at_step

pytestmark = pytest.mark.redis


def described(client, bench) -> RunDescription:
    return decode_description(client.hgetall(bench.keys.description))


def config_in(run: RunDescription, bench) -> RunConfig:
    return config_of(msgspec.json.decode(run.run_file), bench.file)


def test_a_run_describes_itself_from_its_start_and_a_resume_with_what_has_changed(bench, redis_client) -> None:
    assert not redis_client.exists(bench.keys.description)
    trainer = bench.trainer()
    assert config_in(described(redis_client, bench), bench) == bench.config
    trainer.close()
    bench.overrides = ["num_updates=13"]
    bench.trainer(resume=True)
    assert config_in(described(redis_client, bench), bench).num_updates == 13


@pytest.mark.parametrize("lost", ["everything", "the description"])
def test_a_redis_that_has_lost_the_description_gets_it_again(bench, redis_client, lost: str) -> None:
    bench.resilient_producer()
    trainer = bench.trainer()
    before = described(redis_client, bench)

    def lose() -> None:
        if lost == "everything":
            redis_client.flushall()
        else:  # a server that came back with an older state
            redis_client.delete(bench.keys.description)
            trainer.leadership.scripts.connection.restarted = lambda: True

    at_step(trainer, 3, lose)
    assert trainer.run()
    assert described(redis_client, bench) == before
