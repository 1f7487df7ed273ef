"""Text encoded after a known prefix has the ids of the whole, for every tokenizer and every text."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from chat_templates import ANSWER, QUESTION, STYLES, encode, render_text, tokenizer_of
from penstock.producers.endpoint.splice.suffix_encoding import SuffixEncoder

PIECES = ["", " ", "\n", "the", " answer", "ANSWER", "é", "…", "🦊", "e\u0301", "<|im_", "end|>", "<", "|>", "</s", ">"]


def texts(specials: list[str]) -> st.SearchStrategy[str]:
    """Texts in which special tokens stand whole, in part, and next to anything."""
    return st.lists(st.one_of(st.sampled_from(specials), st.sampled_from(PIECES), st.text(max_size=4))).map("".join)


@pytest.mark.parametrize("name", STYLES)
@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_a_suffix_has_the_ids_of_the_whole_in_every_style(name, data):
    encoder = SuffixEncoder(tokenizer_of(name))
    specials = [*STYLES[name].specials, *STYLES[name].words]
    known = None
    text = ""
    for _ in range(3):
        kept = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
        text = kept + data.draw(texts(specials))
        known = encoder.encode(text, known)
        assert known.text == text
        assert known.token_ids == encode(name, text)
        for offset, index in known.cuts:
            special = tokenizer_of(name).convert_ids_to_tokens(known.token_ids[index])
            assert text.startswith(special, offset)


@pytest.mark.parametrize("name", STYLES)
def test_of_a_conversation_only_what_was_added_is_encoded(name, monkeypatch):
    """Each of thirty turns is encoded once or twice: the encoder starts at the last special token in common."""
    encoder, encoded = SuffixEncoder(tokenizer_of(name)), []
    whole = encoder._ids
    monkeypatch.setattr(encoder, "_ids", lambda text: encoded.append(text) or whole(text))
    messages = [{"role": "user", "content": QUESTION}]
    known = None
    for _ in range(30):
        known = encoder.encode(render_text(name, messages, True), known)
        messages.append({"role": "assistant", "content": ANSWER})
        prefix = encoder.encode(render_text(name, messages, False), known)
        messages.append({"role": "user", "content": QUESTION})
        assert prefix.token_ids == encode(name, prefix.text)
        known = encoder.encode(render_text(name, messages, True), prefix)
        assert known.token_ids == encode(name, known.text)
    assert len(known.text) <= sum(map(len, encoded)) < 3 * len(known.text)


# Tokenizers whose special tokens overlap, strip, normalize or need space around them


def token(content: str, **options) -> AddedToken:
    return AddedToken(content, **({"special": True, "normalized": False} | options))


AWKWARD = {
    "one-begins-another": [token("<a>"), token("<a><b>"), token("<b>"), token("<c>")],
    "one-inside-another": [token("<a>"), token("-<a>-"), token("<c>")],
    "one-ends-in-anothers-beginning": [token("ab"), token("bc"), token("aba"), token("<c>")],
    "strip-left": [token("<a>", lstrip=True), token("<c>")],
    "strip-right": [token("<a>", rstrip=True), token("<c>"), token(" <d>")],
    "strip-both": [token("<a>", lstrip=True, rstrip=True), token("<b>", rstrip=True), token("<c>")],
    "single-word": [token("ab", single_word=True), token("b<c>"), token("<c>", single_word=True), token("<d>")],
    "normalized": [token("<A>", normalized=True, special=False), token("<a>"), token("<c>")],
}


@functools.cache
def awkward_tokenizer(kind: str, pipeline: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="?", byte_fallback=False))
    alphabet: list[str] = []
    if pipeline == "metaspace-first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    elif pipeline == "prepend-and-replace":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet, special_tokens=["?"])
    tokenizer.train_from_iterator(["the answer is ab bc abab <a> <b> <c> the answer"] * 3, trainer)
    tokenizer.add_tokens(AWKWARD[kind])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("pipeline", ["metaspace-first", "prepend-and-replace", "normalizing-bytes"])
@pytest.mark.parametrize("kind", AWKWARD)
@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_a_suffix_has_the_ids_of_the_whole_for_awkward_tokenizers(kind, pipeline, data):
    tokenizer = awkward_tokenizer(kind, pipeline)
    encoder = SuffixEncoder(tokenizer)
    pieces = [*(added.content for added in AWKWARD[kind]), *"abc<>- ", "  ", "the answer", "\u212b"]
    drawn = st.lists(st.sampled_from(pieces), max_size=12).map("".join)
    text = data.draw(drawn)
    known = encoder.encode(text[: data.draw(st.integers(0, len(text)))] + data.draw(drawn))
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encoder.encode(text, known).token_ids == whole


def test_tokenizers_that_read_special_tokens_as_text_or_at_random_encode_every_text_whole():
    at_random = Tokenizer.from_str(tokenizer_of("chatml").backend_tokenizer.to_str())
    at_random.model.dropout = 0.5
    as_text = Tokenizer.from_str(tokenizer_of("chatml").backend_tokenizer.to_str())

    class Slow:
        is_fast = False

        def __call__(self, text: str, **options):
            return {"input_ids": [ord(character) for character in text]}

    slow = SuffixEncoder(Slow())
    for encoder in (
        slow,
        SuffixEncoder(PreTrainedTokenizerFast(tokenizer_object=at_random)),
        SuffixEncoder(PreTrainedTokenizerFast(tokenizer_object=as_text, split_special_tokens=True)),
    ):
        assert not encoder.encode("ab<|im_end|>").cuts
    assert slow.encode("ab<|im_end|>", slow.encode("ab")).token_ids == [ord(character) for character in "ab<|im_end|>"]
