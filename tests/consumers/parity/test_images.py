"""The parity check of rows with images: nothing is found where nothing is wrong, and each fault is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForImageTextToText

from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.check import check_parity
from penstock.schemas.images import digest_of
from penstock.schemas.rollout import RolloutGroup, Segment, VersionSpan, pack_floats, pack_ids, unpack_ids
from training_groups import configuration, group_of
from vision_families import IMAGE, picture, save_model, segment

FILES = {digest_of(file): file for file in (picture(60, 60, 1), picture(64, 64, 2), picture(90, 40, 3))}
FIRST, SECOND, THIRD = FILES


class Faults:
    """transformers' own forward pass as an engine, with faults."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vision: Any = PackedModel(str(folder), "float32", torch.device("cpu")).vision
        self._module = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()

    def groups(self, order: Callable[[Any], Any], settings: dict[str, Any], **arguments: Any) -> list[RolloutGroup]:
        torch.manual_seed(0)
        groups = []
        for number, parts in enumerate(((4, FIRST, 2, SECOND, 3), (3, THIRD, 4), (5, SECOND, 4, FIRST, 2)), 1):
            prompt = segment((*parts, 1), 1, self.vision, FILES, number)
            with self.vision.otherwise(**settings):
                answers = [[self._answered(prompt, order, arguments)] for _ in range(4)]
            groups.append(replace(group_of(number, answers, [0.0, 1.0, 0.0, 1.0]), images=FILES))
        return groups

    @torch.no_grad()
    def _answered(self, prompt: Segment, order: Any, arguments: dict[str, Any]) -> Segment:
        """Samples an answer without a placeholder, for which transformers would look for an image."""
        start = prompt.loss_mask[0][0]
        while True:
            ids, logprobs = list(unpack_ids(prompt.token_ids))[:start], list[float]()
            while len(logprobs) < 16:
                shown = self.vision.own_arguments(ids, [FILES[place.digest] for place in order(prompt.images)])
                if arguments:
                    shown |= {"position_ids": torch.arange(len(ids)).expand(3, 1, -1)}
                logits = self._module(input_ids=torch.tensor([ids]), use_cache=False, **shown).logits[0, -1]
                ids.append(int(logits.softmax(-1).multinomial(1)))
                logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
                if ids[-1] == IMAGE:
                    break
            else:
                break
        run = (start, len(ids))
        return replace(
            prompt,
            token_ids=pack_ids(ids),
            behavior_logprobs=pack_floats(logprobs),
            loss_mask=(run,),
            version_spans=(VersionSpan(0, *run),),
        )


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    folder = tmp_path_factory.mktemp("qwen")
    save_model("qwen3_vl", folder)
    return Faults(folder)


@pytest.mark.parametrize(
    ("cause", "order", "settings", "arguments"),
    [
        ("parity", tuple, {}, {}),
        ("image-order", reversed, {}, {}),
        ("image-size", tuple, {"resample": 0}, {}),
        ("image-pixels", tuple, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}, {}),
        ("image-pixels", tuple, {"do_rescale": False}, {}),
        ("image-positions", tuple, {}, {"plain": True}),
    ],
)
def test_a_fault_of_images_is_named(faults: Faults, cause: str, order: Any, settings: Any, arguments: Any) -> None:
    groups = faults.groups(order, settings, **arguments)
    report = check_parity(groups, config=configuration(faults.folder), weights={0: faults.folder}.get)
    assert (report.verdict.cause or report.verdict.status) == cause, report.verdict


def test_images_that_an_engine_has_cut_are_named(tmp_path: Path) -> None:
    """The model is shown squares of one size: a cut image has as many tokens."""
    save_model("gemma3", tmp_path)
    groups = Faults(tmp_path).groups(tuple, {"cropped": True})
    report = check_parity(groups, config=configuration(tmp_path), weights={0: tmp_path}.get)
    assert report.verdict.cause == "image-pixels", report.verdict
    assert any(
        row.name == "image-pixels" and row.note == "cut to the square in the middle" for row in report.hypotheses
    )
