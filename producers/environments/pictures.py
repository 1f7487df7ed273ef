"""Counting what a drawn picture shows: a task that a small model with eyes learns in minutes."""

import random
from typing import Any

from PIL import Image, ImageDraw

from penstock.schemas.prompt import Message, Prompt, Reward

MOST = 6
"""Shapes of a picture; there is one at least."""
_CELLS = 3
"""In which a picture is wide and high; a shape has a cell of its own."""
_SMALLEST, _LARGEST = 40, 56
"""Pixels of a picture's sides."""


class DrawnShapes:
    """`How many?` is asked of a picture of one to six dark squares and discs, and answered with one digit.

    Pictures differ in size and proportions, shapes in place, size, shade and kind. The reward is 1 for the right digit,
    else 0, as its part `exact`. Held-out pictures are the same for every run.
    """

    def __init__(self, *, seed: int, num_evaluation_prompts: int = 256) -> None:
        if num_evaluation_prompts < 0:
            raise ValueError(f"DrawnShapes: num_evaluation_prompts is {num_evaluation_prompts}, expected 0 or more")
        self.num_evaluation_prompts = num_evaluation_prompts
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        return _pose(random.Random(f"training:{self._seed}:{index}"))

    def evaluation_prompt(self, n: int) -> Prompt:
        if not 1 <= n <= self.num_evaluation_prompts:
            raise ValueError(
                f"DrawnShapes: held-out picture {n} asked for, expected 1 to {self.num_evaluation_prompts}"
            )
        return _pose(random.Random(f"held out:{n}"))

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        exact = float(completion.strip() == prompt.answer)
        return Reward(value=exact, parts={"exact": exact})


def _pose(draw: random.Random) -> Prompt:
    number = draw.randint(1, MOST)
    content: Any = ({"type": "image", "image": picture(number, draw)}, {"type": "text", "text": "How many?"})
    return Prompt(messages=(Message(role="user", content=content),), answer=str(number))


def picture(number: int, draw: random.Random) -> Image.Image:
    """Returns a picture of as many squares and discs, dark on white, that do not touch."""
    width, height = draw.randint(_SMALLEST, _LARGEST), draw.randint(_SMALLEST, _LARGEST)
    image = Image.new("RGB", (width, height), "white")
    pencil = ImageDraw.Draw(image)
    for cell in draw.sample(range(_CELLS**2), number):
        row, column = divmod(cell, _CELLS)
        side = draw.uniform(0.45, 0.7) * min(width, height) / _CELLS
        left = column * width / _CELLS + draw.uniform(1, width / _CELLS - side - 2)
        top = row * height / _CELLS + draw.uniform(1, height / _CELLS - side - 2)
        outline = pencil.ellipse if draw.random() < 0.5 else pencil.rectangle
        outline((left, top, left + side, top + side), fill=(draw.randrange(96),) * 3)
    return image
