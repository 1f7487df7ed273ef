"""The verdict of a comparison layer by layer: which part of the model, and what to do."""

import msgspec

from penstock.consumers.parity.report import AS_SERVED, LayerGap, ParityReport, Verdict
from penstock.consumers.parity.tolerance import Gap

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
"""What is wrong and what to do, for the parts that are not layers of the body."""


def _of_layer(layer: LayerGap, baseline: Gap) -> Verdict:
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
        f"{baseline.mean:.1e} as processed",
        advice=advice,
    )


def with_layers(report: ParityReport, layers: tuple[LayerGap, ...]) -> ParityReport:
    """Returns the report with a comparison layer by layer. Its verdict names the first layer that is off unless a
    hypothesis explains the gap."""
    verdict, worst = report.verdict, next((layer for layer in layers if layer.is_off), None)
    if verdict.cause in ("parity", "unexplained") and worst is not None:
        verdict = _of_layer(worst, next(each.gap for each in report.hypotheses if each.name == "processed"))
    return msgspec.structs.replace(report, layers=layers, verdict=verdict)
