"""Settings asked of vLLM, and the comparison with what it reports."""

import json

import msgspec
import pytest

from penstock.producers.engines.settings import engine_arguments, engine_environment, fingerprint, verify
from penstock.producers.interfaces import EngineError
from penstock.schemas.config import (
    EngineConfig,
    EnvironmentConfig,
    LoraConfig,
    ModelConfig,
    ProducersConfig,
    RunConfig,
    SamplingConfig,
)


def config(dtype: str = "float32", **changes) -> RunConfig:
    model = ModelConfig(path="models/tiny", dtype=dtype)
    return RunConfig(name="settings", model=model, environment=EnvironmentConfig(path="nobody:Needed"), **changes)


def arguments_of(run: RunConfig, *, cpu: bool = True) -> dict:
    return engine_arguments(run, 5, cpu=cpu)


def report(run: RunConfig, **changes) -> dict:
    """The report of an engine that follows its settings."""
    arguments = {name: value for name, value in arguments_of(run).items() if not isinstance(value, dict)}
    return (
        arguments
        | {"head_dtype": "float32", "float32_matmul_precision": "highest", "num_threads": 1, "device": "cpu"}
        | changes
    )


def test_every_parity_setting_is_written_out_and_memory_asked_for_in_the_unit_of_the_device():
    arguments = arguments_of(config(engine=EngineConfig(kv_cache_gib=0.5)))
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["enable_prefix_caching"] is arguments["async_scheduling"] is False
    assert arguments["hf_overrides"] == {"head_dtype": "float32"}
    assert (arguments["seed"], arguments["kv_cache_memory_bytes"]) == (5, 2**29)
    arguments = arguments_of(config(engine=EngineConfig(gpu_memory_utilization=0.4)), cpu=False)
    assert arguments["gpu_memory_utilization"] == 0.4 and "kv_cache_memory_bytes" not in arguments


def test_the_engine_process_of_a_gpu_is_spawned_and_multiplies_float32_in_full():
    assert engine_environment(config(), cpu=False) == {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TRITON_F32_DEFAULT": "ieee",
    }
    assert engine_environment(config("bfloat16"), cpu=False) == {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    assert engine_environment(config(), cpu=True) == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def test_further_arguments_are_passed_as_they_stand_and_recorded():
    run = config(engine=EngineConfig(args={"block_size": 32, "hf_overrides": {"rope_theta": 5.0}}))
    arguments = arguments_of(run)
    assert arguments["block_size"] == 32
    assert arguments["hf_overrides"] == {"rope_theta": 5.0, "head_dtype": "float32"}
    assert fingerprint(run, report(run), "0.32").other == {"block_size": "32", "hf_overrides": '{"rope_theta": 5.0}'}


def test_the_engine_scores_experts_as_transformers_does_where_a_configuration_does_not_say(tmp_path):
    run = msgspec.structs.replace(config(), model=ModelConfig(path=str(tmp_path)))
    for said in ({"model_type": "deepseek_v3"}, {"model_type": "deepseek_v3", "scoring_func": "softmax"}):
        (tmp_path / "config.json").write_text(json.dumps(said))
        expected = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "head_dtype": "float32"}
        assert arguments_of(run)["hf_overrides"] == {name: expected[name] for name in expected if name not in said}


def test_prompts_of_seeded_requests_are_computed_whole_where_generators_cannot_be_wound_back():
    synchronous = config(mode="synchronous")
    assert arguments_of(synchronous)["enable_chunked_prefill"] is False
    for run, cpu in ((synchronous, False), (config(), True)):
        assert "enable_chunked_prefill" not in arguments_of(run, cpu=cpu)


def test_what_would_break_updates_or_parity_is_refused_by_its_name(tmp_path):
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 16}

    def ranks(size: int, **other) -> dict:
        folder = tmp_path / "-".join(["model", *other])
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(shape | other))
        return {"engine": EngineConfig(tensor_parallel_size=size), "model": ModelConfig(path=str(folder))}

    def args(**given) -> dict:
        return {"engine": EngineConfig(args=given)}

    truncated = {"sampling": SamplingConfig(top_k=20, top_p=0.9)}
    refused = [
        *((args(**{name: 1}), f"engine.args.{name} = 1: expected .* instead")
          for name in ("logprobs_mode", "max_num_seqs", "enable_prefix_caching", "seed")),
        (args(weight_transfer_config={}), "weight_transfer_config"),
        (args(hf_overrides={"head_dtype": "float16"}), "hf_overrides"),
        (args(mm_processor_kwargs={"size": 1}), "mm_processor_kwargs = .*expected them in its preprocessor"),
        (args(return_sampling_mask=True), "engine.args.return_sampling_mask = True: expected sampling.top_k"),
        (args(enable_lora=True), "engine.args.enable_lora = True: expected lora to be set instead"),
        (args(enable_chunked_prefill=True) | {"mode": "synchronous"},
         "engine.args.enable_chunked_prefill = True with mode = 'synchronous'"),
        *(({"sampling": SamplingConfig(temperature=value)}, "sampling.temperature") for value in (0.0, 0.001, 2.5)),
        (truncated, "sampling.top_k = 20, sampling.top_p = 0.9: vLLM's CPU build does not report which ids it kept"),
        ({"sampling": SamplingConfig(top_logprobs=21)},
         "sampling.top_logprobs = 21: vLLM returns up to max_logprobs = 20 with a token; expected at most that, or"),
        (args(max_logprobs=3) | {"sampling": SamplingConfig(top_logprobs=4)}, "up to max_logprobs = 3 with a token"),
        (ranks(3), "tensor_parallel_size = 3: expected a divisor of the model's num_attention_heads = 8"),
        (ranks(8, intermediate_size=12), "= 8: expected a divisor of the model's intermediate_size = 12"),
        (ranks(4, moe_intermediate_size=6), "= 4: expected a divisor of the model's moe_intermediate_size = 6"),
        (ranks(4, num_key_value_heads=6), "= 4: expected a divisor or a multiple of .* num_key_value_heads = 6"),
        (ranks(2, text_config={"num_attention_heads": 5}), "divisor of the model's num_attention_heads = 5"),
        ({"engine": EngineConfig(tensor_parallel_size=2)}, "tensor_parallel_size = 2: model.path = .*config.json"),
    ]  # fmt: skip
    for changes, message in refused:
        model = changes.pop("model", None)
        run = config(**changes)
        with pytest.raises(EngineError, match=message):
            arguments_of(run if model is None else msgspec.structs.replace(run, model=model))
    with pytest.raises(EngineError, match=r"engine\.tensor_parallel_size = 4: 2 GPUs here; expected at most that"):
        over_gpus = ranks(4)
        run = msgspec.structs.replace(config(engine=over_gpus["engine"]), model=over_gpus["model"])
        engine_arguments(run, 5, cpu=False, num_gpus=2)
    for most in (4, -1):
        arguments_of(config(**args(max_logprobs=most), sampling=SamplingConfig(top_logprobs=4)))
    assert engine_arguments(run, 5, cpu=False, num_gpus=4)["tensor_parallel_size"] == 4


