"""A tiny model that sees, and pictures for it."""

import io
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from penstock.deploy.demo.char_tokenizer import build_tokenizer

IMAGE_TOKEN = "<image>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[:1] }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}"
    "{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """Returns a PNG file of noise."""
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)).save(file, format="PNG")
    return file.getvalue()


def tiny_idefics3(folder: Path, *, seed: int = 0) -> Any:
    """Saves a random Idefics3 of two layers with its processor and returns it: 4 tokens for each tile of 32 pixels and
    for the whole image, with row, column and border tokens between them."""
    from transformers import AutoConfig, AutoModelForImageTextToText, Idefics3ImageProcessorPil, Idefics3Processor

    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    special = [IMAGE_TOKEN, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles]
    tokenizer = build_tokenizer(4096, special=special)
    tokenizer.chat_template = TEMPLATE
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(
            "idefics3",
            text_config=text,
            vision_config=vision,
            scale_factor=2,
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).eval()
    with torch.no_grad():  # what it sees must matter
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.12)
    model.save_pretrained(folder)
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    Idefics3Processor(Idefics3ImageProcessorPil(**sizes), tokenizer, image_seq_len=4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
