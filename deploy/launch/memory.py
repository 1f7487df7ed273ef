"""Estimates the memory of a trainer's rank and of an engine from the shape of the model; see docs/sizing.md."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from penstock.schemas.config import ConfigError, LoraConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
USABLE = 0.9
"""Share of a device left by the CUDA context, NCCL's buffers and what the allocator cannot use."""
PASS_TOKENS = 8192
"""The default of `trainer.tokens_per_microbatch`."""


class ModelShape(NamedTuple):
    """A decoder with attention in every block, by the fields of its config.json.

    intermediate: of one expert, if there are experts. has_head_norms: queries and keys are normalized, as in Qwen3.
    max_model_len: the longest sequence in tokens; 0 if unknown.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    has_head_norms: bool = True
    experts: int = 0
    experts_per_token: int = 0
    max_model_len: int = 0

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def expert_parameters(self) -> int:
        """All experts of a block, without their router."""
        return 3 * self.hidden * self.intermediate * self.experts

    @property
    def block_parameters(self) -> int:
        attention = 2 * self.hidden * (self.query_width + self.key_width) + 2 * self.head_dim * self.has_head_norms
        mlp = 3 * self.hidden * self.intermediate * (self.experts or 1) + self.hidden * self.experts
        return attention + mlp + 2 * self.hidden

    @property
    def root_parameters(self) -> int:
        """Embedding, head and last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.root_parameters


class RankSetting(NamedTuple):
    """The settings of a rank that determine its memory, next to the model.

    tokens: of a pass. dtype: `model.dtype`. unsharded: gradients are reduced once per optimizer step. has_reference: a
    KL term's model is held too. teacher: parameters of a teacher that is held too. adapter: parameters of the adapter
    that is trained; None trains all parameters. by_expert: each rank computes its own experts.
    """

    ranks: int
    tokens: int = PASS_TOKENS
    dtype: str = "bfloat16"
    checkpointing: bool = True
    unsharded: bool = False
    on_cuda: bool = True
    has_reference: bool = False
    teacher: int = 0
    adapter: int | None = None
    by_expert: bool = False


def adapter_parameters(shape: ModelShape, lora: LoraConfig) -> int:
    """Returns the number of an adapter's parameters, for targets by the usual names in decoders of this shape."""
    attention, mlp = {"q_proj": 1, "o_proj": 1, "k_proj": 2, "v_proj": 2}, ("gate_proj", "up_proj", "down_proj")
    widths = (0, shape.query_width, shape.key_width)
    sizes = {name: shape.hidden + widths[which] for name, which in attention.items()}
    sizes |= dict.fromkeys(mlp, shape.hidden + shape.intermediate)
    return shape.layers * lora.rank * sum(sizes.get(target, 0) for target in lora.targets)


