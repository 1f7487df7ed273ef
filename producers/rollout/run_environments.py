"""The environments of a run: constructed and checked, each with its sampling and its rewards."""

import asyncio
import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.producers.interfaces import ConversingEnvironment, Environment
from penstock.producers.rollout.rewards import RewardComponent, reward_components
from penstock.producers.rollout.sampling import evaluation_sampling, training_sampling
from penstock.schemas.config import ConfigError, EnvironmentConfig, RewardConfig, RunConfig, environment_fields
from penstock.schemas.process.plugins import check_protocol, construct, read_attribute
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import SamplingSettings

_NONE = object()


@dataclass(frozen=True, kw_only=True)
class RunEnvironment:
    """One environment of a run.

    sampling, evaluation_sampling: of its training and its held-out prompts.
    num_samples: answers to each held-out prompt.
    room: held by each of its conversations; at most so many at once.
    """

    name: str
    environment: Environment
    rewards: tuple[RewardComponent, ...]
    sampling: SamplingSettings
    evaluation_sampling: SamplingSettings
    num_samples: int
    room: AbstractAsyncContextManager[Any] = dataclasses.field(default_factory=nullcontext)

    @classmethod
    def of(cls, config: RunConfig, settings: EnvironmentConfig, environment: Environment) -> "RunEnvironment":
        """Raises ConfigError: its reward or `converse` cannot be used, or it holds no conversations that could be
        limited."""
        field = next(field for field, each in environment_fields(config) if each == settings)
        converses = read_attribute(environment, "converse", field, settings.path, default=_NONE) is not _NONE
        if converses:
            check_protocol(environment, ConversingEnvironment, field, settings.path)
        if settings.max_conversations and not converses:
            raise ConfigError(
                f"max_conversations = {settings.max_conversations} of {settings.path!r}: it does not converse; "
                "expected an environment with a method converse, or no limit"
            )
        return cls(
            name=settings.name,
            environment=environment,
            rewards=reward_components(config, environment, f"{field}.path = {settings.path!r}"),
            sampling=training_sampling(config, settings),
            evaluation_sampling=evaluation_sampling(config, settings),
            num_samples=config.held_out[settings.name].num_samples,
            room=asyncio.Semaphore(settings.max_conversations) if settings.max_conversations else nullcontext(),
        )

    @property
    def converses(self) -> bool:
        """True if it holds its conversations itself."""
        return hasattr(self.environment, "converse")


class RunEnvironments:
    """The environments of a run, by name."""

    def __init__(self, environments: Iterable[RunEnvironment]) -> None:
        self._by_name = {each.name: each for each in environments}

    @property
    def any_converse(self) -> bool:
        """True if some hold their conversations themselves; the others' prompts are then answered in one turn."""
        return any(each.converses for each in self)

    def converses(self, name: str) -> bool:
        """Returns whether prompts of this name are conversations; False for a name that is not in the run file."""
        found = self._by_name.get(name or next(iter(self._by_name)))
        return found is not None and found.converses

    def check_endpoint(self, config: RunConfig) -> None:
        """Raises ConfigError if one converses and there is no endpoint."""
        for field, plug in environment_fields(config):
            if config.endpoint is None and self.converses(plug.name):
                raise ConfigError(
                    f"{field}.path = {plug.path!r}: it converses, which goes through the endpoint; "
                    "expected an [endpoint] table in the run file"
                )

    def __iter__(self) -> Iterator[RunEnvironment]:
        return iter(self._by_name.values())

    def named(self, name: str) -> RunEnvironment:
        """Returns the environment of a released prompt; the first one for an entry without a name.

        Raises:
            LookupError: the run file has none of this name.
        """
        if name and name not in self._by_name:
            raise LookupError(f"environment {name!r} is not in the run file, which has {', '.join(self._by_name)}")
        return self._by_name[name] if name else next(iter(self))


def open_environments(config: RunConfig) -> RunEnvironments:
    """Constructs every environment of the run file.

    Raises:
        ConfigError: one cannot be constructed or does not fit, or its reward cannot be used; or `[reward]` is set and
            all of them converse.
    """
    found = RunEnvironments(
        RunEnvironment.of(config, each, construct(each, field, Environment, seed=config.seed))
        for field, each in environment_fields(config)
    )
    if config.reward != RewardConfig() and all(each.converses for each in found):
        given = {name: value for name, value in msgspec.to_builtins(config.reward).items() if value}
        raise ConfigError(
            f"reward = {given}: environments that converse reward their conversations themselves, and all here do; "
            "expected no [reward]"
        )
    return found


def pose(environment: Environment, index: int, *, held_out: bool = False) -> Prompt:
    """Returns the environment's task `index`.

    Raises:
        TypeError, msgspec.ValidationError: it is no `Prompt`, or one of its fields has another type.
        Exception: whatever the environment raises.
    """
    name = "evaluation_prompt" if held_out else "prompt"
    prompt = getattr(environment, name)(index)
    if not isinstance(prompt, Prompt):
        raise TypeError(f"{name}({index}) returned {repr(prompt)[:80]}, expected a Prompt")
    return msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt)
