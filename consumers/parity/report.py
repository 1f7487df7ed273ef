"""What the parity check found: plain structs, written as JSON and read by whoever prints or draws them."""

from typing import Literal

import msgspec

REPORT_FILE = "parity.json"
"""In the run's folder."""
AS_SERVED = "as served"
"""The `LayerGap` of the engine's whole body against itself."""
Layer = Literal["semantics", "inference", "objective"]
"""In this order: a wrong meaning makes every later comparison worthless."""
Status = Literal["parity", "mismatch", "unclear"]
EXIT_STATUS: dict[Status, int] = {"parity": 0, "mismatch": 1, "unclear": 2}


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """|engine - trainer| over some tokens, in nats; nan over none."""

    num_tokens: int
    mean: float
    p99: float
    max: float
    chi2: float
    ess_fraction: float


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """The largest gap that counts as parity."""

    mean: float
    p99: float
    max: float | None
    chi2: float | None = None
    ess_fraction: float | None = None
    """The smallest."""


TOLERANCES = {
    "float32": Tolerance(mean=1e-5, p99=5e-5, max=1e-4),
    "bfloat16": Tolerance(mean=5e-2, p99=0.2, max=None, chi2=5e-3, ess_fraction=0.995),
}
"""By `model.dtype`. In bfloat16 it is an alarm only: body noise hides small faults, which float32 shows."""


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the recorded logprobs, with what is left of the gap under it.

    name: a stable identifier, as in "processed", "raw", "temperature", "weights-1".
    says: the reading in a few words, for a table. note: what else was seen, such as a fitted temperature.
    """

    layer: Layer
    name: str
    says: str
    gap: Gap
    note: str = ""


class LagRow(msgspec.Struct, frozen=True, kw_only=True):
    """The objective layer: tokens of one lag bucket, as the trainer would see them now."""

    label: str
    num_tokens: int
    mean: float
    p99: float
    kl: float
    k3_kl: float
    chi2: float
    ess_fraction: float
    ratio_deviation: float
    """<|exp(trainer - engine) - 1|> times 10^4."""


class LayerGap(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the model, run by engine and trainer on the same input: relative error of its output (2-norm)."""

    name: str
    """As in "embedding", "layers.3.attention", "layers.3.mlp", "norm", "head"."""
    error: float
    allowed: float


class GapPoint(msgspec.Struct, frozen=True, array_like=True):
    """One token of the pictures."""

    engine: float
    trainer: float
    position: int
    """Sampled tokens before it in its rollout."""
    lag: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """cause: "parity", the name of the hypothesis that explains the gap, "layer", "unexplained", or why it could not
    be told. sentence: what was found, with residuals. advice: what to do, naming settings; empty under parity."""

    status: Status
    cause: str
    sentence: str
    advice: str = ""


class ParityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one check found."""

    verdict: Verdict
    dtype: str
    tolerance: Tolerance
    num_groups: int
    num_rollouts: int
    num_tokens: int
    versions: tuple[int, ...]
    """Policy versions that were replayed."""
    hypotheses: tuple[Hypothesis, ...]
    lags: tuple[LagRow, ...] = ()
    layers: tuple[LayerGap, ...] = ()
    points: tuple[GapPoint, ...] = ()
    notes: tuple[str, ...] = ()
    """Settings of the engine off the parity recipe, rows left out and why, what was not looked at."""
    seconds: float = 0.0
    gate: Literal["", "refuse", "warn"] = ""
    """Of the trainer's own check before it trains, `parity.gate`; empty for one that somebody asked for."""
