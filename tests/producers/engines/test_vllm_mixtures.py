"""Every parameter of a mixture of experts reaches the engine in flight, whether the model loads it or copies it, and
the engine says which experts it chose."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from penstock.producers.interfaces import Completion
from penstock.schemas.rollout import SamplingSettings, unpack_ids
from shared_engine import BUDGET, CONTEXT, EOS, PROMPT, VOCABULARY, SharedEngine, gap, run_config, weights_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": 2,
}  # fmt: skip


def _mixture(kind: str) -> Any:
    torch.manual_seed(0)
    default = AutoConfig.for_model(kind)
    config = type(default)(**{name: value for name, value in SIZES.items() if hasattr(default, name)})
    return AutoModelForCausalLM.from_config(config).float().eval()


@pytest.mark.parametrize("kind", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.exhaustive)])
async def test_every_parameter_is_the_update_s(vllm_engine, tmp_path: Path, kind: str) -> None:
    """Experts, their biases and sinks are copied by gpt-oss' own code, and packed by the CPU's kernel."""
    model = _mixture(kind)
    model.save_pretrained(tmp_path / "model")
    shared = SharedEngine(await vllm_engine.start(run_config(tmp_path / "model")), model, tmp_path)
    try:
        for number, moved in enumerate((".experts.", ".sinks", "")):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if moved in name:
                        parameter += torch.randn_like(parameter) * (parameter.abs().mean() + (moved == ".sinks"))
            version = await shared.load(_published(model))
            completions = await shared.engine.generate(PROMPT, SamplingSettings(max_tokens=24), 8, f"moved-{number}")
            assert {span.version for each in completions for span in each.version_spans} == {version}
            assert gap(model, completions) <= BUDGET, moved
    finally:
        await shared.engine.close()


@pytest.mark.parametrize("kind", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.exhaustive)])
async def test_the_engine_s_routes_are_transformers_own(vllm_engine, tmp_path: Path, monkeypatch, kind: str) -> None:
    """Prompts and what is sampled have them, finished or not, computed or found in the cache."""
    model = _mixture(kind)
    model.save_pretrained(tmp_path / "model")
    config = run_config(tmp_path / "model", engine={"prefix_caching": True})
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, replay_routes=True))
    shared = SharedEngine(await vllm_engine.start(config), model, tmp_path)
    engine, prompt, sampling = shared.engine, PROMPT * 30, SamplingSettings(max_tokens=100)  # blocks are of 128 tokens
    try:
        assert engine.fingerprint.route_bytes == 2 * 2
        sampled = asyncio.ensure_future(engine.generate(prompt, sampling, 4, "first"))
        unfinished: list[Completion] = []
        async with asyncio.timeout(60):
            while not unfinished and not sampled.done():
                await asyncio.sleep(0)
                unfinished = [one for one in engine.sampled("first") if one.num_tokens > 5]
        completions = await sampled + await engine.generate(prompt, sampling, 4, "cached") + unfinished
    finally:
        await engine.close()
    assert gap(model, completions, prompt=prompt) <= BUDGET
    chosen: list[torch.Tensor] = []
    topk = torch.topk

    def record(scores: torch.Tensor, k: int, *arguments: Any, **keywords: Any) -> Any:
        found = topk(scores, k, *arguments, **keywords)
        chosen.append(found.indices.sort().values)
        return found

    monkeypatch.setattr(torch, "topk", record)
    for completion in completions:
        chosen.clear()
        with torch.no_grad():
            model(torch.tensor([[*prompt, *unpack_ids(completion.token_ids)]]))
        expected = torch.stack(chosen, dim=1)[:-1]
        assert completion.routes is not None and completion.routes.num_rows == len(expected)
        ids = np.frombuffer(completion.routes.ids, dtype=np.uint8).reshape(expected.shape)
        assert np.array_equal(np.sort(ids, axis=-1), expected.numpy())


def _published(model: Any) -> dict[str, torch.Tensor]:
    """Returns what `save_pretrained` would write."""
    return {name: tensor.clone() for name, tensor in revert_weight_conversion(model, weights_of(model)).items()}
