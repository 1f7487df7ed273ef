"""The run file: one TOML document, checked once, frozen afterwards."""

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from penstock.schemas.keys import Keys
from penstock.schemas.rollout import ReproducibleSampling

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Place = Annotated[str, Meta(min_length=1)]
AboveZero = Annotated[float, Meta(gt=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16", "float16"]


DEFAULT_OBJECTIVE = "penstock.consumers.learning.objectives.grpo:Grpo"
OWN_REWARD = "environment"
"""The path of the environment's own reward."""
DEFAULT_CURRICULUM = "penstock.consumers.stream.curricula:uniform"
DEFAULT_ADVANTAGE = "penstock.consumers.learning.advantages:group_relative"


class ConfigError(ValueError):
    """A run file that cannot be used; the message names the field, its value and the expected one."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the run file."""


class Plug(Section, frozen=True, kw_only=True):
    """A user's own class or function, named by import path."""

    path: str
    """`package.module:Name`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the call."""


class GoalConfig(Section, frozen=True, kw_only=True):
    """The goal for the held-out prompts: shown next to their figure, with the time taken to reach it."""

    value: Annotated[float, Meta(ge=-1e9, le=1e9)]
    """The smallest value that reaches the goal."""
    figure: Annotated[str, Meta(pattern="^reward(/.+)?$")] = "reward"
    """`reward`, or one of its parts as `reward/exact`."""


class SolvedConfig(GoalConfig, frozen=True, kw_only=True):
    """The answers that pass@k counts as solved: those whose reward, or a part of it, is at least `value`."""

    value: Annotated[float, Meta(ge=-1e9, le=1e9)] = 1.0
    """The smallest value of a solved answer."""


class HeldOutConfig(Section, frozen=True, kw_only=True):
    """How the held-out prompts of this environment are evaluated; unset fields take their value from `[evaluation]`."""

    num_prompts: NonNegative | None = None
    """Held-out prompts per evaluation, at most all of them."""
    num_samples: Positive | None = None
    """Answers to each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
    """How an environment's held-out prompts are evaluated: `[evaluation]`, and what its own table changes.

    num_prompts: None for all that it has. pass_at: the numbers k of pass@k, at most `num_samples`.
    """

    num_prompts: int | None = None
    num_samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    pass_at: tuple[int, ...] = ()
    solved: SolvedConfig = dataclasses.field(default_factory=SolvedConfig)


class EnvironmentConfig(Plug, frozen=True, kw_only=True):
    """A class that creates tasks and scores answers (docs/environments.md), called with `kwargs` and `seed`."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9._-]+$", max_length=64)] = "main"
    """Its name in metrics, report and inspector; unique among several environments."""
    weight: NonNegativeFloat = 1.0
    """With several environments: its share of the released prompts is its weight over the sum of all weights. 0 only
    evaluates it."""
    max_tokens: Positive | None = None
    """The most tokens of one completion; None takes sampling.max_tokens."""
    max_conversations: Positive | None = None
    """The most conversations that each producer holds at once, of an environment that converses: its sandboxes or
    sessions may be few. None holds as many as the groups in flight have."""
    evaluation: HeldOutConfig = HeldOutConfig()
    num_tasks: Positive | None = None
    """Number of tasks that a curriculum other than `uniform` chooses from; None takes the environment's own
    `num_tasks`."""


class CurriculumPlug(Plug, frozen=True, kw_only=True):
    """Chooses the next tasks of an environment (docs/environments.md)."""

    path: str = DEFAULT_CURRICULUM
    """A function of the tasks' history, called with `kwargs`: `package.module:name`."""


class ObjectivePlug(Plug, frozen=True, kw_only=True):
    path: str = DEFAULT_OBJECTIVE
    """`package.module:Name`."""


class WeightedReward(Plug, frozen=True, kw_only=True):
    """The reward is the weighted sum of its components. Each is logged as `reward/<name>`, without its weight."""

    name: Annotated[str, Meta(pattern="^[^/]+$", max_length=64)]
    """Name of the part."""
    path: str
    """A function, `package.module:name`, or `environment` for the environment's own reward."""
    weight: float = 1.0
    """Factor in the sum. 0 only logs it."""


class RewardConfig(Plug, frozen=True, kw_only=True):
    """The reward of a completion (docs/environments.md)."""

    path: str = OWN_REWARD
    """A function `(prompt, completion) -> float | Reward`, `package.module:name`; `environment` is the environment's
    own."""
    components: tuple[WeightedReward, ...] = ()
    concurrency: Positive = 64
    """Calls of coroutine rewards (`async def`) that one producer awaits at once."""
    timeout_s: PositiveFloat | None = None
    """A coroutine's call that takes longer fails. None leaves the limit to producers.generation_deadline_s."""
    retries: NonNegative = 0
    """A coroutine's call that fails is retried this many times, after 0.25 s, 0.5 s and so on; then its group is
    dead."""

    def __post_init__(self) -> None:
        weights = {each.name: each.weight for each in self.components}
        if self.components and (self.path != OWN_REWARD or self.kwargs):
            raise ValueError(
                f"path = {self.path!r} with components: expected one of the two; a component may have path = "
                f"{OWN_REWARD!r}"
            )
        if len(weights) < len(self.components):
            names = [each.name for each in self.components]
            raise ValueError(f"components have the names {names}, expected different ones")
        if weights and not (all(map(math.isfinite, weights.values())) and any(weights.values())):
            raise ValueError(f"components have the weights {weights}, expected finite numbers, not all of them 0")
        for plug in (self, *self.components):
            if plug.path == OWN_REWARD and plug.kwargs:
                raise ValueError(
                    f"kwargs = {plug.kwargs!r} with path = {OWN_REWARD!r}: expected them in environment.kwargs"
                )


class ModelConfig(Section, frozen=True, kw_only=True):
    path: str
    """Folder of a transformers model and its tokenizer; relative to the working directory. [models.md](models.md) lists
    the architectures tried."""
    dtype: Dtype = "float32"
    """Type of the weights that are published and served, and of the arithmetic on both sides, heads excepted. The
    trainer's own copy is float32. float16 is eight times finer than bfloat16 and ends at 65504: weights or activations
    beyond that are refused, and the trainer scales the loss so that small gradients survive
    ([models.md](models.md#float16))."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the model's chat template wherever it renders messages, such as `{ enable_thinking = false }` for
    Qwen3. A request to the endpoint may set others."""
    replay_routes: bool = False
    """For a mixture of experts: the engine returns which experts it chose for every token, and the trainer computes
    with these, weighted by its own routers. Two computations of one router choose differently wherever scores are
    close, the largest mismatch of such models ([models.md](models.md#routes)). Costs layers x experts per token bytes
    a token on the stream."""
    rounding: Literal["nearest", "dithered"] | None = None
    """How a 16-bit policy follows the trainer's float32 weights. "nearest": a weight changes once it has moved by
    half a unit in the last place, which takes tens of updates at small rates. "dithered": each weight begins at a
    random place of its rounding interval, so that the policy makes the whole movement from the first update, on
    average over the weights; at the start it is the model's own, bit for bit. None is "dithered" for 16 bits without
    `[lora]`, whose adapters begin between the grid's points anyway."""
    freeze: tuple[Literal["vision"], ...] = ()
    """Parts that are not trained: "vision" is all that only images go through, the tower and its projection, which
    keeps its weights and has no optimizer state. Its features of an image serve all updates
    ([models.md](models.md#images))."""
    reference: str | None = None
    """Folder of the frozen reference model of a KL term, in the loss or in the reward; None takes `path`, the base
    model, of which an adapter's run needs no second copy. It is held in `dtype`."""


