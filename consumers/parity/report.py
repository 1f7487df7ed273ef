"""The result of the parity check: structs that are written as JSON, and the causes it can name.

Needs neither torch nor a model, so that code that prints or draws a report can import it.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.consumers.parity.tolerance import Gap, Tolerance, Yardstick

REPORT_FILE = "parity.json"
"""In the run's folder."""
NOT_COMPARABLE = "not comparable"
"""The `Verdict.cause` of records that the gate cannot check at all, and refuses."""
AS_SERVED = "as served"
"""The `LayerGap` of the engine's whole body against itself."""
Layer = Literal["semantics", "inference", "objective"]
"""In this order: wrong semantics make every later comparison meaningless."""
Status = Literal["parity", "mismatch", "unclear"]
EXIT_STATUS: dict[Status, int] = {"parity": 0, "mismatch": 1, "unclear": 2}


class ParityError(ValueError):
    """The check cannot be made; the message says what is missing and what was expected."""


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True):
    """One hypothesis on the recorded logprobs and the gap that remains under it.

    name: a stable identifier, such as "processed", "raw", "temperature", "weights-1".
    says: the hypothesis in a few words, for a table. note: further observations, such as a fitted temperature.
    """

    layer: Layer
    name: str
    says: str
    gap: Gap
    note: str = ""


class LagRow(msgspec.Struct, frozen=True, kw_only=True):
    """The objective layer: tokens of one lag bucket, with logprobs by the trainer's newest policy.

    ratio_deviation: <|exp(trainer - engine) - 1|> times 10^4.
    """

    label: str
    num_tokens: int
    mean: float
    p99: float
    kl: float
    k3_kl: float
    chi2: float
    ess_fraction: float
    ratio_deviation: float