def test_an_engine_that_reports_what_was_asked_for_is_accepted():
    run = config(engine=EngineConfig(max_model_len=128, args={"block_size": 32, "disable_cascade_attn": True}))
    found = report(run)
    del found["disable_cascade_attn"]  # not every argument keeps its name
    verify(arguments_of(run), run, [found])
    run = config(engine=EngineConfig(head_dtype="model"))
    verify(arguments_of(run), run, [report(run, head_dtype="float32")])


def test_a_setting_reported_otherwise_or_not_at_all_is_named_with_both_values():
    run = config(engine=EngineConfig(args={"block_size": 32}), producers=ProducersConfig(num_threads=1))
    for change, message in [
        ({"logprobs_mode": "raw_logprobs"}, "engine.logprobs_mode: wanted 'processed_logprobs', .* 'raw_logprobs'"),
        ({"enable_prefix_caching": True}, "engine.prefix_caching: wanted False, .* True"),
        ({"head_dtype": "bfloat16"}, "engine.head_dtype: wanted 'float32', .* 'bfloat16'"),
        ({"max_num_seqs": 16}, "engine.max_num_seqs: wanted 256, .* 16"),
        ({"block_size": 128}, "engine.args.block_size: wanted 32, .* 128"),
        ({"float32_matmul_precision": "high"}, "float32_matmul_precision: wanted 'highest', .* 'high'"),
        ({"num_threads": 2}, "producers.num_threads: wanted 1, .* 2"),
        ({"async_scheduling": None}, "async_scheduling: wanted False, .* 'nothing'"),
    ]:
        found = {name: value for name, value in report(run, **change).items() if value is not None}
        with pytest.raises(EngineError, match=message):
            verify(arguments_of(run), run, [report(run), found])


def test_heads_are_divided_among_ranks_or_repeated_on_them(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 8, "num_key_value_heads": 2}))
    for size in (2, 4, 8):
        run = config(engine=EngineConfig(tensor_parallel_size=size))
        run = msgspec.structs.replace(run, model=ModelConfig(path=str(tmp_path)))
        assert arguments_of(run)["tensor_parallel_size"] == size
    assert fingerprint(run, report(run), "0.32").other == {"engine.tensor_parallel_size": "8"}


def test_masks_are_asked_for_where_they_are_needed_and_vllm_has_them():
    truncated = config(sampling=SamplingConfig(top_k=20, top_p=0.9))
    assert arguments_of(truncated, cpu=False)["return_sampling_mask"] is True
    assert "return_sampling_mask" not in arguments_of(config(), cpu=False)
    found = report(config()) | {"return_sampling_mask": False}
    with pytest.raises(EngineError, match=r"sampling\.top_k: wanted True, .* reports False"):
        verify(arguments_of(truncated, cpu=False) | {"gpu_memory_utilization": {}}, truncated, [found])


def test_an_adapter_has_one_slot_of_a_rank_that_vllm_knows_and_its_own_place_in_the_run_file():
    run = config(lora=LoraConfig(rank=20, alpha=5.0, targets=("q_proj", "down_proj")))
    arguments = arguments_of(run)
    assert (arguments["enable_lora"], arguments["max_loras"], arguments["max_lora_rank"]) == (True, 1, 32)
    assert arguments["lora_target_modules"] == ["q_proj", "down_proj"]
    verify(arguments, run, [report(run)])
    with pytest.raises(EngineError, match=r"lora.rank: wanted 32, but the running engine reports 16"):
        verify(arguments, run, [report(run, max_lora_rank=16)])
    with pytest.raises(EngineError, match=r"model.dtype = 'float32' with \[lora\]: .*expected 'bfloat16'"):
        arguments_of(run, cpu=False)
    assert arguments_of(config("bfloat16", lora=LoraConfig()), cpu=False)["max_lora_rank"] == 32
    found = json.loads(fingerprint(run, report(run), "1").other["lora"])
    assert found == {"rank": 20, "alpha": 5.0, "targets": ["q_proj", "down_proj"]}
