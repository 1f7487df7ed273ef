"""The parity check as a whole: rollouts and weights in, one report out.

`check_parity` reads the sample, recomputes it as labelled (the baseline), and makes and judges the hypotheses:
semantics first, then tokens and weights if nothing explains the gap. `decide` turns the measurements into the verdict.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.learning.loss.diagnostics import MismatchSums, lag_buckets
from penstock.consumers.learning.loss.importance import Correction
from penstock.consumers.learning.loss.rows import LOG_RATIO_BOUND
from penstock.consumers.parity.adapter import AdapterHypotheses
from penstock.consumers.parity.confidence import Evidence
from penstock.consumers.parity.images import ImageHypotheses
from penstock.consumers.parity.inference import equal_contexts
from penstock.consumers.parity.replay import LoadedPolicy, PolicyStore, Replay, whole
from penstock.consumers.parity.report import GapPoint, Hypothesis, LagRow, ParityReport, cause_of
from penstock.consumers.parity.routes import route_note
from penstock.consumers.parity.sample import Sample, read_sample
from penstock.consumers.parity.sampled_tokens import check_tokenizer, retokenized
from penstock.consumers.parity.semantics import SemanticHypotheses
from penstock.consumers.parity.tolerance import Gap, Yardstick, tolerance_of
from penstock.consumers.parity.verdict import (
    Candidate,
    JudgedHypothesis,
    ParityMeasurements,
    decide,
    gap_of,
    judge,
    quantile,
)
from penstock.consumers.parity.versions import VersionHypotheses
from penstock.consumers.parity.yardstick import measure_yardstick
from penstock.schemas.config import RunConfig
from penstock.schemas.metrics import LAG_LABELS, lag_key
from penstock.schemas.policy import FutureVersionError, UnknownVersionError, split_version
from penstock.schemas.rollout import EngineFingerprint, RolloutGroup

NUM_POINTS = 4000
"""The most tokens in the pictures."""


def check_parity(
    groups: Sequence[RolloutGroup],
    *,
    config: RunConfig,
    weights: Callable[[int], Path | None],
    lag_of: Callable[[int], int] | None = None,
    tokenizer: Any = None,
    device: torch.device | str = "cpu",
    max_tokens: int | None = None,
    loaded: LoadedPolicy | None = None,
    yardstick: Yardstick | None = None,
    evidence: Evidence | None = None,
) -> ParityReport:
    """Compares the recorded logprobs of `groups` with the trainer's, and names the cause of a difference.

    The trainer's own code recomputes every token with the weights of the version that the token is labelled with and,
    in rows that several versions sampled, with the keys and values that the older ones left. If that fits, few other
    hypotheses are tried; otherwise more, from the meaning of the numbers to the weights behind them, some of them on a
    part of the tokens, as the notes say. At most the logits of a few thousand tokens exist at once.

    Args:
        groups: decoded groups from any engine that fills the record.
        config: of the run. `model.path` is the trainer's model, `model.dtype` the type its weights are published in.
        weights: the published safetensors file of a version, or a folder with a whole model, as the base model for
            version 0; None if it is gone.
        lag_of: the lag of a version in optimizer steps; by default lags count from the newest version in `groups`.
        tokenizer: a transformers tokenizer; without one re-tokenized ids are not looked for.
        device: of the model, unless `loaded` has one.
        max_tokens: the most sampled tokens checked, in groups spread evenly.
        loaded: a model in memory, which saves a load; it is left unchanged.
        yardstick: the model's own, which is measured here otherwise.
        evidence: of earlier batches, which count too; this one's is added.

    Raises:
        ParityError: there is nothing to compare: no tokens or logprobs, weights that are gone, a model or a tokenizer
            of other rollouts.
        ConfigError: no such model.
    """
    started = time.monotonic()
    device = loaded.model.parameters()[0].device if loaded is not None else torch.device(device)
    policies = PolicyStore(config, weights, device, loaded)
    sample = read_sample(groups, policies.vocabulary, policies.has, max_tokens)
    if tokenizer is not None:
        check_tokenizer(groups, tokenizer)
    budget = config.trainer.tokens_per_microbatch
    if yardstick is None:
        yardstick = measure_yardstick(sample, policies.model(int(sample.versions[0])), budget)
    replay = Replay(sample, policies, budget, tolerance_of(yardstick, config.model.dtype))
    baseline = replay.baseline()
    notes = [*sample.notes, *_recipe_notes(groups, config), *filter(None, [route_note(replay)])]
    evidence = Evidence() if evidence is None else evidence
    evidence.add(sample, baseline)
    found = _measure(replay, baseline, evidence, tokenizer, config.engine.args.get("block_size"), notes, yardstick)
    lags = _lags(sample, lag_of)
    return ParityReport(
        verdict=decide(found),
        dtype=config.model.dtype,
        tolerance=replay.tolerance,
        yardstick=yardstick,
        num_groups=sample.num_groups,
        num_rollouts=sample.num_rollouts,
        num_tokens=sample.num_tokens,
        versions=tuple(np.unique(sample.versions).tolist()),
        hypotheses=_table(found),
        lags=_lag_rows(sample, _at_newest(replay, baseline, lags), lags),
        points=_points(sample, baseline, lags),
        notes=tuple(notes),
        seconds=time.monotonic() - started,
    )


def _measure(
    replay: Replay,
    baseline: Tensor,
    evidence: Evidence,
    tokenizer: Any,
    block_size: int | None,
    notes: list[str],
    yardstick: Yardstick | None,
) -> ParityMeasurements:
    """Tries the hypotheses and adds to `notes`."""
    sample, dtype, tolerance = replay.sample, replay.policies.dtype, replay.tolerance
    passing = tolerance.allows(gap_of(sample.engine, baseline))
    semantics = SemanticHypotheses(replay, baseline, passing)
    notes += semantics.notes

    def tokens_and_weights() -> Iterator[Candidate]:
        """Yields the hypotheses that need forward passes of their own."""
        if tokenizer is None:
            notes.append("no tokenizer given: re-tokenized ids were not looked for")
        elif (candidate := retokenized(replay, baseline, tokenizer)) is not None:
            yield candidate
        if replay.policies.lora is not None:
            yield from AdapterHypotheses(replay, baseline, replay.policies.lora).candidates()
        if (vision := replay.policies.vision) is not None:
            yield from ImageHypotheses(replay, baseline, vision).candidates()
        yield from VersionHypotheses(replay, baseline, block_size).candidates()

    def judged_of(candidates: Iterator[Candidate]) -> list[JudgedHypothesis]:
        noisy = dtype != "float32"
        return [judge(each, sample.engine, baseline, tolerance, noisy=noisy) for each in candidates]

    judged = judged_of(semantics.candidates())
    if not passing and not any(each.explains for each in judged):
        judged += judged_of(tokens_and_weights())
    contexts = equal_contexts(sample, "float16" if dtype == "float16" else "bfloat16")
    return ParityMeasurements(
        dtype=dtype,
        baseline=gap_of(torch.zeros(1).expand_as(evidence.differences), evidence.differences),
        lower=evidence.lower(),
        num_rollouts=evidence.num_rollouts,
        tolerance=tolerance,
        yardstick=yardstick,
        trainer_head=semantics.trainer_head,
        judged=tuple(sorted(judged, key=lambda each: each.hypothesis.layer != "semantics")),
        refused=_refused(sample),
        engine_head=str(contexts) if dtype != "float32" and contexts.has_rounded_logits else "",
        spread=contexts.spread,
        sampling=semantics.suspicion,
    )


def _refused(sample: Sample) -> str:
    if any(row.sampling.has_penalties for row in sample.rows):
        return "without-penalties"
    return "whole-vocabulary" if any(row.lacks_mask for row in sample.rows) else ""


def _table(found: ParityMeasurements) -> tuple[Hypothesis, ...]:
    """Returns every hypothesis with its residual, the baseline first."""

    def of_heads(name: str, gap: Gap) -> Hypothesis:
        return Hypothesis(layer="inference", name=name, says=cause_of(name).says, gap=gap)

    rows = [Hypothesis(layer="semantics", name="processed", says="as the trainer computes it", gap=found.baseline)]
    rows += [each.hypothesis for each in found.judged if each.hypothesis.gap.num_tokens]
    rows.append(of_heads("trainer-head", found.trainer_head))
    if found.spread is not None and found.spread.num_tokens:
        rows.append(of_heads("engine-spread", found.spread))
    return tuple(rows)


def _points(sample: Sample, baseline: Tensor, lags: np.ndarray) -> tuple[GapPoint, ...]:
    step = -(-sample.num_tokens // NUM_POINTS)
    return tuple(
        GapPoint(float(sample.engine[n]), float(baseline[n]), int(sample.positions[n]), int(lags[n]))
        for n in range(0, sample.num_tokens, step)
    )


def _recipe_notes(groups: Sequence[RolloutGroup], config: RunConfig) -> tuple[str, ...]:
    """Returns a line for each engine setting that can change a logprob and departs from the parity recipe."""
    fingerprints: list[EngineFingerprint] = []
    for group in groups:
        if group.fingerprint not in fingerprints:
            fingerprints.append(group.fingerprint)
    several = [f"{len(fingerprints)} different engine fingerprints among the groups"] * (len(fingerprints) > 1)
    return (*several, *dict.fromkeys(note for each in fingerprints for note in _departures(each, config)))


def _departures(engine: EngineFingerprint, config: RunConfig) -> Iterator[str]:
    if engine.logprobs_mode != "processed_logprobs":
        yield f"the engine reports logprobs_mode = {engine.logprobs_mode!r}, the recipe is 'processed_logprobs'"
    if engine.dtype != config.model.dtype:
        yield f"the engine reports dtype = {engine.dtype!r}, the trainer computes in {config.model.dtype!r}"
    if engine.head_dtype != "float32":
        yield f"the engine reports head_dtype = {engine.head_dtype!r}, the trainer's head is 'float32'"
    if engine.prefix_caching:
        yield "the engine reports prefix_caching = true: a hit may reuse keys and values of older weights"


def _lags(sample: Sample, lag_of: Callable[[int], int] | None) -> np.ndarray:
    """Returns each token's lag, [M] int64, -1 if unknown; without `lag_of` from the newest version of the sample."""
    newest = int(sample.versions.max())
    known: dict[int, int] = {}
    for version in np.unique(sample.versions).tolist():
        try:
            if lag_of is not None:
                known[version] = lag_of(version)
            else:
                same_line = split_version(version)[0] == split_version(newest)[0]
                known[version] = newest - version if same_line else -1
        except (UnknownVersionError, FutureVersionError):
            known[version] = -1
    return np.array([known[version] for version in sample.versions.tolist()])


def _at_newest(replay: Replay, baseline: Tensor, lags: np.ndarray) -> Tensor:
    """Returns [M] float64 logprobs by the version of the smallest lag, with rows recomputed whole as the trainer does.

    The baseline has them already for rows that this version sampled alone.
    """
    versions, known = replay.sample.versions, lags >= 0
    newest = int(versions[known][lags[known].argmin()]) if known.any() else int(versions.max())
    others = [row for row in replay.sample.rows if row.is_mixed or row.versions[0] != newest]
    recomputed = replay.logprobs(whole(row, newest) for row in others)
    return torch.where(recomputed.isnan(), baseline, recomputed)


def _lag_rows(sample: Sample, trainer: Tensor, lags: np.ndarray) -> tuple[LagRow, ...]:
    """Returns the objective layer by lag bucket, over the tokens of known lag. trainer: [M] float64, `_at_newest`."""
    known = torch.from_numpy(lags >= 0)
    if not known.any():
        return ()
    lag = torch.from_numpy(lags).where(known, 1)  # unknown is not fresh
    rows = torch.from_numpy(sample.rows_of)
    ones = torch.ones_like(trainer)
    uncorrected = Correction(weights=ones, keep_mask=known, corrected_mask=~known)
    tokens = trainer, sample.engine, known, rows, lag
    metrics = MismatchSums.of_packed(*tokens, uncorrected, threshold=1.0, advantages=ones).metrics()
    buckets = lag_buckets(lag, torch.unique_consecutive(rows, return_inverse=True)[1])
    return tuple(
        _lag_row(label, (trainer - sample.engine)[known & (buckets == n)], metrics)
        for n, label in enumerate(LAG_LABELS)
        if (known & (buckets == n)).any()
    )


def _lag_row(label: str, difference: Tensor, metrics: dict[str, float]) -> LagRow:
    ratio = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return LagRow(
        label=label,
        num_tokens=len(difference),
        mean=float(difference.abs().mean()),
        p99=quantile(difference.abs(), 0.99),
        ratio_deviation=float((ratio - 1).abs().mean()) * 1e4,
        **{name: metrics[lag_key(name, label)] for name in ("kl", "k3_kl", "chi2", "ess_fraction")},
    )
