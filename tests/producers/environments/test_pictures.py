"""Pictures of shapes to count: what they show, and what an answer is worth."""

import io

import pytest
from PIL import Image, ImageChops, ImageDraw

from penstock.producers.environments.pictures import MOST, DrawnShapes
from penstock.schemas.prompt import Prompt

PICTURES = DrawnShapes(seed=3, num_evaluation_prompts=40)


def opened(prompt: Prompt) -> Image.Image:
    (part,) = prompt.images
    return Image.open(io.BytesIO(part.data))


def num_spots(image: Image.Image) -> int:
    """Returns the number of dark spots, each found by flooding it with white."""
    dark = image.convert("L").point(lambda shade: 0 if shade < 128 else 255)
    number = 0
    while box := ImageChops.invert(dark).getbbox():
        row = dark.crop((box[0], box[1], box[2], box[1] + 1))
        ImageDraw.floodfill(dark, (box[0] + row.tobytes().index(0), box[1]), 255)
        number += 1
    return number


def test_a_picture_shows_as_many_shapes_as_the_answer_says_in_many_sizes() -> None:
    prompts = [PICTURES.prompt(n) for n in range(1, 80)]
    assert [str(num_spots(opened(prompt))) for prompt in prompts] == [prompt.answer for prompt in prompts]
    assert {prompt.answer for prompt in prompts} == {str(number) for number in range(1, MOST + 1)}
    assert len({opened(prompt).size for prompt in prompts}) > 40
    assert [part.text for part in prompts[0].messages[0].content[1:]] == ["How many?"]


def test_training_follows_the_seed_and_the_held_out_pictures_do_not() -> None:
    same, other = (DrawnShapes(seed=seed, num_evaluation_prompts=40) for seed in (3, 4))
    assert PICTURES.prompt(1) == same.prompt(1) != other.prompt(1)
    held_out = [PICTURES.evaluation_prompt(n) for n in range(1, 41)]
    assert held_out == [other.evaluation_prompt(n) for n in range(1, 41)]
    assert not set(map(str, held_out)) & {str(PICTURES.prompt(n)) for n in range(1, 200)}
    with pytest.raises(ValueError, match="held-out picture 41 asked for, expected 1 to 40"):
        PICTURES.evaluation_prompt(41)
    with pytest.raises(ValueError, match="num_evaluation_prompts is -1"):
        DrawnShapes(seed=3, num_evaluation_prompts=-1)


@pytest.mark.parametrize(("completion", "value"), [("{}", 1.0), (" {}\n", 1.0), ("0", 0.0), ("{}0", 0.0), ("", 0.0)])
def test_the_right_digit_alone_is_worth_one(completion: str, value: float) -> None:
    prompt = PICTURES.prompt(1)
    reward = PICTURES.reward(prompt, completion.format(prompt.answer))
    assert reward.value == value == reward.parts["exact"]
