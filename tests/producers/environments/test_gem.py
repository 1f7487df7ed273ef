"""Environments of the library GEM, as published."""

import re
from typing import Any

import pytest

from penstock.producers.environments.gem import GemEnvironment
from penstock.producers.interfaces import Environment
from penstock.schemas.config import EnvironmentConfig
from penstock.schemas.process.plugins import construct
from scripted_conversation import ScriptedConversation

# It pins msgspec 0.19, Penstock needs 0.20, and so no extra can install it.
gem = pytest.importorskip("gem", reason="gem is not installed: pip install --no-deps gem-llm==0.1.0 'penstock[gem]'")
GUESS = "game:GuessTheNumber-v0-easy"


async def test_a_game_is_posed_by_its_index_and_its_steps_add_up() -> None:
    environment = GemEnvironment(seed=3, id=GUESS)
    prompt = environment.prompt(1)
    assert "between 1 and 10 (inclusive) within 4 turns" in prompt.messages[0].content
    assert prompt == GemEnvironment(seed=3, id=GUESS).prompt(1) != environment.prompt(2)
    game = gem.make(GUESS)
    game.reset(seed=int(prompt.metadata["seed"]))
    secret = game.game_number
    other = secret % 10 + 1
    conversation = ScriptedConversation(rf"\boxed{{{other}}}", rf"\boxed{{{secret}}}")
    reward = await environment.converse(prompt, conversation)
    assert (reward.value, reward.parts) == (1.0, {"finished": 1.0})
    hint = "lower" if other > secret else "higher"
    told = f"At turn 1, you guessed {other}, and the target number is {hint} than {other}.\nEnter your next guess."
    assert conversation.read[1] == told
    assert (await environment.reward(prompt, rf"\boxed{{{other}}}")).parts == {"finished": 0.0}


async def test_its_python_tool_is_a_turn_with_a_reward_of_its_own() -> None:
    environment = GemEnvironment(seed=3, id=GUESS, wrappers=["python_tool"], max_turns=2)
    conversation = ScriptedConversation("<python>print(3 + 4)</python>", "no number")
    reward = await environment.converse(environment.prompt(1), conversation)
    assert "Code execution result: 7" in conversation.read[1]
    assert reward.value == pytest.approx(0.05 + 0.25 - 0.1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"id": "game:Guess"}, "no such environment, expected one of"),
        ({"id": GUESS, "wrappers": ["calculator"]}, "no 'calculator', expected of python_tool, "),
        ({"id": GUESS, "wrappers": ["concat_chat"]}, "Tokenizer must be provided"),
    ],
)
def test_what_cannot_be_made_is_an_error_of_the_run_file(kwargs: dict[str, Any], message: str) -> None:
    plug = EnvironmentConfig(path="penstock.producers.environments.gem:GemEnvironment", kwargs=kwargs)
    with pytest.raises(ValueError, match=re.escape(message)):
        construct(plug, "environment", Environment, seed=0)


class Pictures(gem.Env):
    """Shows a picture."""

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        return {"text": "What is this?", "images": [b""]}, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}


def test_a_picture_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem.envs.registration.ENV_REGISTRY", {})
    gem.register("pictures", Pictures)
    with pytest.raises(ValueError, match="TypeError: an observation is of type dict, expected text"):
        GemEnvironment(seed=0, id="pictures")
