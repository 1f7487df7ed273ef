"""Games of the library TextArena, as published."""

import re
from typing import Any

import pytest

pytest.importorskip("textarena", reason="textarena is not installed: pip install -e '.[dev]'")
import textarena as ta
from textarena.envs import registration

from penstock.producers.environments import textarena as module
from penstock.producers.environments.stepping import ContextFullError, Step
from penstock.producers.environments.textarena import TextArenaEnvironment
from penstock.producers.interfaces import Environment
from penstock.schemas.config import EnvironmentConfig
from penstock.schemas.process.plugins import construct
from scripted_conversation import ScriptedConversation

GUESS = "GuessTheNumber-v0"


def secret_of(seed: int) -> int:
    """Returns the number to be guessed, from the library itself."""
    game = ta.make(GUESS)
    game.reset(num_players=1, seed=seed)
    return game.state.game_state["game_number"]


async def test_a_game_is_posed_by_its_index_and_played_by_its_own_rules() -> None:
    environment = TextArenaEnvironment(seed=3, id=GUESS, num_evaluation_prompts=2)
    prompt = environment.prompt(1)
    assert "guess the number between 1 and 20" in prompt.messages[0].content
    assert prompt == TextArenaEnvironment(seed=3, id=GUESS).prompt(1)
    secrets = [secret_of(int(environment.prompt(index).metadata["seed"])) for index in range(1, 9)]
    assert len(set(secrets)) > 2
    assert environment.evaluation_prompt(1) == TextArenaEnvironment(seed=4, id=GUESS).evaluation_prompt(1)
    secret = secrets[0]
    lower = secret - 1 or 20
    conversation = ScriptedConversation(f"I say [{lower}]", str(secret))  # its wrapper adds the brackets
    reward = await environment.converse(prompt, conversation)
    assert (reward.value, reward.parts) == (1.0, {"finished": 1.0, "invalid_move": 0.0})
    assert conversation.read[1] == f"The target number is {'higher' if lower < secret else 'lower'}."


async def test_a_game_that_is_not_finished_gets_invalid_moves_until_it_ends() -> None:
    environment = TextArenaEnvironment(seed=3, id=GUESS, max_turns=1)
    prompt = environment.prompt(1)
    near, far = sorted(({1, 20} - {secret_of(int(prompt.metadata["seed"]))}), key=lambda n: -abs(n - 10))[0], 99
    rewards = [await environment.converse(prompt, ScriptedConversation(f"[{guess}]")) for guess in (near, far)]
    assert [reward.parts for reward in rewards] == [{"finished": 0.0, "invalid_move": 1.0}] * 2
    assert 0 <= rewards[0].value < 1
    assert await environment.reward(prompt, f"[{near}]") == rewards[0]


async def test_tiles_of_2048_fall_alike_for_siblings_that_move_alike() -> None:
    environment = TextArenaEnvironment(seed=1, id="2048-v0", max_turns=8)
    moves = ["[Up]", "[Left]", "[Down]", "[Right]"] * 2
    boards = []
    for _ in range(2):
        conversation = ScriptedConversation(*moves)
        await environment.converse(environment.prompt(1), conversation)
        boards.append(conversation.read)
    assert boards[0] == boards[1] and len(set(boards[0])) > 4


@pytest.mark.parametrize("trained", [0, 1])
async def test_a_game_of_two_is_played_against_itself_and_one_side_is_trained(trained: int) -> None:
    environment = TextArenaEnvironment(seed=1, id="TicTacToe-v0", num_players=2)
    prompt = next(p for p in map(environment.prompt, range(1, 99)) if int(p.metadata["seed"]) % 2 == trained)
    assert prompt.messages[0].content.startswith(f"You are Player {trained} in Tic Tac Toe.")
    cells = ["[0]", "[3]", "[1]", "[4]", "[2]"]  # Player 0 fills the first row
    conversation = ScriptedConversation(*cells)
    reward = await environment.converse(prompt, conversation)
    assert (reward.value, reward.parts) == ((1, -1)[trained], {"finished": 1.0, "invalid_move": 0.0})
    assert [fields.get("is_trained", True) for fields in conversation.fields] == [n % 2 == trained for n in range(5)]
    last = conversation.asked[-1]  # what Player 0 reads has nothing of the other's conversation but the game's words
    assert [message["content"] for message in last if message["role"] == "assistant"] == ["[0]", "[1]"]
    assert "Player 1" in last[-1]["content"] and last[0]["content"].startswith("You are Player 0")


