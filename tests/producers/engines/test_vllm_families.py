"""docs/models.md says how far the engine is from the trainer, before and after an update in flight, and which adapters
it takes: small random models of each architecture, uncompiled."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from families import ROWS, Family, assert_agrees, small_model
from penstock.consumers.learning.batch.packing import pack_segments
from penstock.consumers.learning.loss.scoring import head_logprobs
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.producers.interfaces import Completion, EngineError
from penstock.schemas.config import LoraConfig
from penstock.schemas.rollout import (
    SamplingSettings,
    Segment,
    VersionSpan,
    pack_floats,
    pack_ids,
    unpack_ids,
)
from shared_engine import publish, run_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(300),
    # Of an engine that does not start.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <function Context:pytest.PytestUnraisableExceptionWarning"
    ),
    pytest.mark.asyncio(loop_scope="session"),
]

PROMPT = [3, 17, 5, 40, 8, 33, 21, 60, 9, 12, 55, 7, 30, 31, 4, 19, 22]
"""Longer than the windows."""
BYPASSED = {"dt_proj", "classifier"}
"""Linear layers whose weights architectures read without calling them."""


@pytest.fixture(autouse=True)
def inspected_here(monkeypatch, tmp_path: Path) -> Path:
    """Has vLLM inspect a model's class in this process, not in one of its own that imports vLLM anew; returns the file
    of what the engine's process says. Configurations that it replaces in transformers are restored."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: function())
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", dict(CONFIG_MAPPING._extra_content))
    monkeypatch.setenv("ENGINE_LOG", str(tmp_path / "engine.log"))
    return tmp_path / "engine.log"


@pytest.mark.parametrize("family", ROWS, ids=[family.kind for family in ROWS])
async def test_the_page_says_how_far_the_engine_is(vllm_engine, tmp_path: Path, inspected_here, family: Family) -> None:
    try:
        gaps = await _gaps(vllm_engine, tmp_path, family.kind, _dtype(family))
    except EngineError as error:
        log = inspected_here.read_text() if inspected_here.exists() else ""
        said = re.search("`(.*)`", family.engine)
        assert said is not None and said[1] in f"{error}\n{log}", f"{error}\n{log[-3000:]}"
    else:
        assert_agrees(family.engine, *gaps)


async def test_without_torchvision_the_text_of_a_model_with_a_tower_for_images_is_served(
    vllm_engine, tmp_path: Path
) -> None:
    text = small_model("qwen3_5_text").config.to_dict()
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
    config = Qwen3_5Config(text_config=text, vision_config=tower | {"num_position_embeddings": 16})
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    assert_agrees("2e-2, 2e-2", *(await _gaps(vllm_engine, tmp_path, "qwen3_5", "bfloat16"))[:2])


@pytest.mark.parametrize("family", ROWS, ids=[family.kind for family in ROWS])
async def test_the_page_says_which_adapters_are_trained_and_served(vllm_engine, tmp_path: Path, family: Family) -> None:
    """Adapters of every linear layer in the blocks."""
    layers = small_model(family.kind).named_modules()
    names = {
        re.sub(r".*\.", "", name) for name, layer in layers if type(layer) is nn.Linear and re.search(r"\.\d+\.", name)
    }
    if family.adapter == "no linear layers":
        assert not names
        return
    lora = LoraConfig(rank=2, alpha=4.0, targets=tuple(sorted(names - BYPASSED)))
    if family.adapter == "trained":
        trainer = _trainer(tmp_path, family.kind, "float32", lora)
        _move(trainer)
        ids, logprobs = pack_ids(PROMPT), pack_floats([0.0] * len(PROMPT))
        sampled = Completion(token_ids=ids, behavior_logprobs=logprobs, version_spans=(), finish_reason="length")
        _differences(trainer, [sampled]).sum().backward()
        assert all(parameter.grad.any() for parameter in trainer.parameters())
    elif family.adapter == "not served":
        with pytest.raises(EngineError):
            await _gaps(vllm_engine, tmp_path, family.kind, _dtype(family), lora)
    else:
        assert family.adapter == "served"
        assert_agrees(family.engine, *await _gaps(vllm_engine, tmp_path, family.kind, _dtype(family), lora))


def _dtype(family: Family) -> str:
    return "bfloat16" if family.engine.startswith("bfloat16") else "float32"


def _trainer(folder: Path, kind: str, dtype: str, lora: LoraConfig | None = None) -> PackedModel:
    if not (folder / "model").exists():
        small_model(kind).save_pretrained(folder / "model")
    return PackedModel(str(folder / "model"), dtype, torch.device("cpu"), lora=lora)


async def _gaps(vllm_engine: Any, folder: Path, kind: str, dtype: str, lora: LoraConfig | None = None) -> list[float]:
    """Returns the gaps before and after an update in flight; in bfloat16 also that of transformers' eager attention
    from its sdpa attention."""
    trainer = _trainer(folder, kind, dtype, lora)
    settings = {"args": {"enforce_eager": True}, "max_num_seqs": 8, "kv_cache_gib": 0.1, "max_model_len": 128}
    config = msgspec.structs.replace(run_config(folder / "model", engine=settings, dtype=dtype), lora=lora)
    engine, gaps = await vllm_engine.start(config), list[float]()
    try:
        for version in range(2):
            if version:
                _move(trainer)
                await engine.load_weights(*publish(trainer.published_weights(), version, folder))
            completions = await engine.generate(PROMPT, SamplingSettings(max_tokens=24), 8, f"version-{version}")
            assert {span.version for one in completions for span in one.version_spans} == {version}
            gaps.append(_mean(_differences(trainer, completions)))
    finally:
        await engine.close()
    if dtype == "bfloat16":
        both = []
        for name in ("eager", "sdpa"):
            trainer.module.set_attn_implementation(name)
            both.append(_differences(trainer, completions))
        gaps.append(_mean(both[0] - both[1]))
    return gaps


@torch.no_grad()
def _move(trainer: PackedModel) -> None:
    """Changes every tensor that is published, saved buffers among them, by a third of its size."""
    random = torch.Generator().manual_seed(1)
    for tensor in trainer.state().values():
        if tensor.is_floating_point():
            tensor += torch.randn(tensor.shape, generator=random) * 0.3 * (tensor.abs().mean() + 0.1)


def _mean(differences: Tensor) -> float:
    return float(differences.detach().abs().mean())


def _differences(trainer: PackedModel, completions: Sequence[Completion]) -> Tensor:
    """Returns the trainer's logprobs of the sampled tokens minus the engine's, by one pass."""
    segments = [(0, _segment(one), 1.0) for one in completions]
    ((microbatch, _),) = pack_segments(segments, 8 * 128, arrangement=trainer.arrangement)
    return head_logprobs(*trainer.forward(microbatch), microbatch)[0] - microbatch.behavior_logprobs


def _segment(completion: Completion) -> Segment:
    ids = [*PROMPT, *unpack_ids(completion.token_ids)]
    run = (len(PROMPT), len(ids))
    return Segment(
        token_ids=pack_ids(ids),
        behavior_logprobs=completion.behavior_logprobs,
        loss_mask=(run,),
        version_spans=(VersionSpan(0, *run),),
    )
