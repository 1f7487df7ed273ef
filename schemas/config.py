"""The run file: one TOML document, checked once, frozen afterwards."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from schemas.keys import Keys
from schemas.rollout import SamplingSettings

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


DEFAULT_OBJECTIVE = "consumers.objectives.grpo:Grpo"


class ConfigError(ValueError):
    """A run file that cannot be used; the message names the field, its value and what was expected."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the run file."""


class Plug(Section, frozen=True, kw_only=True):
    """Something of the user's own, named by import path."""

    path: str
    """`package.module:Name`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments it is called with."""


class ModelConfig(Section, frozen=True, kw_only=True):
    path: str
    """Folder of a transformers model and its tokenizer; relative to the working directory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that are published and served. The trainer's own copy is float32."""


class SamplingConfig(SamplingSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rollouts are sampled. Only what the trainer can reproduce is accepted."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """Engine settings that can move a logprob are written out here and verified after boot."""

    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    prefix_caching: bool = False
    async_scheduling: bool = False
    head_dtype: Literal["float32", "model"] = "float32"
    """Type of the language-model head; `model` leaves it at model.dtype."""
    max_model_len: Positive | None = None
    """Longest prompt plus completion in tokens; None takes the model's own limit."""
    max_num_seqs: Positive = 256
    """Sequences decoded at once."""
    kv_cache_gib: PositiveFloat = 1.0
    """CPU build only: memory for the KV cache."""
    gpu_memory_utilization: Fraction = 0.9
    """GPU only: share of the device memory the engine may take."""
    args: dict[str, Any] = {}
    """Further vLLM engine arguments, passed as they stand and recorded in the fingerprint."""


class ProducersConfig(Section, frozen=True, kw_only=True):
    count: Positive = 2
    """Producers that `penstock run` starts on this machine."""
    groups_in_flight: Positive = 32
    """Prompt groups that one producer generates at once."""
    num_threads: Positive = 1
    """Compute threads of one engine on CPU."""
    generation_deadline_s: PositiveFloat = 600.0
    """A group that takes longer is given up and settled as dead."""
    claim_idle_s: PositiveFloat = 30.0
    """A claim not refreshed for this long may be taken over by another producer."""
    claim_refresh_s: PositiveFloat = 10.0
    max_attempts: Positive = 8
    """A prompt delivered this often without a result is settled as dead."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    learning_rate: PositiveFloat = 1e-5
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly to its value."""
    decay: Literal["constant", "linear"] = "constant"
    """`linear` lets the learning rate fall to zero at the last update."""
    max_grad_norm: PositiveFloat = 1.0
    tokens_per_microbatch: Positive = 8192
    """Tokens (context and sampled) of one forward pass; a longer single segment makes a pass of its own."""
    num_threads: Positive = 1
    """CPU compute threads."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: bool = False
    lease_s: PositiveFloat = 5.0
    """A trainer not heard of for this long may be replaced by one that stands by."""
    max_dead_in_a_row: Positive = 64
    """Stop the run with the last reason once so many groups have died with no good one arriving in between."""


class AdvantageConfig(Section, frozen=True, kw_only=True):
    normalize_std: bool = True
    """Divide by the group's standard deviation, as GRPO does; False as in Dr. GRPO."""
    leave_one_out: bool = False
    """Take the mean of the other siblings as baseline (RLOO)."""


class CorrectionConfig(Section, frozen=True, kw_only=True):
    """Per-token trust in behavior logprobs: `f(exp(proximal - behavior))`."""

    mode: Literal["none", "token_truncate", "token_mask"] = "token_truncate"
    threshold: Annotated[float, Meta(ge=1)] = 2.0
    """The largest importance weight kept (truncate) or trusted (mask)."""


class EvaluationConfig(Section, frozen=True, kw_only=True):
    every: Positive = 25
    """Updates between evaluations; one more happens at the start and at the end."""
    num_prompts: NonNegative | None = None
    """Held-out prompts per evaluation, at most what the environment has. None takes all, 0 evaluates nothing."""
    max_tokens: Positive | None = None
    """None takes sampling.max_tokens."""


class CheckpointConfig(Section, frozen=True, kw_only=True):
    every: Positive = 100
    """Updates between checkpoints; one more is written at the end."""
    keep: Annotated[int, Meta(ge=2)] = 2
    """Committed checkpoints kept on disk."""


class WeightsConfig(Section, frozen=True, kw_only=True):
    folder: str | None = None
    """Folder that trainer and producers share, best on tmpfs; None takes `<runs>/<name>/weights`."""
    keep: Annotated[int, Meta(ge=2)] = 8
    """Published versions kept."""


class RedisConfig(Section, frozen=True, kw_only=True):
    """Where the streams live. The environment variable REDIS_URL wins over `url`."""

    url: str | None = None
    """None: REDIS_URL, else a server of the run's own. A password comes with REDIS_URL or REDIS_PASSWORD_FILE only."""
    maxmemory_mb: Positive = 1024
    """Limit of the run's own server (noeviction)."""
    outage_s: PositiveFloat = 600.0
    """Give up after Redis has been away for this long."""


class MetricsConfig(Section, frozen=True, kw_only=True):
    port: Annotated[int, Meta(ge=0, le=65535)] = 9400
    """First port to try; each process of this machine takes the next free one. 0 lets the system choose."""
    host: str = "127.0.0.1"


class RunConfig(Section, frozen=True, kw_only=True):
    """Everything a run depends on."""

    name: str
    seed: int = 0
    mode: Literal["asynchronous", "synchronous"] = "asynchronous"
    """`synchronous` generates, drains, trains and updates in turn: a lag bound of 0."""
    num_updates: Positive = 100
    """Batches trained; one optimizer step each."""
    group_size: Annotated[int, Meta(ge=2)] = 8
    """Siblings sampled per prompt."""
    groups_per_step: Positive = 32
    """Groups per optimizer step."""
    max_lag: NonNegative = 2
    """Tokens older than this many optimizer steps are masked."""

    model: ModelConfig
    environment: Plug
    reward: Plug | None = None
    """A function `(prompt, completion) -> float | Reward` in place of the environment's own reward."""
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    producers: ProducersConfig = ProducersConfig()
    trainer: TrainerConfig = TrainerConfig()
    objective: Plug = Plug(path=DEFAULT_OBJECTIVE)
    advantage: AdvantageConfig = AdvantageConfig()
    correction: CorrectionConfig = CorrectionConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    redis: RedisConfig = RedisConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def lag_bound(self) -> int:
        """The lag bound in force: `max_lag`, or 0 in synchronous mode."""
        return 0 if self.mode == "synchronous" else self.max_lag

    @property
    def credit(self) -> int:
        """The most groups that may be released and not settled."""
        return (self.lag_bound + 1) * self.groups_per_step

    def folder(self, runs: Path) -> Path:
        return runs / self.name

    def weights_folder(self, runs: Path) -> Path:
        return Path(self.weights.folder) if self.weights.folder else self.folder(runs) / "weights"


def load_config(file: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run file; each override is `dotted.path=value` with a TOML value (a bare word counts as a string).

    Raises:
        ConfigError: no such file, not TOML, an unknown or ill-typed field, or settings that contradict each other.
    """
    try:
        document = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None
    for override in overrides:
        _apply_override(document, override)
    try:
        config = msgspec.convert(document, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {_explain(error, document)}") from None
    _check(config, file)
    return config


def _apply_override(document: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path.strip():
        raise ConfigError(f"override {override!r}: expected dotted.path=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = path.strip().split(".")
    table = document
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a table")
    table[last] = value


def _explain(error: msgspec.ValidationError, document: dict[str, Any]) -> str:
    """msgspec's message with the field's path first and the offending value beside it."""
    text, _, path = str(error).partition(" - at ")
    path = path.strip("`").removeprefix("$").removeprefix(".")
    if text.startswith(("Object contains unknown field", "Object missing required field")):
        verb = "unknown field" if "unknown" in text else "missing field"
        name = text.split("`")[1]
        return f"{path + '.' if path else ''}{name}: {verb}"
    value: Any = document
    for part in path.replace("[", ".").replace("]", "").split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return f"{path}: {text}"
    return f"{path} = {value!r}: {text}"


def _check(config: RunConfig, file: Path) -> None:
    try:
        Keys(config.name)
    except ValueError as error:
        raise ConfigError(f"{file}: name: {error}") from None
    if config.redis.url and re.search(r"//[^@]*:[^@]+@", config.redis.url):
        # A run file is printed, copied into the run's folder and compared with it.
        raise ConfigError(
            f"{file}: redis.url holds a password; expected it in the environment variable REDIS_URL or in the file "
            "that REDIS_PASSWORD_FILE names"
        )
    sampling = config.sampling
    if sampling.top_k not in (0, -1) or sampling.top_p != 1.0:
        raise ConfigError(
            f"{file}: sampling.top_k = {sampling.top_k}, sampling.top_p = {sampling.top_p}: the trainer cannot "
            "reproduce these logprobs; expected top_k = 0 and top_p = 1.0"
        )
    if sampling.temperature < 0:
        raise ConfigError(f"{file}: sampling.temperature = {sampling.temperature}: expected 0 or more")
    if sampling.max_tokens < 1:
        raise ConfigError(f"{file}: sampling.max_tokens = {sampling.max_tokens}: expected 1 or more")
    if config.engine.logprobs_mode != "processed_logprobs" and sampling.temperature != 1.0:
        raise ConfigError(
            f"{file}: engine.logprobs_mode = {config.engine.logprobs_mode!r} with sampling.temperature = "
            f"{sampling.temperature}: raw logprobs are not those of the sampled distribution; "
            "expected 'processed_logprobs'"
        )
    for name in ("environment", "objective", "reward"):
        plug = getattr(config, name)
        if plug is not None and plug.path.count(":") != 1:
            raise ConfigError(f"{file}: {name}.path = {plug.path!r}: expected package.module:Name")
    if config.producers.claim_refresh_s >= config.producers.claim_idle_s:
        raise ConfigError(
            f"{file}: producers.claim_refresh_s = {config.producers.claim_refresh_s}: expected less than "
            f"claim_idle_s = {config.producers.claim_idle_s}"
        )
