"""From what was measured to one sentence a person can act on. Pure."""

from dataclasses import dataclass

import msgspec
from penstock.consumers.parity.gaps import passes
from penstock.consumers.parity.report import (
    AS_SERVED,
    TOLERANCES,
    Gap,
    Hypothesis,
    LayerGap,
    ParityReport,
    Tolerance,
    Verdict,
)

MIN_TOKENS = 16
"""With fewer tokens to compare the verdict is "unclear"."""
_DISTINCT = 3.0
"""Of two readings that explain the gap, the later one is believed only where it leaves so many times less of it."""

_OWN_NOISE = 0.3
"""Share of the gap that the engine's disagreement with itself must have to be its cause."""


@dataclass(frozen=True)
class Finding:
    """A reading, what the recorded logprobs are off by as processed on the same tokens, and whether it explains that.

    detail: what the verdict adds in brackets, such as a fitted temperature.
    """

    hypothesis: Hypothesis
    baseline: Gap
    explains: bool
    detail: str = ""


@dataclass(frozen=True)
class Evidence:
    """All that `decide` rests on.

    null: the recorded logprobs against the trainer's, all tokens.
    trainer_head: the trainer's logprobs against a plain head in float64 on the same hidden states.
    findings: in layer order.
    refused: why the trainer refuses such records ("top-p", "penalties"); empty where it takes them.
    engine_head: what says that the engine's logits are bfloat16 numbers; empty where nothing does.
    spread: the engine against itself on equal contexts.
    sampling: what says that the tokens were drawn from another distribution than these logprobs; empty where nothing.
    """

    dtype: str
    null: Gap
    trainer_head: Gap
    findings: tuple[Finding, ...] = ()
    refused: str = ""
    engine_head: str = ""
    spread: Gap | None = None
    sampling: str = ""
    layers: tuple[LayerGap, ...] = ()


def decide(evidence: Evidence) -> Verdict:
    """The verdict, by the first of these that holds: too few tokens, the trainer's own head, a reading that explains
    the gap (semantics before inference), signs that need no gap, a layer, nothing found."""
    null, tolerance = evidence.null, TOLERANCES[evidence.dtype]
    if null.num_tokens < MIN_TOKENS:
        return Verdict(
            status="unclear",
            cause="too few tokens",
            sentence=f"could not tell: {null.num_tokens} tokens to compare, at least {MIN_TOKENS} are needed",
            advice="check more rollouts",
        )
    if not passes(evidence.trainer_head, TOLERANCES["float32"]):
        return _mismatch("trainer-head", null, evidence.trainer_head)
    found = _explanation(evidence.findings)
    if found is not None:
        return _mismatch(found.hypothesis.name, found.baseline, found.hypothesis.gap, found.detail)
    if passes(null, tolerance):
        return _of_passing(evidence, tolerance)
    if evidence.engine_head:
        return _mismatch("engine-head", null, None, evidence.engine_head)
    if _is_own_noise(evidence.spread, null, tolerance):
        return _mismatch("engine-spread", null, evidence.spread)
    return _layer(evidence, null) or _mismatch("unexplained", null, None)


def _of_passing(evidence: Evidence, tolerance: Tolerance) -> Verdict:
    null = evidence.null
    if evidence.refused:
        return _mismatch("whole-vocabulary" if evidence.refused == "top-p" else "without-penalties", null, None)
    if evidence.engine_head:
        return _mismatch("engine-head", null, None, evidence.engine_head)
    if evidence.sampling:
        return _mismatch("sampling", null, None, evidence.sampling)
    return _layer(evidence, null) or Verdict(
        status="parity",
        cause="parity",
        sentence=f"parity: mean |engine - trainer| is {null.mean:.1e} nats over {null.num_tokens:,} tokens "
        f"(p99 {null.p99:.1e}, max {null.max:.1e}; {evidence.dtype} allows a mean of {tolerance.mean:.0e})",
    )


def with_layers(report: ParityReport, layers: tuple[LayerGap, ...]) -> ParityReport:
    """The report with a comparison layer by layer, which names the first layer that is off unless something before the
    layers explains the gap."""
    verdict = report.verdict
    if verdict.cause in ("parity", "unexplained"):
        worst = _first_off(layers)
        if worst is not None:
            null = next(each.gap for each in report.hypotheses if each.name == "processed")
            verdict = _of_layer(worst, null)
    return msgspec.structs.replace(report, layers=layers, verdict=verdict)


