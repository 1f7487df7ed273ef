"""The study's methods, lags and learning rates, the grid that they span, and the results of its cells."""

from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from bench.result import RESULTS as BENCH_RESULTS
from bench.result import installed, now
from penstock.deploy.demo.make_model import ModelRecipe
from penstock.schemas.config import ConfigError, RunConfig, load_config
from penstock.schemas.process.files import write_whole

RESULTS = BENCH_RESULTS / "study.jsonl"
"""A line for each finished cell."""
PACKAGES = ("torch", "transformers")

RUN_FILE = Path(__file__).parents[2] / "deploy" / "runs" / "demo.toml"
NUM_UPDATES = 200
"""The demo's own."""
EVALUATE_EVERY = 10
"""Updates between evaluations, one more before the first update."""
NUM_LAST_EVALUATIONS = 5


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train on stale tokens, as overrides of the run file."""

    name: str
    label: str
    overrides: tuple[str, ...]


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """A learning rate: how far the policy moves in an optimizer step."""

    name: str
    learning_rate: float
    label: str


GRPO = 'objective={path="penstock.consumers.learning.objectives.grpo:Grpo"}'
BYPASS = 'correction={mode="none", bypass=true}'
METHODS = (
    Method(name="none", label="no correction", overrides=(GRPO, 'correction={mode="none"}')),
    Method(
        name="truncate",
        label="truncation",
        overrides=(GRPO, 'correction={mode="token_truncate", threshold=2.0}'),
    ),
    # One optimizer step a batch: against a recomputed proximal policy every policy ratio is 1, and GSPO would be GRPO
    # with another mean. In bypass mode its ratio is current / behavior, and its clip is the correction.
    Method(
        name="gspo",
        label="GSPO, clip 3e-4 / 4e-4",
        overrides=('objective={path="penstock.consumers.learning.objectives.gspo:Gspo"}', BYPASS),
    ),
    Method(
        name="gspo-wide",
        label="GSPO, clip 0.2",
        overrides=(
            'objective={path="penstock.consumers.learning.objectives.gspo:Gspo", kwargs={clip_low=0.2, clip_high=0.2}}',
            BYPASS,
        ),
    ),
    # Tells GSPO's sequence ratio from what bypass mode alone does.
    Method(name="grpo-bypass", label="GRPO, clip 0.2, bypass", overrides=(GRPO, BYPASS)),
)


def _of(name: str, label: str, objective: str, kwargs: str = "", correction: str = 'mode="none"', *more: str) -> Method:
    path = f"penstock.consumers.learning.objectives.{objective}"
    own = f'objective={{path="{path}", kwargs={{{kwargs}}}}}', f"correction={{{correction}}}", *more
    return Method(name=name, label=label, overrides=own)


_NONE, _BYPASS, _TOP = 'mode="none"', 'mode="none", bypass=true', "sampling.top_logprobs=20"
_MASK = "threshold=2.0, lower=0.5"
_ROWS = 'mode="sequence_truncate", sequence_ratio="product", threshold=2.0'
_BASELINE = 'advantage={path="penstock.consumers.learning.advantages:minimum_variance", kwargs={}}'
OBJECTIVES = (
    Method(name="none", label="GRPO, no correction", overrides=METHODS[0].overrides),
    Method(name="truncate", label="GRPO, truncation", overrides=METHODS[1].overrides),
    # Two-sided, as masks are used in the field (IcePop): a token the policy left teaches as little as one it ran to.
    _of("mask", "GRPO, masking", "grpo:Grpo", "", f'mode="token_mask", {_MASK}'),
    _of("truncate-rows", "GRPO, truncation of rows", "grpo:Grpo", "", _ROWS),
    _of("mask-rows", "GRPO, masking of rows", "grpo:Grpo", "", f'mode="sequence_mask", {_MASK}'),
    # With one step a batch and a sampler without mismatch this is what `proximal = "sampled_version"` does too.
    Method(name="grpo-bypass", label="GRPO, clip 0.2, bypass", overrides=METHODS[4].overrides),
    _of("dppo-tv", "DPPO, total variation", "dppo:DppoTv"),
    _of("dppo-kl", "DPPO, KL", "dppo:DppoKl"),
    _of("cispo", "CISPO", "cispo:Cispo", "", _BYPASS),
    Method(name="gspo", label="GSPO, clip 3e-4 / 4e-4", overrides=METHODS[2].overrides),
    Method(name="gspo-wide", label="GSPO, clip 0.2", overrides=METHODS[3].overrides),
    _of("decoupled", "decoupled PPO", "decoupled_ppo:DecoupledPpo", 'proximal="loglinear", total_weight_cap=5.0'),
    _of("centering", "score centering", "score_centering:ScoreCentering", "", _NONE, _TOP),
    _of(
        "centering-truncate", "score centering, weights to 2",
        "score_centering:ScoreCentering", "weight_low=0.0, weight_high=2.0", _NONE, _TOP,
    ),
    _of("vcpo", "VCPO", "grpo:Grpo", "full_rate_ess=1.0", _ROWS, _BASELINE),
)  # fmt: skip
"""The methods of the second study: every objective that says something of lag."""
OBJECTIVE_LAGS = (0, 2, 8)
PACES = (
    Pace(name="demo", learning_rate=3e-5, label="the demo's learning rate, 3e-5"),
    # At the demo's rate sixteen steps hardly move the policy, and the methods have nothing to correct.
    Pace(name="fast", learning_rate=3e-4, label="ten times the demo's learning rate, 3e-4"),
)
LAGS = (1, 4, 16)
REFERENCE = METHODS[0].name
"""The method of the reference cells, at lag 0: the same data budget on-policy."""
GRID_SEED = 1
SEEDS = (1, 2, 3)
COMPARED_PACE, COMPARED_LAG = "fast", 16
"""The methods differ here, so all seeds are run."""


class StudyCell(msgspec.Struct, frozen=True, kw_only=True):
    """One training run. `seed` decides its problems and its sampling noise; its model has seed - 1."""

    pace: str
    lag: int
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.pace}-lag{self.lag}-{self.method}-seed{self.seed}"

    @property
    def method_used(self) -> Method:
        return next(method for method in (*METHODS, *OBJECTIVES) if method.name == self.method)

    @property
    def recipe(self) -> ModelRecipe:
        """As in the demo, which trains model 0 on the problems of seed 1: its warm start saw other problems."""
        return ModelRecipe(seed=self.seed - 1)

    def config(self, models: Path, num_updates: int = NUM_UPDATES) -> RunConfig:
        """Returns the demo's run file with this cell's changes. Raises ConfigError, see `load_config`.

        models: the folder of all models.
        """
        model = models / ("demo" if self.recipe.seed == 0 else f"demo-s{self.recipe.seed}")
        pace = next(pace for pace in PACES if pace.name == self.pace)
        return load_config(
            RUN_FILE,
            [
                f"name=study-{self.name}",
                f"seed={self.seed}",
                f"num_updates={num_updates}",
                f"max_lag={self.lag}",
                f"model.path={model}",
                f"trainer.learning_rate={pace.learning_rate}",
                "trainer.num_threads=1",
                "trainer.device=cpu",
                f"evaluation.every={EVALUATE_EVERY}",
                *self.method_used.overrides,
            ],
        )


def grid() -> list[StudyCell]:
    """Returns every cell of the study: the grid on one seed, then the other seeds where the methods are compared."""
    cells = [
        StudyCell(pace=pace.name, lag=lag, method=method, seed=GRID_SEED)
        for pace in PACES
        for lag, method in [(0, REFERENCE), *((lag, method.name) for lag in LAGS for method in METHODS)]
    ]
    compared = [(0, REFERENCE), *((COMPARED_LAG, method.name) for method in METHODS)]
    return cells + [
        StudyCell(pace=COMPARED_PACE, lag=lag, method=method, seed=seed)
        for seed in SEEDS
        if seed != GRID_SEED
        for lag, method in compared
    ]


def objectives_grid() -> list[StudyCell]:
    """Returns every cell of the second study: each objective at each lag, three seeds of equal samples."""
    return [
        StudyCell(pace=COMPARED_PACE, lag=lag, method=method.name, seed=seed)
        for method in OBJECTIVES
        for lag in OBJECTIVE_LAGS
        for seed in SEEDS
    ]


def every_cell() -> list[StudyCell]:
    """Returns the cells of both studies, each once."""
    return list(dict.fromkeys([*grid(), *objectives_grid()]))


def settings(cell: StudyCell, config: RunConfig) -> dict[str, Any]:
    """Returns what decides a cell's outcome beside the demo's run file; a finished cell of other settings is run
    again."""
    return {
        "seed": config.seed,
        "num_updates": config.num_updates,
        "groups_per_batch": config.groups_per_batch,
        "group_size": config.group_size,
        "max_lag": config.max_lag,
        "max_tokens": config.sampling.max_tokens,
        "learning_rate": config.trainer.learning_rate,
        "method": list(cell.method_used.overrides),
    }


class StudyResult(msgspec.Struct, kw_only=True):
    """One finished cell.

    date: UTC, ISO 8601. accuracy: (updates done, held-out greedy accuracy of the policy then). mean_ess: of
    `ess_fraction`, over the updates. num_skipped: updates without an optimizer step.
    """

    cell: StudyCell
    date: str = msgspec.field(default_factory=now)
    packages: dict[str, str] = msgspec.field(default_factory=lambda: installed(PACKAGES))
    settings: dict[str, Any]
    accuracy: list[tuple[int, float]]
    mean_ess: float
    num_skipped: int
    wall_s: float

    @property
    def mean_accuracy(self) -> float:
        """Over the evaluations after the start: the area under the curve, high for fast and for steady learning."""
        return fmean(value for update, value in self.accuracy if update)

    @property
    def last_accuracy(self) -> float:
        """The mean of the last evaluations."""
        return fmean(value for _, value in self.accuracy[-NUM_LAST_EVALUATIONS:])


def read_results(file: Path = RESULTS) -> dict[StudyCell, StudyResult]:
    """Returns the finished cells; none without a file. Raises ConfigError: the file holds something else."""
    if not file.exists():
        return {}
    try:
        results = [msgspec.json.decode(line, type=StudyResult) for line in file.read_bytes().splitlines()]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: no results of the study: {error}") from None
    return {result.cell: result for result in results}


def write_results(results: dict[StudyCell, StudyResult], file: Path = RESULTS) -> None:
    """Writes all of them, whole or not at all, in the order of the grid."""
    ordered = sorted(results.values(), key=lambda result: result.cell.name)
    write_whole(file, b"".join(msgspec.json.encode(result) + b"\n" for result in ordered))
