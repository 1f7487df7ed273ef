"""The real engine with images: tokens, logprobs before and after an update of the vision tower, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace

from penstock.producers.interfaces import PlacedImages
from penstock.schemas.images import digest_of, settings_that_differ
from penstock.schemas.process.image_files import decoded
from penstock.schemas.rollout import SamplingSettings, unpack_floats, unpack_ids
from shared_engine import BUDGET, publish, run_config
from vision_models import IMAGE_TOKEN, picture, tiny_idefics3

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # of transformers' processors
]
FILES = [picture(48, 40, 1), picture(20, 70, 2)]
TEXT = f"1{IMAGE_TOKEN}2{IMAGE_TOKEN}3"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(vllm_engine, tmp_path_factory):
    """The engine, its model and its folder."""
    folder = tmp_path_factory.mktemp("seeing")
    model = tiny_idefics3(folder / "model")
    settings = {"max_num_seqs": 8, "max_model_len": 512, "prefix_caching": True}
    config = run_config(folder / "model", engine=settings)
    config = replace(config, engine=replace(config.engine, args={"enforce_eager": True}))  # with its tokenizer
    engine = await vllm_engine.start(config)
    yield engine, model, folder
    await engine.close()


def processed(folder: Path, files: list[bytes]) -> Any:
    """What transformers' own processor makes of the prompt."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder / "model")
    pictures = [[decoded(file) for file in files]]
    return processor(text=[TEXT], images=pictures, return_tensors="pt", add_special_tokens=False)


async def gap(engine: Any, model: Any, folder: Path, name: str) -> float:
    """Returns the largest |difference| of the logprobs of siblings from transformers'."""
    inputs = processed(folder, FILES)
    ids, images = await engine.expand(engine._llm.get_tokenizer().encode(TEXT), FILES)
    assert inputs["input_ids"][0].tolist() == ids
    largest = 0.0
    for one in await engine.generate(ids, SamplingSettings(max_tokens=12), 4, name, images=images):
        sampled = list(unpack_ids(one.token_ids))
        if model.config.image_token_id in sampled:  # transformers would look for an image there
            continue
        row = torch.tensor([ids + sampled])
        with torch.no_grad():
            logits = model(**{**inputs, "input_ids": row, "attention_mask": torch.ones_like(row)}).logits[0].double()
        expected = logits.log_softmax(-1)[len(ids) - 1 : -1].gather(1, torch.tensor(sampled)[:, None])[:, 0]
        largest = max(largest, (expected - torch.tensor(unpack_floats(one.behavior_logprobs))).abs().max().item())
    return largest


async def test_images_stand_where_the_processor_puts_them(seeing):
    engine, _, _ = seeing
    tokenizer = engine._llm.get_tokenizer()
    ids, images = await engine.expand(tokenizer.encode(TEXT), FILES)
    first, second = images.places
    assert engine.takes_images and (first.digest, second.digest) == tuple(map(digest_of, FILES))
    assert tokenizer.decode(ids[: first.start] + ids[first.end : second.start] + ids[second.end :]) == "123"
    assert first.end - first.start > second.end - second.start > 4, "tiles of each image's own size, and rows between"
    assert await engine.expand(tokenizer.encode("12"), []) == (tokenizer.encode("12"), PlacedImages())


async def test_the_image_processor_s_settings_are_those_of_the_trainer(seeing):
    from penstock.consumers.learning.model.packed_model import PackedModel

    engine, _, folder = seeing
    vision = PackedModel(str(folder / "model"), "float32", torch.device("cpu")).vision
    assert engine.image_processor == vision.settings and vision.settings["size"] == {"longest_edge": 64}
    with vision.otherwise(resample=0):
        assert settings_that_differ(engine.image_processor, vision.settings) == ["resample"]


async def test_logprobs_are_transformers_before_and_after_an_update_of_the_vision_tower(seeing):
    from safetensors.torch import load_file

    engine, model, folder = seeing
    assert await gap(engine, model, folder, "before") < BUDGET
    with torch.no_grad():
        for parameter in model.model.vision_model.parameters():
            parameter.mul_(1.3)
    model.save_pretrained(folder / "updated")
    weights = load_file(folder / "updated" / "model.safetensors")
    old = await gap(engine, model, folder, "old tower")
    assert old > 100 * BUDGET, "the model does not look at its images"
    await engine.load_weights(*publish(weights, 1, folder))
    assert await gap(engine, model, folder, "new tower") < BUDGET


async def test_what_does_not_fit_the_images_is_refused_and_nothing_else_is_lost(seeing):
    engine, _, _ = seeing
    ids = engine._llm.get_tokenizer().encode(TEXT)
    for asked, files, message in [
        (ids, FILES[:1], "2 placeholders of images for 1 images, expected one each"),
        ([5, 6], FILES[:1], "0 placeholders of images for 1 images"),
        (ids, [], "2 placeholders of images for 0 images"),
        (ids, [FILES[0], b"none"], "image 2 of 2: 4 bytes that cannot be decoded"),
    ]:
        with pytest.raises(ValueError, match=message):
            await engine.expand(asked, files)
    full, images = await engine.expand(ids, FILES)
    other = digest_of(picture(90, 20, 3))
    moved = tuple(replace(place, digest=other) for place in images.places)
    for places, given, message in [
        (images.places, {}, f"no image of the digest {images.places[0].digest}"),
        (moved, {other: picture(90, 20, 3)}, "the processor expands image 1 of 2 to other tokens than the"),
        ((images.places[0], images.places[1].moved(1)), images.files, "expands image 2 of 2 to other tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            await engine.generate(full, SamplingSettings(max_tokens=2), 1, message, images=PlacedImages(places, given))
    assert len(await engine.generate(full, SamplingSettings(max_tokens=2), 3, "next", images=images)) == 3


async def test_a_sampled_placeholder_is_no_image(seeing):
    engine, model, _ = seeing
    ids = engine._llm.get_tokenizer().encode(f"1{IMAGE_TOKEN}2")
    full, images = await engine.expand(ids, FILES[:1])
    more = [*full, model.config.image_token_id, 5]
    (one,) = await engine.generate(more, SamplingSettings(max_tokens=2), 1, "stray", images=images)
    assert one.num_tokens == 2
