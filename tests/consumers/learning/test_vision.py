"""Rows with images, against transformers' own forward pass."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from penstock.consumers.learning.batch.packing import pack_segments
from penstock.consumers.learning.batch.trainable import check_trainable
from penstock.consumers.learning.loss.scoring import head_logprobs
from penstock.consumers.learning.model.loading import set_attention
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.sample import read_sample
from penstock.consumers.parity.yardstick import measure_yardstick
from penstock.schemas.config import LoraConfig, ModelConfig, TrainerConfig
from penstock.schemas.images import ImagePlace, digest_of
from penstock.schemas.rollout import RecordError, RolloutGroup, Segment, pack_ids
from rank_processes import on_ranks
from rank_work import step_once
from training_groups import configuration, group_of
from vision_families import FILES, IMAGE, KINDS, VOCABULARY, save_model, segment

CPU = torch.device("cpu")
FIRST, SECOND, THIRD = FILES


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, path)
    return path


def rows(vision: Any) -> list[Segment]:
    """Two siblings whose prompt has two images, one of whom is shown two more; a row with an image of its own; text."""
    prompt = (3, FIRST, 2, SECOND, 3)
    return [
        segment((*prompt, 6), 6, vision, FILES, 0),
        segment((*prompt, 4, THIRD, 2, FIRST, 1, 7), 7, vision, FILES, 0),
        segment((5, SECOND, 8), 8, vision, FILES, 1),
        segment((25,), 20, vision, FILES, 2),
    ]


def own_logprobs(module: Any, vision: Any, row: Segment) -> torch.Tensor:
    token_ids = torch.frombuffer(bytearray(row.token_ids), dtype=torch.int32).long()
    shown = vision.own_arguments(token_ids.tolist(), [FILES[p.digest] for p in row.images]) if row.images else {}
    logits = module(input_ids=token_ids[None], use_cache=False, **shown).logits[0]
    start, end = row.loss_mask[0]
    return logits[start - 1 : end - 1].log_softmax(-1).gather(1, token_ids[start:end, None])[:, 0]


def test_rows_with_images_agree_with_transformers_packed_and_in_rectangles(folder: Path) -> None:
    model = PackedModel(str(folder), "float32", CPU)
    assert model.arrangement == "packed"
    found_rows = rows(model.vision)
    reference = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    expected = [own_logprobs(reference, model.vision, row) for row in found_rows]
    torch.cat(expected).sum().backward()
    for attention, arrangement in (("penstock_packed", "packed"), ("sdpa", "rectangles")):
        set_attention(model.module, attention)
        model.arrangement = arrangement
        segments = [(max(0, number - 1), row, 1.0) for number, row in enumerate(found_rows)]
        ((microbatch, places),) = pack_segments(segments, 10**6, arrangement=arrangement, files=FILES)
        before = model.vision.num_runs
        found, _ = head_logprobs(*model.forward(microbatch), microbatch)
        assert model.vision.num_runs - before == 3  # each image once, though rows share them
        torch.testing.assert_close(found, torch.cat([expected[place] for place in places]), rtol=0, atol=1e-5)
        model.module.zero_grad()
        found.sum().backward()
        for (name, parameter), (_, own) in zip(
            model.module.named_parameters(), reference.named_parameters(), strict=True
        ):
            grads = [torch.zeros(()) if each.grad is None else each.grad for each in (parameter, own)]
            torch.testing.assert_close(*torch.broadcast_tensors(*grads), rtol=2e-4, atol=2e-5, msg=name)


def test_a_placeholder_that_was_sampled_is_text(folder: Path) -> None:
    model = PackedModel(str(folder), "float32", CPU)
    row = segment((3, FIRST, 9), 6, model.vision, FILES, 0)
    ids = torch.frombuffer(bytearray(row.token_ids), dtype=torch.int32).tolist()
    logprobs = []
    for sampled, arrangement in ((ids[-3], "packed"), (IMAGE, "packed"), (IMAGE, "rectangles")):
        changed = replace(row, token_ids=pack_ids([*ids[:-3], sampled, *ids[-2:]]))
        if arrangement == "rectangles":
            set_attention(model.module, "sdpa")
            model.arrangement = arrangement
        ((microbatch, _),) = pack_segments([(0, changed, 1.0)], 999, arrangement=arrangement, files=FILES)
        logprobs.append(head_logprobs(*model.forward(microbatch), microbatch)[0])
    torch.testing.assert_close(logprobs[1], logprobs[2], rtol=0, atol=1e-5)
    torch.testing.assert_close(logprobs[0][:3], logprobs[1][:3], rtol=0, atol=1e-5)  # the image is the same
    assert (logprobs[0][4:] - logprobs[1][4:]).abs().min() > 1e-4  # what follows is not


def test_groups_whose_images_the_trainer_cannot_reproduce_are_refused(tmp_path: Path) -> None:
    save_model("smolvlm", tmp_path)
    vision = PackedModel(str(tmp_path), "float32", CPU).vision
    row = segment((3, FIRST, 9), 6, vision, FILES, 0)
    (place,) = row.images
    broken = b"no image"
    for shown, sees, message in (
        (place, vision, None),
        (place, None, "images, which a model of the trainer cannot be shown: model.path, "),
        (ImagePlace(FIRST, place.start + 1, place.end), vision, "19 placeholders, expected the 20 that the trainer's"),
        (ImagePlace(digest_of(broken), place.start, place.end), vision, "8 bytes that cannot be decoded"),
    ):
        group = group_of(7, [[replace(row, images=(shown,))]], [1.0])
        group = replace(group, images=FILES | {digest_of(broken): broken})
        if message is None:
            check_trainable(group, VOCABULARY, sees=sees)
        else:
            with pytest.raises(RecordError, match=f"^group 7: .*{re.escape(message)}"):
                check_trainable(group, VOCABULARY, sees=sees)


def test_a_model_without_image_processor_is_trained_on_text_alone(tmp_path: Path) -> None:
    save_model("gemma3", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    model = PackedModel(str(tmp_path), "float32", CPU)
    assert model.vision is None and model.arrangement == "packed"


def shown_groups(folder: Path) -> list[RolloutGroup]:
    """A group whose siblings are shown images, and three of text."""
    vision = PackedModel(str(folder), "float32", CPU).vision
    seen = [[segment((3, FIRST, 2, SECOND, 3, 6), 6, vision, FILES, seed)] for seed in (0, 1)]
    text = [[[segment((20,), 15, vision, FILES, seed)] for seed in pair] for pair in ((2, 3), (4, 5), (6, 7))]
    first = replace(group_of(1, seen, [0.0, 1.0]), images=dict(list(FILES.items())[:2]))
    return [first, *(group_of(number, rows, [0.0, 1.0]) for number, rows in enumerate(text, 2))]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("kind", "settings"), [("smolvlm", {}), ("qwen3_vl", {}), ("gemma3", {"freeze": ("vision",), "dtype": "bfloat16"})]
)
def test_two_ranks_of_which_one_has_images_find_the_gradients_of_one_process(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    save_model(kind, tmp_path / kind)
    trainer = TrainerConfig(device="cpu", max_grad_norm=1e9, tokens_per_microbatch=60, gradient_checkpointing=True)
    model = ModelConfig(path=str(tmp_path / kind), **settings)
    configs = {kind: configuration(tmp_path / kind, trainer=trainer, model=model)}
    groups = shown_groups(tmp_path / kind)
    (one, expected), (two, found) = (
        on_ranks(size, step_once, configs, groups, folder=tmp_path / str(size))[0][kind] for size in (1, 2)
    )
    assert one.keys() == two.keys()
    assert any("vision" in name or "visual" in name for name in one) != bool(settings)
    allowed = 2e-2 if settings else 1e-5
    for name, gradient in one.items():
        assert (gradient - two[name]).norm() <= allowed * gradient.norm() + 1e-9, name
    for place, findings in expected.items():
        logprobs, others = (np.frombuffer(each.proximal_logprobs, np.float32) for each in (findings, found[place]))
        np.testing.assert_allclose(others, logprobs, rtol=0, atol=allowed)


def test_the_tower_is_published_by_the_names_of_the_files_and_read_again(folder: Path) -> None:
    model = PackedModel(str(folder), "float32", CPU)
    weights = model.published_weights()
    assert weights.keys() == load_file(folder / "model.safetensors").keys()
    assert {part.name for part in model.published_parts()()} == weights.keys()


@pytest.mark.parametrize("how", ["frozen", "adapter"])
def test_a_tower_that_is_not_trained_encodes_an_image_once_for_all_passes(how: str, folder: Path) -> None:
    lora = LoraConfig(rank=2, targets=("q_proj", "v_proj")) if how == "adapter" else None
    model = PackedModel(str(folder), "bfloat16", CPU, lora=lora, freezes_vision=how == "frozen")
    tower = {id(each) for each in model.vision.parameters()}
    assert model.parameters() and not any(id(each) in tower for each in model.parameters())
    segments = [(0, row, 1.0) for row in rows(model.vision)[:2]]
    before = model.vision.num_runs
    for _ in range(2):
        ((microbatch, _),) = pack_segments(segments, 10**6, files=FILES)
        head_logprobs(*model.forward(microbatch), microbatch)[0].sum().backward()
    assert model.vision.num_runs - before == 3
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad and each.ndim > 1)


def test_the_yardstick_of_parity_sees_the_images(folder: Path) -> None:
    model = PackedModel(str(folder), "float32", CPU)
    sample = read_sample(shown_groups(folder), VOCABULARY, lambda _: True)
    yardstick = measure_yardstick(sample, model, 200)
    assert yardstick.packed < 1e-5 and yardstick.transformers < 1e-5
