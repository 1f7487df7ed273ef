"""Environments of the library SkyRL-gym, unchanged, on a data set as SkyRL reads it."""

import asyncio
import json
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import msgspec

from penstock.producers.environments.dataset import Dataset
from penstock.producers.environments.rows import DataRows
from penstock.producers.environments.stepping import (
    Episode,
    Json,
    OneAnswer,
    Step,
    as_dicts,
    library,
    play,
    text_of,
    unknown,
)
from penstock.producers.interfaces import Conversation
from penstock.schemas.prompt import Prompt, Reward


class SkyRLEnvironment(Dataset):
    """An environment that `skyrl_gym.make` makes for each row, in a conversation: each answer is an action, and its
    observations are the next messages.

    A row's other columns (`reward_spec`, `extra_info`) are the environment's `extras`. The reward is the sum of all
    steps, and the numbers among the environment's metrics are its parts.

    id: a registered environment; None takes each row's `env_class`. config: the environment's `env_config`.
    max_turns: of SkyRL's generator, the most answers; it is among the extras.
    data: of `Dataset`, such as `training` and `evaluation`; rows have a column `prompt`.

    Raises:
        ValueError: the data cannot be read, or the first row's environment cannot be made.
        ImportError: skyrl_gym is not installed.
    """

    def __init__(
        self, *, id: str | None = None, config: Mapping[str, Any] | None = None, max_turns: int = 1, **data: Any
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}, expected at least 1")
        self._gym = library("skyrl_gym", "skyrl")
        self._known = library("skyrl_gym.envs.registration", "skyrl").registry
        self._config = library("omegaconf", "skyrl").OmegaConf.create(dict(config or {}))
        self._id, self._max_turns = id, max_turns
        super().__init__(**{"columns": {"prompt": "prompt"}} | data)
        first = self.evaluation_prompt(1) if self._training is None else self.prompt(1)
        try:
            _Episode(self._make(first), as_dicts(first))
        except ValueError:
            raise
        except Exception as error:  # the library's environments raise anything
            raise ValueError(f"{first.metadata['source']}: {type(error).__name__}: {error}") from error

    async def reward(self, prompt: Prompt, completion: str) -> Reward:  # type: ignore[override]
        """Returns the reward of an episode with this answer alone."""
        return await self.converse(prompt, OneAnswer(completion))

    async def converse(self, prompt: Prompt, conversation: Conversation) -> Reward:
        episode = _Episode(await asyncio.to_thread(self._make, prompt), as_dicts(prompt))
        return await play(episode, episode.begun, conversation, self._max_turns)

    def _read(self) -> list[str]:
        return []

    def _pose(self, rows: DataRows, number: int) -> Prompt:
        prompt = super()._pose(rows, number)
        extras = {name: value for name, value in rows[number].items() if name != self._columns["prompt"]}
        encoded = msgspec.json.encode(extras, enc_hook=str).decode()
        return msgspec.structs.replace(prompt, metadata={**prompt.metadata, "extras": encoded})

    def _make(self, prompt: Prompt) -> Any:
        extras = {"max_turns": self._max_turns, **json.loads(prompt.metadata["extras"])}
        id = self._id or extras.get("env_class")
        if id is None:
            raise ValueError(f"{prompt.metadata['source']}: no env_class, expected it in each row, or an id for all")
        if id not in self._known:
            raise unknown(str(id), self._known)
        return self._gym.make(id, env_config=self._config, extras=extras)


class _Episode(Episode):
    """An episode of a made environment. begun: the messages that it begins with."""

    def __init__(self, environment: Any, prompt: list[Json]) -> None:
        self._environment = environment
        self.begun, _ = environment.init(prompt)

    async def step(self, action: str) -> Step:
        done = await asyncio.to_thread(self._environment.step, action)
        for message in done["observations"]:
            text_of(message["content"], "an observation")
        return Step(done["observations"], done["reward"], done["done"])

    def parts(self) -> Mapping[str, float]:
        metrics = self._environment.get_metrics().items()
        return {name: float(value) for name, value in metrics if isinstance(value, Real) and math.isfinite(value)}

    async def close(self) -> None:
        await asyncio.to_thread(self._environment.close)
