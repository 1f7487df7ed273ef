"""Makes a run's environments from objects of a test."""

from collections.abc import Mapping
from typing import Any

from penstock.producers.rollout.run_environments import RunEnvironment, RunEnvironments
from penstock.schemas.config import RunConfig


def alone(config: RunConfig, environment: Any) -> RunEnvironments:
    """Returns the environments of a run that has one."""
    (name,) = config.every_environment
    return several(config, {name: environment})


def several(config: RunConfig, by_name: Mapping[str, Any]) -> RunEnvironments:
    """Returns the environments of a run, by the names of the run file."""
    settings = config.every_environment
    return RunEnvironments(RunEnvironment.of(config, settings[name], each) for name, each in by_name.items())
