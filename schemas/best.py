"""The description of a run's best model, stored with its weights in the run's folder `best`."""

from pathlib import Path

import msgspec

from penstock.schemas.adapter import AdapterIdentity
from penstock.schemas.config import ConfigError

BEST_FOLDER = "best"
"""In the run's folder."""
BEST_FILE = "best.json"


class BestModel(msgspec.Struct, frozen=True, kw_only=True):
    """figure: `checkpoint.best`. value: its value in the evaluation of `policy_version`, published after `update`.
    dtype: of the weights. adapter: set if they are an adapter's.
    """

    figure: str
    value: float
    policy_version: int
    update: int
    dtype: str
    adapter: AdapterIdentity | None = None


def read_best(folder: Path, file: str = BEST_FILE) -> BestModel | None:
    """Reads the description of the best model in `folder`; returns None if there is none.

    Raises:
        ConfigError: the file was modified by something other than the trainer.
    """
    try:
        return msgspec.json.decode((folder / file).read_bytes(), type=BestModel)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{folder / file}: {error}; expected what the trainer wrote, or no folder") from None
