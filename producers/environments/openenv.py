"""Any server of the library OpenEnv, over its own client."""

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from penstock.producers.environments.stepping import (
    MAX_TURNS,
    Episode,
    Json,
    SeededTasks,
    Step,
    library,
    play,
    text_of,
)
from penstock.producers.interfaces import Conversation
from penstock.schemas.prompt import Prompt, Reward

SESSION = "a session (environment.max_conversations is more than it has room for?) or its reset"


class OpenEnvEnvironment(SeededTasks):
    """A server's environment, in a conversation: each answer is a field of an action, each message an observation.

    The reward is the sum of all steps; an episode none of whose steps has a reward is dead. `environment.
    max_conversations` limits a producer's sessions: a server has room for one unless it was started for more.

    url: the server's. action: the field of an action that the answer is. fields: its other fields. observation: the
        field that the model reads; None shows all of them, as JSON. instructions: a system's message before the first
        observation. reset: arguments of each reset beside the seed. timeout_s: for one reply of the server.
    num_evaluation_prompts: how many episodes are held out.

    Raises:
        ValueError: the server does not answer, or its actions or observations have no such field.
        ImportError: openenv is not installed.
    """

    def __init__(
        self,
        *,
        seed: int,
        url: str,
        action: str = "message",
        fields: Mapping[str, Any] | None = None,
        observation: str | None = None,
        instructions: str | None = None,
        reset: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        num_evaluation_prompts: int = 64,
        max_turns: int = MAX_TURNS,
    ) -> None:
        super().__init__(seed=seed, num_evaluation_prompts=num_evaluation_prompts, max_turns=max_turns)
        self._client = library("openenv.core.generic_client", "openenv").GenericEnvClient
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._action, self._fields, self._observation = action, dict(fields or {}), observation
        self._instructions, self._reset = instructions, dict(reset or {})
        try:
            # This takes no session, of which the server may have one.
            with urllib.request.urlopen(f"{self._url}/schema", timeout=timeout_s) as answer:
                schema = json.load(answer)
        except (OSError, ValueError) as error:
            raise ValueError(f"url = {url!r}: no OpenEnv server answers at {self._url}/schema: {error}") from error
        shown = [] if observation is None else [("observation", observation)]
        for part, name in [("action", action), *(("action", name) for name in self._fields), *shown]:
            known = schema[part].get("properties", {})
            if name not in known and schema[part].get("additionalProperties") is False:
                raise ValueError(f"{part}: the server has no field {name!r} in it, expected one of {', '.join(known)}")

    def pose(self, seed: int) -> str:
        """Returns the instructions alone: the first observation is the server's, which may have few sessions."""
        return self._instructions or ""

    async def begin(self, seed: int) -> "_Episode":
        client = self._client(self._url, connect_timeout_s=self._timeout_s, message_timeout_s=self._timeout_s)
        episode = _Episode(client, self._action, self._fields, self._observation)
        try:
            await episode.begin(self._reset | {"seed": seed})
        except BaseException:
            await episode.close()
            raise
        return episode

    async def converse(self, prompt: Prompt, conversation: Conversation) -> Reward:
        system = [{"role": "system", "content": self._instructions}] if self._instructions else []
        episode = await self.begin(int(prompt.metadata["seed"]))
        return await play(episode, [*system, *episode.begun], conversation, self._max_turns)


class _Episode(Episode):
    """An episode over one client; `begin` it."""

    def __init__(self, client: Any, action: str, fields: Json, observation: str | None) -> None:
        self._client, self._action, self._fields, self._observation = client, action, fields, observation
        self._is_rewarded = False
        self.begun: list[Json] = []

    async def begin(self, reset: Json) -> None:
        """Raises RuntimeError: the server refuses a session or the reset, or does not answer in time."""
        self.begun = self._told((await self._asked(self._client.reset(**reset), SESSION)).observation)

    async def step(self, action: str) -> Step:
        sent = {**self._fields, self._action: action}
        done = await self._asked(self._client.step(sent), f"an action with the fields {sorted(sent)}")
        self._is_rewarded |= done.reward is not None
        if done.done:
            self._check_rewarded()
            return Step([], done.reward or 0.0, True)
        return Step(self._told(done.observation), done.reward or 0.0, False)

    async def give_up(self) -> float:
        self._check_rewarded()
        return 0.0

    async def close(self) -> None:
        await self._client.disconnect()

    async def _asked(self, request: Any, what: str) -> Any:
        try:
            return await request
        except TimeoutError:
            raise RuntimeError("openenv: the server has not answered in time (timeout_s)") from None
        except Exception as error:  # a refusal of the server's, or one of the client's WebSocket
            raise RuntimeError(f"openenv: the server does not take {what}: {type(error).__name__}: {error}") from error

    def _check_rewarded(self) -> None:
        if not self._is_rewarded:
            raise RuntimeError("openenv: no step of the episode had a reward")

    def _told(self, observed: Any) -> list[Json]:
        text = json.dumps(observed) if self._observation is None else self._field(observed)
        return [{"role": "user", "content": text}]

    def _field(self, observed: Json) -> str:
        if self._observation not in observed:
            raise LookupError(f"openenv: no field {self._observation!r} in the observation, found {sorted(observed)}")
        return text_of(observed[self._observation], f"the observation's field {self._observation!r}")
