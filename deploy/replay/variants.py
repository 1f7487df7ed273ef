"""The variants of a replay: the run's own settings with overrides."""

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.schemas.config import ConfigError, RunConfig, config_of

_TABLES = ("objective", "correction", "advantage", "trainer", "model", "teacher")
SECTIONS = (*_TABLES, "mode", "max_lag", "num_updates", "seed")
"""The parts of a run file that a training step of a given batch depends on: `trainer.decay` reads `num_updates`, the
split into mini-batches reads `seed`."""
OWN = "own"
RECORDED = "recorded"
"""The name of the run's own numbers, next to the variants."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
RANKS = "trainer.num_processes"


class ReplayVariant(msgspec.Struct, frozen=True, kw_only=True):
    """settings: overrides of the run's own settings, `dotted.path=value` each."""

    name: str
    settings: tuple[str, ...] = ()

    @property
    def changes_sums_alone(self) -> bool:
        """True if it has the run's own settings, except perhaps the number of ranks."""
        return all(_field(setting) == RANKS for setting in self.settings)

    def config(self, recorded: dict[str, Any], source: Path) -> RunConfig:
        """Returns the settings of a recorded run with this variant's overrides; `source` is named in errors.

        Raises:
            ConfigError: a setting that does not fit.
        """
        document = copy.deepcopy(recorded)
        for field, path in (setting.split("=", 1) for setting in self.settings if "=" in setting):
            plug = field.strip().removesuffix(".path")
            if plug in ("objective", "advantage") and document[plug]["path"] != path:
                document[plug]["kwargs"] = {}  # these are of another one
        document["record"] = False
        return config_of(document, source, self.settings)


def variants_of(
    objectives: Sequence[str], settings: Sequence[str], named: Sequence[Sequence[str]]
) -> tuple[ReplayVariant, ...]:
    """Returns the variants of a command line: one per objective, one per `--variant NAME SETTING ...`, else one.

    `settings` apply to all of them.

    Raises:
        ConfigError: two variants of one name, an unusable name, or a setting that no step reads.
    """
    variants = [
        ReplayVariant(name=path.rpartition(":")[2].lower() or path, settings=(f"objective.path={path}", *settings))
        for path in objectives
    ]
    variants += [ReplayVariant(name=name, settings=(*settings, *more)) for name, *more in named]
    if not variants:
        variants = [ReplayVariant(name="set" if settings else OWN, settings=tuple(settings))]
    for variant in variants:
        if not NAME.fullmatch(variant.name):
            raise ConfigError(f"variant {variant.name!r}: expected a name of letters, digits, '.', '_' and '-'")
        if variant.name.lower() == RECORDED:
            raise ConfigError(
                f"variant {variant.name!r}: the name of the run's own numbers; expected another one, as in "
                "--variant NAME SETTING ..."
            )
        if [other.name for other in variants].count(variant.name) > 1:
            raise ConfigError(f"variant {variant.name!r}: two have this name; name them by --variant NAME SETTING ...")
        for setting in variant.settings:
            _check_setting(setting)
    return tuple(variants)


def steps_alike(one: RunConfig, other: RunConfig) -> bool:
    """Returns whether two configurations make the same steps from the same batches."""
    return all(getattr(one, name) == getattr(other, name) for name in SECTIONS)


def _field(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _check_setting(setting: str) -> None:
    if "=" not in setting:
        raise ConfigError(f"setting {setting!r}: expected FIELD=VALUE, as in correction.mode=token_mask")
    if _field(setting).partition(".")[0] not in SECTIONS:
        raise ConfigError(
            f"setting {setting!r}: a replay does not read {_field(setting)}; expected a field of "
            f"{', '.join(SECTIONS[:-4])}, or {', '.join(SECTIONS[-4:])}"
        )
