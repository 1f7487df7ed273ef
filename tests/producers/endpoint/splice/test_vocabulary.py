"""What single tokens stand for: bytes that are the text's own, and no more of it than the bound says."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chat_templates import tokenizer_of
from penstock.producers.endpoint.splice.vocabulary import Vocabulary

TEXTS = st.text(st.sampled_from("the answer \n\u4e2d\U0001f600e\u0301\u1100\u1161\u11a8<|im_end|>"), max_size=60)


def with_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: white space is a character of its own, and other text its bytes."""
    words = ("\u2581", "t", "h", "e", "\u2581t", "he", "\u2581the")
    vocabulary = {token: n for n, token in enumerate((*(f"<0x{byte:02X}>" for byte in range(256)), *words, "<unk>"))}
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def composing() -> PreTrainedTokenizerFast:
    """As Qwen's: composes characters first."""
    tokenizer = Tokenizer.from_str(tokenizer_of("chatml").backend_tokenizer.to_str())
    tokenizer.normalizer = normalizers.NFC()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


KINDS = {"byte-level": lambda: tokenizer_of("chatml"), "composing": composing, "with fallback": with_fallback}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=TEXTS)
def test_the_bytes_of_tokens_are_those_of_their_text_and_no_fewer_tokens_make_it(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    expected = unicodedata.normalize("NFC", text) if kind == "composing" else text
    found = b"".join(map(vocabulary.bytes_of, ids))
    assert found.removeprefix(b" " if kind == "with fallback" and text else b"") == expected.encode()
    assert vocabulary.least_tokens(text) <= len(ids)
    for n in range(len(ids) + 1):
        if not any(map(vocabulary.ends_inside, ids[n - 1 : n])):
            assert tokenizer.decode(ids).startswith(tokenizer.decode(ids[:n]))


def test_a_bound_is_close_where_there_is_one_and_none_where_text_may_be_left_out() -> None:
    for make in KINDS.values():
        assert Vocabulary(make()).least_tokens("x" * 10_000) >= 500
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy = Tokenizer.from_str(tokenizer_of("chatml").backend_tokenizer.to_str())
    lossy.normalizer = normalizers.Sequence([normalizers.Replace("xx", "x"), normalizers.NFKC()])
    for tokenizer in (words, lossy):
        assert Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer)).least_tokens("x" * 10_000) == 0
