"""Token ids of a growing text: only the added part is encoded if that provably gives the ids of the whole.

A fast tokenizer first splits the raw text at its special tokens (leftmost first, the longer of two at one place) and
treats the pieces between them one by one. Take a special token that lies entirely in the common prefix of two texts.
None of those used here fits into another between its first and last character, so both texts are split before it and
have the same ids there; and what follows, encoded with that token in front, has the ids that it has in the whole.
"""

import re
import threading
from bisect import bisect_left
from functools import lru_cache
from typing import Any, NamedTuple

from penstock.schemas.prefixes import num_shared

PATTERNS_KEPT = 256
"""Conversations of one template need a few; texts that spell out reserved tokens may need any number."""


class Encoded(NamedTuple):
    """A text and its ids; read-only.

    cuts: the offset in the text and the index in the ids of each special token at which it may be cut, ascending.
    """

    text: str
    token_ids: list[int]
    cuts: list[tuple[int, int]]


class SuffixEncoder:
    """Encodes rendered prompts, without adding special tokens of its own.

    tokenizer: of transformers, for this encoder alone. One without tokens to cut at encodes every text whole.

    Any number of threads may encode at once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        """Held while a tokenizer written in Python encodes."""
        self._backend = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = tokenizer.split_special_tokens
        self._split_at: dict[int, str] = {}
        """The tokens at which the tokenizer splits the raw text."""
        self._cut_at: dict[int, str] = {}
        """Those of them at which the text may be cut here."""
        self._single_words: set[str] = set()
        """Those whose text is a token only as a word of its own."""
        if _cuts_at_special_tokens(tokenizer):
            self._find_cut_tokens()
        self._contents = frozenset(self._cut_at.values())

    def _find_cut_tokens(self) -> None:
        tokens = {n: token for n, token in self._tokenizer.added_tokens_decoder.items() if not token.normalized}
        self._split_at = {n: token.content for n, token in tokens.items()}
        self._single_words = {token.content for token in tokens.values() if token.single_word}
        # A token inside a longer one could be a part of that one in the text.
        longer = "\0".join(content[1:-1] for content in self._split_at.values())
        for n, token in tokens.items():
            if not token.single_word and token.content not in longer:
                self._cut_at[n] = token.content

    def encode(self, text: str, known: Encoded | None = None) -> Encoded:
        """Returns the ids that the tokenizer gives for the whole of `text`. Those of the prefix shared with `known`, up
        to its last special token, are copied from there."""
        n = 0 if known is None else self._num_usable_cuts(known, num_shared(known.text, text))
        if known is None or not n:
            token_ids = self._ids(text)
            return Encoded(text, token_ids, self._cuts(text, token_ids, 0, 0))
        offset, index = known.cuts[n - 1]
        added = self._ids(text[offset:])
        return Encoded(
            text, known.token_ids[:index] + added, known.cuts[: n - 1] + self._cuts(text, added, offset, index)
        )

    def _num_usable_cuts(self, known: Encoded, shared: int) -> int:
        """Returns the number of cuts that lie, with their tokens, within the first `shared` characters."""
        n = bisect_left(known.cuts, (shared, 0))
        while n:
            offset, index = known.cuts[n - 1]
            if offset + len(self._cut_at[known.token_ids[index]]) <= shared:
                break
            n -= 1
        return n

    def _ids(self, text: str) -> list[int]:
        if self._backend is not None:  # a batch of one, since a single text would be encoded with Python's lock held
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        with self._lock:
            return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _cuts(self, text: str, token_ids: list[int], offset: int, index: int) -> list[tuple[int, int]]:
        """Returns the cuts of `text[offset:]`, whose ids are `token_ids`; these begin at `index` of all ids."""
        present = {self._split_at[n] for n in self._split_at.keys() & set(token_ids)}
        pattern = any_of(frozenset(present | self._single_words))
        matches = [match for match in pattern.finditer(text, offset) if match.group() in self._contents]
        indices = [n for n, token_id in enumerate(token_ids) if token_id in self._cut_at]
        if [match.group() for match in matches] != [self._cut_at[token_ids[n]] for n in indices]:
            return []
        return [(match.start(), index + n) for match, n in zip(matches, indices, strict=True)]


@lru_cache(PATTERNS_KEPT)
def any_of(contents: frozenset[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of these tokens: the longer one first, as the tokenizer does."""
    by_length = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, by_length)) or r"(?!)")


def _cuts_at_special_tokens(tokenizer: Any) -> bool:
    """Returns True for a fast tokenizer without a setting that encodes special tokens as text, or text at random."""
    if not getattr(tokenizer, "is_fast", False):
        return False
    backend = tokenizer.backend_tokenizer
    return not (
        tokenizer.split_special_tokens or backend.encode_special_tokens or getattr(backend.model, "dropout", None)
    )
