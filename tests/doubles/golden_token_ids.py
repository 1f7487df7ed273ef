"""Reads the golden cases of token-exact rollouts, and the tokenizers from an installed package that made them."""

import hashlib
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "token_ids.json").read_text())


def cases(kind: str) -> list[Any]:
    """Returns the cases of a kind as pytest parameters with ids."""
    import pytest

    return [pytest.param(case, id=case.get("id") or f"{case['kind']}-{case['text'].strip()}") for case in GOLDEN[kind]]


@cache
def mistral_tokenizer_file(name: str) -> Path:
    """Returns a tokenizer file of `mistral_common`; checks that it is the one that made the golden cases."""
    found = importlib.util.find_spec("mistral_common")
    assert found is not None and found.origin is not None, "mistral_common is not installed"
    path = Path(found.origin).parent / "data" / name
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GOLDEN["about"]["tokenizers"][name], path
    return path
