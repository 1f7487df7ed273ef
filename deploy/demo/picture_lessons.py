"""The lessons of the model that sees: it is asked about pictures, answers with a digit, and guesses which."""

import io
import itertools
import random

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from penstock.deploy.demo.char_tokenizer import EOS, build_tokenizer
from penstock.deploy.demo.model_recipe import ModelRecipe
from penstock.producers.environments.pictures import MOST, DrawnShapes
from penstock.schemas.prompt import Prompt

IMAGE = "<image>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ message.role + ': ' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}{{ '<image>' if part.type == 'image' else part.text }}{%- endfor -%}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}
"""
SIDE, PATCH = 48, 16
"""Pixels to which each picture is scaled, and of the patches in it, of which each becomes a token."""
_NUM_TOKENS = (SIDE // PATCH) ** 2


def build_seeing_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    special = (IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    pieces = ("user: ", "assistant: ", "How many?")
    return build_tokenizer(max_tokens, special=special, pieces=pieces, chat_template=CHAT_TEMPLATE)


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Idefics3Processor:
    images = Idefics3ImageProcessorPil(
        do_image_splitting=False, size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=_NUM_TOKENS)


def build_seeing_model(recipe: ModelRecipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Returns an Idefics3, which the engine serves on CPU without torchvision."""
    shape = {
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
    }
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": recipe.max_tokens,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(
        "idefics3",
        text_config=shape | text,
        vision_config=shape | {"image_size": SIDE, "patch_size": PATCH},
        scale_factor=1,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        tie_word_embeddings=recipe.tie_word_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForImageTextToText.from_config(config).float()
    with torch.no_grad():  # the default of 0.02 suits wide models; here it delays all learning
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                width = weight.shape[1] if name.endswith(("embed_tokens.weight", "embedding.weight")) else 0
                weight.normal_(0, (width or weight[0].numel()) ** -0.5)
    return model


class PictureLessons:
    """Teaches to answer with a digit and nothing of which. The accuracy is the greedy exact match, by chance."""

    skill = "a digit"
    enough = 1.0
    advice = "more num_steps raise the second"

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: ModelRecipe) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._environment = DrawnShapes(seed=recipe.seed, num_evaluation_prompts=recipe.num_evaluation_prompts)
        self._processor = build_processor(tokenizer)
        self._draw = random.Random(f"{recipe.seed}:guesses")
        self._indices = itertools.count(1)

    def batch(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        prompts = list(map(self._environment.prompt, itertools.islice(self._indices, self._recipe.batch_size)))
        inputs = self._encode(prompts, [f"{self._draw.randint(1, MOST)}{EOS}" for _ in prompts])
        return inputs, inputs["input_ids"][:, -2:]

    @torch.no_grad()
    def held_out(self, model: PreTrainedModel) -> tuple[float, float]:
        """Returns the shares of held-out pictures whose shapes are counted exactly, and answered with a digit."""
        count = range(1, self._environment.num_evaluation_prompts + 1)
        prompts = [self._environment.evaluation_prompt(n) for n in count]
        inputs = self._encode(prompts, [""] * len(prompts))
        likeliest = model(**inputs, logits_to_keep=1).logits[:, -1].argmax(-1)
        answers = self._tokenizer.batch_decode(likeliest[:, None])
        exact = sum(answer == prompt.answer for answer, prompt in zip(answers, prompts, strict=True))
        return exact / len(prompts), sum(map(str.isdecimal, answers)) / len(prompts)

    def _encode(self, prompts: list[Prompt], answers: list[str]) -> dict[str, torch.Tensor]:
        """Returns the model's inputs; all prompts have the same number of tokens, and all answers too."""
        dialogues = [[message.for_template for message in prompt.messages or ()] for prompt in prompts]
        asked = self._tokenizer.apply_chat_template(dialogues, tokenize=False, add_generation_prompt=True)
        images = [[Image.open(io.BytesIO(part.data or b"")) for part in prompt.images] for prompt in prompts]
        said = [question + answer for question, answer in zip(asked, answers, strict=True)]
        inputs = self._processor(text=said, images=images, return_tensors="pt")
        return {name: inputs[name] for name in ("input_ids", "pixel_values")}