def _explanation(findings: tuple[Finding, ...]) -> Finding | None:
    """The first that explains the gap, unless one of the same layer leaves far less of it."""
    explaining = [finding for finding in findings if finding.explains]
    if not explaining:
        return None
    same = [finding for finding in explaining if finding.hypothesis.layer == explaining[0].hypothesis.layer]
    best = min(finding.hypothesis.gap.mean for finding in same)
    return next(finding for finding in same if finding.hypothesis.gap.mean <= _DISTINCT * best)


def _first_off(layers: tuple[LayerGap, ...]) -> LayerGap | None:
    return next((layer for layer in layers if not layer.error <= layer.allowed), None)


def _is_own_noise(spread: Gap | None, null: Gap, tolerance: Tolerance) -> bool:
    """Whether the engine's disagreement with itself is too large, and a good part of the gap."""
    if spread is None or not spread.num_tokens or passes(spread, tolerance):
        return False
    return spread.mean >= _OWN_NOISE * null.mean


def _layer(evidence: Evidence, null: Gap) -> Verdict | None:
    worst = _first_off(evidence.layers)
    return None if worst is None else _of_layer(worst, null)


_LAYER_SAYS = {
    "embedding": (
        "the embedding is another one in the engine",
        "compare the weights of embed_tokens in engine and trainer, and how the model scales them",
    ),
    "head": (
        "the head computes something else in the engine; the whole body agrees",
        'set engine.head_dtype = "float32" (vLLM: hf_overrides={"head_dtype": "float32"}), then compare the weights of '
        "lm_head, or of embed_tokens where they are tied",
    ),
    AS_SERVED: (
        "the engine serves another hidden state than it computes step by step; each part of it agrees with the trainer",
        "the compiled model differs from the eager one: look at what it fuses (vLLM: compilation_config), or set "
        "engine.args = {enforce_eager = true}",
    ),
}
"""By part: what is wrong and what to do, where it is not a layer of the body."""


def _of_layer(layer: LayerGap, null: Gap) -> Verdict:
    opening, advice = _LAYER_SAYS.get(
        layer.name,
        (
            f"{layer.name} computes something else in the engine",
            f"compare the engine's implementation and settings of {layer.name} with the model's config.json "
            "(rope_parameters, norm epsilon, activation); every layer before it agrees",
        ),
    )
    under = "against the one it recorded" if layer.name == AS_SERVED else "on equal input"
    return Verdict(
        status="mismatch",
        cause="layer",
        sentence=f"{opening}: relative error {layer.error:.1e} {under}, {layer.allowed:.1e} is allowed; residual "
        f"{null.mean:.1e} as processed",
        advice=advice,
    )


