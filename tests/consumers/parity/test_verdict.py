"""From measurements to one verdict: every cause by its name, semantics before inference, and what must be done."""

import math

import msgspec
import pytest

from penstock.consumers.parity.report import (
    AS_SERVED,
    CAUSES,
    TOLERANCES,
    Gap,
    Hypothesis,
    LayerGap,
    ParityReport,
)
from penstock.consumers.parity.verdict import MIN_TOKENS, JudgedHypothesis, ParityMeasurements, decide, with_layers


def gap(mean: float, num_tokens: int = 1000, spread: float = 3.0) -> Gap:
    chi2 = mean**2
    return Gap(
        num_tokens=num_tokens, mean=mean, p99=spread * mean, max=5 * mean, chi2=chi2, ess_fraction=1 / (1 + chi2)
    )


def hypothesis(name: str, after: float = 1e-6, *, layer: str = "semantics", explains: bool = True) -> JudgedHypothesis:
    return JudgedHypothesis(
        Hypothesis(layer=layer, name=name, says=name, gap=gap(after)), gap(0.3), explains, "so to speak"
    )


def measured(mean: float = 0.3, dtype: str = "float32", **changes) -> ParityMeasurements:
    return ParityMeasurements(**{"dtype": dtype, "baseline": gap(mean), "trainer_head": gap(1e-6)} | changes)


def test_a_gap_within_the_tolerance_is_parity() -> None:
    verdict = decide(measured(1e-6))
    assert (verdict.status, verdict.cause, verdict.advice) == ("parity", "parity", "")
    assert "1.0e-06" in verdict.sentence


def test_body_noise_is_parity_in_bfloat16_alone() -> None:
    assert decide(measured(2e-2, "bfloat16")).status == "parity"
    assert decide(measured(2e-2)).cause == "unexplained"


def test_too_few_tokens_are_unclear_however_well_they_fit() -> None:
    verdict = decide(ParityMeasurements("float32", baseline=gap(1e-7, MIN_TOKENS - 1), trainer_head=gap(1e-7)))
    assert verdict.status == "unclear"
    assert f"at least {MIN_TOKENS} are needed" in verdict.sentence


@pytest.mark.parametrize("name", sorted(set(CAUSES) - {"weights", "trainer-head", "engine-spread", "sampling"}))
def test_an_explanation_is_named_with_both_residuals_and_what_to_do(name) -> None:
    verdict = decide(measured(judged=(hypothesis("shifted+1", explains=False), hypothesis(name))))
    assert (verdict.status, verdict.cause) == ("mismatch", name)
    assert "residual 3.0e-01 as processed, 1.0e-06" in verdict.sentence
    assert "(so to speak)" in verdict.sentence
    assert verdict.advice
    assert verdict.advice in verdict.sentence


@pytest.mark.parametrize("name", ["weights-1", "weights+1", "weights-other"])
def test_other_weights_are_named_by_how_far_off_they_are(name) -> None:
    assert decide(measured(judged=(hypothesis(name, layer="inference"),))).cause == name


def test_the_sentence_for_raw_logprobs_reads_as_promised() -> None:
    found = JudgedHypothesis(Hypothesis(layer="semantics", name="raw", says="raw", gap=gap(4.2e-6)), gap(0.31), True)
    assert decide(measured(judged=(found,))).sentence == (
        "these are raw logprobs: residual 3.1e-01 as processed, 4.2e-06 as raw; "
        'set engine.logprobs_mode = "processed_logprobs" (vLLM: logprobs_mode="processed_logprobs")'
    )


def test_semantics_come_before_inference() -> None:
    found = (hypothesis("raw", 5e-6), hypothesis("weights-1", 1e-7, layer="inference"))
    assert decide(measured(judged=found)).cause == "raw"


def test_within_a_layer_the_first_wins_unless_a_later_one_leaves_far_less() -> None:
    assert decide(measured(judged=(hypothesis("raw", 2e-6), hypothesis("temperature", 1e-6)))).cause == "raw"
    assert decide(measured(judged=(hypothesis("raw", 9e-6), hypothesis("temperature", 1e-6)))).cause == "temperature"


