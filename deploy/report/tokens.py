"""Finds the text of each token."""

import codecs
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from penstock.schemas.config import ConfigError, RunConfig

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""SentencePiece's space."""


class TokenText(NamedTuple):
    """One token. text: the characters that end in it; the texts of all tokens join to the whole text.

    mark: "special"; "unknown" for an id that the tokenizer lacks; the bytes, such as "E2 82", of a token that begins or
    ends within a character; else empty.
    """

    text: str
    mark: str = ""


class TokenTexts:
    """Texts from a transformers tokenizer. A character spread over tokens belongs to the one that completes it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        state = decoder.__getstate__().decode() if decoder is not None else ""
        self._is_byte_level = '"ByteLevel"' in state
        self._has_spaces = backend is None or _SPACE in state
        self._has_byte_pieces = backend is None or '"ByteFallback"' in state
        self._piece = cache(self._find_piece)

    def texts(self, token_ids: Sequence[int]) -> list[TokenText]:
        """Returns one text for each id."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        found: list[TokenText] = []
        for n, token_id in enumerate(token_ids):
            piece = self._piece(token_id)
            if piece is None:
                found.append(TokenText(decoder.decode(b"", True), "unknown"))
                decoder.reset()
                continue
            was_within = bool(decoder.getstate()[0])
            text = decoder.decode(piece, n == len(token_ids) - 1)
            is_within = bool(decoder.getstate()[0])
            mark = "special" if token_id in self._special else ""
            if was_within or is_within or "\ufffd" in text:
                mark = piece.hex(" ").upper()
            found.append(TokenText(text, mark))
        return found

    def _find_piece(self, token_id: int) -> bytes | None:
        if token_id in self._special:
            return self._special[token_id].encode(errors="replace")
        try:
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
        except (IndexError, KeyError, OverflowError, ValueError):
            return None
        if not isinstance(piece, str):
            return None
        if self._is_byte_level and all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
        if self._has_byte_pieces and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        return (piece.replace(_SPACE, " ") if self._has_spaces else piece).encode(errors="replace")


def texts_of_run(config: RunConfig | None) -> tuple[TokenTexts | None, str]:
    """Loads the run's tokenizer; without one, returns None and the reason."""
    from penstock.producers.rollout.episode import load_tokenizer

    if config is None:
        return None, "tokens are shown as ids: without the run's folder its model is not known"
    try:
        return TokenTexts(load_tokenizer(config)), ""
    except ConfigError as error:
        return None, f"tokens are shown as ids: {error}"


def _byte_characters() -> dict[str, int]:
    """Maps each character of a byte-level vocabulary to its byte: printable bytes to themselves, the others in order to
    characters from U+0100."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()
