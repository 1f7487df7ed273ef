"""An OpenEnv server: one guesses a number, which the seed decides. `python openenv_server.py PORT` serves it."""

import random
import sys
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str
    mode: str = "rewarded"


class Hint(Observation):
    text: str
    picture: tuple[int, ...] = ()


class Guessing(Environment[Guess, Hint, State]):
    state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, most: int = 9, **_: Any) -> Hint:
        self._secret = random.Random(seed).randint(1, most)
        return Hint(text=f"Guess a number from 1 to {most}.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.mode == "broken":
            raise RuntimeError("the dice are lost")
        guess = int(action.message) if action.message.isdecimal() else 0
        is_done, rewarded = guess == self._secret, action.mode == "rewarded"
        hint = "right" if is_done else "higher" if guess < self._secret else "lower"
        return Hint(text=hint, done=is_done, reward=(1.0 if is_done else -0.125) if rewarded else None)


app = create_fastapi_app(Guessing, Guess, Hint)

if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
