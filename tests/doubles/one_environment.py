"""A run's environments, of which a test has made the only one."""

from typing import Any

from penstock.producers.rollout.run_environments import RunEnvironment, RunEnvironments
from penstock.schemas.config import RunConfig


def alone(config: RunConfig, environment: Any) -> RunEnvironments:
    (settings,) = config.every_environment.values()
    return RunEnvironments([RunEnvironment.of(config, settings, environment)])
