"""A tokenizer without training: a token for each character and for each given piece of text."""

import re
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def build_tokenizer(
    max_tokens: int,
    *,
    eos: str = EOS,
    special: Sequence[str] = (),
    pieces: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """Builds a tokenizer of printable ASCII and newline; any other character is an error.

    special: special tokens in addition to `eos`.
    pieces: texts that are one token each; the longest match is taken.
    """
    vocabulary = {token: number for number, token in enumerate([PAD, eos, *special, *pieces, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    longest_first = sorted(pieces, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=eos,
        additional_special_tokens=list(special) or None,
        chat_template=chat_template,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )
