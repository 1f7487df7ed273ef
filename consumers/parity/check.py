"""The parity check as a whole: rollouts and weights in, one report out."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from penstock.consumers.parity.candidate import Candidate, judge
from penstock.consumers.parity.gaps import gap_of, passes
from penstock.consumers.parity.head import engine_head_sign, equal_contexts, rounding_slope
from penstock.consumers.parity.meanings import Meanings
from penstock.consumers.parity.objective import at_newest, lag_rows, lags_of, newest_version
from penstock.consumers.parity.policies import LoadedPolicy, PolicyStore
from penstock.consumers.parity.recipe import departures
from penstock.consumers.parity.replay import Replay, as_labelled
from penstock.consumers.parity.report import TOLERANCES, Gap, GapPoint, Hypothesis, LagRow, LayerGap, ParityReport
from penstock.consumers.parity.retokenized import Search, check_tokenizer
from penstock.consumers.parity.sample import Sample, read_sample
from penstock.consumers.parity.verdict import Evidence, Finding, decide
from penstock.consumers.parity.versions import Versions
from penstock.schemas.config import RunConfig
from penstock.schemas.rollout import RolloutGroup

NUM_POINTS = 4000
"""Tokens in the pictures, at most."""


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
    layers: tuple[LayerGap, ...] = (),
) -> ParityReport:
    """Holds the recorded logprobs of `groups` against the trainer's, and names what is wrong where they differ.

    The trainer's own code recomputes every token with the weights of the version that the token is labelled with and,
    in rows that several versions sampled, with the keys and values that the older ones left. Where that fits, little
    more is done; else other readings of the same tokens are tried, from the meaning of the numbers to the weights
    behind them, some of them on a part of the tokens, which the notes say. Logits of a few thousand tokens exist at
    once at most.

    Args:
        groups: decoded; of any engine that fills the record.
        config: of the run. `model.path` is the trainer's model, `model.dtype` the type its weights are published in.
        weights: of a version the published safetensors file, or a folder with a whole model, as the base model for
            version 0; None where it is gone.
        lag_of: of a version in optimizer steps; left out, lags count from the newest version in `groups`.
        tokenizer: a transformers tokenizer; without one re-tokenized ids cannot be told.
        max_tokens: the most sampled tokens looked at, in groups spread evenly.
        device: of the model, unless `loaded` has one.
        loaded: a model in memory, which spares a load; it is left as it is.
        layers: what `penstock.consumers.parity.layers` found; `verdict.with_layers` adds it later.

    Raises:
        ParityError: there is nothing to compare: no tokens or logprobs, weights that are gone, a model or a tokenizer
            that is not theirs.
        ConfigError: no such model.
    """
    started = time.monotonic()
    device = loaded.model.parameters()[0].device if loaded is not None else torch.device(device)
    policies = PolicyStore(config, weights, device, loaded)
    sample = read_sample(groups, policies.vocabulary, policies.has, max_tokens)
    if tokenizer is not None:
        check_tokenizer(groups, tokenizer)
    replay = Replay(sample, policies, config.trainer.tokens_per_microbatch, device)
    check = _Check(config, sample, replay, policies, tokenizer, device)
    evidence = check.evidence(layers)
    lags = lags_of(sample, lag_of)
    return ParityReport(
        verdict=decide(evidence),
        dtype=config.model.dtype,
        tolerance=TOLERANCES[config.model.dtype],
        num_groups=sample.num_groups,
        num_rollouts=sample.num_rollouts,
        num_tokens=sample.num_tokens,
        versions=tuple(np.unique(sample.versions).tolist()),
        hypotheses=check.table(evidence),
        lags=check.lag_rows(lags),
        layers=layers,
        points=check.points(lags),
        notes=(*sample.notes, *departures(groups, config), *check.notes),
        seconds=time.monotonic() - started,
    )


class _Check:
    """One check's measurements, each made once."""

    def __init__(
        self,
        config: RunConfig,
        sample: Sample,
        replay: Replay,
        policies: PolicyStore,
        tokenizer: Any,
        device: torch.device,
    ) -> None:
        self._config, self._sample, self._replay, self._policies = config, sample, replay, policies
        self._tokenizer, self._device = tokenizer, device
        self._dtype = config.model.dtype
        self._null = replay.logprobs(as_labelled(row) for row in sample.rows)
        self.notes: list[str] = []

    def evidence(self, layers: tuple[LayerGap, ...]) -> Evidence:
        null = gap_of(self._sample.engine, self._null)
        passing = passes(null, TOLERANCES[self._dtype])
        meanings = Meanings(self._sample, self._replay, self._null, self._policies.vocabulary, passing, self._dtype)
        self.notes += meanings.notes
        findings = [self._judge(candidate) for candidate in meanings.candidates()]
        if not passing and not any(finding.explains for finding in findings):
            findings += [self._judge(candidate) for candidate in self._tokens_and_weights()]
        contexts = equal_contexts(self._sample)
        slope = rounding_slope(self._sample.engine, meanings.processed, meanings.bfloat16_head)
        return Evidence(
            dtype=self._dtype,
            null=null,
            trainer_head=meanings.trainer_head,
            findings=tuple(sorted(findings, key=lambda finding: finding.hypothesis.layer != "semantics")),
            refused=_refused(self._sample),
            engine_head=engine_head_sign(contexts, slope) if self._dtype != "float32" else "",
            spread=contexts.spread,
            sampling=meanings.suspicion,
            layers=layers,
        )

    def table(self, evidence: Evidence) -> tuple[Hypothesis, ...]:
        """Every reading with its residual, as processed first."""
        rows = [Hypothesis(layer="semantics", name="processed", says="as the trainer computes it", gap=evidence.null)]
        rows += [each.hypothesis for each in evidence.findings if each.hypothesis.gap.num_tokens]
        rows.append(_inference("trainer-head", "the trainer's head against a plain one", evidence.trainer_head))
        if evidence.spread is not None and evidence.spread.num_tokens:
            rows.append(_inference("engine-spread", "the engine against itself on equal contexts", evidence.spread))
        return tuple(rows)

    def lag_rows(self, lags: np.ndarray) -> tuple[LagRow, ...]:
        newest = newest_version(self._sample, lags)
        return lag_rows(self._sample, at_newest(self._sample, self._replay, self._null, newest), lags)

    def points(self, lags: np.ndarray) -> tuple[GapPoint, ...]:
        step = -(-self._sample.num_tokens // NUM_POINTS)
        engine, positions = self._sample.engine, self._sample.positions
        return tuple(
            GapPoint(float(engine[n]), float(self._null[n]), int(positions[n]), int(lags[n]))
            for n in range(0, self._sample.num_tokens, step)
        )

    def _judge(self, candidate: Candidate) -> Finding:
        return judge(candidate, self._sample.engine, self._null, self._dtype)

    def _tokens_and_weights(self) -> Iterator[Candidate]:
        """The readings that need forward passes of their own."""
        if self._tokenizer is not None:
            budget = self._config.trainer.tokens_per_microbatch
            search = Search(self._sample, self._policies, self._tokenizer, budget, self._device)
            candidate = search.candidate(self._null)
            if candidate is not None:
                yield candidate
        else:
            self.notes.append("no tokenizer given: re-tokenized ids were not looked for")
        versions = Versions(self._sample, self._replay, self._policies, self._null)
        block_size = self._config.engine.args.get("block_size")
        yield from versions.weights()
        yield from versions.labels()
        yield from versions.stale_prefix(block_size)
        yield from versions.recomputed()
        self.notes += versions.notes


def _refused(sample: Sample) -> str:
    if any(row.sampling.has_penalties for row in sample.rows):
        return "penalties"
    if any(row.sampling.is_truncated and row.segment.sampling_mask is None for row in sample.rows):
        return "top-p"
    return ""


def _inference(name: str, says: str, gap: Gap) -> Hypothesis:
    return Hypothesis(layer="inference", name=name, says=says, gap=gap)


__all__ = ["LoadedPolicy", "check_parity"]
