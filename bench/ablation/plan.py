"""The plan of an ablation, read from its TOML file: the workload, the arms, the seeds."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.deploy.demo.make_model import ModelRecipe
from penstock.schemas.config import ConfigError, RunConfig, config_of, explain, load_config, read_document

NAME_PATTERN = "^[a-z0-9][a-z0-9-]*$"
"""Arms and ablations give files and runs their names."""

WITHOUT_EFFECT = ("name", "parity", "metrics", "redis", "checkpoint", "weights")
"""Fields of the run file that no trajectory depends on."""


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One set-up of the workload.

    set: overrides of the run file, as `penstock run --set` takes them.
    gpu_set: more of them on a machine with a GPU, which the CPU build refuses.
    gpu_only: the arm needs a GPU.
    environment: additional variables of its run.
    seeds: None takes the reference's first alone.
    note: shown with the arm's label on the page.
    """

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]
    label: str
    set: tuple[str, ...] = ()
    gpu_set: tuple[str, ...] = ()
    gpu_only: bool = False
    environment: dict[str, str] = {}
    seeds: Annotated[tuple[int, ...], Meta(min_length=1)] | None = None
    note: str = ""


class AblationCell(msgspec.Struct, frozen=True, kw_only=True):
    """One run of an arm. `seed` decides its problems and its sampling noise."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"


class AblationPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An ablation. Paths are relative to its file, but for the run file's own, which are the working directory's.

    run_file: the workload. set: overrides of it that all arms share.
    recipe: makes the model at `model.path` if it is missing.
    results: folder of the finished cells. page: the markdown file whose marked part is written; figures lie beside it.
    reference: the arm that the others are measured against.
    compared: arms drawn beside the reference in the figures of two or three curves.
    """

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]
    run_file: Path
    results: Path
    page: Path
    reference: str
    arms: Annotated[tuple[Arm, ...], Meta(min_length=2)]
    compared: Annotated[tuple[str, ...], Meta(min_length=1)]
    set: tuple[str, ...] = ()
    recipe: ModelRecipe | None = None

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def seeds_of(self, arm: Arm) -> tuple[int, ...]:
        return arm.seeds or (self.arm(self.reference).seeds or (1,))[:1]

    def cells(self, *, gpu: bool) -> list[AblationCell]:
        """Returns every arm once, then the further seeds: if stopped halfway, every arm has a result."""
        arms = [arm for arm in self.arms if gpu or not arm.gpu_only]
        first = [AblationCell(arm=arm.name, seed=self.seeds_of(arm)[0]) for arm in arms]
        return first + [AblationCell(arm=arm.name, seed=seed) for arm in arms for seed in self.seeds_of(arm)[1:]]

    def overrides(self, cell: AblationCell, *, gpu: bool) -> list[str]:
        """Returns the overrides of the run file; the later one of a field wins."""
        arm = self.arm(cell.arm)
        return [*self.set, *arm.set, *(arm.gpu_set if gpu else ()), f"seed={cell.seed}"]

    def config(self, cell: AblationCell, *, gpu: bool) -> RunConfig:
        """Returns the cell's run as it will be read. Raises ConfigError, see `load_config`."""
        return load_config(self.run_file, self.overrides(cell, gpu=gpu))

    def settings(self, cell: AblationCell, *, gpu: bool) -> dict[str, Any]:
        """Returns the settings as they are written, not as they are read: a field added to the schema does not make old
        results stale. Nor does what the overrides replace. Raises ConfigError, see `load_config`."""
        document = read_document(self.run_file)
        config_of(document, self.run_file, self.overrides(cell, gpu=gpu))
        document.get("evaluation", {}).pop("goal", None)  # a line in the report
        chosen = {
            "run_file": {name: value for name, value in document.items() if name not in WITHOUT_EFFECT},
            "environment": self.arm(cell.arm).environment,
            "recipe": self.recipe,
            "device": "gpu" if gpu else "cpu",
        }
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(chosen))
        return found


def load_plan(file: Path) -> AblationPlan:
    """Reads an ablation's file.

    Raises:
        ConfigError: no such file, not TOML, an unknown or ill-typed field, an arm or run file that is not there.
    """
    try:
        document = read_document(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; expected a TOML file") from None
    try:
        plan = msgspec.convert(document, AblationPlan, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {explain(error, document, AblationPlan)}") from None
    names = [arm.name for arm in plan.arms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{file}: arms: {name!r} is there twice, expected names that differ")
    for field, wanted in (("reference", [plan.reference]), ("compared", list(plan.compared))):
        for name in wanted:
            if name not in names:
                raise ConfigError(f"{file}: {field} = {name!r}: expected one of {', '.join(names)}")
    if plan.arm(plan.reference).gpu_only:
        raise ConfigError(f"{file}: reference = {plan.reference!r}: expected an arm that runs everywhere")
    folder = file.parent
    if not (folder / plan.run_file).is_file():
        raise ConfigError(f"{file}: run_file = {str(plan.run_file)!r}: no such file in {folder}; expected a run file")
    return msgspec.structs.replace(
        plan, **{name: (folder / getattr(plan, name)).resolve() for name in ("run_file", "results", "page")}
    )
