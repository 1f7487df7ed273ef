"""The endpoint section's model and conversations: an untrained model with a chat tokenizer, and text to send."""

import pydoc_data.topics
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 8192
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{TURN_START}' + message['role'] + '\\n' + message['content'] + '{TURN_END}\\n' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{TURN_START}assistant\\n' }}}}{{% endif %}}"
)
TEXT = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore").decode()
"""The topics of Python's `help()`: half a megabyte of English and code that every Python contains."""


def make_chat_model(folder: Path, max_tokens: int) -> None:
    """Saves a model of the demo's size with random weights that speaks ChatML in byte-pair tokens."""
    from transformers.utils.logging import disable_progress_bar

    from penstock.deploy.demo.make_model import ModelRecipe, build_model

    disable_progress_bar()
    tokenizer = chat_tokenizer(max_tokens)
    model = build_model(ModelRecipe(train=False, max_tokens=max_tokens), tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def chat_tokenizer(max_tokens: int) -> "PreTrainedTokenizerFast":
    """Trains a byte-level byte-pair encoding on `TEXT`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )


class Topics:
    """User turns of a given length, cut one after another from `TEXT`, which starts over at its end."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = tokenizer(TEXT, verbose=False)["input_ids"]
        self._next = 0

    def turn(self, num_tokens: int) -> str:
        if self._next + num_tokens > len(self._token_ids):
            self._next = 0
        self._next += num_tokens
        return self._tokenizer.decode(self._token_ids[self._next - num_tokens : self._next])
