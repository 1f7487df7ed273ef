"""Turns the run file's settings into vLLM's arguments and verifies the running engine's report; imports no vLLM."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from penstock.producers.interfaces import EngineError
from penstock.schemas.config import RunConfig
from penstock.schemas.rollout import EngineFingerprint

FIELDS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "logprobs_mode": "engine.logprobs_mode",
    "enable_prefix_caching": "engine.prefix_caching",
    "head_dtype": "engine.head_dtype",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "kv_cache_memory_bytes": "engine.kv_cache_gib",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "num_threads": "producers.num_threads",
    "return_sampling_mask": "sampling.top_k",
    "enable_lora": "lora",
    "max_loras": "lora",
    "max_lora_rank": "lora.rank",
    "lora_target_modules": "lora.targets",
}
"""The run file's field for each of vLLM's settings, by vLLM's name."""
OWN = ("weight_transfer_config", "worker_extension_cls")
"""Engine arguments that weight updates depend on."""
PIXELS = ("mm_processor_kwargs", "media_io_kwargs")
"""Engine arguments that would make other pixels of an image than the trainer's."""

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""The temperatures at which vLLM samples groups. It silently raises a lower one to 0.01, and a greedy request has one
completion only."""

MOST_LOGPROBS = 20
"""vLLM's `max_logprobs`, unless it is set."""

GENERATION_FILE = "generation_config.json"
"""Of transformers: the settings that a model's makers recommend for sampling."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The LoRA ranks that vLLM supports; a smaller one is padded with zeros."""

UNSAID = {"deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}}
"""By model type, fields of the published config.json that transformers neither reads nor writes: it computes so always,
and vLLM otherwise without them."""

WHOLE_DEVICE = 0.9
"""Share of a GPU's memory for an engine that has the GPU to itself."""

MATMUL_PRECISION = "highest"
"""The trainer's float32 matmul precision: no TF32."""


def engine_arguments(config: RunConfig, seed: int, *, cpu: bool, num_gpus: int | None = None) -> dict[str, Any]:
    """Returns arguments for vLLM's AsyncEngineArgs, without those of `OWN`.

    num_gpus: the GPUs that this process can use; None skips the check.

    Raises:
        EngineError: `engine.args` sets something that has its own field in the run file, vLLM cannot sample groups at
            this temperature or cannot report what it sampled from, or `engine.tensor_parallel_size` does not divide
            the model or exceeds `num_gpus`.
    """
    engine, allowed = config.engine, f"{LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}"
    if not LOWEST_TEMPERATURE <= (temperature := config.sampling.temperature) <= HIGHEST_TEMPERATURE:
        raise EngineError(f"sampling.temperature = {temperature}: vLLM cannot sample groups there; expected {allowed}")
    for name, how in config.held_out.items():
        if how.temperature and not LOWEST_TEMPERATURE <= how.temperature <= HIGHEST_TEMPERATURE:
            raise EngineError(
                f"evaluation.temperature = {how.temperature} of environment {name!r}: vLLM cannot sample there; "
                f"expected 0, or {allowed}"
            )
    if cpu and config.sampling.is_truncated:
        raise EngineError(
            f"sampling.top_k = {config.sampling.top_k}, sampling.top_p = {config.sampling.top_p}: vLLM's CPU build "
            "does not report which ids it kept, and without them the trainer cannot reproduce the logprobs; expected "
            "top_k = 0 and top_p = 1.0, or a GPU"
        )
    most = engine.args.get("max_logprobs", MOST_LOGPROBS)
    if isinstance(most, int) and 0 <= most < config.sampling.top_logprobs:
        raise EngineError(
            f"sampling.top_logprobs = {config.sampling.top_logprobs}: vLLM returns up to max_logprobs = {most} with a "
            "token; expected at most that, or more in engine.args.max_logprobs"
        )
    if engine.tensor_parallel_size > 1:
        _check_divides(engine.tensor_parallel_size, Path(config.model.path))
    if num_gpus is not None and engine.tensor_parallel_size > num_gpus:
        raise EngineError(
            f"engine.tensor_parallel_size = {engine.tensor_parallel_size}: {num_gpus} GPUs here; expected at most that"
        )
    arguments = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "seed": seed,
        "logprobs_mode": engine.logprobs_mode,
        "enable_prefix_caching": engine.prefix_caching,
        "async_scheduling": False,  # vLLM's own default differs by device
        "max_num_seqs": engine.max_num_seqs,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if config.sampling.is_truncated:
        arguments["return_sampling_mask"] = True
    if config.model.replay_routes:
        # Hooks on the CPU build's routers do not fire in a compiled graph.
        arguments["enforce_eager" if cpu else "enable_return_routed_experts"] = True
    if engine.max_model_len is not None:
        arguments["max_model_len"] = engine.max_model_len
    if (lora := config.lora) is not None:
        if not cpu and config.model.dtype == "float32":
            raise EngineError(
                "model.dtype = 'float32' with [lora]: vLLM's LoRA kernels for GPUs take 16 bits; expected 'bfloat16' "
                "or 'float16'"
            )
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
            "lora_target_modules": list(lora.targets),
        }
    if cpu:
        arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * 2**30)
        if config.mode == "synchronous":
            # Between the chunks of a prompt vLLM rewinds the request's generator, which torch cannot do on CPU.
            if engine.args.get("enable_chunked_prefill"):
                raise EngineError(
                    "engine.args.enable_chunked_prefill = True with mode = 'synchronous': every request has its "
                    "own seed, with which vLLM cannot compute a prompt in chunks; expected it to be left out"
                )
            arguments["enable_chunked_prefill"] = False
    else:
        fraction = engine.gpu_memory_utilization
        arguments["gpu_memory_utilization"] = WHOLE_DEVICE if fraction is None else fraction
    said = _configuration(config.model.path)
    kind = said.get("model_type", "")
    if kind in ("qwen3_5", "qwen3_5_moe") and find_spec("torchvision") is None:
        arguments["language_model_only"] = True  # its images need that package
    unsaid = {name: value for name, value in UNSAID.get(kind, {}).items() if name not in said}
    for name in engine.args:
        if name in FIELDS:
            raise EngineError(f"engine.args.{name} = {engine.args[name]!r}: expected {FIELDS[name]} to be set instead")
        if name in PIXELS:
            raise EngineError(
                f"engine.args.{name} = {engine.args[name]!r}: the trainer makes pixels by the model's own settings; "
                "expected them in its preprocessor_config.json"
            )
        if name in OWN:
            raise EngineError(f"engine.args.{name} = {engine.args[name]!r}: weight updates need their own; remove it")
    overrides = engine.args.get("hf_overrides", {})
    if not isinstance(overrides, Mapping) or "head_dtype" in overrides:
        raise EngineError(f"engine.args.hf_overrides = {overrides!r}: expected a table without head_dtype")
    return arguments | engine.args | {"hf_overrides": {**unsaid, **overrides, "head_dtype": engine.head_dtype}}


