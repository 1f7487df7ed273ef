"""Episodes step by step: what is said to whom, and what becomes of rewards, errors and a lack of room."""

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.producers.endpoint.chat.errors import ApiError, bad_request, too_long
from penstock.producers.environments.gem import GemEnvironment
from penstock.producers.environments.global_random import GlobalRandom
from penstock.producers.environments.stepping import Episode, Step, library, play, seed_of, text_of, unknown
from penstock.schemas.prompt import Reward
from scripted_conversation import ScriptedConversation

BEGUN = [{"role": "user", "content": "begin"}]
TOO_LONG = too_long(10, 20)


class Counting(Episode):
    """Every action is worth its number, `end` ends the episode, and giving up costs 10."""

    def __init__(self, reward: Callable[[str], Any] = float) -> None:
        self.reward = reward
        self.num_closed = 0

    async def step(self, action: str) -> Step:
        is_done = action == "end"
        return Step([{"role": "user", "content": f"{action}!"}], 0.5 if is_done else self.reward(action), is_done)

    async def give_up(self) -> float:
        return -10.0

    def parts(self) -> dict[str, float]:
        return {"moves": 3.0}

    async def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize(
    ("answers", "value", "finished"),
    [
        (("1", "2", "end"), 3.5, 1.0),
        (("1", "2", "4", "8"), 5.0, 0.0),  # the limit
        (("1", TOO_LONG), -9.0, 0.0),
    ],
)
async def test_rewards_add_up_until_the_end_the_limit_or_a_full_context(answers, value: float, finished: float) -> None:
    conversation = ScriptedConversation(*answers)
    reward = await play(Counting(np.float32), BEGUN, conversation, max_turns=4)  # a library's number
    assert reward == Reward(value=value, parts={"finished": finished, "moves": 3.0})
    assert [[said["content"] for said in asked] for asked in conversation.asked[:2]] == [
        ["begin"],
        ["begin", "1", "1!"],
    ]


@pytest.mark.parametrize(
    ("answers", "reward", "error"),
    [
        ((TOO_LONG,), float, ApiError),  # the prompt itself
        (("1", bad_request("no")), float, ApiError),
        (("1",), lambda _: None, "reward is None, expected a finite number"),
        (("1",), lambda _: float("nan"), "reward is nan, expected a finite number"),
        (("1",), str, "reward is '1', expected a finite number"),
    ],
)
async def test_what_is_no_reward_is_an_error(answers, reward, error: Any) -> None:
    expected = (ValueError, error) if isinstance(error, str) else (error, None)
    episode = Counting(reward)
    with pytest.raises(expected[0], match=expected[1]):
        await play(episode, BEGUN, ScriptedConversation(*answers), max_turns=4)
    assert episode.num_closed == 1


def test_observations_are_text_and_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="its observation is of type dict, expected text"):
        text_of({"type": "image_url"}, "its observation")
    with pytest.raises(ImportError, match=r"no_such_library cannot be imported .*: pip install 'penstock\[games\]'"):
        library("no_such_library", "games")
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(ImportError, match=r"pip install 'penstock\[gem\]', then pip install --no-deps gem-llm==0.1.0"):
        GemEnvironment(seed=1, id="game:GuessTheNumber-v0-easy")
    message = "id = 'Chess': no such environment, expected one of 3 such as Chess-v0"
    assert str(unknown("Chess", ["Nim-v0", "Chess-v0", "Go"])) == message
    assert "expected one of 2 such as Go, Nim" in str(unknown("zzz", ["Nim", "Go"]))


def test_every_index_has_a_seed_of_its_own() -> None:
    seeds = [seed_of("training", 0, index) for index in range(1000)]
    assert len(set(seeds)) == 1000 and all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of("training", 0, 7) == 1177663650 != seed_of("training", 1, 7)


def test_games_draw_the_same_numbers_whatever_others_draw() -> None:
    def draw(generator: GlobalRandom) -> tuple[float, float]:
        with generator.lent():
            return random.random(), np.random.rand()

    alone, other = GlobalRandom(7), GlobalRandom(8)
    expected = [draw(alone) for _ in range(3)]
    again, found = GlobalRandom(7), []
    random.seed(1)
    for _ in range(3):
        found.append(draw(again))
        assert draw(other) not in expected
        random.random(), np.random.rand()
    assert found == expected
    outside = random.Random(1)
    assert [random.random(), random.random()] == [outside.random() for _ in range(5)][3:], "theirs go on as they were"