_SAYS = {
    "raw": (
        "these are raw logprobs",
        "as raw",
        'set engine.logprobs_mode = "processed_logprobs" (vLLM: logprobs_mode="processed_logprobs")',
    ),
    "temperature": (
        "these are logprobs at another temperature than the recorded one",
        "at the fitted one",
        "record the temperature that the engine samples at: sampling.temperature in the run file, "
        "sampling in each record",
    ),
    "whole-vocabulary": (
        "these logprobs are normalised over the whole vocabulary, but top-k or top-p kept part of it",
        "over the whole vocabulary",
        "sample with top_p = 1.0 and top_k = 0, or take processed logprobs and record the sampling_mask",
    ),
    "kept-support": (
        "these logprobs are normalised over what top-k and top-p kept, and the record lacks the sampling_mask",
        "over the kept tokens",
        "sample with top_p = 1.0 and top_k = 0, or record the sampling_mask (vLLM: return_sampling_mask=True)",
    ),
    "penalties": (
        "these logprobs are of a distribution with penalties, which the trainer does not reproduce",
        "with the recorded penalties",
        "set presence_penalty = 0, frequency_penalty = 0 and repetition_penalty = 1",
    ),
    "without-penalties": (
        "these logprobs leave out the penalties that the tokens were sampled with",
        "without penalties",
        "set presence_penalty = 0, frequency_penalty = 0 and repetition_penalty = 1",
    ),
    "log2": ("these are logarithms to base 2", "as log2", "record natural logarithms: multiply by ln 2"),
    "log10": ("these are logarithms to base 10", "as log10", "record natural logarithms: multiply by ln 10"),
    "probability": ("these are probabilities", "as probabilities", "record natural logarithms of them"),
    "rounded": (
        "these logprobs were rounded to bfloat16",
        "rounded to bfloat16",
        "keep logprobs in float32 from the engine to the record",
    ),
    "shifted+1": (
        "each logprob stands one token too late",
        "moved back by one",
        "align behavior_logprobs with the sampled tokens: entry n is that of sampled token n",
    ),
    "shifted-1": (
        "each logprob stands one token too early",
        "moved on by one",
        "align behavior_logprobs with the sampled tokens: entry n is that of sampled token n",
    ),
    "siblings": (
        "logprobs stand with the wrong sibling of their group",
        "put back",
        "keep ids and logprobs of a completion together, by its index in the request's outputs",
    ),
    "retokenized": (
        "these token ids were made again from text and are not the ones that were sampled",
        "of the ids found again",
        "record the ids that the engine returns; never encode its text anew",
    ),
    "weights": (
        "the tokens were sampled by other weights than their version says",
        "with other weights",
        "check that an update is loaded before its version is announced (the engine's weight checksums, load_weights), "
        "and that the label is set in the same step",
    ),
    "label-late": (
        "version labels change too late: the first tokens of an update carry the old label",
        "with the boundary moved",
        "take the version at the step that samples the token, not when its output arrives (vLLM: weight_versions)",
    ),
    "label-early": (
        "version labels change too early: the last tokens before an update carry the new label",
        "with the boundary moved",
        "set the version when the weights are in place, not when the update begins (vLLM: weight_versions)",
    ),
    "stale-prefix": (
        "part of the context's keys and values come from older weights",
        "with the older prefix",
        "set engine.prefix_caching = false, or salt the cache by policy version",
    ),
    "recomputed-kv": (
        "keys and values are computed anew at each weight update instead of kept",
        "recomputed",
        "harmless to training, but not the recipe: update with mode keep and clear_cache=False, or drain "
        '(engine.update = "drained") and expect no mixed rows',
    ),
    "engine-head": (
        "the engine's head computes in bfloat16, the trainer's in float32",
        "with a bfloat16 head",
        'set engine.head_dtype = "float32" (vLLM: hf_overrides={"head_dtype": "float32"})',
    ),
    "trainer-head": (
        "the trainer's head is not the float32 head it should be",
        "between it and a plain head on the same hidden states",
        "the trainer must take logprobs from penstock.consumers.learning.head.selected_logprobs and leave torch's "
        'float32 matmul precision at "highest"',
    ),
    "engine-spread": (
        "the engine disagrees with itself: equal contexts give different logprobs in different batches",
        "between its own answers",
        "switch on batch invariance where the engine has it (vLLM on GPU: VLLM_BATCH_INVARIANT=1), or accept it as "
        "the floor of the mismatch",
    ),
    "sampling": (
        "the logprobs are the trainer's, but the tokens were not drawn from that distribution",
        "",
        "look for sampling settings that the record lacks (top_p, top_k, min_p, penalties of generation_config.json) "
        'and set engine.logprobs_mode = "processed_logprobs"',
    ),
    "unexplained": (
        "engine and trainer differ, and no reading explains it",
        "",
        "compare layer by layer: run penstock parity on the run file, which boots an engine and names the layer",
    ),
}
"""By cause: what is wrong, what its residual is of, and what to do."""


def _mismatch(cause: str, baseline: Gap, gap: Gap | None, detail: str = "") -> Verdict:
    opening, under, advice = _SAYS["weights" if cause.startswith("weights") else cause]
    residuals = f"residual {baseline.mean:.1e} as processed"
    if gap is not None:
        residuals += f", {gap.mean:.1e} {under}"
    return Verdict(
        status="mismatch",
        cause=cause,
        sentence=f"{opening}{f' ({detail})' if detail else ''}: {residuals}; {advice}",
        advice=advice,
    )