class LayerGap(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the model, run by engine and trainer on the same input: relative error of its output (2-norm).

    name: as in "embedding", "layers.3.attention", "layers.3.mlp", "norm", "head".
    """

    name: str
    error: float
    allowed: float

    @property
    def is_off(self) -> bool:
        """True for NaN too."""
        return not self.error <= self.allowed


class GapPoint(msgspec.Struct, frozen=True, array_like=True):
    """One token of the pictures; `position` counts the sampled tokens before it in its rollout."""

    engine: float
    trainer: float
    position: int
    lag: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion of a check.

    cause: "parity", a name in `CAUSES` (for other weights with the distance, as in "weights-1"), "layer", or the reason
        why the check could not tell.
    sentence: the finding, with residuals. advice: what to do, with the settings' names; empty under parity.
    """

    status: Status
    cause: str
    sentence: str
    advice: str = ""


class ParityReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check.

    tolerance: the one that decided, with `yardstick`, the model's own; None if it could not be measured.
    versions: the replayed policy versions.
    notes: engine settings that depart from the parity recipe, rows left out and why, checks that were not made.
    gate: the setting of `parity.gate` for the trainer's own check; empty for a check on request.
    """

    verdict: Verdict
    dtype: str
    tolerance: Tolerance
    num_groups: int
    num_rollouts: int
    num_tokens: int = 0
    versions: tuple[int, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()
    lags: tuple[LagRow, ...] = ()
    layers: tuple[LayerGap, ...] = ()
    points: tuple[GapPoint, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    gate: Literal["", "refuse", "warn"] = ""
    yardstick: Yardstick | None = None


@dataclass(frozen=True)
class Cause:
    """The text for one cause.

    says: the hypothesis in a table; empty if there is none.
    opening: the beginning of the verdict's sentence. residual: the condition of its second residual.
    advice: what to do.
    """

    says: str
    opening: str
    residual: str
    advice: str


_ALIGN = "align behavior_logprobs with the sampled tokens: entry n is that of sampled token n"
_NO_PENALTIES = "set presence_penalty = 0, frequency_penalty = 0 and repetition_penalty = 1"
_FULL_SUPPORT = "sample with top_p = 1.0 and top_k = 0, or "

SEMANTICS = {
    "raw": Cause(
        "at temperature 1, before top-k, top-p and penalties",
        "these are raw logprobs",
        "as raw",
        'set engine.logprobs_mode = "processed_logprobs" (vLLM: logprobs_mode="processed_logprobs")',
    ),
    "temperature": Cause(
        "at another temperature",
        "these are logprobs at another temperature than the recorded one",
        "at the fitted one",
        "record the temperature that the engine samples at: sampling.temperature in the run file, "
        "sampling in each record",
    ),
    "whole-vocabulary": Cause(
        "over the whole vocabulary, not the sampling_mask",
        "these logprobs are normalised over the whole vocabulary, but top-k or top-p kept part of it",
        "over the whole vocabulary",
        _FULL_SUPPORT + "take processed logprobs and record the sampling_mask",
    ),
    "kept-support": Cause(
        "over what top-k and top-p keep",
        "these logprobs are normalised over what top-k and top-p kept, and the record lacks the sampling_mask",
        "over the kept tokens",
        _FULL_SUPPORT + "record the sampling_mask (vLLM: return_sampling_mask=True)",
    ),
    "penalties": Cause(
        "with the recorded penalties",
        "these logprobs are of a distribution with penalties, which the trainer does not reproduce",
        "with the recorded penalties",
        _NO_PENALTIES,
    ),
    "without-penalties": Cause(
        "",
        "these logprobs leave out the penalties that the tokens were sampled with",
        "without penalties",
        _NO_PENALTIES,
    ),
    "log2": Cause(
        "logarithm to base 2",
        "these are logarithms to base 2",
        "as log2",
        "record natural logarithms: multiply by ln 2",
    ),
    "log10": Cause(
        "logarithm to base 10",
        "these are logarithms to base 10",
        "as log10",
        "record natural logarithms: multiply by ln 10",
    ),
    "probability": Cause(
        "probability, no logarithm", "these are probabilities", "as probabilities", "record natural logarithms of them"
    ),
    "rounded": Cause(
        "rounded to 16 bits",
        "these logprobs were rounded to 16 bits",
        "rounded to 16 bits",
        "keep logprobs in float32 from the engine to the record",
    ),
    "shifted+1": Cause(
        "each of the token before", "each logprob stands one token too late", "moved back by one", _ALIGN
    ),
    "shifted-1": Cause("each of the token after", "each logprob stands one token too early", "moved on by one", _ALIGN),
    "siblings": Cause(
        "of another sibling of the group",
        "logprobs stand with the wrong sibling of their group",
        "with the right sibling",
        "keep ids and logprobs of a completion together, by its index in the request's outputs",
    ),
    "retokenized": Cause(
        "of other ids with the same text",
        "these token ids were made again from text and are not the ones that were sampled",
        "of the ids found again",
        "record the ids that the engine returns; never re-encode its text",
    ),
    "sampling": Cause(
        "",
        "the logprobs are the trainer's, but the tokens were not drawn from that distribution",
        "",
        "look for sampling settings that the record lacks (top_p, top_k, min_p, penalties of generation_config.json) "
        'and set engine.logprobs_mode = "processed_logprobs"',
    ),
}
"""Causes in the meaning of the record: of its numbers and its token ids."""
INFERENCE = {
    "weights": Cause(
        "weights of another version than the labelled one",
        "the tokens were sampled by other weights than their version says",
        "with other weights",
        "check that an update is loaded before its version is announced (the engine's weight checksums, load_weights), "
        "and that the label is set in the same step",
    ),
    "label-late": Cause(
        "version labels late by some tokens",
        "version labels change too late: the first tokens of an update carry the old label",
        "with the boundary moved",
        "take the version at the step that samples the token, not when its output arrives (vLLM: weight_versions)",
    ),
    "label-early": Cause(
        "version labels early by some tokens",
        "version labels change too early: the last tokens before an update carry the new label",
        "with the boundary moved",
        "set the version when the weights are in place, not when the update begins (vLLM: weight_versions)",
    ),
    "stale-prefix": Cause(
        "whole blocks of the context with keys and values of older weights",
        "part of the context's keys and values come from older weights",
        "with the older prefix",
        "set engine.prefix_caching = false, or salt the cache by policy version",
    ),
    "recomputed-kv": Cause(
        "keys and values recomputed after each update",
        "keys and values are recomputed at each weight update instead of kept",
        "recomputed",
        "harmless to training, but not the recipe: update with mode keep and clear_cache=False, or drain "
        '(engine.update = "drained") and expect no mixed rows',
    ),
    "adapter-off": Cause(
        "by the base, without the adapter",
        "the engine samples from the base: the policy's adapter is not applied",
        "without the adapter",
        "check that every request has the adapter, and that the engine computes with it in all layers of lora.targets",
    ),
    "adapter-scale": Cause(
        "with the adapter at another scale",
        "the engine applies the adapter at another scale than alpha / rank",
        "at the fitted scale",
        "check that engine and trainer have one lora.rank and one lora.alpha, and scale the adapter once",
    ),
    "image-order": Cause(
        "with the images of each row in the reverse order",
        "the engine has the images of a prompt in another order",
        "turned round",
        "hand the engine the images in the order of their placeholders",
    ),
    "image-positions": Cause(
        "with the images' tokens at plain positions",
        "the engine gives the tokens of images plain positions, the model's are in three dimensions",
        "with plain ones",
        "check the engine's rotary positions of this architecture (get_rope_index in transformers)",
    ),
    "image-size": Cause(
        "with images resized by another filter",
        "the engine resizes images otherwise",
        "with the other filter",
        "give engine and trainer one preprocessor_config.json and one image processor, without settings beside it",
    ),
    "image-pixels": Cause(
        "with other pixel values of images",
        "the engine makes other pixel values of images: another mean, scale or part of them",
        "with the other values",
        "give engine and trainer one preprocessor_config.json and one image processor, without settings beside it",
    ),
    "engine-head": Cause(
        "by a head that rounds logits to 16 bits",
        "the engine's head computes in 16 bits, the trainer's in float32",
        "with a 16-bit head",
        'set engine.head_dtype = "float32" (vLLM: hf_overrides={"head_dtype": "float32"})',
    ),
    "trainer-head": Cause(
        "the trainer's head against a plain one",
        "the trainer's head is not the float32 head it should be",
        "between it and a plain head on the same hidden states",
        "the trainer must take logprobs from penstock.consumers.learning.model.head.selected_logprobs and leave "
        'torch\'s float32 matmul precision at "highest"',
    ),
    "trainer-pass": Cause(
        "the trainer's packed pass against transformers' own",
        "the trainer's pass over packed rows does not compute this model",
        "between it and transformers' own attention on the same rows",
        "report it: the model cannot be trained over packed rows of this length",
    ),
    "engine-spread": Cause(
        "the engine against itself on equal contexts",
        "the engine disagrees with itself: equal contexts give different logprobs in different batches",
        "between its own answers",
        "switch on batch invariance where the engine has it (vLLM on GPU: VLLM_BATCH_INVARIANT=1), or accept it as "
        "the floor of the mismatch",
    ),
    "unexplained": Cause(
        "",
        "engine and trainer differ, and no hypothesis explains it",
        "",
        "compare layer by layer: run penstock parity on the run file, which boots an engine and names the layer",
    ),
}
"""Causes in the computation. "weights" stands for every distance, as in "weights-1"."""
CAUSES = SEMANTICS | INFERENCE


def cause_of(name: str) -> Cause:
    """Returns the cause that a hypothesis of this name stands for."""
    return CAUSES["weights" if name.startswith("weights") else name]


def layer_of(name: str) -> Layer:
    return "semantics" if name in SEMANTICS else "inference"
