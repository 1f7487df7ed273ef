"""A group whose prompt shows an image, against a group of the same tokens without: bytes, processor time of an update,
and how often the tower runs."""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessorPil
from transformers.utils.logging import disable_progress_bar

from bench.groups import learner_config, random_group
from bench.result import Figure, compare_rounds, in_turns
from bench.trainer.ranks import LEARNING_RATE
from penstock.consumers.learning.learner.learner import Learner
from penstock.schemas.config import ModelConfig
from penstock.schemas.images import ImagePlace, digest_of
from penstock.schemas.rollout import RolloutGroup, encode_group, pack_ids, unpack_ids

PAD, EOS, PLACEHOLDER, VIDEO, START, END = range(6)
PATCH, MERGED = 16, 2
"""Pixels of a patch's side; patches of a token's."""


class ImagesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A Qwen3-VL whose tower has a fifth of the parameters. width, height: pixels of the image."""

    hidden: int = 320
    layers: int = 8
    tower_hidden: int = 128
    tower_layers: int = 5
    vocabulary: int = 4000
    width: int = 480
    height: int = 384
    group_size: int = 8
    prompt_tokens: int = 20
    sampled_tokens: int = 128
    rounds: int = 5

    @property
    def image_tokens(self) -> int:
        return self.width * self.height // (PATCH * MERGED) ** 2


def images_figures(settings: ImagesSettings, folder: Path) -> Iterator[Figure]:
    save_seeing(settings, folder)
    image, text = image_group(settings)
    (file,) = (image.images or {}).values()
    size = len(encode_group(image))
    yield Figure(
        f"a group of {settings.group_size} with one image: bytes",
        unit="B",
        measured=size,
        reference=len(encode_group(text)) + len(file),
        reference_is="the group of the same tokens as text, and the image file",
        details={"image_bytes": len(file)},
    )
    towers: dict[str, tuple[Literal["vision"], ...]] = {"trained": (), "frozen": ("vision",)}
    learners = {
        tower: Learner(
            learner_config(
                ModelConfig(path=str(folder), freeze=freeze),
                device="cpu",
                learning_rate=LEARNING_RATE,
                tokens_per_microbatch=10**6,
            )
        )
        for tower, freeze in towers.items()
    }
    runs: dict[str, list[int]] = {tower: [] for tower in towers}

    def seconds(tower: str, group: RolloutGroup) -> float:
        learner = learners[tower]
        vision = learner.model.vision
        assert vision is not None
        before = vision.num_runs
        began_s = time.process_time()
        learner.step(learner.pack([group], lambda version: 0))
        took_s = time.process_time() - began_s
        if group.images:
            runs[tower].append(vision.num_runs - before)
        return took_s

    measures: dict[str, Callable[[], float]] = {
        f"{how}, {tower}": partial(seconds, tower, group)
        for how, group in (("image", image), ("text", text))
        for tower in towers
    }
    in_turns(1, measures)  # the first does not count
    found = in_turns(settings.rounds, measures)
    tokens = {"image_tokens": settings.image_tokens, "row_tokens": _row_tokens(settings)}
    for tower in towers:
        yield compare_rounds(
            f"an update over a group of {settings.group_size} with one image, tower {tower}",
            found[f"image, {tower}"],
            found[f"text, {tower}"],
            reference_is="the same tokens as text, in processor time",
            unit="s",
            details=tokens | {"tower_runs_by_round": runs[tower]},
        )
    yield Figure(
        f"runs of the trainer's tower for a group of {settings.group_size} with one image",
        measured=max(runs["trained"]),
        reference=settings.group_size,
        reference_is="one for each sibling",
        details={"frozen": runs["frozen"]},
    )


def _row_tokens(settings: ImagesSettings) -> int:
    return settings.prompt_tokens + settings.image_tokens + settings.sampled_tokens


def image_group(settings: ImagesSettings) -> tuple[RolloutGroup, RolloutGroup]:
    """Returns a group whose prompt begins with an image, and one of the same tokens in which they are text."""
    text = random_group(
        1,
        [settings.sampled_tokens] * settings.group_size,
        settings.vocabulary - 6,
        prompt_tokens=settings.prompt_tokens + settings.image_tokens,
    )
    file = picture(settings.width, settings.height)
    place = ImagePlace(digest_of(file), 0, settings.image_tokens)

    def shown(token_ids: Sequence[int], is_image: bool) -> bytes:
        own = [token + 6 for token in token_ids]
        return pack_ids([PLACEHOLDER] * place.end + own[place.end :] if is_image else own)

    def of(is_image: bool) -> RolloutGroup:
        rollouts = tuple(
            replace(
                rollout,
                segments=tuple(
                    replace(
                        segment,
                        token_ids=shown(unpack_ids(segment.token_ids), is_image),
                        images=(place,) if is_image else (),
                    )
                    for segment in rollout.segments
                ),
            )
            for rollout in text.rollouts
        )
        return replace(text, rollouts=rollouts, images={place.digest: file} if is_image else {})

    return of(True), of(False)


def picture(width: int, height: int) -> bytes:
    """Returns a PNG file of smooth noise, some of whose detail a file can leave out, as of a photograph's."""
    noise = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(file, format="PNG")
    return file.getvalue()


def save_seeing(settings: ImagesSettings, folder: Path) -> None:
    """Saves a random Qwen3-VL with its image processor."""
    disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config={
            "vocab_size": settings.vocabulary,
            "hidden_size": settings.hidden,
            "intermediate_size": 3 * settings.hidden,
            "num_hidden_layers": settings.layers,
            "num_attention_heads": settings.hidden // 64,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "pad_token_id": PAD,
            "eos_token_id": EOS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
            | {"mrope_interleaved": True},
        },
        vision_config={
            "hidden_size": settings.tower_hidden,
            "intermediate_size": 4 * settings.tower_hidden,
            "depth": settings.tower_layers,
            "num_heads": settings.tower_hidden // 32,
            "out_hidden_size": settings.hidden,
            "patch_size": PATCH,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=PLACEHOLDER,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    limits = {"shortest_edge": (PATCH * MERGED) ** 2, "longest_edge": settings.width * settings.height}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGED, size=limits).save_pretrained(folder)
