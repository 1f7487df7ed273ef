"""Games of the library TextArena, unchanged: their rules, observations and rewards. Those of several players are played
by the policy against itself."""

import asyncio
import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from penstock.producers.environments.global_random import GlobalRandom
from penstock.producers.environments.stepping import (
    MAX_TURNS,
    TOO_LONG,
    Episode,
    SeededTasks,
    Step,
    library,
    play,
    text_of,
    unknown,
)
from penstock.producers.interfaces import Conversation
from penstock.schemas.prompt import Prompt, Reward

Json = dict[str, Any]

MAX_EMPTY = 64
"""Empty actions that a game gets to end."""


class TextArenaEnvironment(SeededTasks):
    """A game that `textarena.make` makes, in a conversation: each answer is an action, and each message is what the
    game has told the player since the last one.

    The reward is the game's at its end, with the part `invalid_move`: 1 for a game that an invalid action has ended. A
    game for whose next turn the context has no room, or of more than `max_turns` answers, gets empty actions, invalid
    ones in most games, until it ends; it is dead if it does not.

    Of several players one is trained, as the task's seed says; the policy as it is then answers for the others too.
    Each player reads what the game tells that player alone. One whose context has no room makes an empty action. A game
    that another player's action ends before the trained one's first turn is begun again, and that player trained.

    id: a registered game. args: of `textarena.make`. num_players: of the game. num_evaluation_prompts: how many games
        are held out. max_turns: answers of the player who is trained.

    Raises:
        ValueError: the game cannot be made or begun, or it is not one of `num_players` players.
        ImportError: textarena is not installed.
    """

    def __init__(
        self,
        *,
        seed: int,
        id: str,
        args: Mapping[str, Any] | None = None,
        num_players: int = 1,
        num_evaluation_prompts: int = 64,
        max_turns: int = MAX_TURNS,
    ) -> None:
        super().__init__(seed=seed, num_evaluation_prompts=num_evaluation_prompts, max_turns=max_turns)
        ta = library("textarena", "textarena")
        if id not in (known := library("textarena.envs.registration", "textarena").ENV_REGISTRY):
            raise unknown(id, known)
        self._num_players = num_players
        try:
            self._made = ta.make(id, **(args or {}))
            state = _Game(self._made, 0, num_players).inner.state
        except Exception as error:  # the library's games raise anything
            raise ValueError(f"id = {id!r}, num_players = {num_players}: {type(error).__name__}: {error}") from error
        if isinstance(state, ta.SinglePlayerState) != (num_players == 1):
            kind = "a game for a single player" if num_players > 1 else "a game of several players"
            raise ValueError(f"id = {id!r}: {kind}, expected one of num_players = {num_players}")

    def pose(self, seed: int) -> str:
        return _Game(self._made, seed, self._num_players).told_first

    async def begin(self, seed: int, player: int | None = None) -> "_Game":
        return await asyncio.to_thread(_Game, self._made, seed, self._num_players, player)

    async def converse(self, prompt: Prompt, conversation: Conversation) -> Reward:
        player = None
        for _ in range(self._num_players):
            game = await self.begin(int(prompt.metadata["seed"]), player)
            game.conversation = conversation
            opening = await game.others()
            if not opening.is_done:
                return await play(game, opening.messages, conversation, self._max_turns)
            player = game.mover
        raise RuntimeError("textarena: the game has ended before the first turn of the player who is trained")


class _Game(Episode):
    """One game, begun.

    player: the one who is trained, by default as the seed says. told_first: what the game has told this player at its
        beginning. conversation: answers for the other players. mover: who of them has acted last.
    """

    def __init__(self, made: Any, seed: int, num_players: int, player: int | None = None) -> None:
        self.player = self.mover = seed % num_players if player is None else player
        self.conversation: Conversation | None = None
        self._messages: dict[int, list[Json]] = defaultdict(list)
        self._random = GlobalRandom(seed)
        with self._random.lent():
            self._game = copy.deepcopy(made)
            self._game.reset(num_players=num_players, seed=seed)
        self.inner = self._game
        while hasattr(self.inner, "env"):  # a wrapper; those of observations repeat all that was said before
            self.inner = self.inner.env
        self.told_first = self._text(self.inner.state.observations[self.player], self.player)

    async def step(self, action: str) -> Step:
        is_done = await asyncio.to_thread(self._act, action)
        return self._ended() if is_done else await self.others()

    async def others(self) -> Step:
        """Lets the others play until it is the player's turn, or the game has ended."""
        while True:
            player, observed = self.inner.get_observation()
            said = {"role": "user", "content": self._text(observed, player)}
            if player == self.player:
                return Step([said], 0.0, False)
            assert self.conversation is not None
            messages = self._messages[player]
            messages.append(said)
            try:
                reply = await self.conversation.chat(messages, is_trained=False)
            except Exception as error:
                if getattr(error, "code", None) not in TOO_LONG:
                    raise
                reply = {"role": "assistant", "content": ""}
            messages.append(reply)
            self.mover = player
            if await asyncio.to_thread(self._act, reply.get("content") or ""):
                return self._ended()

    async def give_up(self) -> float:
        for _ in range(MAX_EMPTY):
            if await asyncio.to_thread(self._act, ""):
                return self._ended().reward
        raise RuntimeError(f"textarena: the game has not ended, and goes on after {MAX_EMPTY} empty actions")

    def parts(self) -> Mapping[str, float]:
        _, facts = self.inner.close()
        return {"invalid_move": float(facts[self.player]["invalid_move"])}

    def _act(self, action: str) -> bool:
        """Makes the action of the player whose turn it is; returns whether the game has ended."""
        with self._random.lent():
            is_done, _ = self._game.step(action)
        return bool(is_done)

    def _ended(self) -> Step:
        rewards, _ = self.inner.close()
        if self.player not in (rewards or {}):
            raise RuntimeError("textarena: the game has ended without a reward")
        return Step([], rewards[self.player], True)

    def _text(self, observed: Any, player: int) -> str:
        """Returns what a player has been told, but for what this player has said."""
        names = self.inner.state.role_mapping
        lines = [(who, text_of(text, "what the game says")) for who, text, _ in observed if who != player]
        return "\n".join(f"[{names.get(who, who)}] {text}" if who >= 0 else text for who, text in lines)
