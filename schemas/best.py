"""The model of a run's best evaluation, in the run's folder `best`: what it is, beside its weights."""

from pathlib import Path

import msgspec

from penstock.schemas.adapter import AdapterIdentity
from penstock.schemas.config import ConfigError

BEST_FOLDER = "best"
"""In the run's folder."""
BEST_FILE = "best.json"


class BestModel(msgspec.Struct, frozen=True, kw_only=True):
    """figure: `checkpoint.best`. value: what the evaluation of `policy_version`, published after `update`, has of it.
    dtype: of the weights. adapter: they are an adapter's.
    """

    figure: str
    value: float
    policy_version: int
    update: int
    dtype: str
    adapter: AdapterIdentity | None = None


def read_best(folder: Path, file: str = BEST_FILE) -> BestModel | None:
    """What the model in `folder` is; None if there is none.

    Raises:
        ConfigError: its `best.json` was changed by other hands.
    """
    try:
        return msgspec.json.decode((folder / file).read_bytes(), type=BestModel)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{folder / file}: {error}; expected what the trainer wrote, or no folder") from None
