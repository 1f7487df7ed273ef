"""Small random vision-language models with the files of their processors, and rows that show them images."""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from penstock.schemas.images import ImagePlace, digest_of
from penstock.schemas.rollout import Segment, VersionSpan, pack_floats, pack_ids

KINDS = ("gemma3", "smolvlm", "idefics3", "qwen2_5_vl", "qwen3_vl", "internvl")
IMAGE, VIDEO = 2, 3
VOCABULARY = 67
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8, "initializer_range": 0.2,
}  # fmt: skip
_QWEN = {
    "hidden_size": 64, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 128, "initializer_range": 0.2,
}  # fmt: skip


def save_model(kind: str, folder: Path, seed: int = 0) -> None:
    """Saves a model of the kind and its image processor."""
    torch.manual_seed(seed)
    config, processor = _parts(kind)
    model = AutoModelForImageTextToText.from_config(config)
    if kind == "gemma3":
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)  # else zeros
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _parts(kind: str) -> tuple[Any, Any]:
    token, tiles = {"image_token_id": IMAGE}, {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    if kind == "gemma3":
        layers = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 32}
        own = {"text_config": _TEXT | layers, "vision_config": _SIGLIP, "mm_tokens_per_image": 4}
        token = {"image_token_index": IMAGE, "boi_token_index": 4, "eoi_token_index": 5}
        processor = transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    elif kind in ("smolvlm", "idefics3"):
        own = {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _SIGLIP, "scale_factor": 2}
        own |= {"pad_token_id": 0}
        name = "SmolVLMImageProcessorPil" if kind == "smolvlm" else "Idefics3ImageProcessorPil"
        processor = getattr(transformers, name)(**tiles)
    elif kind == "internvl":
        square = {"image_size": [32, 32], "patch_size": [8, 8]}
        own = {"text_config": _TEXT | {"model_type": "qwen2"}, "vision_config": _SIGLIP | square}
        own |= {"image_seq_length": 4}
        processor = transformers.GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, max_patches=4)
    else:
        token |= {"video_token_id": VIDEO, "vision_start_token_id": 4, "vision_end_token_id": 5}
        text, patch = _TEXT | {"rope_parameters": sections}, 14
        vision = _QWEN | {"depth": 2, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        if kind == "qwen3_vl":
            text, patch = _TEXT | {"rope_parameters": sections | {"mrope_interleaved": True}, "head_dim": 32}, 16
            vision = _QWEN | {"depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
        own = {"text_config": text, "vision_config": vision}
        limits = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (6 * patch) ** 2}
        processor = transformers.Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, size=limits)
    return AutoConfig.for_model(kind, tie_word_embeddings=False, **own, **token), processor


def picture(width: int, height: int, seed: int) -> bytes:
    """Returns a PNG file of noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, format="PNG")
    return file.getvalue()


FILES = {digest_of(file): file for file in (picture(50, 40, 1), picture(90, 30, 2), picture(20, 64, 3))}
"""Three images of several sizes."""


def segment(parts: Iterable[int | str], sampled: int, vision: Any, files: Mapping[str, bytes], seed: int) -> Segment:
    """Returns a row. parts: numbers of random tokens, and digests of images. sampled: the last tokens, which are."""
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = []
    places = []
    for part in parts:
        if isinstance(part, int):
            token_ids += torch.randint(6, VOCABULARY, (part,), generator=generator).tolist()
        else:
            num_tokens = vision.num_tokens(part, files[part])
            places.append(ImagePlace(part, len(token_ids), len(token_ids) + num_tokens))
            token_ids += [IMAGE] * num_tokens
    run = (len(token_ids) - sampled, len(token_ids))
    return Segment(
        token_ids=pack_ids(token_ids),
        behavior_logprobs=pack_floats([-4.0] * sampled),
        loss_mask=(run,),
        version_spans=(VersionSpan(0, *run),),
        images=tuple(places),
    )
