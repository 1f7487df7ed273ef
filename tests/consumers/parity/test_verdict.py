"""From measurements to one verdict: semantics before inference, evidence that needs no gap, and layers."""

import math

import pytest
from msgspec.structs import replace

from penstock.consumers.parity.layer_verdict import with_layers
from penstock.consumers.parity.report import AS_SERVED, Hypothesis, LayerGap, ParityReport
from penstock.consumers.parity.tolerance import TOLERANCES, Gap, Yardstick
from penstock.consumers.parity.verdict import MIN_TOKENS, JudgedHypothesis, ParityMeasurements, decide


def gap(mean: float, num_tokens: int = 1000) -> Gap:
    chi2 = mean**2
    return Gap(num_tokens=num_tokens, mean=mean, p99=3 * mean, max=5 * mean, chi2=chi2, ess_fraction=1 / (1 + chi2))


def judged(name: str, after: float = 1e-6, *, layer: str = "semantics", explains: bool = True) -> JudgedHypothesis:
    return JudgedHypothesis(
        Hypothesis(layer=layer, name=name, says=name, gap=gap(after)), gap(0.3), explains, "so to speak"
    )


def measured(mean: float = 0.3, dtype: str = "float32", **changes) -> ParityMeasurements:
    settings = {
        "dtype": dtype,
        "baseline": gap(mean),
        "lower": gap(0.8 * mean),
        "num_rollouts": 64,
        "tolerance": TOLERANCES[dtype],
        "trainer_head": gap(1e-6),
    }
    return ParityMeasurements(**settings | changes)


def of_larger_model(mean: float, **changes) -> ParityMeasurements:
    """Returns measurements of a model whose exact computations differ by 4e-6 nats."""
    yardstick = Yardstick(transformers=4e-6, packed=3e-6, num_tokens=500)
    return measured(mean, tolerance=yardstick.tolerance("float32"), yardstick=yardstick, **changes)


RAW_AND_OLDER = (judged("raw", 5e-6), judged("weights-1", 1e-7, layer="inference"))


@pytest.mark.parametrize(
    ("measurements", "cause", "part"),
    [
        (measured(1e-6), "parity", "1.0e-06 nats over 1,000 tokens"),
        (measured(2e-2, "bfloat16"), "parity", "5.0e-02 is allowed in the mean)"),
        (of_larger_model(1.1e-5), "parity", "3.2e-05 is allowed in the mean, 8 times what exact computations of this"),
        (of_larger_model(4.2e-5), "unexplained", "(mean 4.2e-05, at least 3.4e-05; 3.2e-05 is allowed)"),
        (
            measured(2e-2),
            "unexplained",
            "as processed (mean 2.0e-02, at least 1.6e-02; 1.0e-05 is allowed)",
        ),
        (
            measured(8e-2, "bfloat16", lower=gap(4e-2)),
            "undecided",
            "but over 1,000 tokens of 64 rollouts, by which it may be as small as 4.0e-02",
        ),
        (
            measured(baseline=replace(gap(1e-3), p99=0.28), dtype="bfloat16", lower=gap(1e-3)),
            "undecided",
            "has a p99 2.8e-01, 2.0e-01 is allowed",
        ),
        (measured(0.3, lower=None, num_rollouts=4), "undecided", "4 rollouts, at least 8 are needed"),
        (measured(yardstick=Yardstick(transformers=3e-6, packed=0.4, num_tokens=9)), "trainer-pass", "1.0e-04 is allo"),
        (measured(baseline=gap(1e-7, MIN_TOKENS - 1)), "too few tokens", f"at least {MIN_TOKENS} are needed"),
        (measured(judged=(judged("shifted+1", explains=False), judged("raw"))), "raw", "these are raw logprobs (so to"),
        (measured(judged=(judged("weights-other", layer="inference"),)), "weights-other", "1.0e-06 with other weights"),
        (measured(judged=RAW_AND_OLDER), "raw", "3.0e-01 as processed, 5.0e-06 as raw (mean 3.0e-01; 1.0e-05 is all"),
        (measured(judged=(judged("raw", 2e-6), judged("temperature", 1e-6))), "raw", "as raw"),
        (measured(judged=(judged("raw", 9e-6), judged("temperature", 1e-6))), "temperature", "at the fitted one"),
        (measured(trainer_head=gap(1e-3), judged=(judged("raw"),)), "trainer-head", "1.0e-03 between it and a plain"),
        (measured(2e-2, "bfloat16", engine_head="40 of 41"), "engine-head", "(40 of 41)"),
        (measured(0.3, "bfloat16", engine_head="40 of 41"), "engine-head", "(40 of 41)"),
        (measured(1e-6, refused="whole-vocabulary"), "whole-vocabulary", "top-k or top-p kept part of it"),
        (measured(1e-6, refused="without-penalties"), "without-penalties", "leave out the penalties"),
        (measured(1e-6, sampling="z = 9"), "sampling", "(z = 9)"),
        (measured(0.3, sampling="z = 9"), "unexplained", "no hypothesis explains it"),
        (measured(1e-3, spread=gap(5e-4)), "engine-spread", "5.0e-04 between its own answers"),
        (measured(0.3, spread=gap(5e-4)), "unexplained", "no hypothesis explains it"),
        (measured(1e-3, spread=gap(1e-6)), "unexplained", "no hypothesis explains it"),
    ],
)
def test_the_first_that_holds_is_named(measurements, cause, part) -> None:
    verdict = decide(measurements)
    assert verdict.cause == cause and part in verdict.sentence, verdict
    statuses = {"parity": "parity", "too few tokens": "unclear", "undecided": "unclear"}
    assert verdict.status == statuses.get(cause, "mismatch")
    assert (verdict.advice == "") == (cause == "parity")
    assert verdict.status != "mismatch" or verdict.advice in verdict.sentence


def off(name: str, error: float = 0.5) -> LayerGap:
    return LayerGap(name=name, error=error, allowed=1e-5)


@pytest.mark.parametrize(
    ("layers", "cause", "opening", "setting"),
    [
        ([off("layers.1.attention", 2e-2), off("layers.2.mlp")], "layer", "layers.1.attention computes", "rope"),
        ([off("layers.0.mlp", math.nan)], "layer", "layers.0.mlp computes something else", "rope"),
        ([off("embedding")], "layer", "the embedding is another one", "embed_tokens"),
        ([off("head")], "layer", "the head computes something else in the engine; the whole b", "engine.head_dtype"),
        ([off(AS_SERVED)], "layer", "the engine serves another hidden state than it computes", "enforce_eager"),
        ([], "unexplained", "engine and trainer differ", "compare layer by layer"),
    ],
)
def test_layers_name_what_is_unexplained_and_change_no_explanation(layers, cause, opening, setting) -> None:
    layers = (off("layers.0.attention", 1e-7), *layers)
    unexplained, explained, parity = measured(), measured(judged=(judged("raw"),)), measured(1e-6)
    verdict = with_layers(report(unexplained), layers).verdict
    assert verdict.cause == cause and verdict.sentence.startswith(opening) and setting in verdict.advice
    assert with_layers(report(explained), layers).verdict.cause == "raw"
    assert with_layers(report(parity), layers).verdict.cause == ("parity" if len(layers) == 1 else "layer")


def report(measurements: ParityMeasurements) -> ParityReport:
    return ParityReport(
        verdict=decide(measurements),
        dtype="float32",
        tolerance=TOLERANCES["float32"],
        num_groups=1,
        num_rollouts=1,
        hypotheses=(Hypothesis(layer="semantics", name="processed", says="", gap=measurements.baseline),),
    )
