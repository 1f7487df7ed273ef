"""Opens a transformers model as the trainer needs it: whole, and computed as the engines compute it."""

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from penstock.schemas.config import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(path: str, named: str, max_model_len: int | None) -> Any:
    """Returns the model in the folder `path` in float32, with transformers' choice of attention.

    named: the run file's field and value, for messages. max_model_len: see `fix_rope`.

    Raises:
        ConfigError: no such model, incomplete weights, a head that its configuration contradicts, or an architecture
            that cannot be opened.
    """
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{named}: expected a folder with a transformers model (no config.json there)")
    # Progress bars would break a run's own display.
    transformers_logging.disable_progress_bar()
    try:
        module, loaded = read_model(path, torch.float32, output_loading_info=True)
    except Exception as error:  # an untried architecture may raise anything
        why = str(error) or type(error).__name__
        raise ConfigError(f"{named}: transformers cannot load it: {why}") from error
    if loaded["missing_keys"]:
        # transformers would continue with random values in their place.
        raise ConfigError(f"{named}: lacks the weights {sorted(loaded['missing_keys'])[:3]}")
    with torch.device("meta"):
        declared: Any = auto_class(module.config).from_config(module.config)
    for name, parameter in declared.named_parameters():
        module.get_parameter(name).requires_grad_(parameter.requires_grad)  # which loading forgets
    _check_tied(module, named)
    fix_rope(module, max_model_len)
    fix_time_steps(module)
    return module


def read_model(path: Path | str, dtype: torch.dtype | str, **how: Any) -> Any:
    """Returns what transformers' `from_pretrained` does, without the folder's generation_config.json: transformers
    refuses some of what that may hold, and nothing here generates by it."""
    kind = auto_class(AutoConfig.from_pretrained(path))
    return kind.from_pretrained(path, dtype=dtype, local_files_only=True, generation_config=GenerationConfig(), **how)


def auto_class(config: Any) -> Any:
    """Returns transformers' class that opens a model of this configuration: with its vision tower, unless transformers
    has a class for its text alone (Qwen3.5)."""
    sees, reads = AutoModelForImageTextToText._model_mapping, AutoModelForCausalLM._model_mapping
    kind = type(config)
    if kind in sees and (kind not in reads or reads[kind] is sees[kind]):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def empty_model(path: str, dtype: torch.dtype, max_model_len: int | None) -> Any:
    """Returns the model of a transformers folder with uninitialized parameters, which take no memory yet; buffers are
    empty."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(path)
        module: Any = auto_class(config).from_config(config, dtype=dtype)
    module.tie_weights()
    kept = kept_in_float32(module)
    filled: dict[int, nn.Parameter] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                is_kept = (f"{prefix}.{name}" if prefix else name) in kept
                empty = torch.empty_like(parameter, dtype=torch.float32 if is_kept else dtype, device="cpu")
                owner._parameters[name] = filled.setdefault(id(parameter), nn.Parameter(empty, parameter.requires_grad))
    fix_rope(module, max_model_len)
    fix_time_steps(module)
    return module


def _check_tied(module: Any, named: str) -> None:
    """Refuses a head in the file that config.json says is the embedding: engines take the embedding, transformers the
    head."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if (
        getattr(module.config.get_text_config(), "tie_word_embeddings", False)
        and type(module)._tied_weights_keys
        and head is not None
        and head.weight is not embedding.weight
    ):
        raise ConfigError(
            f"{named}: tie_word_embeddings = true in its config.json, and its files have another weight for the head "
            "than for the embedding; expected tie_word_embeddings = false, or files without a weight for the head"
        )


