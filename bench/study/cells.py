"""The study's methods, lags and learning rates, the grid that they span, and a cell's result."""

from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from bench.experiments.experiment import CellResult
from penstock.deploy.demo.make_model import ModelRecipe
from penstock.schemas.config import RunConfig, load_config

RUN_FILE = Path(__file__).parents[2] / "deploy" / "runs" / "demo.toml"
NUM_UPDATES = 200
"""The demo's own."""
EVALUATE_EVERY = 10
"""Updates between evaluations, one more before the first update."""


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
        name="truncate-const",
        label="truncation, const",
        overrides=(GRPO, 'correction={mode="token_truncate", threshold=2.0, schedule="const"}'),
    ),
    Method(
        name="truncate-power",
        label="truncation, power",
        overrides=(GRPO, 'correction={mode="token_truncate", threshold=2.0, schedule="power"}'),
    ),
    Method(
        name="mask-power",
        label="masking, power",
        # Two-sided, as masks are used in the field (IcePop): a token the policy has left teaches as little as one it
        # has run towards.
        overrides=(GRPO, 'correction={mode="token_mask", threshold=2.0, lower=0.5, schedule="power"}'),
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
        return next(method for method in METHODS if method.name == self.method)

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


def settings(cell: StudyCell, config: RunConfig) -> dict[str, Any]:
    """See `Experiment.settings`."""
    everything = msgspec.to_builtins(config)
    named = ("seed", "num_updates", "group_size", "groups_per_batch", "max_lag", "advantage")
    of_trainer = ("learning_rate", "betas", "weight_decay", "warmup_steps", "decay", "max_grad_norm")
    chosen = {
        **{name: everything[name] for name in named},
        "environment": {name: everything["environment"][name] for name in ("path", "kwargs")},
        "trainer": {name: everything["trainer"][name] for name in of_trainer},
        "sampling": {name: everything["sampling"][name] for name in ("temperature", "max_tokens")},
        # As they are written, not as they are read: a field added to the schema does not make old results stale.
        "method": cell.method_used.overrides,
        "model": cell.recipe,
    }
    return msgspec.json.decode(msgspec.json.encode(chosen))


class StudyResult(CellResult, kw_only=True):
    """One finished cell.

    curves: lag, reward (of the lagging policy that sampled), and the learner's metrics.
    skipped: updates without an optimizer step, by reason.
    """

    cell: StudyCell
    skipped: dict[str, int]

    @property
    def mean_accuracy(self) -> float:
        """Over the evaluations after the start: the area under the curve, high for fast and for steady learning."""
        return fmean(value for update, value in self.accuracy if update)

    @property
    def mean_ess(self) -> float:
        return self.overall("ess_fraction")

    @property
    def summary(self) -> str:
        skipped = f", {sum(self.skipped.values())} updates skipped" if self.skipped else ""
        return f"mean {self.mean_accuracy:.3f}, ESS {self.mean_ess:.3f}{skipped}"
