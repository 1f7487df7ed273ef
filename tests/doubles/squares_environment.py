"""An environment whose prompts show a drawing. It is copied into a user's folder."""

import io
import random

from PIL import Image, ImageDraw

from penstock.schemas.prompt import Message, Prompt

SIZES = ((48, 40), (64, 30), (30, 70))
"""Width and height in pixels."""


class Squares:
    """How many squares? The reward is the share of letters in the answer, of which a random model gives some."""

    num_evaluation_prompts = 2

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        random_of = random.Random(f"{self._seed} {index}")
        size, number = random_of.choice(SIZES), random_of.randint(1, 4)
        image = Image.new("RGB", size, "white")
        for _ in range(number):
            x, y = (random_of.randrange(side - 8) for side in size)
            ImageDraw.Draw(image).rectangle((x, y, x + 6, y + 6), fill=random_of.choice(("red", "blue")))
        file = io.BytesIO()
        image.save(file, "PNG")
        content = ({"type": "image", "image": file.getvalue()}, {"type": "text", "text": "?"})
        return Prompt(messages=(Message(role="user", content=content),), answer=str(number))

    def evaluation_prompt(self, n: int) -> Prompt:
        return self.prompt(-n)

    def reward(self, prompt: Prompt, completion: str) -> float:
        return sum(character.isalpha() for character in completion) / max(1, len(completion))
