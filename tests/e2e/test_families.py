"""Small random models of other architectures train by `penstock run`: the real engine, updates in flight, and the
parity gate on."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from demo_run import DemoRun
from penstock.deploy.demo.char_tokenizer import build_tokenizer

pytestmark = [
    pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900),
]  # fmt: skip

MAMBA = {"n_groups": 2, "chunk_size": 16, "head_dim": 32, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "gemma2": ("float32", False, {"head_dim": 32, "num_key_value_heads": 2, "sliding_window": 16,
                                  "query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "gpt_oss": ("float32", False, {"head_dim": 32, "num_key_value_heads": 2, "sliding_window": 16,
                                   "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoehybrid": ("float32", True, {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32,
                                           "mamba_chunk_size": 16, "layer_types": ["mamba", "attention"],
                                           "num_local_experts": 4, "num_experts_per_tok": 2,
                                           "num_key_value_heads": 2, "shared_intermediate_size": 64}),
    "nemotron_h": ("float32", True, MAMBA | {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32,
                                             "layers_block_type": ["mamba", "attention"]}),
    "stablelm": ("float32", True, {"num_key_value_heads": 2}),
    "phi": ("float32", False, {"num_key_value_heads": 4}),
}  # fmt: skip
"""By model type: `model.dtype`, whether rows run in rectangles, and the configuration beside the sizes. What the engine
computes on CPU."""

ALLOWED = 3e-5
"""Nats. An engine whose experts no update reached was at 6e-5 after two updates and at 5e-4 after four."""


def _save_model(kind: str, folder: Path) -> None:
    tokenizer = build_tokenizer(256)
    kinds = type(AutoConfig.for_model(kind).get_text_config())
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 256, "initializer_range": 0.09}
    sizes |= {"tie_word_embeddings": False, "bos_token_id": None}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    AutoModelForCausalLM.from_config(kinds(**sizes | ends | FAMILIES[kind][2])).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(**ends, do_sample=True, temperature=1.0).save_pretrained(folder)


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_architecture_trains_with_the_real_engine(tmp_path: Path, kind: str) -> None:
    dtype, in_rectangles, _ = FAMILIES[kind]
    _save_model(kind, tmp_path / "model")
    settings = {"model.path": tmp_path / "model", "model.dtype": dtype, "num_updates": 6, "groups_per_batch": 8}
    settings |= {"producers.count": 1, "producers.groups_in_flight": 8, "metrics.port": 0}
    settings |= {"environment.kwargs.partial_credit": 0.9, "evaluation.num_prompts": 8}
    settings |= {"correction.proximal": "sampled_version"}  # the engine's gap is known after every update
    run = DemoRun(tmp_path, kind, **settings)
    try:
        run.start(fresh=False)
        assert run.wait() == 0, run.output()
    finally:
        run.stop()
    updates = [json.loads(line) for line in (run.folder / "updates.jsonl").read_text().splitlines()]
    gaps = {update["update"]: update["mismatch_lag0"] for update in updates if "mismatch_lag0" in update}
    assert len(updates) == 6 and max(gaps) > 2, gaps
    assert max(gaps.values()) < ALLOWED, gaps
    assert ("padded to a rectangle" in (run.folder / "logs" / "trainer.log").read_text()) == in_rectangles
