"""The state that a learner resumes from: masters and optimizer moments, written by all ranks during training."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.learning.model.tensor_files import Specs, read_tensors, specs_in, write_tensors
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.config import ConfigError

MASTERS = "masters/"
"""Tensors are named `masters/<parameter>` and `<moment>/<parameter>`, as in `exp_avg/lm_head.weight`."""
MOST_NAMED = 3


class LearnerState:
    """The tensors of a model and its optimizer as files, by the names of the parameters. Its methods are collective."""

    def __init__(self, model: PackedModel, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        self._model = model
        self._optimizer = optimizer
        self._ranks = ranks
        self._writers = ranks.for_thread("checkpoint")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def begin(self, folder: Path) -> Future[dict[str, str]]:
        """Copies the tensors into host memory, then writes them into `folder` in a thread. The lead's result is the
        digest of each file by name; OSError if some rank could not write."""
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors().items()}
        return self._thread.submit(self._write, copies, folder)

    def _write(self, copies: Mapping[str, Tensor], folder: Path) -> dict[str, str]:
        self._writers.phase = "checkpoint"
        try:
            return write_tensors(copies, folder, self._writers)
        finally:
            self._writers.phase = ""

    def load(self, folder: Path) -> None:
        """Replaces masters and moments by those in `folder`, written by any number of ranks.

        Raises:
            ConfigError: they are another model's.
            OSError: they cannot be read.
        """
        found = specs_in(folder)
        parameters = self._model.state()
        check_masters(parameters, found, folder)
        self._optimizer.state.clear()
        for place, (shape, dtype) in found.items():
            moment, _, name = place.partition("/")
            if not place.startswith(MASTERS):
                parameter = parameters[name]
                whole = shape == parameter.shape
                self._optimizer.state[parameter][moment] = (
                    torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                    if whole
                    else torch.zeros(shape, dtype=dtype, device=parameter.device)
                )
        read_tensors({name: tensor.detach() for name, tensor in self._tensors().items()}, folder, self._ranks)

    def _tensors(self) -> dict[str, Tensor]:
        """Returns the tensors in use by their names in a checkpoint."""
        parameters = self._model.state()
        tensors = {MASTERS + name: tensor for name, tensor in parameters.items()}
        for name, parameter in parameters.items():
            if parameter in self._optimizer.state:
                moments = self._optimizer.state[parameter]
                tensors |= {f"{moment}/{name}": value for moment, value in moments.items()}
        return tensors


def check_masters(expected: Mapping[str, Tensor], specs: Specs, folder: Path) -> None:
    """Raises ConfigError, naming what differs, unless `specs` has masters for `expected`, by parameter name."""
    model = {MASTERS + name: tensor.shape for name, tensor in expected.items()}
    found = {name: shape for name, (shape, _) in specs.items() if name.startswith(MASTERS)}
    differences = [
        *(f"lacks {name}" for name in sorted(model.keys() - found.keys())),
        *(f"has {name}, which the model has not" for name in sorted(found.keys() - model.keys())),
        *(
            f"{name} is {list(found[name])}, in the model {list(shape)}"
            for name, shape in model.items()
            if found.get(name, shape) != shape
        ),
    ]
    if differences:
        more = f"; and {len(differences) - MOST_NAMED} more" if len(differences) > MOST_NAMED else ""
        raise ConfigError(f"{folder}: of another model: {'; '.join(differences[:MOST_NAMED])}{more}")