def block_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Returns what autograd keeps of one block for its backward pass. b bytes per element of `dtype`:

    norms         2 hidden (4 + 2b)                  input in float32, normalized, output; each of the two
    attention     3b query + 2b key                  what goes in, grouped into rows; what comes out
    head norms    (4 + b)(query + key)               where a model has them
    MLP           4b intermediate                    gate, up, activation, product
    experts       k (4b intermediate + 2b hidden)    of the k that a token meets, with what is gathered for them
    """
    b = DTYPE_BYTES[dtype]
    query, key, experts = shape.query_width, shape.key_width, shape.experts_per_token
    kept = 2 * shape.hidden * (4 + 2 * b) + 3 * b * query + 2 * b * key + 4 * b * shape.intermediate * (experts or 1)
    # One float32 per norm and head: reciprocal roots, attention's normalizer.
    kept += 8 + 4 * shape.heads + shape.has_head_norms * ((4 + b) * (query + key) + 4 * (shape.heads + shape.kv_heads))
    return kept + 2 * b * shape.hidden * experts


def rank_bytes(shape: ModelShape, setting: RankSetting) -> dict[str, float]:
    """Returns the peak of one rank's memory by use. With b bytes per element of `dtype`, N ranks, T tokens per pass:

    masters, gradients, moments   16 parameters / N                  float32: one, one, two
    gathered all the while        b root                             with one rank: b parameters in 16 bits, rounded
                                                                     for a pass, and nothing in float32
    unsharded gradients           4 parameters                       where the ranks reduce them once per step
    reference model, teacher      b parameters / N                   where they exist, each with its own parameters
    activations                   T (b hidden layers)                the blocks' inputs, with checkpointing
                                  T layers (block's bytes a token)   without
                                  T (3b + 16) hidden                 embeddings, last norm, the head's inputs, gradients
    the largest of                logits, 4 vocabulary hidden        the head, with its weight's gradient
                                  2b block + (b + 4) block + b root  a block: it and the next one gathered, its gradient
                                  + T (block's bytes a token)        twice, in `dtype` and float32, and the head's; what
                                                                     checkpointing computes again
                                  (b + 4) root                       the gradients of embedding and head, at the end

    With an adapter of P parameters, masters, gradients and moments take 16 P / N, unsharded gradients 4 P and the
    frozen base b parameters / N; nothing is rounded for a pass, and block, embedding and head have no gradients.

    By expert, a block's experts are not gathered: 2b experts / N, rounded, with their gradient, and they have no
    unsharded gradients.
    """
    b, n, tokens = DTYPE_BYTES[setting.dtype], setting.ranks, setting.tokens
    experts = shape.expert_parameters if setting.by_expert and n > 1 else 0
    block, root, whole = shape.block_parameters, shape.root_parameters, shape.parameters
    per_block = tokens * block_bytes_per_token(shape, setting.dtype)
    kept = tokens * b * shape.hidden * shape.layers if setting.checkpointing else shape.layers * per_block
    elements, scratch = (1 << 28, 2 * 4096 * 8192) if setting.on_cuda else (1 << 25, 0)
    rows = min(tokens, max(elements // shape.vocabulary, shape.hidden // 4))
    has_gradients = setting.adapter is None
    trained = whole if setting.adapter is None else setting.adapter
    phases: list[float] = [4 * (rows * shape.vocabulary + scratch + shape.vocabulary * shape.hidden * has_gradients)]
    computed_again = per_block if setting.checkpointing else 0
    if n == 1:
        gathered = b * whole * (setting.dtype != "float32" and has_gradients)
        phases += [computed_again]
    else:
        gathered = b * root
        gathered_block = (2 * b + (b + 4) * has_gradients) * (block - experts)
        phases += [computed_again + gathered_block + 2 * b * experts / n + b * root * has_gradients]
        phases += [(b + 4) * root * has_gradients]
    parts = {
        "masters, gradients, moments": 16 * trained / n,
        "base model": b * whole * (not has_gradients) / n,
        "gathered all the while": gathered,
        "unsharded gradients": 4 * (trained - shape.layers * experts * has_gradients) * (setting.unsharded and n > 1),
        "reference model": b * whole * setting.has_reference / n,
        "teacher": b * setting.teacher / n,
        "activations": kept + tokens * (3 * b + 16) * shape.hidden,
        "a block, or the head": max(phases),
    }
    return {name: part for name, part in parts.items() if part}


def engine_bytes(
    shape: ModelShape, dtype: str, num_devices: int, max_model_len: int, max_num_seqs: int
) -> dict[str, float]:
    """Returns the least memory of one device that an engine over `num_devices` needs, by use."""
    b = DTYPE_BYTES[dtype]
    return {
        "weights": b * shape.parameters / num_devices,
        "KV cache of one longest sequence": 2 * b * shape.layers * shape.key_width * max_model_len / num_devices,
        "logits": 4 * shape.vocabulary * max_num_seqs,
    }


def read_model_config(folder: Path) -> dict[str, Any]:
    """Reads a model's config.json, the fields of its text model at the top. Raises ConfigError if it is no JSON."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path = {str(folder)!r}: config.json: {error}; expected JSON") from None
    return config | (config.get("text_config") or {})


def read_shape(folder: Path) -> ModelShape | None:
    """Reads a model's shape; None for an architecture with other fields. Raises ConfigError as `read_model_config`."""
    config = read_model_config(folder)
    experts = next((config[name] for name in ("num_experts", "num_local_experts") if config.get(name)), 0)
    try:
        return ModelShape(
            name=folder.name,
            hidden=config["hidden_size"],
            intermediate=(experts and config.get("moe_intermediate_size")) or config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
            has_head_norms=str(config.get("model_type")).startswith("qwen3"),
            experts=experts,
            experts_per_token=config["num_experts_per_tok"] if experts else 0,
            max_model_len=config.get("max_position_embeddings", 0),
        )
    except KeyError:
        return None


def total_gb(shape: ModelShape, setting: RankSetting) -> float:
    return sum(rank_bytes(shape, setting).values()) / 1e9
