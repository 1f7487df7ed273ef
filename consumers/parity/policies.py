"""The policies that rollouts name, one model in memory at a time."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from penstock.consumers.learning.model import PackedModel
from penstock.consumers.parity.errors import ParityError
from penstock.schemas.config import ConfigError, RunConfig
from safetensors import SafetensorError
from torch import Tensor

_CONFIG = "config.json"
_CACHE_BYTES = 1 << 30
"""Weights kept in memory beside the model's: a small model's versions are read once each."""


class LoadedPolicy(NamedTuple):
    """A model that is in memory already, and the version of its weights. It is read only."""

    version: int
    model: PackedModel


class PolicyStore:
    """The trainer's model with the weights of whichever version is asked for.

    weights: of a version the published safetensors file, or a folder with a whole model; None where it is gone.
    loaded: serves its version without a load.
    """

    def __init__(
        self,
        config: RunConfig,
        weights: Callable[[int], Path | None],
        device: torch.device,
        loaded: LoadedPolicy | None = None,
    ) -> None:
        self._config, self._weights, self._device, self._loaded = config, weights, device, loaded
        self._paths: dict[int, Path | None] = {}
        self._model: PackedModel | None = None
        self._held: Path | None = None
        self._cache: dict[Path, dict[str, Tensor]] = {}
        self.dtype = config.model.dtype

    def has(self, version: int) -> bool:
        """Whether the weights of `version` are there, as far as their file tells."""
        return version >= 0 and (
            (self._loaded is not None and version == self._loaded.version) or self._path(version) is not None
        )

    @property
    def vocabulary(self) -> int:
        return (self._loaded.model if self._loaded is not None else self._base()).vocabulary

    def model(self, version: int) -> PackedModel:
        """The model with the weights of `version`, until the next call.

        Raises:
            ParityError: they are gone, or do not fit the model of model.path.
        """
        if self._loaded is not None and version == self._loaded.version:
            return self._loaded.model
        path = self._path(version)
        if path is None:
            raise ParityError(f"the weights of version {version} are gone; a larger weights.keep_versions keeps them")
        model = self._base()
        if path == self._held:
            return model
        self._held = None
        if path in self._cache:
            model.module.load_state_dict(self._cache[path])
        else:
            self._read(model, path, version)
        self._held = path
        return model

    def _read(self, model: PackedModel, path: Path, version: int) -> None:
        try:
            with self._folder(path) as folder:
                model.load(folder)
        except (ConfigError, OSError, SafetensorError) as error:
            if not path.exists():
                raise ParityError(
                    f"the weights of version {version} were deleted during the check ({path.resolve()}); a larger "
                    "weights.keep_versions keeps them"
                ) from error
            raise ParityError(
                f"the weights of version {version} in {path.resolve()} are not those of model.path = "
                f"{self._config.model.path!r}: {error}"
            ) from error
        state: dict[str, Tensor] = model.module.state_dict()
        size = sum(tensor.nbytes for tensor in state.values())
        if (len(self._cache) + 1) * size <= _CACHE_BYTES:
            self._cache[path] = {name: tensor.clone() for name, tensor in state.items()}

    def _path(self, version: int) -> Path | None:
        if version not in self._paths:
            found = self._weights(version)
            self._paths[version] = found if found is not None and found.exists() else None
        return self._paths[version]

    def _base(self) -> PackedModel:
        if self._model is None:
            self._model = PackedModel(self._config.model.path, self.dtype, self._device)
            self._held = Path(self._config.model.path)
        return self._model

    @contextmanager
    def _folder(self, path: Path) -> Iterator[Path]:
        """A folder that transformers loads `path` from: the base model's configuration beside the published file."""
        if path.is_dir():
            yield path
            return
        with tempfile.TemporaryDirectory(prefix="penstock-parity-") as folder:
            (Path(folder) / "model.safetensors").symlink_to(path.absolute())
            (Path(folder) / _CONFIG).symlink_to((Path(self._config.model.path) / _CONFIG).resolve())
            yield Path(folder)