async def test_an_opponent_without_room_makes_empty_actions() -> None:
    environment = TextArenaEnvironment(seed=1, id="TicTacToe-v0", num_players=2)
    tasks = {int(p.metadata["seed"]) % 2: p for p in map(environment.prompt, range(1, 99))}
    full = [ContextFullError("no room")] * 2  # the second invalid action of a player loses the game
    reward = await environment.converse(tasks[0], ScriptedConversation("[0]", *full))
    assert (reward.value, reward.parts["invalid_move"]) == (1, 0.0)


async def test_a_game_that_ends_before_the_trained_players_turn_is_begun_again_for_the_one_who_ended_it() -> None:
    environment = TextArenaEnvironment(seed=1, id="TicTacToe-v0", num_players=2)
    second = next(p for p in map(environment.prompt, range(1, 99)) if int(p.metadata["seed"]) % 2)
    conversation = ScriptedConversation("none", "none", "[0]", "[3]", "[1]", "[4]", "[2]")
    reward = await environment.converse(second, conversation)
    assert (reward.value, reward.parts) == (1, {"finished": 1.0, "invalid_move": 0.0})
    trained = [fields.get("is_trained", True) for fields in conversation.fields]
    assert trained == [False, False, True, False, True, False, True]
    assert len(conversation.asked[2]) == 1 and conversation.read[2].startswith("You are Player 0")


async def test_a_game_that_always_ends_before_the_trained_players_turn_is_an_error(monkeypatch) -> None:
    environment = TextArenaEnvironment(seed=1, id="TicTacToe-v0", num_players=2)

    async def ended(game: object) -> Step:
        return Step([], 0.0, True)

    monkeypatch.setattr(module._Game, "others", ended)
    with pytest.raises(RuntimeError, match="has ended before the first turn of the player who is trained"):
        await environment.converse(environment.prompt(1), ScriptedConversation())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"id": "GuessNumber"}, "such as GuessTheNumber-v0"),
        ({"id": "TicTacToe-v0"}, "num_players = 1: AssertionError: The number of players has to be 2"),
        ({"id": "SpiteAndMalice-v0"}, "a game of several players, expected one of num_players = 1"),
        ({"id": GUESS, "num_players": 2}, "The number of players has to be 1, received 2"),
        ({"id": GUESS, "args": {"sides": 6}}, "unexpected keyword argument 'sides'"),
        ({"id": GUESS, "max_turns": 0}, "max_turns is 0, expected at least 1"),
    ],
)
def test_what_cannot_be_played_is_an_error_of_the_run_file(kwargs: dict[str, Any], message: str) -> None:
    plug = EnvironmentConfig(path="penstock.producers.environments.textarena:TextArenaEnvironment", kwargs=kwargs)
    with pytest.raises(ValueError, match=re.escape(message)):
        construct(plug, "environment", Environment, seed=0)


class Unrewarded(ta.Env):
    """A game without rewards, or without an end."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = ta.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: "Say something.")

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.turns -= 1
        self.state.done = self.turns == 0
        return self.state.step()


@pytest.mark.parametrize(("turns", "message"), [(1, "ended without a reward"), (10_000, "has not ended, and goes on")])
async def test_a_game_without_a_reward_or_an_end_is_dead(monkeypatch, turns: int, message: str) -> None:
    monkeypatch.setattr(registration, "ENV_REGISTRY", {})
    registration.register(id="Unrewarded", entry_point=Unrewarded, turns=turns)
    environment = TextArenaEnvironment(seed=0, id="Unrewarded")
    with pytest.raises(RuntimeError, match=message):
        await environment.reward(environment.prompt(1), "well")
