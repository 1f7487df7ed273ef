"""Computes a mixture of experts by the experts that the engine chose (R3: arXiv 2510.11370).

Two computations of one router choose differently wherever two scores are close. With the choice given, the weights of
the chosen experts still come from the trainer's own router, so that it has its gradient.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.consumers.learning.batch.batch import UNKNOWN_EXPERT
from penstock.schemas.config import ConfigError
from penstock.schemas.routes import shape_in


class RouteReplay:
    """Forces the choices of a model's routers, by hooks on its layers of experts.

    A hook lets `torch.topk` over all experts return the given ones with their own scores, whatever the family's router
    computes around it. In a layer that is computed again for its gradient the hooks work alike, so that the routes of a
    pass stay until the next one.

    Raises:
        ConfigError: no layer with experts, or one without a number.
    """

    def __init__(self, module: Any, named: str) -> None:
        self.num_layers, self.num_experts, self.per_token = shape_in(module.config.get_text_config().to_dict())
        self._routes: Tensor | None = None
        self._is_free = False
        self.differing: dict[int, list[Tensor]] | None = None
        """By layer, while not None: of each pass [N] bool, whether the model's own choice is another set of experts."""
        self._named, self._type = named, type(module).__name__
        self._layers: dict[int, _Choice] = {}
        for name, block in module.named_modules():
            number = re.search(r"\.layers\.(\d+)\.", f".{name}.")
            if number is None or not isinstance(getattr(block, "experts", None), nn.Module):
                continue
            choice = self._layers[int(number[1])] = _Choice(self, int(number[1]))
            block.register_forward_pre_hook(choice.begin)
            block.register_forward_hook(choice.end, always_call=True)
        if not self._layers or not self.num_experts:
            raise ConfigError(
                f"model.replay_routes = true with {named}: {self._type} has no layers of experts; expected false, or a "
                "mixture of experts"
            )

    def take(self, routes: Tensor | None) -> None:
        """Forces the choices of the next pass. routes: [N, layers, experts per token], integers; -1 where the router
        chooses. None for a pass without."""
        self._routes = None if self._is_free else routes
        for choice in self._layers.values():
            choice.is_made = False

    @contextmanager
    def compared(self) -> Iterator[dict[int, list[Tensor]]]:
        """Within the context `differing` collects; yields it."""
        self.differing = {}
        try:
            yield self.differing
        finally:
            self.differing = None

    @contextmanager
    def freed(self) -> Iterator[None]:
        """Within the context the model's own routers choose."""
        self._is_free = True
        try:
            yield
        finally:
            self._is_free = False

    @torch.no_grad()
    def check(self, run: Callable[[Tensor], Any]) -> None:
        """Raises ConfigError unless every layer of experts chooses by a `torch.topk` that can be replaced. run: runs
        the model over one token with these routes."""
        run(torch.full((1, self.num_layers, self.per_token), UNKNOWN_EXPERT))
        missed = [layer for layer, choice in self._layers.items() if not choice.is_made]
        if missed:
            raise ConfigError(
                f"model.replay_routes = true with {self._named}: the routers of {self._type} in layers {missed} do not "
                f"choose {self.per_token} of {self.num_experts} experts by torch.topk; expected false"
            )

    @property
    def is_forcing(self) -> bool:
        """True if the pass has routes."""
        return self._routes is not None

    def of(self, layer: int) -> Tensor:
        """Returns the routes of one layer, [N, experts per token] int64, of a pass that has them."""
        assert self._routes is not None
        return self._routes[:, layer].long()


class _Choice(TorchFunctionMode):
    """The choice of one layer, entered while the layer runs."""

    def __init__(self, replay: RouteReplay, layer: int) -> None:
        super().__init__()
        self._replay, self._layer = replay, layer
        self.is_made = False

    def begin(self, module: nn.Module, arguments: Any) -> None:
        if self._replay.is_forcing:
            self.__enter__()

    def end(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._replay.is_forcing:
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, own = args[0] if args else kwargs["input"], found.indices
        forced = self._replay.of(self._layer)
        wanted = (len(forced), self._replay.num_experts), (len(forced), self._replay.per_token)
        if (scores.shape, own.shape) != wanted:
            return found
        self.is_made = True
        forced = torch.where(forced == UNKNOWN_EXPERT, own, forced)
        if self._replay.differing is not None:
            others = (forced.sort().values != own.sort().values).any(-1)
            self._replay.differing.setdefault(self._layer, []).append(others)
        return torch.return_types.topk((scores.gather(-1, forced), forced))
