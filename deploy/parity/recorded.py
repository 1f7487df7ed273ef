"""Rollouts in a file: written with the weights that they name, read back as something to check."""

from pathlib import Path

import msgspec
from penstock.consumers.parity.errors import ParityError
from penstock.consumers.parity.report import TOLERANCES
from penstock.deploy.parity.material import Material, versions_of
from penstock.deploy.parity.weights import WeightVersions, with_neighbours
from penstock.schemas.config import ModelConfig, Plug, RunConfig
from penstock.schemas.model_digest import model_digest
from penstock.schemas.rollout_file import RolloutFileHeader, read_rollout_file, write_rollout_file


def save(material: Material, file: Path) -> str:
    """Writes the rollouts to `file` and the weights they name, with their neighbours, to `<file>.weights`; says so."""
    folder = file.with_name(file.name + ".weights")
    copies = material.weights.copy(with_neighbours(versions_of(material.groups)), folder)
    model = Path(material.config.model.path)
    header = RolloutFileHeader(
        run=material.config.name,
        model=str(model.absolute()),
        model_digest=model_digest(model),
        dtype=material.config.model.dtype,
        weights=folder.name,
        policy_version=material.policy_version,
        forks=material.forks,
        announced=material.announced,
    )
    num_groups = write_rollout_file(file, header, material.groups)
    return f"{file}: {num_groups} groups; {folder}: {len(copies)} versions"


def load(file: Path, *, model: str | None = None, folder: Path | None = None, dtype: str | None = None) -> Material:
    """The rollouts in a rollout file. `model`, `folder` and `dtype` stand in for what its header says.

    Raises:
        ParityError: the base model or `folder` is not there, or the model is another one than the rollouts are of.
        RolloutFileError: no whole rollout file.
    """
    header, groups = read_rollout_file(file)
    path = Path(model or header.model)
    if not (model or header.model):
        raise ParityError(f"{file} does not say of which model its rollouts are; expected --model FOLDER")
    if not (path / "config.json").is_file():
        raise ParityError(
            f"{file}: its rollouts are of the model in {path}, which is not there; expected --model FOLDER to name it"
        )
    if header.model_digest and model_digest(path) != header.model_digest:
        raise ParityError(
            f"{file}: its rollouts are of another model than the one in {path}: digest {model_digest(path)[:12]}, "
            f"recorded {header.model_digest[:12]}; expected the base model of run {header.run!r} (--model FOLDER)"
        )
    dtype = dtype or header.dtype
    if dtype not in TOLERANCES:
        raise ParityError(f"{file}: dtype {dtype!r} of the published weights: expected one of {', '.join(TOLERANCES)}")
    if folder is not None and not folder.is_dir():
        raise ParityError(f"--weights {folder}: no such folder; expected one with v<version>.safetensors files")
    if folder is None and header.weights:
        folder = file.parent / header.weights
    config = RunConfig(
        name=header.run or "rollouts",
        model=msgspec.convert({"path": str(path), "dtype": dtype}, ModelConfig),
        environment=Plug(path="nobody:Needed"),
    )
    weights = WeightVersions(path, folder)
    weights.hold()
    return Material(
        title=f"rollout file {file.name}" + (f" of run {header.run}" if header.run else ""),
        config=config,
        groups=groups,
        weights=weights,
        policy_version=header.policy_version,
        forks=header.forks,
        announced=header.announced,
        notes=(f"{len(groups)} groups in the rollout file",),
    )
