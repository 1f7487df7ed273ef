"""The families of docs/models.md: a small random model of each, of sizes that the engine's CPU kernels take."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


class Family(NamedTuple):
    """A row of the page's table."""

    architecture: str
    kind: str
    rows: str
    trainer: str
    engine: str
    adapter: str
    ranks: str


_ROW = re.compile(r"^\| `(\w+)` \| `(\w+)`" + 5 * r" \| ([^|]+)" + r" \|$", re.M)
ROWS = [Family(*row) for row in _ROW.findall(PAGE.read_text())]
SIZES = {
    "vocab_size": 67, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
    "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts": 4,
    "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32,
}  # fmt: skip
WINDOW = {"sliding_window": 16}
LATENT = {
    "head_dim": 64, "num_key_value_heads": 4, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 512,
    "first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
YARN = {
    "max_position_embeddings": 163840,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                        "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip
DELTA_NET = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 16}
CONVOLUTIONS = {
    "layer_types": ["conv", "full_attention"], "conv_dim": 128, "conv_dim_out": 128, "block_dim": 128,
    "block_ff_dim": 128, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.3} | WINDOW,
    "deepseek_v2": LATENT | YARN | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | YARN,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 256},
    "gemma4_text": {
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 67,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 0,
        "num_experts": None,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    | WINDOW,
    "glm4_moe": {"n_routed_experts": 4, "head_dim": 32},
    "glm4_moe_lite": LATENT | {"topk_method": "noaux_tc"},
    "granite": {"logits_scaling": 6.0},
    "granitemoe": {"logits_scaling": 6.0},
    "granitemoehybrid": MAMBA | {"shared_intermediate_size": 64, "layer_types": ["mamba", "attention"]},
    "granitemoeshared": {"logits_scaling": 6.0},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS | {"num_dense_layers": 1},
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": LATENT
    | {"expert_ffn_hidden_size": 32, "num_layers": 2, "ffn_hidden_size": 128}
    | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 32, "n_groups": 1, "chunk_size": 16},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "n_groups": 2,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "attention"],
        "n_routed_experts": 4,
    },
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), DELTA_NET),
    "kimi_linear": LATENT | {"linear_num_heads": 2, "linear_head_dim": 64, "layer_types": DELTA_NET["layer_types"]},
    "recurrent_gemma": {"lru_width": 128, "attention_window_size": 16, "num_hidden_layers": 3},
    "smollm3": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]} | WINDOW,
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1} | WINDOW,
    **dict.fromkeys(("exaone4", "gemma3_text", "gpt_oss", "mistral", "mixtral", "olmo3", "phi3", "phimoe"), WINDOW),
}
"""By model type, what differs from its own defaults and from `SIZES`. Among it are fields of the published
configurations that transformers' own lack and the engine reads."""


def small_model(kind: str, **changes: Any) -> PreTrainedModel:
    default = AutoConfig.for_model(kind).get_text_config()
    default.allow_global_per_layer_attribute_access = True
    sizes = {name: size for name, size in SIZES.items() if hasattr(default, name)}
    torch.manual_seed(0)
    config = type(default)(**sizes | SETTINGS.get(kind, {}) | changes)
    return AutoModelForCausalLM.from_config(config)


def assert_agrees(cell: str, *found: float) -> None:
    """Compares gaps with the numbers at the beginning of the page's cell, within a factor that rounding, another
    processor and another order of sums explain; 0 is below 1e-7."""
    written = [float(number) for number in re.findall(r"\de-\d+", cell)][: len(found)]
    assert len(written) == len(found) and all(
        max(one, 1e-7) / 8 <= max(other, 1e-7) <= 8 * max(one, 1e-7) for one, other in zip(written, found, strict=True)
    ), f"the page says {cell}, found {', '.join(f'{gap:.0e}' for gap in found)}"
