"""The longest sequence of a model is known before an engine starts, and it is the engine's."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.deploy.launch.context_length import check_context, longest_sequence, read_context
from penstock.schemas.config import ConfigError, EngineConfig, EnvironmentConfig, ModelConfig, RunConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
QWEN = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
PHI = {"model_type": "phi3", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
MODELS: list[tuple[dict[str, Any], dict[str, Any], float, int]] = [
    (QWEN, {}, 256, 256),
    ({"model_type": "qwen3", "n_positions": 128}, {}, 128, 128),
    (QWEN | {"rope_scaling": YARN}, {}, 256, 256),
    (QWEN | {"rope_parameters": LINEAR}, {}, 1024, 1024),
    (QWEN | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, 512, 512),
    (QWEN | {"rope_scaling": MROPE}, {}, 256, 256),
    (QWEN | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}, {}, 256, 256),
    (PHI | {"rope_scaling": LONG, "original_max_position_embeddings": 64}, {}, 256, 64),
    (QWEN | {"seq_length": 96}, {}, 96, 96),
    (QWEN | {"max_seq_len": 512}, {}, 256, 256),
    (QWEN | {"max_sequence_length": 32}, {}, 32, 32),
    (QWEN | {"model_max_length": 2048}, {}, 2048, 2048),
    (QWEN, {"hf_overrides": {"max_position_embeddings": 4096}}, 4096, 4096),
    ({"model_type": "gpt2", "n_positions": 48, "n_ctx": 48}, {}, 48, 48),
    ({"model_type": "gpt2"}, {}, 1024, 1024),
    ({"model_type": "gpt2", "n_ctx": 64}, {}, 1024, 1024),
]  # fmt: skip
"""config.json, engine.args, the limit, and the engine's longest sequence if none is asked for."""
UNKNOWN: list[tuple[dict[str, Any], float, int]] = [
    ({"max_position_embeddings": 64}, 64, 64),
    ({"model_type": "own", "seq_length": 64, "n_positions": 128}, 64, 64),
    ({"model_type": "own", "text_config": {"max_sequence_length": 32}}, 32, 32),
    ({"model_type": "own", "hidden_size": 64}, float("inf"), 2048),
]
"""Of no architecture that transformers knows."""


def of(folder: Path, model: dict[str, Any], args: dict[str, Any], max_model_len: int | None = None) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(model))
    return RunConfig(
        name="r",
        model=ModelConfig(path=str(folder)),
        environment=EnvironmentConfig(path="nobody:Needed"),
        engine=EngineConfig(args=args, max_model_len=max_model_len),
    )


def test_a_context_is_read_from_every_key_and_scaled_as_the_engine_scales_it(tmp_path, monkeypatch) -> None:
    for model, args, limit, usual in [*MODELS, *((model, {}, limit, usual) for model, limit, usual in UNKNOWN)]:
        context = read_context(of(tmp_path, model, args))
        assert (context.limit, context.usual) == (limit, usual), model
        assert longest_sequence(of(tmp_path, model, args, 16)) == 16
        if limit == float("inf"):
            check_context(of(tmp_path, model, args, 1_000_000))
            continue
        check_context(of(tmp_path, model, args, int(limit)))
        too_long = of(tmp_path, model, args, int(limit) + 1)
        with pytest.raises(
            ConfigError, match=rf"max_model_len = \d+: .* a context of {int(limit)} tokens \({context.key} "
        ):
            check_context(too_long)
        with monkeypatch.context() as allowed:
            allowed.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
            check_context(too_long)


@pytest.mark.vllm
def test_the_limit_is_vllms_own(tmp_path) -> None:
    from vllm.config.model import _get_and_verify_max_len
    from vllm.transformers_utils.config import get_config, get_hf_text_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    for model, args, limit, usual in MODELS:
        of(tmp_path, model, args)
        whole = get_config(tmp_path, False, hf_overrides_kw=args.get("hf_overrides", {}))
        text = get_hf_text_config(whole)
        found = ModelArchConfigConvertorBase(whole, text).derive_max_model_len_and_key()

        class Derived:
            derived_max_model_len_and_key = found

        def longest(asked: int | None, text: Any = text, derived: Any = Derived) -> int:
            return _get_and_verify_max_len(text, derived, None, asked, False, None)

        assert longest(None) == usual and longest(int(limit)) == limit, model
        with pytest.raises(ValueError, match="greater than the derived"):
            longest(int(limit) + 1)
