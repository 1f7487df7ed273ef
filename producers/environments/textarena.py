"""Games for one player of the library TextArena, unchanged: their rules, observations and rewards."""

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

from penstock.producers.environments.global_random import GlobalRandom
from penstock.producers.environments.stepping import MAX_TURNS, Episode, SeededTasks, Step, library, text_of, unknown

PLAYER = 0
MAX_EMPTY = 64
"""Empty actions that a game gets to end."""


class TextArenaEnvironment(SeededTasks):
    """A game that `textarena.make` makes, in a conversation: each answer is an action, and each message is what the
    game has told the player since the last one.

    The reward is the game's at its end, with the part `invalid_move`: 1 for a game that an invalid action has ended. A
    game for whose next turn the context has no room, or of more than `max_turns` answers, gets empty actions, invalid
    ones in most games, until it ends; it is dead if it does not.

    id: a registered game. args: of `textarena.make`. num_evaluation_prompts: how many games are held out.

    Raises:
        ValueError: the game cannot be made or begun, or it is one of several players.
        ImportError: textarena is not installed.
    """

    def __init__(
        self,
        *,
        seed: int,
        id: str,
        args: Mapping[str, Any] | None = None,
        num_evaluation_prompts: int = 64,
        max_turns: int = MAX_TURNS,
    ) -> None:
        super().__init__(seed=seed, num_evaluation_prompts=num_evaluation_prompts, max_turns=max_turns)
        ta = library("textarena", "textarena")
        if id not in (known := library("textarena.envs.registration", "textarena").ENV_REGISTRY):
            raise unknown(id, known)
        try:
            self._made = ta.make(id, **(args or {}))
            state = _Game(self._made, 0).inner.state
        except Exception as error:  # the library's games raise anything
            raise ValueError(f"id = {id!r}: {type(error).__name__}: {error}") from error
        if not isinstance(state, ta.SinglePlayerState):
            raise ValueError(f"id = {id!r}: a game of several players; expected one for a single player")

    def pose(self, seed: int) -> str:
        return _Game(self._made, seed).said

    async def begin(self, seed: int) -> "_Game":
        return await asyncio.to_thread(_Game, self._made, seed)


class _Game(Episode):
    """One game, begun. said: what the player is told first."""

    def __init__(self, made: Any, seed: int) -> None:
        self._random = GlobalRandom(seed)
        with self._random.lent():
            self._game = copy.deepcopy(made)
            self._game.reset(num_players=1, seed=seed)
        self.inner = self._game
        while hasattr(self.inner, "env"):  # a wrapper; those of observations repeat all that was said before
            self.inner = self.inner.env
        self.said = self._observe()

    async def step(self, action: str) -> Step:
        return await asyncio.to_thread(self._step, action)

    async def give_up(self) -> float:
        for _ in range(MAX_EMPTY):
            _, reward, is_done = await self.step("")
            if is_done:
                return reward
        raise RuntimeError(f"textarena: the game has not ended, and goes on after {MAX_EMPTY} empty actions")

    def parts(self) -> Mapping[str, float]:
        _, facts = self.inner.close()
        return {"invalid_move": float(facts[PLAYER]["invalid_move"])}

    def _step(self, action: str) -> Step:
        with self._random.lent():
            is_done, _ = self._game.step(action)
        if not is_done:
            return Step([{"role": "user", "content": self._observe()}], 0.0, False)
        rewards, _ = self.inner.close()
        if not rewards:
            raise RuntimeError("textarena: the game has ended without a reward")
        return Step([], rewards[PLAYER], True)

    def _observe(self) -> str:
        _, said = self.inner.get_observation()
        return "\n".join(text_of(text, "what the game says") for speaker, text, _ in said if speaker != PLAYER)