def _configuration(model: str) -> dict[str, Any]:
    """Returns what is in a model's config.json; nothing where there is no such file."""
    try:
        said: dict[str, Any] = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # vLLM's message says more
        return {}
    return said


def end_ids(model: str) -> list[int] | None:
    """Returns the end-of-sequence ids of a model's generation_config.json, the only setting in it that is used; None
    without a file that holds settings: those of config.json end a sequence then.

    Raises:
        EngineError: they are no token ids.
    """
    file = Path(model) / GENERATION_FILE
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict):
        return None
    given = settings.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token_id) is int for token_id in ids):
        raise EngineError(f"{file}: eos_token_id = {given!r}, expected a token id, or a list of them")
    return ids


def _check_divides(size: int, model: Path) -> None:
    """Raises EngineError unless a model's layers can be divided among `size` ranks; reads its config.json."""
    where = f"engine.tensor_parallel_size = {size}: "
    try:
        shape = json.loads((model / "config.json").read_text(encoding="utf-8"))
        shape |= shape.get("text_config") or {}
    except (OSError, ValueError) as error:
        raise EngineError(f"{where}model.path = {str(model)!r}: {error}; expected a transformers model") from None
    for name in ("num_attention_heads", "intermediate_size", "moe_intermediate_size"):
        if (total := shape.get(name) or 0) % size:
            raise EngineError(f"{where}expected a divisor of the model's {name} = {total}")
    heads = shape.get("num_key_value_heads") or size
    if heads % size and size % heads:  # vLLM repeats a head on several ranks where there are fewer heads than ranks
        raise EngineError(f"{where}expected a divisor or a multiple of the model's num_key_value_heads = {heads}")


def engine_environment(config: RunConfig, *, cpu: bool) -> dict[str, str]:
    """Returns the environment variables that decide how vLLM starts its engine process and how that computes."""
    if cpu:
        # vLLM would bind every engine of a machine to the same cores.
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(config.producers.num_threads)}
    # vLLM would fork this process, whose other threads may hold locks.
    variables = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if config.model.dtype == "float32":
        # Its float32 attention is Triton's, which multiplies in TF32 by default.
        variables["TRITON_F32_DEFAULT"] = "ieee"
    return variables


def verify(arguments: Mapping[str, Any], config: RunConfig, reports: Sequence[Mapping[str, Any]]) -> None:
    """Compares the requested settings with those that every engine process reports.

    Plain values of `engine.args` are compared if the engine reports them under the same name.

    Raises:
        EngineError: names the first setting that differs, the value wanted and the value found.
    """
    head_dtype = config.model.dtype if config.engine.head_dtype == "model" else config.engine.head_dtype
    wanted = {name: value for name, value in arguments.items() if isinstance(value, bool | int | float | str)}
    del wanted["model"]
    wanted |= {"head_dtype": head_dtype, "float32_matmul_precision": MATMUL_PRECISION}
    for report in reports:
        expected = dict(wanted)
        if report["device"] == "cpu":
            expected["num_threads"] = config.producers.num_threads
        required = {*FIELDS, "async_scheduling", "float32_matmul_precision"} & set(expected)
        for name, value in expected.items():
            if name not in report and name not in required:
                continue
            found = report.get(name, "nothing")
            if found != value:
                field = FIELDS.get(name, f"engine.args.{name}" if name in config.engine.args else name)
                raise EngineError(f"{field}: wanted {value!r}, but the running engine reports {found!r}")


def fingerprint(config: RunConfig, report: Mapping[str, Any], version: str) -> EngineFingerprint:
    """Returns the engine as it reports itself; `other` holds `engine.args` and Penstock's non-default settings."""
    other = {name: json.dumps(value, sort_keys=True, default=str) for name, value in config.engine.args.items()}
    for name, usual in (("update", "in_flight"), ("tensor_parallel_size", 1)):
        if (value := getattr(config.engine, name)) != usual:
            other[f"engine.{name}"] = json.dumps(value)
    if config.lora is not None:
        other["lora"] = json.dumps(msgspec.to_builtins(config.lora), sort_keys=True)
    return EngineFingerprint(
        engine="vllm",
        version=version,
        model=config.model.path,
        dtype=report["dtype"],
        head_dtype=report["head_dtype"],
        logprobs_mode=report["logprobs_mode"],
        prefix_caching=report["enable_prefix_caching"],
        async_scheduling=report["async_scheduling"],
        other=other,
        route_bytes=report["route_bytes"] if config.model.replay_routes else msgspec.UNSET,
    )