def test_the_trainers_own_head_comes_before_all_else() -> None:
    verdict = decide(measured(trainer_head=gap(1e-3), judged=(hypothesis("raw"),)))
    assert verdict.cause == "trainer-head"
    assert "1.0e-03 between it and a plain head" in verdict.sentence


@pytest.mark.parametrize("mean", [2e-2, 0.3])
def test_the_sign_of_a_bfloat16_head_counts_with_and_without_a_gap(mean) -> None:
    verdict = decide(measured(mean, "bfloat16", engine_head="40 of 41 differences"))
    assert verdict.cause == "engine-head"
    assert "40 of 41 differences" in verdict.sentence


@pytest.mark.parametrize("cause", ["whole-vocabulary", "without-penalties"])
def test_records_that_the_trainer_refuses_are_no_parity_however_well_they_fit(cause) -> None:
    assert decide(measured(1e-6, refused=cause)).cause == cause


def test_tokens_drawn_from_elsewhere_are_named_where_logprobs_fit() -> None:
    assert decide(measured(1e-6, sampling="z = 9")).cause == "sampling"
    assert decide(measured(0.3, sampling="z = 9")).cause == "unexplained"


def test_an_engine_that_disagrees_with_itself_is_named_where_that_is_a_good_part_of_the_gap() -> None:
    assert decide(measured(1e-3, spread=gap(5e-4))).cause == "engine-spread"
    assert decide(measured(0.3, spread=gap(5e-4))).cause == "unexplained"
    assert decide(measured(1e-3, spread=gap(1e-6))).cause == "unexplained"


LAYERS = (
    LayerGap(name="layers.0.attention", error=1e-7, allowed=1e-5),
    LayerGap(name="layers.1.attention", error=2e-2, allowed=1e-5),
    LayerGap(name="layers.2.mlp", error=0.5, allowed=1e-5),
)


@pytest.mark.parametrize("mean", [1e-6, 0.3])
def test_the_first_layer_that_is_off_is_named(mean) -> None:
    verdict = with_layers(report(mean), LAYERS).verdict
    assert verdict.cause == "layer"
    assert verdict.sentence.startswith(
        "layers.1.attention computes something else in the engine: relative error 2.0e-02"
    )


@pytest.mark.parametrize(
    ("part", "opening", "setting"),
    [
        ("embedding", "the embedding is another one", "embed_tokens"),
        ("head", "the head computes something else in the engine; the whole body agrees", "engine.head_dtype"),
        (AS_SERVED, "the engine serves another hidden state than it computes step by step", "enforce_eager"),
    ],
)
def test_a_part_that_is_no_layer_of_the_body_is_named_with_what_to_do(part, opening, setting) -> None:
    verdict = with_layers(report(0.3), (*LAYERS[:1], LayerGap(name=part, error=0.5, allowed=1e-5))).verdict
    assert verdict.cause == "layer"
    assert verdict.sentence.startswith(opening) and "relative error 5.0e-01" in verdict.sentence
    assert setting in verdict.advice and "rope" not in verdict.advice


def test_a_layer_with_an_error_that_is_no_number_is_off() -> None:
    broken = (LayerGap(name="layers.0.mlp", error=math.nan, allowed=1e-5),)
    assert with_layers(report(0.3), broken).verdict.cause == "layer"


def report(mean: float, **changes) -> ParityReport:
    found = measured(mean, **changes)
    return ParityReport(
        verdict=decide(found),
        dtype="float32",
        tolerance=TOLERANCES["float32"],
        num_groups=1,
        num_rollouts=1,
        num_tokens=1000,
        versions=(0,),
        hypotheses=(Hypothesis(layer="semantics", name="processed", says="", gap=found.baseline),),
    )


def test_layers_that_come_later_name_what_was_unexplained() -> None:
    with_them = with_layers(report(0.3), LAYERS)
    assert (with_them.verdict.cause, with_them.layers) == ("layer", LAYERS)
    assert with_layers(report(0.3), LAYERS[:1]).verdict.cause == "unexplained"


def test_layers_that_come_later_change_no_explanation() -> None:
    assert with_layers(report(0.3, judged=(hypothesis("raw"),)), LAYERS).verdict.cause == "raw"


def test_a_report_survives_json() -> None:
    found = report(0.3, judged=(hypothesis("raw"),))
    assert msgspec.json.decode(msgspec.json.encode(found), type=ParityReport) == found