def fix_rope(module: nn.Module, max_model_len: int | None) -> None:
    """Makes rotary frequencies that transformers chooses by the longest position of a pass those of the engine.

    vLLM chooses longrope's factors once, by its longest sequence, and scales `dynamic` once. In a packed pass
    transformers would choose by the longest row, for all rows.

    max_model_len: the engine's longest sequence in tokens; None for vLLM's default.
    """
    rope: Any
    for rope in module.modules():
        kinds: Any = getattr(rope, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer, kind in by_layer.items():
            name = "inv_freq" if layer is None else f"{layer}_inv_freq"
            if kind == "longrope":
                setattr(rope, name, _longrope(rope, layer, getattr(rope, name), max_model_len))
            elif kind == "dynamic":
                setattr(rope, name, _dynamic(rope, layer, getattr(rope, name)))
        fixed = {
            layer: "fixed" if kind == "longrope" or "dynamic" in (kind or "") else kind
            for layer, kind in by_layer.items()
        }
        if fixed != by_layer:
            rope.rope_type = fixed if isinstance(kinds, dict) else fixed[None]


def fix_time_steps(module: nn.Module) -> None:
    """Removes the limits of Mamba-2's time steps, as vLLM does: transformers has Nemotron-H's begin at `time_step_min`,
    which is a setting of the initial weights."""
    mixer: Any
    for mixer in module.modules():
        if hasattr(mixer, "time_step_limit"):
            mixer.time_step_limit = (0.0, math.inf)


def _longrope(rope: Any, layer: str | None, like: Tensor, max_model_len: int | None) -> Tensor:
    """Returns the frequencies [dim / 2] for an engine with sequences of `max_model_len`, on the device of `like`."""
    config = rope.config
    length = max_model_len or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
    return ROPE_INIT_FUNCTIONS["longrope"](config, like.device, seq_len=length, layer_type=layer)[0]


def _dynamic(rope: Any, layer: str | None, like: Tensor) -> Tensor:
    """Returns the frequencies [dim / 2] of vLLM's `dynamic`, on the device of `like` [dim / 2].

    Their base is multiplied by a growth to the power dim / (dim - 2): by `alpha`, or by the growth of the context from
    `max_trained_positions` to the configuration's longest sequence.
    """
    table = rope.config.rope_parameters if layer is None else rope.config.rope_parameters[layer]
    longest, dim = rope.config.max_position_embeddings, 2 * len(like)
    growth = table["factor"] * longest / table.get("max_trained_positions", longest) - (table["factor"] - 1)
    base = table["rope_theta"] * table.get("alpha", growth) ** (dim / (dim - 2))
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=like.device) / dim)


def kept_in_float32(module: nn.Module) -> frozenset[str]:
    """Returns the names of the floating tensors that are computed and published in float32 in a 16-bit run as well:
    saved buffers, parameters that the architecture declares untrained, and those that transformers keeps
    (`_keep_in_fp32_modules_strict`). Routers' biases are of all three kinds, and engines hold them in float32."""
    patterns = [name.replace("*", ".*") for name in getattr(module, "_keep_in_fp32_modules_strict", None) or ()]
    pattern = re.compile("|".join(patterns)) if patterns else None
    return frozenset(
        name
        for name, tensor in module.state_dict(keep_vars=True).items()
        if not tensor.requires_grad or (pattern is not None and pattern.search(name))
    )


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and saved buffers in use by name, tied ones once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def logit_scale(config: Any) -> float:
    """Returns the model's factor on its logits: Cohere's architectures multiply by it, Granite's divide."""
    factor, divisor = (getattr(config, name, None) for name in ("logit_scale", "logits_scaling"))
    return (factor if isinstance(factor, float | int) else 1.0) / (divisor or 1.0)


def softcap(config: Any) -> float | None:
    """Returns the cap of the model's logits, see `head.OutputHead`; None without one."""
    for name in ("final_logit_softcapping", "logits_soft_cap"):
        value = getattr(config, name, None)
        if value:
            return float(value)
    return None


def body_of(module: Any) -> nn.Module:
    """Returns the model without its head: with its vision tower, if it has one.

    Raises:
        NotImplementedError: transformers does not separate them.
    """
    body: Any = module.base_model if sees_images(module) else module.get_decoder()
    if body is module:  # architectures that are one part of another
        body = getattr(module, "model", None)
    if not isinstance(body, nn.Module):
        raise NotImplementedError("transformers does not separate its body from its head")
    return body


def sees_images(module: Any) -> bool:
    """Returns whether a model has a vision tower."""
    return hasattr(module.base_model, "get_image_features")


def language_of(module: Any) -> Any:
    """Returns the part of a model that text goes through: without a vision tower, all of it."""
    return module.get_decoder() if sees_images(module) else module


def set_attention(module: Any, name: str) -> None:
    """Sets the attention of the language model; a vision tower keeps its own."""
    config, text = module.config, module.config.get_text_config()
    own = [key for key in config.sub_configs if getattr(config, key) is text]
    module.set_attn_implementation({"": name} | dict.fromkeys(own, name))


def even_length(module: Any) -> float:
    """Returns `PackedModel.even_length`. A token's products with weights cost 2 per parameter; those of attention 4
    times the heads' width per earlier token, on average half the row, in every layer."""
    config = module.config.get_text_config()
    layers = range(getattr(config, "num_hidden_layers", 0))
    try:
        configs = [config.per_layer_config[layer] for layer in layers]  # whose widths differ
    except ValueError:
        configs = [config for _ in layers]
    width = sum(_attention_width(layer) for layer in configs)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    return num_parameters / width if width else math.inf


def _attention_width(config: Any) -> int:
    heads: int = getattr(config, "num_attention_heads", 0)
    return heads * (getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(1, heads))
