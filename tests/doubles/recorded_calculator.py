"""The calculator environment, which writes the reward of each conversation to a file, one per line."""

import json
from pathlib import Path
from typing import Any

from penstock.producers.environments.calculator import Calculator
from penstock.schemas.prompt import Prompt, Reward


class RecordedCalculator(Calculator):
    def __init__(self, *, file: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._file = Path(file)

    async def converse(self, prompt: Prompt, conversation: Any) -> Reward:
        reward = await super().converse(prompt, conversation)
        with self._file.open("a") as file:
            file.write(json.dumps(reward.parts) + "\n")
        return reward
