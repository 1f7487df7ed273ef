"""The text of single tokens: the bytes that one stands for, and how much text one can stand for at most."""

import json
import unicodedata
from collections.abc import Iterator
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
"""Byte-level vocabularies write each byte of a token as one of these characters."""
_FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}
"""Other vocabularies have these tokens for text that no other token covers."""
_KEEPING = frozenset({"NFC", "Prepend", "ByteLevel", "Split", "Digits", "Punctuation", "Metaspace"})
"""Steps before a tokenizer's model that leave no text out."""


class Vocabulary:
    """The text of a tokenizer's tokens. tokenizer: of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
        self._strips = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
        ids = tokenizer.get_vocab()
        self._steps = list(_steps(tokenizer)) if getattr(tokenizer, "is_fast", False) else []
        self._has_fallback = ids.keys() >= _FALLBACK.keys()
        self._is_byte_level = not self._has_fallback and any(step["type"] == "ByteLevel" for step in self._steps)
        self._left_out = bytes(byte for character, byte in _BYTES.items() if character not in ids)
        """With a byte-level vocabulary: bytes that it has no token for, which become none."""
        self._is_bounded = (self._has_fallback or self._is_byte_level) and all(map(_keeps_length, self._steps))
        self._longest = max(len(self.bytes_of(n)) for n in ids.values()) if self._is_bounded else 0

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes of one token, which may be a part of a character."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id) if self._has_fallback or self._is_byte_level else None
        if token is not None and self._is_byte_level and _BYTES.keys() >= set(token):
            return bytes(_BYTES[character] for character in token)
        if token is not None and self._has_fallback:
            return bytes([_FALLBACK[token]]) if token in _FALLBACK else token.replace("\u2581", " ").encode()
        return self._tokenizer.decode([token_id]).encode()

    def ends_inside(self, token_id: int) -> bool:
        """Returns whether the text that ends with this token may change with the next one: it may be a part of a
        character. A run of tokens for bytes that is no text as a whole is decoded otherwise than its beginning."""
        if token_id not in self._added and self._has_fallback:
            return self._tokenizer.convert_ids_to_tokens(token_id) in _FALLBACK
        try:
            return "\ufffd" in self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            return True

    def least_tokens(self, text: str) -> int:
        """Returns a number of tokens that `text` has at least, without encoding it: no token stands for more bytes than
        the longest one of the vocabulary has. 0 if the tokenizer may leave text out or has tokens for any text."""
        if not self._is_bounded:
            return 0
        if not text.isascii() and any(step["type"] == "NFC" for step in self._steps):
            text = unicodedata.normalize("NFC", text)
        if self._strips:  # some special tokens take in the white space beside them
            text = "".join(text.split())
        data = text.encode("utf-8", "surrogatepass")
        num_bytes = len(data if self._has_fallback else data.translate(None, self._left_out))
        return -(-num_bytes // self._longest)


def _steps(tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yields the settings of each normalizer and pre-tokenizer."""
    backend = tokenizer.backend_tokenizer
    waiting = [json.loads(part.__getstate__()) for part in (backend.normalizer, backend.pre_tokenizer) if part]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += step.get("normalizers") or step.get("pretokenizers") or []
        else:
            yield step


def _keeps_length(step: dict[str, Any]) -> bool:
    """Returns whether a text is as long after a step as before, apart from what `Vocabulary.least_tokens` looks at."""
    if step["type"] == "Replace":
        found = step["pattern"].get("String")
        return found is not None and len(found.encode()) <= len(step["content"].encode())
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"