class LoraConfig(Section, frozen=True, kw_only=True):
    """A low-rank adapter is trained and published in place of all weights; the base model is unchanged
    ([lora.md](lora.md))."""

    rank: Annotated[int, Meta(ge=1, le=512)] = 32
    """Rank of the product that is added to each target's weight."""
    alpha: PositiveFloat = 32.0
    """The product is scaled by `alpha / rank`."""
    targets: Annotated[tuple[str, ...], Meta(min_length=1)] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    """Names of the linear layers, in every block, that are adapted."""

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


class WarmStartConfig(Section, frozen=True, kw_only=True):
    """Before the first update the model is trained on demonstrations, by cross-entropy on the assistant's turns: for
    models that fail a task at first ([warm-start.md](warm-start.md))."""

    demonstrations: Place
    """A file of JSON lines: `messages`, and `tools` if there are any; or `prompt` and `completion`, for environments
    whose prompts are texts. Relative to the trainer's working directory."""
    steps: Positive = 200
    """Optimizer steps."""
    learning_rate: PositiveFloat = 2e-5
    """The optimizer's, constant."""
    batch_size: Positive = 16
    """Demonstrations of one step."""


class SamplingConfig(ReproducibleSampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rollouts are sampled. Only settings that the trainer can reproduce are accepted."""

    top_logprobs: NonNegative = 0
    """This many of the likeliest ids are recorded with each sampled token, 8 bytes each, for objectives that read them
    (docs/objectives.md#score-centering). The engine's limit is `engine.args.max_logprobs`, 20 unless set."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """Engine settings that can change logprobs; they are verified after boot."""

    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """Which logprobs vLLM returns: of the distribution that was sampled, or of the model before temperature."""
    prefix_caching: bool = False
    """Reuse the KV cache of prompts with a common prefix, as far as the same policy version computed it."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Type of the language-model head; `model` leaves it at model.dtype."""
    update: Literal["in_flight", "drained"] = "in_flight"
    """How new weights are loaded. `in_flight`: requests pause for the load, keep their KV and continue with the new
    weights. `drained`: every request in flight ends first and the KV cache is cleared, so that one version samples each
    completion; the engine idles until its longest request ends."""
    tensor_parallel_size: Positive = 1
    """Devices (on CPU: processes) that share every layer of one engine. It has to divide the number of attention
    heads."""
    max_model_len: Positive | None = None
    """Longest prompt plus completion in tokens; None takes the model's own limit."""
    max_num_seqs: Positive = 256
    """Sequences decoded at once."""
    kv_cache_gib: PositiveFloat = 1.0
    """CPU build only: memory for the KV cache of each of the tensor_parallel_size processes."""
    gpu_memory_utilization: AboveZero | None = None
    """GPU only: share of the device memory that the engine may use. None: 0.9; on a GPU that `penstock run` gives to
    several engines, an equal part of what the trainer leaves of those 0.9."""
    args: dict[str, Any] = {}
    """Further vLLM engine arguments, passed unchanged and recorded in the fingerprint."""


class ProducersConfig(Section, frozen=True, kw_only=True):
    count: Positive = 2
    """Producers that `penstock run` starts on this machine."""
    groups_in_flight: Positive = 32
    """Prompt groups that one producer generates at once."""
    num_threads: Positive = 1
    """Compute threads of each process of one engine on CPU."""
    devices: tuple[NonNegative, ...] | None = None
    """GPUs of the engines that `penstock run` starts, by nvidia-smi's numbers: each engine takes the next
    engine.tensor_parallel_size of them, starting over at the end. None: those that the trainer leaves, else all."""
    generation_deadline_s: PositiveFloat = 600.0
    """A group that takes longer is given up and settled as dead. Time in which the producer stood still (its machine
    slept, it was stopped) does not count."""
    claim_idle_s: PositiveFloat = 30.0
    """A claim not refreshed for this long may be taken over by another producer. A producer refreshes its claims three
    times in it."""
    max_attempts: Positive = 8
    """A prompt delivered this often without a result is settled as dead. From the third time on, and the last time, it
    is sampled alone. The count restarts once a producer has made progress with it for claim_idle_s."""
    abort_past_lag: bool = False
    """Gives a group up, which settles it as dead, when a policy is loaded that is more than max_lag steps ahead of the
    oldest token, while it is being sampled; otherwise it is kept and corrected. Conversations are kept either way."""
    progress_s: NonNegativeFloat = 0.5
    """Most seconds of sampling that a rollout loses with its producer: twice in this time, and when a producer is told
    to stop, the progress of rollouts in flight is saved in Redis, and a producer that takes one over continues from
    there. Less often if it would take 1% of a producer's time. 0: never; a rollout that is taken over starts over."""


class EndpointConfig(Section, frozen=True, kw_only=True):
    """Any agents, outside the producers, make the training rollouts: each producer serves an OpenAI-compatible HTTP
    endpoint (docs/agents.md). Its key, if any, is in the environment variable PENSTOCK_API_KEY or in the file that
    PENSTOCK_API_KEY_FILE names."""

    host: str = "127.0.0.1"
    """An address that other machines can reach requires a key."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 9500
    """First port to try; each producer of this machine takes the next free one. 0 lets the system choose."""
    unsupported: Literal["refuse", "ignore"] = "refuse"
    """Treatment of a request's field that is unknown or would change how tokens are sampled, and of tools that are no
    functions or that the chat template does not render: `refuse` answers with an error that names them; `ignore`
    answers as if they were absent, counts them and logs each name once."""
    idle_timeout_s: PositiveFloat = 300.0
    """A rollout without a request for this long after one is given up."""
    group_deadline_s: PositiveFloat = 1800.0
    """A group goes onto the stream with the rollouts that are finished this long after its first was opened, or its
    first conversation inside the producer began."""
    tool_parser: str | None = None
    """vLLM's name of the parser for the model's tool calls (its `--tool-call-parser`, for example `hermes`); None
    leaves them in the text."""
    reasoning_parser: str | None = None
    """vLLM's name of the parser for the model's reasoning (for example `qwen3`); None leaves it in the text."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    learning_rate: PositiveFloat = 1e-5
    """The optimizer's, after the warm-up."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """AdamW's."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's, for parameters with two or more dimensions: not for norms and biases."""
    optimizer: Plug | None = None
    """A `torch.optim.Optimizer` in place of AdamW, called with the parameters, `lr` and `kwargs`, such as
    `torch.optim:SGD`. Its state has to be tensors of the parameters' shape or of one element."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which the learning rate rises linearly to its value."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, from `learning_rate` to zero after `num_updates * num_epochs *
    num_minibatches` optimizer steps. Batches that train nothing take none: a run with such batches ends above zero."""
    decay_steps: Positive | None = None
    """The rate falls over the last `decay_steps` optimizer steps and stays at `learning_rate` before them
    (warmup-stable-decay); None decays from the end of the warm-up."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients of a larger norm are scaled down to it."""
    num_epochs: Positive = 1
    """Times the groups of a batch are trained; the proximal policy stays that of the first read."""
    num_minibatches: Positive = 1
    """Optimizer steps per epoch: a batch's groups are split into this many parts, at random by `seed` in asynchronous
    mode, where short answers arrive first, and by index in synchronous mode."""
    tokens_per_microbatch: Positive = 8192
    """Tokens (context and sampled) of one forward pass; a longer single segment makes a pass of its own."""
    num_threads: Positive = 1
    """CPU compute threads."""
    cpu_matmul: Literal["default", "onednn"] = "default"
    """`onednn` computes float32 products by oneDNN, twice as fast as MKL on AMD; tested for accuracy at the start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA if torch sees a GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile: bool = False
    """Run each block through `torch.compile`: the first step is slow, the others faster. Needs a C++ compiler."""
    devices: tuple[NonNegative, ...] | None = None
    """GPUs of the ranks that `penstock run` starts, one each, by nvidia-smi's numbers. None: the first ones."""
    num_processes: Positive = 1
    """Ranks on this machine, one per device, that share the model's parameters; torchrun's own number overrides it."""
    gradient_accumulation: Literal["unsharded", "sharded"] = "unsharded"
    """With several ranks: `unsharded` sums their gradients once per optimizer step, and needs 4 more bytes per
    parameter on each rank; `sharded` sums them in every pass."""
    expert_parallel: bool = False
    """With several ranks: each computes its own experts of a mixture, whole ones, and receives the other ranks' tokens
    for them, instead of gathering every expert of a block."""
    context_parallel: Positive = 1
    """Consecutive ranks that compute each forward pass together, each a part of the tokens of every row, for rows that
    are too long for one."""
    rank_timeout_s: PositiveFloat = 300.0
    """The trainer ends if ranks have waited this long for another."""
    lease_s: PositiveFloat = 5.0
    """A trainer that has not renewed its lease for this long may be replaced by a standby trainer."""
    max_dead_in_a_row: Positive = 64
    """Stop the run with the last reason once this many groups have died with no good one arriving in between. Groups
    abandoned by their agents do not count."""

    def __post_init__(self) -> None:
        if self.decay_steps is not None and self.decay == "constant":
            raise ValueError(
                f"decay_steps = {self.decay_steps} with decay = 'constant': expected decay = 'linear' or 'cosine'"
            )
        unread = {"betas": self.betas != (0.9, 0.95), "weight_decay": self.weight_decay != 0}
        if self.optimizer is not None and any(unread.values()):
            name = next(name for name in unread if unread[name])
            raise ValueError(
                f"{name} = {getattr(self, name)!r} with optimizer.path = {self.optimizer.path!r}: it is AdamW's; "
                "expected in optimizer.kwargs what the optimizer takes"
            )


class AdvantageConfig(Plug, frozen=True, kw_only=True):
    path: str = DEFAULT_ADVANTAGE
    """A function of the batch's rewards, called with `kwargs`: `package.module:name`."""
    kl_coefficient: NonNegativeFloat = 0.0
    """KL in the reward: this factor times the sum of proximal - reference logprobs over a rollout's sampled tokens is
    subtracted from its reward before advantages are computed. The reference is `model.reference`."""
    truncated: Literal["train", "mask", "penalize"] = "train"
    """Treatment of rollouts that end at the token limit. `train`: they are trained like others. `mask`: their
    tokens are left out of the loss and its denominators (DAPO's overlong filtering, arXiv 2503.14476); their rewards
    still count among their siblings'. `penalize`: their advantages are those of the reward `truncated_reward`."""
    truncated_reward: Annotated[float, Meta(ge=-1e9, le=1e9)] | None = None
    """For `truncated = "penalize"`: replaces their rewards. The logs show the original rewards."""

    def __post_init__(self) -> None:
        if (self.truncated == "penalize") != (self.truncated_reward is not None):
            expected = "a number" if self.truncated == "penalize" else "it to be left out"
            raise ValueError(
                f"truncated_reward = {self.truncated_reward} with truncated = {self.truncated!r}: expected {expected}"
            )


class TeacherConfig(Section, frozen=True, kw_only=True):
    """On-policy distillation: a frozen model scores every sampled token; a token's advantage is the teacher's logprob
    minus the policy's ([distillation.md](distillation.md))."""

    model: Place | None = None
    """Folder of the teacher, which the trainer holds in `model.dtype`. Its tokenizer has to have the tokens of
    `model.path`."""
    url: str | None = None
    """In place of `model`: the teacher is served by vLLM, for example at `http://host:8000/v1`, and producers query
    it."""
    coefficient: PositiveFloat = 1.0
    """Factor of its advantages."""
    alone: bool = True
    """The advantages are the teacher's alone, and rewards are only logged; false adds the advantages of
    `[advantage]`."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.url is None):
            found = "neither is there" if self.model is None else "both are there"
            raise ValueError(f"model, url: {found}; expected one of the two")
        if self.url is not None and not re.fullmatch("https?://[^/@]+(/[^@]*)?", self.url):
            raise ValueError(f"url = {self.url!r}: expected http://host:port/v1, without a user or a key")


def _check_fields(struct: msgspec.Struct) -> None:
    """Checks types, choices, ranges and finite floats on construction: msgspec checks them on decoding only.

    Raises:
        ValueError: names the field and its value.
    """
    for info in msgspec.structs.fields(struct):
        value = getattr(struct, info.name)
        try:
            msgspec.convert(value, info.type)
        except msgspec.ValidationError as error:
            raise ValueError(f"{info.name} = {value!r}: {error}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{info.name} = {value!r}: expected a finite number")


class Rejection(Section, frozen=True):
    """Masks tokens, or whole rows, whose divergence from the behavior policy is too large (verl's rollout_rs), or
    tokens that are too old.

    Per token, with l = proximal - behavior clamped to +-20: k1 = -l, k2 = l^2 / 2, k3 = e^l - l - 1 (Schulman's
    estimators of a KL divergence). `token_*` judges each token, `seq_sum_*`, `seq_mean_*` and `seq_max_*` each row by
    that statistic over its valid tokens, and masks all of it. For `seq_sum_k1` and `seq_mean_k1` l is clamped after
    the sum or mean, not before. `token_lag` judges a token by its lag in optimizer steps.
    """

    mode: Literal[
        "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
        "seq_mean_k3", "seq_max_k1", "seq_max_k2", "seq_max_k3", "token_lag",
    ]  # fmt: skip
    """The statistic: `token_*` judges each token, `seq_sum_*`, `seq_mean_*` and `seq_max_*` mask whole rows."""
    upper: PositiveFloat
    """The largest value kept. k2, k3, lag: of the statistic itself. k1: of its exponential, which is a ratio behavior /
    proximal; 1 or more."""
    lower: PositiveFloat | None = None
    """k1 only, at most 1: the smallest exponential kept. None takes 1 / upper. Not for `seq_max_k1`, which is
    one-sided: `upper = 1e4` drops a row with any importance ratio below 1e-4 (slime's rs_veto_threshold)."""

    def __post_init__(self) -> None:
        _check_fields(self)
        if not self.mode.endswith("k1"):
            if self.lower is not None:
                raise ValueError(f"lower = {self.lower!r}: {self.mode} is one-sided, expected none")
            return
        if self.upper < 1:
            raise ValueError(f"upper = {self.upper!r}: {self.mode} bounds a ratio, expected 1 or more")
        if self.lower is not None and (self.mode == "seq_max_k1" or self.lower > 1):
            expected = "none, it is one-sided" if self.mode == "seq_max_k1" else "1 or less"
            raise ValueError(f"lower = {self.lower!r} with {self.mode}: expected {expected}")


class CorrectionConfig(Section, frozen=True):
    """What corrects for the gap between engine and trainer, unless the objective does: trust in behavior logprobs,
    `f(exp(proximal - behavior))` per token. Formulas: consumers/learning/loss/importance.py.

    Under mode "none" every weight is 1 and the settings of the weight are unused, so that one override switches it
    off; `rejection` and `off_policy_delta` mask as they do under any mode. Tokens older than twice the run's `max_lag`
    are masked before all of it.
    """

    mode: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = None
    """ms-swift's names and meaning. `sequence_*` go by the row's ratio; a row that `sequence_mask` keeps has its
    tokens' own ratios as weights. None: `token_truncate`; for GSPO `bypass` with its clip as the correction, and
    nothing for objectives that read the behavior policy themselves."""
    threshold: Annotated[float, Meta(ge=1)] = 2.0
    """The largest importance weight kept (truncate) or trusted (mask)."""
    lower: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Smallest weight: raised to it (truncate), or masked below it (mask, IcePop's). None has no such bound."""
    sequence_ratio: Literal["geometric", "product"] = "geometric"
    """The ratio of `sequence_*` modes: geometric mean of the tokens' ratios (ms-swift, AReaL) or their product (verl,
    TRL, slime). One threshold means different things under the two. In a row that `sequence_mask` keeps, a token's
    weight is its own ratio with `geometric` (ms-swift), the row's with `product` (TRL)."""
    rejection: tuple[Rejection, ...] = ()
    """Masks on top of the mode's; a token has to pass all of them."""
    off_policy_delta: NonNegativeFloat | None = None
    """Mask rows of negative advantage whose mean of behavior - current is above this (DeepSeek-V3.2)."""
    bypass: bool = False
    """The objective's ratio is current / behavior and the weight 1: the two ratios in one. Needs mode "none"."""
    proximal: Literal["consumed", "sampled_version"] = "consumed"
    """The proximal policy. `consumed`: the one before the first step on the batch, so that the weight corrects engine
    and lag, and the policy ratio is that of the batch's own steps. `sampled_version`: the version that sampled each
    token, recomputed (arXiv 2605.12070): the weight corrects the engine alone, and the policy ratio is all of the lag.
    The policies that tokens are trained on stay in host memory, and each version in a batch costs a forward pass of its
    rows."""

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.mode is None:
            defaults = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
            for name in ("threshold", "lower", "sequence_ratio"):
                if (value := getattr(self, name)) != defaults[name]:
                    raise ValueError(f"{name} = {value!r} without mode: expected one of weights, as 'token_truncate'")
        if self.bypass and self.mode not in (None, "none"):
            raise ValueError(
                f"bypass = True with mode = {self.mode!r}: the gap would count twice, expected mode = 'none'"
            )
        if self.bypass and self.proximal != "consumed":
            raise ValueError(
                f"proximal = {self.proximal!r} with bypass = True, which reads no proximal policy: expected 'consumed'"
            )
        if (self.mode or "").startswith("token") and self.sequence_ratio != "geometric":
            raise ValueError(
                f"sequence_ratio = {self.sequence_ratio!r} with mode = {self.mode!r}: expected a sequence_* mode"
            )

    @property
    def is_sequence_level(self) -> bool:
        """The row's ratio is compared with the threshold."""
        return self.mode in ("sequence_truncate", "sequence_mask")

    @property
    def is_token_level(self) -> bool:
        """A token's correction depends on that token alone, not on a statistic of its row."""
        return not (
            self.is_sequence_level
            or self.off_policy_delta is not None
            or any(rejection.mode.startswith("seq") for rejection in self.rejection)
        )


class BatchConfig(Section, frozen=True, kw_only=True):
    fill: Literal["any", "with_variance"] = "any"
    """Which groups a batch waits for. `any`: those released first. `with_variance`: those of rewards that differ
    (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2); others are settled as skipped and others are sampled in
    their place."""
    max_skipped: Positive | None = None
    """For `with_variance`: once a batch has skipped this many groups, it takes any. None: four times
    groups_per_batch."""

    def __post_init__(self) -> None:
        if self.max_skipped is not None and self.fill == "any":
            raise ValueError(f"max_skipped = {self.max_skipped} with fill = 'any': expected fill = 'with_variance'")


class EvaluationConfig(Section, frozen=True, kw_only=True):
    every: Positive = 25
    """Updates between evaluations; there is another one at the start and at the end."""
    num_prompts: NonNegative | None = None
    """Held-out prompts per evaluation of each environment, at most all of them. None takes all, 0 evaluates nothing."""
    num_samples: Positive = 1
    """Answers to each held-out prompt. The figures are means over them, avg@k (docs/evaluation.md)."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy, for one answer each."""
    top_p: AboveZero = 1.0
    """1.0 keeps every token."""
    top_k: NonNegative = 0
    """0 keeps every token."""
    max_tokens: Positive | None = None
    """None takes that of the training prompts."""
    pass_at: tuple[Positive, ...] | None = None
    """The numbers k of pass@k; an environment with fewer samples has those up to its own number. None: num_samples
    alone, if that is above 1."""
    solved: SolvedConfig = SolvedConfig()
    goal: GoalConfig | None = None
    stop_at_goal: bool = False
    """An evaluation that reaches the goal ends the run as its last update would."""
    patience: Positive | None = None
    """This many evaluations in a row without a better value end the run as its last update would: of the figure of
    `checkpoint.best`, else of the goal's, else of the reward."""

    @property
    def figure(self) -> str:
        """The run's main figure: the goal's."""
        return self.goal.figure if self.goal is not None else "reward"


class CheckpointConfig(Section, frozen=True, kw_only=True):
    every: Positive = 100
    """Updates between checkpoints; one more is written at the end."""
    keep: Annotated[int, Meta(ge=2)] = 2
    """Committed checkpoints kept on disk."""
    best: Annotated[str, Meta(pattern=r"^(environments/[^/]+/)?(reward(/.+)?|pass@\d+)$")] | None = None
    """A figure of the evaluations, by its name in their lines: `reward`, `reward/exact`, `pass@8`, or one environment's
    as `environments/math/pass@8`. The policy that has the highest is kept as a model in `<runs>/<name>/best`."""
    push_to_hub: Annotated[str, Meta(pattern=r"^[^/\s]+(/[^/\s]+)?$")] | None = None
    """`USER/NAME` on the Hugging Face Hub, where `penstock run` uploads the model of a complete run as `penstock push`
    does: that of the best evaluation with `best`, else the last. An upload that fails is a warning."""


class WeightsConfig(Section, frozen=True, kw_only=True):
    """Where published policies are stored. Each is a delta of the previous one, in chunks; some are also written whole,
    as anchors for readers that come late. The policy stream tells producers where chunks are."""

    deltas: Place = "redis"
    """Where deltas are kept: "redis", a folder that all hosts share, or an fsspec URL such as `s3://bucket/prefix`. In
    a folder or under a URL each run has a folder of its own name."""
    anchors: Place | None = None
    """Where anchors are kept, likewise, and deltas that Redis has no room for; None: in Redis if four of them fit
    `redis_mb`, else in `<runs>/<name>/weights`."""
    redis_mb: Positive = 512
    """Most memory in Redis for chunks."""
    keep_versions: Annotated[int, Meta(ge=2)] = 8
    """Latest published versions whose weights stay available: `penstock parity` replays tokens of these versions."""
    host_folder: str | None = None
    """Folder of the copy of the policy that the producers of one host share, preferably in memory: it is as large as
    the published weights. None takes /dev/shm, or the system's temporary folder if that does not exist."""


class ParityConfig(Section, frozen=True, kw_only=True):
    """Checks that engine and trainer agree: `penstock parity`, and the gate before the first optimizer step."""

    gate: Literal["refuse", "warn", "off"] = "refuse"
    """The trainer checks its first batch. On a mismatch `refuse` ends the run with the verdict before anything is
    trained; `warn` logs it and continues; `off` does not check, and accepts settings that cannot pass. From then on it
    judges each producer, and trains nothing more from one whose groups keep differing ([parity](parity.md))."""


RECORD_FILE_MB = 64
"""A file of the record that has reached this size is closed and the next one begun."""


class RecordingConfig(Section, frozen=True, kw_only=True):
    """How much of the record of rollouts is kept, if the run keeps one (`record`)."""

    max_mb: Positive = 4096
    """Once the record is larger, its oldest file is deleted, and the trainer logs it."""


class RedisConfig(Section, frozen=True, kw_only=True):
    """Where the streams are. The environment variable REDIS_URL overrides `url`."""

    url: str | None = None
    """None: REDIS_URL, else a server of the run's own. A password comes with REDIS_URL or REDIS_PASSWORD_FILE only."""
    maxmemory_mb: Positive = 1024
    """Limit of the run's own server (noeviction)."""
    outage_s: PositiveFloat = 600.0
    """Give up after Redis has been unreachable for this long."""


WANDB_OFFLINE = ("offline", "disabled", "dryrun")
"""Values of the environment variable WANDB_MODE with which no server is asked."""


class WandbConfig(Section, frozen=True, kw_only=True):
    """Sends the numbers of each update and evaluation to Weights & Biases. Needs the extra `wandb`; its key is in
    WANDB_API_KEY."""

    project: Annotated[str, Meta(min_length=1)]
    """Project in Weights & Biases. W&B's own environment variables say the rest: WANDB_ENTITY, and WANDB_MODE =
    `offline`, which writes to `<runs>/<name>/wandb/` only, for `wandb sync`."""


class TrackioConfig(Section, frozen=True, kw_only=True):
    """Sends the numbers of each update and evaluation to trackio. Needs the extra `trackio`."""

    project: Annotated[str, Meta(pattern=r"\S")]
    """Project in trackio, in its local store (TRACKIO_DIR), or at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""


class MlflowConfig(Section, frozen=True, kw_only=True):
    """Sends the numbers of each update and evaluation to MLflow. Needs the extra `mlflow`."""

    experiment: Annotated[str, Meta(pattern=r"\S")]
    """Experiment in MLflow, at MLFLOW_TRACKING_URI, without which it is in `mlflow.db` and `mlruns` of the working
    directory."""


class MetricsConfig(Section, frozen=True, kw_only=True):
    port: Annotated[int, Meta(ge=0, le=65535)] = 9400
    """First port to try; each process of this machine takes the next free one. 0 lets the system choose."""
    host: str = "127.0.0.1"
    """Address that the metrics endpoints listen on. `0.0.0.0` serves everyone who can reach it, as a container must."""
    tensorboard: bool = False
    """Also writes the numbers of each update and evaluation to `<runs>/<name>/tensorboard/`. Needs the extra
    `tensorboard`."""
    wandb: WandbConfig | None = None
    traces: bool = False
    """Exports one OpenTelemetry trace per group to where `OTEL_EXPORTER_OTLP_ENDPOINT` says ([tracing](tracing.md)).
    Needs the extra `otel`."""
    trace_url: Annotated[str, Meta(pattern=r"^(https?://\S*\{trace_id\}\S*)?$")] = ""
    """Address of a trace in your tracing tool, for links in the report: `{trace_id}` stands for its id."""
    trackio: TrackioConfig | None = None
    mlflow: MlflowConfig | None = None
    completions_every: Positive | None = None
    """Updates between tables of sampled completions, eight with their prompts and rewards, in TensorBoard, Weights &
    Biases, trackio and MLflow, as far as they are set. None shows none; `penstock inspect` shows all."""


class RunConfig(Section, frozen=True, kw_only=True):
    """All settings of a run."""

    name: str
    """Name of the run: of its folder and its Redis keys. `--name` replaces it."""
    seed: int = 0
    """Random seed of the environment, of mini-batches and, with the producer's name, of each engine; in synchronous
    mode of each request, with its place in the run."""
    mode: Literal["asynchronous", "synchronous"] = "asynchronous"
    """`synchronous` generates, drains, trains and updates in turn: a lag bound of 0. On CPU such a run gives the same
    bits again (docs/operations.md)."""
    num_updates: Positive = 100
    """Batches trained, of `trainer.num_epochs * trainer.num_minibatches` optimizer steps each (normally one)."""
    group_size: Positive = 8
    """Siblings sampled per prompt. 1 needs an `[advantage]` function that compares the rewards of different groups, or
    a teacher alone."""
    groups_per_batch: Positive = 32
    """Groups per batch."""
    max_lag: NonNegative = 2
    """The age in optimizer steps for which prompts are released and started. Tokens of a group that is overtaken by
    faster ones get older, up to twice this, and are trained on too; older ones are masked."""

    model: ModelConfig
    lora: LoraConfig | None = None
    """None trains all weights."""
    batch: BatchConfig = BatchConfig()
    environment: EnvironmentConfig | None = None
    """The environment of a run with only one."""
    environments: tuple[EnvironmentConfig, ...] = ()
    """Several environments in one run, in place of `[environment]`."""
    curriculum: CurriculumPlug = CurriculumPlug()
    reward: RewardConfig = RewardConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    producers: ProducersConfig = ProducersConfig()
    trainer: TrainerConfig = TrainerConfig()
    warm_start: WarmStartConfig | None = None
    """None begins with the model as it is."""
    objective: ObjectivePlug = ObjectivePlug()
    """The loss (docs/objectives.md)."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Rewards become advantages (docs/objectives.md)."""
    teacher: TeacherConfig | None = None
    """None learns from rewards."""
    correction: CorrectionConfig = CorrectionConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    parity: ParityConfig = ParityConfig()
    record: bool = True
    """Keep every rollout group that the trainer takes, with its findings about each token, in the run's folder
    `record`: for `penstock replay` and for inspecting samples."""
    recording: RecordingConfig = RecordingConfig()
    redis: RedisConfig = RedisConfig()
    metrics: MetricsConfig = MetricsConfig()
    endpoint: EndpointConfig | None = None
    """None: prompts of the environment are answered in one turn each, inside the producer."""

    @property
    def every_environment(self) -> dict[str, EnvironmentConfig]:
        """By name: those of `environments`, or `environment` alone."""
        return {each.name: each for each in self.environments or filter(None, (self.environment,))}

    @property
    def num_evaluation_prompts(self) -> dict[str, int | None]:
        """Held-out prompts per evaluation by environment; None for all that it has."""
        return {name: each.num_prompts for name, each in self.held_out.items()}

    @property
    def held_out(self) -> dict[str, HeldOut]:
        """How each environment's held-out prompts are evaluated, by name."""
        shared, found = self.evaluation, {}
        for name, environment in self.every_environment.items():
            own = environment.evaluation
            num_samples = own.num_samples or shared.num_samples
            wanted = shared.pass_at if shared.pass_at is not None else (num_samples,) * (num_samples > 1)
            found[name] = HeldOut(
                num_prompts=shared.num_prompts if own.num_prompts is None else own.num_prompts,
                num_samples=num_samples,
                temperature=shared.temperature,
                top_p=shared.top_p,
                top_k=shared.top_k,
                max_tokens=shared.max_tokens or environment.max_tokens or self.sampling.max_tokens,
                pass_at=tuple(k for k in wanted if k <= num_samples),
                solved=shared.solved,
            )
        return found

    @property
    def max_tokens(self) -> int:
        """The most tokens that a completion of any environment may have."""
        return max(each.max_tokens or self.sampling.max_tokens for each in self.every_environment.values())

    @property
    def teacher_url(self) -> str | None:
        """The teacher's server, if the run has one."""
        return None if self.teacher is None else self.teacher.url

    @property
    def lag_bound(self) -> int:
        """The lag bound in force: `max_lag`, or 0 in synchronous mode."""
        return 0 if self.mode == "synchronous" else self.max_lag

    @property
    def oldest_lag(self) -> int:
        """The largest lag of a token that is trained on, which without faults is the largest at all; older ones are
        masked."""
        return self.lag_bound + self.num_passing // self.groups_per_batch * self.steps_per_batch

    @property
    def num_passing(self) -> int:
        """The most groups that batches take before an older one that is still being sampled: those of as many batches
        as the lag bound has, so that its tokens are that much older than if it had been taken in its turn."""
        return self.lag_bound // self.steps_per_batch * self.groups_per_batch

    @property
    def num_trained_versions(self) -> int:
        """Published policies that may have sampled a token that is trained on, the newest included."""
        return self.oldest_lag // self.steps_per_batch + 1

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps taken on one batch."""
        return self.trainer.num_epochs * self.trainer.num_minibatches

    @property
    def dithers(self) -> bool:
        """Whether the masters begin at random places of their rounding intervals."""
        return self.model.dtype != "float32" and self.lora is None and self.model.rounding != "nearest"

    @property
    def num_steps_planned(self) -> int:
        """Optimizer steps of the run, if none is left out."""
        return self.num_updates * self.steps_per_batch

    @property
    def credit(self) -> int:
        """The most groups that may be released and not settled."""
        return self.groups_per_batch + self.num_passing

    @property
    def max_skipped(self) -> int:
        """The most groups that one batch may skip while it is filled."""
        return 0 if self.batch.fill == "any" else self.batch.max_skipped or 4 * self.groups_per_batch

    @property
    def most_open(self) -> int:
        """The largest credit, which includes groups that batches are expected to skip."""
        is_fixed = self.mode == "synchronous"
        return self.credit if is_fixed else self.credit + self.credit * self.max_skipped // self.groups_per_batch

    def folder(self, runs: Path) -> Path:
        return runs / self.name


Overrides = Sequence[str] | Mapping[str, Any]
"""Fields to change: texts `dotted.path=value` with a TOML value (a bare word counts as a string), or values by dotted
path. A table of an array is named by its index, from 0, or by its `name`: `environments.math.weight`."""


def load_config(file: Path, overrides: Overrides = ()) -> RunConfig:
    """Reads a run file, changed by `overrides`.

    Raises:
        ConfigError: no such file, not TOML, an unknown or ill-typed field, or settings that contradict each other.
    """
    return config_of(read_document(file), file, overrides)


def read_document(file: Path) -> dict[str, Any]:
    """Reads the tables of a run file without checking their content.

    Raises:
        ConfigError: no such file, not UTF-8, or not TOML.
    """
    try:
        return tomllib.loads(file.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8, which TOML is written in: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None


def config_of(document: dict[str, Any], file: Path, overrides: Overrides = ()) -> RunConfig:
    """Converts a run file's `document` to the configuration; `overrides` change the document. Errors name `file`.

    Raises:
        ConfigError: an unknown or ill-typed field, or settings that contradict each other.
    """
    for path, value in overridden(overrides).items():
        _override(document, path, value)
    _check_sampling_names(document, file)
    try:
        config = msgspec.convert(document, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {explain(error, document, RunConfig)}") from None
    for problem in _problems(config):
        raise ConfigError(f"{file}: {problem}")
    return config


def overridden(overrides: Overrides) -> dict[str, Any]:
    """Returns the new values by dotted path. Raises ConfigError for a text that is not `dotted.path=value`."""
    if isinstance(overrides, Mapping):
        return dict(overrides)
    found = {}
    for text in overrides:
        # Python decodes a command line by the locale; bytes that this has no letters for are surrogates.
        path, separator, value = text.encode("utf-8", "surrogateescape").decode(errors="replace").partition("=")
        if not separator or not path.strip():
            raise ConfigError(f"override {text!r}: expected dotted.path=value")
        try:
            found[path.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[path.strip()] = value
    return found


def _override(document: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    table: Any = document
    for n, parent in enumerate(parents):
        if isinstance(table, dict):
            if table.get(parent) is None:  # a run's description has None for a table that is not there
                table[parent] = {}
            table = table[parent]
        else:
            named = {str(number): each for number, each in enumerate(table)}
            named |= {str(each["name"]): each for each in table if "name" in each}
            if parent not in named:
                array = ".".join(parents[:n])
                raise ConfigError(
                    f"override of {path} = {value!r}: {array} has no {parent!r}, expected one of {', '.join(named)}"
                )
            table = named[parent]
        is_array = isinstance(table, list | tuple) and bool(table) and all(isinstance(each, dict) for each in table)
        if not isinstance(table, dict) and not (is_array and n < len(parents) - 1):
            expected = (
                f"an array of tables; expected {'.'.join(parents)}.PLACE.FIELD" if is_array else "a value, not a table"
            )
            raise ConfigError(f"override of {path} = {value!r}: {parent} is {expected}")
    table[last] = value


def explain(error: msgspec.ValidationError, document: dict[str, Any], root: type[msgspec.Struct]) -> str:
    """Rewrites msgspec's message about a document of type `root`: the field's path, its value, then the expected
    one."""
    text, _, path = str(error).partition(" - at ")
    path = path.strip("`").removeprefix("$").removeprefix(".")
    parts = path.replace("[", ".").replace("]", "").split(".") if path else []
    kind: Any = root
    for part in parts:
        kind = _inner(kind, part)
    if text.startswith(("Object contains unknown field", "Object missing required field")):
        name = text.split("`")[1]
        where = f"{path + '.' if path else ''}{name}"
        if "unknown" not in text:
            return f"{where}: missing field"
        meant = _similar(name, kind, root)
        guess = f" (did you mean {meant}?)" if meant else ""
        if where in NEVER:
            return f"{where}: unknown field: {NEVER[where]}"
        known = f", expected one of {', '.join(_section(kind).__struct_fields__)}" if _section(kind) else ""
        return f"{where}: unknown field{guess}{known}"
    value: Any = document
    for part in parts:
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return f"{path}: {text}"
    choices = [choice for each in (kind, *get_args(kind)) if get_origin(each) is Literal for choice in get_args(each)]
    if text.startswith("Invalid enum value") and choices:
        return f"{path} = {value!r}: expected one of {', '.join(map(repr, choices))}"
    return f"{path} = {value!r}: {text}"


NEVER = {"lora.dropout": "the trainer has to reproduce the policy that sampled, which knows none"}
"""Fields that users of other trainers look for, and why there are none."""
NAMES_IN_TRL = {
    "max_steps": "num_updates",
    "num_generations": "group_size",
    "num_iterations": "trainer.num_epochs",
    "per_device_train_batch_size": "trainer.tokens_per_microbatch",
    "max_completion_length": "sampling.max_tokens",
    "beta": "objective.kwargs.kl_coefficient",
    "epsilon": "objective.kwargs.clip_low",
    "epsilon_high": "objective.kwargs.clip_high",
    "save_steps": "checkpoint.every",
    "eval_steps": "evaluation.every",
    "reward_funcs": "reward.path",
    "reward_weights": "reward.components",
    "mask_truncated_completions": "advantage.truncated",
    "lr_scheduler_type": "trainer.decay",
    "early_stopping_patience": "evaluation.patience",
    "hub_model_id": "checkpoint.push_to_hub",
    "log_completions": "metrics.completions_every",
}
"""Fields by their names in TRL's GRPOConfig, if these differ."""


def _similar(name: str, kind: Any, root: type[msgspec.Struct]) -> str | None:
    """Returns the field that TRL calls `name`, or the field of section `kind` with a similar name, else the path of a
    field of this name elsewhere in `root`."""
    if name in NAMES_IN_TRL and root is RunConfig:
        return NAMES_IN_TRL[name]
    section = _section(kind)
    found: list[str] = difflib.get_close_matches(name, section.__struct_fields__ if section else (), n=1)
    found += (path for path in _paths(root) if path.rpartition(".")[2] == name)
    return next(iter(found), None)


def names_plug(path: str) -> bool:
    """Returns whether a field's path, as in `environment` or `reward.components[0]`, is that of a `Plug`."""
    kind: Any = RunConfig
    for part in path.replace("[", ".").replace("]", "").split("."):
        kind = _inner(kind, part)
    section = _section(kind)
    return section is not None and issubclass(section, Plug)


def _paths(section: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yields the dotted paths of all fields of a section and of its subsections."""
    for name, kind in get_type_hints(section).items():
        yield prefix + name
        if _section(kind):
            yield from _paths(_section(kind), f"{prefix}{name}.")


def _inner(kind: Any, part: str) -> Any:
    """Returns the type of a section's field, or of a list's items; None if unknown."""
    if part.isdecimal():
        return next(iter(get_args(kind)), None)
    section = _section(kind)
    return None if section is None else get_type_hints(section).get(part)


def _section(kind: Any) -> Any:
    """Returns the struct in `kind`, which may be optional; None if it has none."""
    structs = (each for each in (kind, *get_args(kind)) if isinstance(each, type) and issubclass(each, msgspec.Struct))
    return next(structs, None)


RESERVED_BY_TEMPLATES = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip
"""Names that transformers would take as its own arguments, and no variables of a chat template."""
_NOT_REPRODUCIBLE = (
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids",
    "bad_words", "min_tokens", "logits_processors", "structured_outputs", "thinking_token_budget", "watermarking",
)  # fmt: skip
"""vLLM's sampling settings that change the distribution in ways that the trainer's head does not reproduce."""


def _check_sampling_names(document: dict[str, Any], file: Path) -> None:
    sampling = document.get("sampling")
    for name in _NOT_REPRODUCIBLE:
        if isinstance(sampling, dict) and name in sampling:
            raise ConfigError(
                f"{file}: sampling.{name} = {sampling[name]!r}: the trainer cannot reproduce the logprobs it leads to; "
                "expected it to be left out"
            )


def _problems(config: RunConfig) -> Iterator[str]:
    """Finds settings that contradict each other: one message for each, which names field and value."""
    try:
        Keys(config.name)
    except ValueError as error:
        yield f"name: {error}"
    if config.redis.url and re.search(r"//[^@]*:[^@]+@", config.redis.url):
        # A run file is printed, copied into the run's folder and compared with it.
        yield (
            "redis.url holds a password; expected it in the environment variable REDIS_URL or in the file that "
            "REDIS_PASSWORD_FILE names"
        )
    sampling = config.sampling
    if not 0 < sampling.top_p <= 1:
        yield f"sampling.top_p = {sampling.top_p}: expected more than 0, and at most 1"
    if sampling.is_truncated and sampling.top_k < 1:
        yield (
            f"sampling.top_k = {sampling.top_k}, sampling.top_p = {sampling.top_p}: every token is recorded with the "
            "ids that it was sampled from, which top_k bounds and which vLLM's CPU build does not report; expected "
            "top_p = 1.0, or on a GPU top_k = 1 or more, and evaluation.top_k too unless evaluation.temperature is 0"
        )
    if sampling.is_truncated and config.engine.logprobs_mode != "processed_logprobs":
        yield (
            f"engine.logprobs_mode = {config.engine.logprobs_mode!r} with sampling.top_k = {sampling.top_k}: these are "
            "not of the ids that were kept; expected 'processed_logprobs'"
        )
    if sampling.top_logprobs and (sampling.is_truncated or config.engine.logprobs_mode != "processed_logprobs"):
        yield (
            f"sampling.top_logprobs = {sampling.top_logprobs} with sampling.top_k = {sampling.top_k}, sampling.top_p = "
            f"{sampling.top_p}, engine.logprobs_mode = {config.engine.logprobs_mode!r}: the trainer needs the "
            "likeliest ids of the whole vocabulary, as they were sampled from; expected 0, 1.0 and 'processed_logprobs'"
        )
    if not 0 <= sampling.temperature < math.inf:
        yield f"sampling.temperature = {sampling.temperature}: expected 0 or more, and finite"
    if sampling.max_tokens < 1:
        yield f"sampling.max_tokens = {sampling.max_tokens}: expected 1 or more"
    if reserved := RESERVED_BY_TEMPLATES & config.model.chat_template_kwargs.keys():
        yield (
            f"model.chat_template_kwargs.{min(reserved)}: Penstock sets it; expected variables of the chat template, "
            "such as enable_thinking"
        )
    if "logits_processors" in config.engine.args:
        yield (
            f"engine.args.logits_processors = {config.engine.args['logits_processors']!r}: the trainer cannot "
            "reproduce the logprobs they lead to; expected it to be left out"
        )
    for name in ("deltas", "anchors"):
        if re.search(r"//[^/]*@", getattr(config.weights, name) or ""):
            yield (
                f"weights.{name} holds a user or a key, and every producer reads the run file in Redis; expected them "
                "where the store's own client looks (for s3:// AWS_ACCESS_KEY_ID and its like)"
            )
    if isinstance(config.engine.args.get("hf_token"), str):
        yield (
            "engine.args.hf_token holds a key, and every producer reads the run file in Redis; expected it in the "
            "environment variable HF_TOKEN"
        )
    if config.model.rounding is not None and config.model.dtype == "float32":
        yield (
            f"model.rounding = {config.model.rounding!r} with model.dtype = 'float32': float32 weights are published "
            "as they are; expected it to be left out, or model.dtype = 'bfloat16' or 'float16'"
        )
    if config.model.rounding is not None and config.lora is not None:
        yield (
            f"model.rounding = {config.model.rounding!r} with [lora]: adapters begin between the values of any "
            "rounding; expected it to be left out"
        )
    metrics = config.metrics
    if metrics.completions_every and not (metrics.tensorboard or metrics.wandb or metrics.trackio or metrics.mlflow):
        yield (
            f"metrics.completions_every = {metrics.completions_every}: there is nothing to show them in; expected "
            "metrics.tensorboard, wandb, trackio or mlflow beside it"
        )
    yield from _environment_problems(config)
    yield from _evaluation_problems(config)
    yield from _step_problems(config)
    yield from _teacher_problems(config)
    if config.parity.gate != "off":
        yield from _parity_problems(config)
    if config.recording.max_mb < 2 * RECORD_FILE_MB:
        yield f"recording.max_mb = {config.recording.max_mb}: expected at least two of its files, {2 * RECORD_FILE_MB}"
    plugs: dict[str, Plug] = dict(environment_fields(config))
    plugs |= {name: getattr(config, name) for name in ("curriculum", "objective", "advantage")}
    rewards = {"reward": config.reward} | {f"reward.components[{n}]": r for n, r in enumerate(config.reward.components)}
    plugs |= {name: each for name, each in rewards.items() if each.path != OWN_REWARD}
    for name, plug in plugs.items():
        if plug.path.count(":") != 1:
            yield f"{name}.path = {plug.path!r}: expected package.module:Name"


def environment_fields(config: RunConfig) -> Iterator[tuple[str, EnvironmentConfig]]:
    """Yields each environment with its field in the run file: `environment`, or `environments[0]` and so on."""
    if config.environment is not None:
        yield "environment", config.environment
    yield from ((f"environments[{n}]", each) for n, each in enumerate(config.environments))


def _environment_problems(config: RunConfig) -> Iterator[str]:
    if (config.environment is None) == (not config.environments):
        found = "neither is there" if config.environment is None else "both are there"
        yield f"environment, environments: {found}; expected [environment], or [[environments]]"
    names = [each.name for each in config.environments]
    if len(config.every_environment) < len(names):
        yield f"environments have the names {names}, expected different ones"
    weights = {name: each.weight for name, each in config.every_environment.items()}
    if not 0 < math.fsum(weights.values()) < math.inf:
        yield f"environments have the weights {weights}, expected a finite sum above 0"
    for field, each in environment_fields(config):
        if each.num_tasks is not None and config.curriculum.path == DEFAULT_CURRICULUM:
            yield (
                f"{field}.num_tasks = {each.num_tasks} with curriculum.path = {DEFAULT_CURRICULUM!r}, which poses "
                "tasks without end; expected it to be left out, or another curriculum"
            )


def _evaluation_problems(config: RunConfig) -> Iterator[str]:
    """Checks the settings of held-out prompts; messages name each by the field that sets it."""
    room = config.producers.groups_in_flight * config.group_size
    evaluation = config.evaluation
    for field, environment in environment_fields(config):
        of_its_own = environment.evaluation.num_samples is not None
        num_samples = config.held_out[environment.name].num_samples
        asked = f"{field + '.' if of_its_own else ''}evaluation.num_samples = {num_samples}"
        if num_samples > 1 and not evaluation.temperature:
            yield (
                f"{asked} with evaluation.temperature = {evaluation.temperature}: greedy answers are all alike; "
                "expected a temperature above 0, or num_samples = 1"
            )
        if num_samples > room:
            yield f"{asked}: expected at most producers.groups_in_flight * group_size = {room}"
    most = max((how.num_samples for how in config.held_out.values()), default=1)
    if max(evaluation.pass_at or (), default=0) > most:
        yield (
            f"evaluation.pass_at = {evaluation.pass_at} with num_samples = {most}: pass@k needs k answers; expected at "
            f"most {most}"
        )
    for name in ("top_p", "top_k"):
        if not evaluation.temperature and (value := getattr(evaluation, name)) != getattr(EvaluationConfig(), name):
            yield (
                f"evaluation.{name} = {value} with evaluation.temperature = {evaluation.temperature}: greedy answers "
                "take the likeliest token, whatever it is; expected it to be left out, or a temperature above 0"
            )
    if config.sampling.is_truncated and evaluation.temperature and not evaluation.top_k:
        yield (
            f"evaluation.top_k = 0 with sampling.top_k = {config.sampling.top_k}: every token is recorded with the ids "
            "that it was sampled from; expected top_k = 1 or more, which bounds them"
        )
    if evaluation.stop_at_goal and evaluation.goal is None:
        yield "evaluation.stop_at_goal = True without evaluation.goal: expected a goal, as in { value = 0.9 }"
    if 0 in config.num_evaluation_prompts.values() and not any(config.num_evaluation_prompts.values()):
        for name in ("stop_at_goal", "patience"):
            if value := getattr(evaluation, name):
                yield f"evaluation.{name} = {value} with evaluation.num_prompts = 0: expected held-out prompts"
    yield from _best_problems(config)
    parts = [f"reward/{each.name}" for each in config.reward.components]
    for setting, _, figure in named_figures(config) if parts and config.endpoint is None else ():
        if figure.startswith("reward/") and not any(f"{figure}/".startswith(f"{part}/") for part in parts):
            yield f"{setting}: no component of the reward has this name; expected {' or '.join(['reward', *parts])}"


def named_figures(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yields the settings that name a figure of evaluations: `field = value`, the figure's environment, "" for all of
    them, and the figure."""
    solved = config.evaluation.solved.figure
    for name, how in config.held_out.items():
        if how.pass_at:
            yield f"evaluation.solved.figure = {solved!r}", name, solved
    if (goal := config.evaluation.goal) is not None:
        yield f"evaluation.goal.figure = {goal.figure!r}", "", goal.figure
    if (best := config.checkpoint.best) is not None:
        yield f"checkpoint.best = {best!r}", *split_figure(best)


def split_figure(name: str) -> tuple[str, str]:
    """Splits a figure's name, as in `checkpoint.best`, into the environment's, "" for all of them, and the key."""
    if not name.startswith("environments/"):
        return "", name
    _, environment, key = name.split("/", 2)
    return environment, key


def _best_problems(config: RunConfig) -> Iterator[str]:
    best = config.checkpoint.best or "reward"
    name, figure = split_figure(best)
    if name and name not in config.held_out:
        yield f"checkpoint.best = {best!r}: expected an environment of {', '.join(config.held_out)}"
    sets = [config.held_out[name]] if name else config.held_out.values()
    passes = set.intersection(*({f"pass@{k}" for k in how.pass_at} for how in sets))
    if figure.startswith("pass@") and figure not in passes:
        found = ", ".join(sorted(passes)) or "none"
        yield f"checkpoint.best = {best!r}: expected a pass@k of evaluation.pass_at, which has {found}"


def _teacher_problems(config: RunConfig) -> Iterator[str]:
    """Checks settings that a teacher makes useless or excludes, and those that need one."""
    teacher, sampling = config.teacher, config.sampling
    if config.group_size == 1 and config.batch.fill != "any":
        yield f"batch.fill = {config.batch.fill!r} with group_size = 1: no group has reward variance; expected 'any'"
    if config.group_size == 1 and teacher is None and config.curriculum.path.endswith(":drop_flat"):
        yield (
            f"curriculum.path = {config.curriculum.path!r} with group_size = 1: no group has reward variance, and "
            "every task would be dropped; expected another curriculum"
        )
    if teacher is None:
        return
    if config.batch.fill != "any":
        yield (
            f"batch.fill = {config.batch.fill!r} with [teacher]: groups whose rewards are equal teach as others do; "
            "expected 'any'"
        )
    for name in ("path", "kwargs", "kl_coefficient", "truncated_reward"):
        value = getattr(config.advantage, name)
        if teacher.alone and value != getattr(AdvantageConfig(), name):
            yield (
                f"advantage.{name} = {value!r} with teacher.alone = true: no reward becomes an advantage; expected it "
                "to be left out, or teacher.alone = false"
            )
    if config.teacher_url is not None and (sampling.temperature != 1.0 or sampling.is_truncated):
        yield (
            f"teacher.url = {teacher.url!r} with sampling.temperature = {sampling.temperature}, sampling.top_k = "
            f"{sampling.top_k}, sampling.top_p = {sampling.top_p}: a server's prompt logprobs are those of temperature "
            "1 and every token; expected 1.0, 0 and 1.0, or teacher.model"
        )


def _parity_problems(config: RunConfig) -> Iterator[str]:
    """Checks settings under which engine and trainer cannot agree: the gate would refuse the run after its start."""
    engine, temperature = config.engine, config.sampling.temperature
    if engine.logprobs_mode != "processed_logprobs" and temperature != 1.0:
        yield (
            f"engine.logprobs_mode = {engine.logprobs_mode!r} with sampling.temperature = {temperature}: raw logprobs "
            "are not those of the sampled distribution; expected 'processed_logprobs', or parity.gate = 'off' to run "
            "with them all the same"
        )
    if config.model.dtype != "float32" and engine.head_dtype != "float32":
        yield (
            f"engine.head_dtype = {engine.head_dtype!r} with model.dtype = {config.model.dtype!r}: the trainer's head "
            "is float32, and on one side only it widens the gap; expected 'float32', or parity.gate = 'off' to run "
            "with it all the same"
        )


def _step_problems(config: RunConfig) -> Iterator[str]:
    """Checks the settings of batch, optimizer steps and lag against each other."""
    trainer, steps = config.trainer, config.steps_per_batch
    if trainer.num_minibatches > config.groups_per_batch:
        yield (
            f"trainer.num_minibatches = {trainer.num_minibatches}: expected at most groups_per_batch = "
            f"{config.groups_per_batch}"
        )
    if config.mode == "asynchronous" and 0 < config.max_lag < steps:
        yield (
            f"max_lag = {config.max_lag} with {steps} optimizer steps per batch (trainer.num_epochs * "
            f"trainer.num_minibatches): a group that waits for one batch is past the bound; expected at least {steps}, "
            "or mode = 'synchronous'"
        )
    if trainer.decay_steps is not None and trainer.warmup_steps + trainer.decay_steps > config.num_steps_planned:
        yield (
            f"trainer.decay_steps = {trainer.decay_steps} with trainer.warmup_steps = {trainer.warmup_steps}: expected "
            f"their sum to be at most the run's {config.num_steps_planned} optimizer steps (num_updates * "
            "trainer.num_epochs * trainer.num_minibatches)"
        )
