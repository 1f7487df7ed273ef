"""A rank that carries out the lead's orders: it knows no Redis and decides nothing."""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock.consumers.distributed.start import check_alike
from penstock.consumers.distributed.watch import Watch
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.parity.loaded import LoadedChecks
from penstock.consumers.parity.report import ParityError
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.weights.shard import ShardPublisher, open_shard
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.rollout import RolloutGroup


def follow(config: RunConfig, ranks: Ranks, watch: Watch, url: Callable[[], str] | None = None) -> int:
    """Follows the lead until the lead ends, which ends this process; returns 1 after an error, which `watch` reports
    to the others.

    url: returns the URL of the run's Redis, if policies are published; called once chunks are written there.
    """
    orders: dict[str, Callable[..., object]] = {}

    def open_learner(config: RunConfig) -> None:
        learner, checks = Learner(config, ranks), LoadedChecks(config)

        def yardstick(groups: Sequence[RolloutGroup]) -> None:
            checks.measure(groups, learner.model)

        def gate(groups: Sequence[RolloutGroup], version: int) -> None:
            with suppress(ParityError):  # the lead reports it
                checks.check(groups, learner.model, version)

        orders.update(learner.orders, yardstick=yardstick, gate=gate)
        if url is not None:
            connection = functools.cache(lambda: TrainerConnection(url(), config.redis.outage_s))
            call = lambda command: connection().call(command)  # noqa: E731 - not needed without chunks in Redis
            shard = open_shard(config, ranks, call, learner)
            learner.before_update = shard.snapshots.wait
            orders["publish"] = ShardPublisher(shard, ranks).begin

    orders["learner"] = open_learner
    try:
        check_alike(config, ranks)
        ranks.follow(orders)
    except (ConfigError, OSError) as error:
        watch.refused(error)
    except Exception as error:
        watch.leave(error)
    return 1
