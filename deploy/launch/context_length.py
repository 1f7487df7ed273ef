"""The longest sequence that vLLM allows for a model: its rule (`vllm.config.model._get_and_verify_max_len` and
`ModelArchConfigConvertorBase`, version 0.32) on the model's configuration, without vLLM."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from penstock.deploy.launch.memory import read_model_config
from penstock.schemas.config import ConfigError, RunConfig

_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_DEFAULT = 2048
"""Of vLLM, for a model without any of these."""
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rotary embeddings for which the configuration's length is the scaled one."""
_ALLOW_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


class Context(NamedTuple):
    """limit: the longest sequence in tokens; infinite without a key. key: of config.json, that says so. usual: the
    longest if `engine.max_model_len` is not set."""

    limit: float
    key: str
    usual: int


def check_context(config: RunConfig) -> None:
    """Raises ConfigError if engine.max_model_len is beyond the model's own limit: the engine would refuse it later."""
    asked = config.engine.max_model_len
    if asked is None or os.environ.get(_ALLOW_LONGER, "0").strip().lower() in ("1", "true"):
        return
    context = read_context(config)
    if asked > context.limit:
        raise ConfigError(
            f"engine.max_model_len = {asked}: model.path = {config.model.path!r} has a context of "
            f"{int(context.limit)} tokens ({context.key} in its config.json); expected at most that"
        )


def longest_sequence(config: RunConfig) -> int:
    """Returns the engine's longest sequence in tokens."""
    return config.engine.max_model_len or read_context(config).usual


def read_context(config: RunConfig) -> Context:
    """Reads a model's context as the engine will, with `engine.args.hf_overrides`. Imports transformers."""
    model = _configuration(config)
    lengths = {key: length for key in _KEYS if isinstance(length := getattr(model, key, None), int | float)}
    if model_max := lengths.get("model_max_length"):
        lengths = {"model_max_length": model_max}
    key = min(lengths, key=lengths.__getitem__, default="")
    limit: float = lengths.get(key, math.inf)
    window = getattr(model, "sliding_window", None)
    if config.engine.args.get("disable_sliding_window") and isinstance(window, int) and window < limit:
        key, limit = "sliding_window", window
    if limit == math.inf:
        return Context(limit, "", _DEFAULT)
    ropes = list(_rotary_embeddings(model))
    factors = [rope.get("factor") for rope in ropes if _kind(rope) not in _SCALED_ALREADY and "factor" in rope]
    if factors and "gemma3" not in str(getattr(model, "model_type", "")):
        limit *= factors[-1] or 1.0
    usual = int(limit)
    if any(_kind(rope) in ("su", "longrope") for rope in ropes):
        usual = int(getattr(model, "original_max_position_embeddings", None) or limit)
    return Context(limit, key, usual)


def _configuration(config: RunConfig) -> Any:
    """Returns the text model's configuration with the defaults of its class, or for an architecture that transformers
    does not know, what stands in config.json."""
    from transformers import AutoConfig

    overrides = config.engine.args.get("hf_overrides", {})
    overrides = overrides if isinstance(overrides, Mapping) else {}
    written = {**read_model_config(Path(config.model.path)), **overrides}
    try:
        known: Any = AutoConfig.from_pretrained(config.model.path, local_files_only=True)
        known.update({name: value for name, value in overrides.items() if not isinstance(value, Mapping)})
        return known.get_text_config()
    except Exception:  # an unknown or untried architecture may raise anything; the engine says what is wrong with it
        return SimpleNamespace(**written)


def _rotary_embeddings(model: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the settings of rotary embeddings, of each kind of layer if they differ."""
    settings = getattr(model, "rope_parameters", None) or getattr(model, "rope_scaling", None) or {}
    nested = [value for value in settings.values() if isinstance(value, Mapping)]
    yield from nested or [settings]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))
