"""Which layer is wrong: each part of the model run by the trainer on the input that the engine gave its own.

An error of one layer moves every layer after it. So the trainer's layers do not run on each other's outputs: hooks put
the engine's residual stream in front of each attention, MLP and norm, and of the head, and what comes out of each is
compared with what came out of the engine's. An error then shows where it arises and nowhere else.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from penstock.consumers.learning.attention import make_layout
from penstock.consumers.learning.head import selected_logprobs
from penstock.consumers.learning.model import PackedModel
from penstock.consumers.parity.errors import ParityError
from penstock.consumers.parity.report import AS_SERVED, LayerGap
from penstock.schemas import hidden_states as names
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative error of one part's output, by the type that the trainer's body computes with."""
ALLOWED_AS_SERVED = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
"""Of the whole body, in which the rounding errors of all layers have added up."""
ALLOWED_HEAD = 1e-5
"""Of the logprobs. The head computes in float32, whatever the body does: a bfloat16 head is off by 1e-4 and more."""


@torch.no_grad()
def compare_layers(model: PackedModel, capture: Path | str) -> tuple[LayerGap, ...]:
    """How far engine and trainer are apart in each part of the model, on equal input; in the order of computation.

    With e the engine's output and t the trainer's, over all tokens, the error is |e - t| / |t| (2-norms).

    Args:
        model: with the weights of the version that the capture names (`captured_version`).
        capture: a file laid out as `penstock.schemas.hidden_states` says.

    Returns:
        "embedding"; "layers.<i>.attention" and "layers.<i>.mlp", each with the norm before it; "norm", the final one;
        "head", logprobs of the sequence's own tokens; "as served", the engine's final hidden state as it serves
        requests (compiled) against the one it recorded, which is the engine against itself.

    Raises:
        ParityError: the file is no capture, or one of another model; or the trainer's model has other parts.
    """
    tensors, num_layers = _read(capture)
    body = getattr(model.module, model.module.base_model_prefix)
    layers = getattr(body, "layers", ())
    if len(layers) != num_layers:
        raise ParityError(f"{capture}: hidden states of {num_layers} layers, the trainer's model has {len(layers)}")
    token_ids = tensors[names.TOKEN_IDS]
    if int(token_ids.max()) >= model.vocabulary:
        raise ParityError(f"{capture}: token {int(token_ids.max())}, the vocabulary ends at {model.vocabulary - 1}")
    device = next(model.module.parameters()).device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    counts = np.array([len(token_ids)])
    layout = make_layout(0 * counts, 0 * counts, 0 * counts, counts, len(token_ids))
    with _Replacement(tensors) as replacement:
        replacement.watch(body, layers)
        norm, head = model.run(token_ids.to(device), torch.arange(len(token_ids), device=device), layout.to(device))
    if norm.shape != tensors[names.NORM].shape:
        raise ParityError(
            f"{capture}: hidden states {tuple(tensors[names.NORM].shape)}, the trainer's are {tuple(norm.shape)}"
        )
    found = replacement.gaps
    found.append(_gap("norm", tensors[names.NORM], norm, ALLOWED))
    hidden = tensors[names.NORM].to(norm.dtype)
    logprobs, _ = selected_logprobs(hidden[:-1], head, tensors[names.TOKEN_IDS][1:])
    error = _error(tensors[names.LOGPROBS], logprobs)
    found.append(LayerGap(name="head", error=error, allowed=ALLOWED_HEAD))
    found.append(_gap(AS_SERVED, tensors[names.AS_SERVED], hidden[-1], ALLOWED_AS_SERVED))
    return tuple(found)


def captured_version(capture: Path | str) -> int:
    """The policy version whose weights a capture was made with.

    Raises:
        ParityError: the file is no capture.
    """
    return int(_metadata(capture)["policy_version"])


class _Replacement:
    """Hooks on the trainer's model that swap inputs for the engine's and compare outputs, for one forward pass."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._hooks: list[Any] = []
        self.gaps: list[LayerGap] = []

    def __enter__(self) -> "_Replacement":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def watch(self, body: Any, layers: Any) -> None:
        add = self._hooks.append
        for index, layer in enumerate(layers):
            own = {name: getattr(layer, name, None) for name in ("self_attn", "post_attention_layernorm", "mlp")}
            if missing := [name for name, part in own.items() if part is None]:
                raise ParityError(
                    f"layers are compared of models with self_attn, post_attention_layernorm and mlp; "
                    f"{type(layer).__name__} has no {', '.join(missing)}"
                )
            before = self._swap(names.layer(index, names.INPUT), "embedding" if index == 0 else None)
            add(layer.register_forward_pre_hook(before, with_kwargs=True))
            middle = self._swap(names.layer(index, names.MIDDLE))
            add(layer.post_attention_layernorm.register_forward_pre_hook(middle, with_kwargs=True))
            for part, name in ((layer.self_attn, names.ATTENTION), (layer.mlp, names.MLP)):
                add(part.register_forward_hook(self._compare(names.layer(index, name))))
        add(body.norm.register_forward_pre_hook(self._swap(names.STREAM), with_kwargs=True))

    def _swap(self, name: str, compared_as: str | None = None) -> Callable[..., Any]:
        """Puts the engine's tensor in the place of the module's hidden states, [1, N, H]."""
        theirs = self._tensors[name]

        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            ours = arguments[0] if arguments else keywords["hidden_states"]
            if ours[0].shape != theirs.shape:
                raise ParityError(
                    f"{name}: the engine's hidden states are {tuple(theirs.shape)}, the trainer's "
                    f"{tuple(ours[0].shape)}; expected captures of the same model"
                )
            if compared_as is not None:
                self.gaps.append(_gap(compared_as, theirs, ours[0], ALLOWED))
            swapped = theirs.to(ours.dtype)[None]
            if arguments:
                return (swapped, *arguments[1:]), keywords
            return arguments, keywords | {"hidden_states": swapped}

        return hook

    def _compare(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            ours = output[0] if isinstance(output, tuple) else output
            self.gaps.append(_gap(name, self._tensors[name], ours.reshape(self._tensors[name].shape), ALLOWED))

        return hook


def _gap(name: str, engine: Tensor, trainer: Tensor, allowed: dict[torch.dtype, float]) -> LayerGap:
    return LayerGap(name=name, error=_error(engine, trainer), allowed=allowed[trainer.dtype])


def _error(engine: Tensor, trainer: Tensor) -> float:
    """|engine - trainer| / |trainer|, 2-norms over everything; 0 where both are zero."""
    difference = float((engine.double() - trainer.double()).norm())
    return difference / float(trainer.double().norm()) if difference else 0.0


def _metadata(capture: Path | str) -> dict[str, str]:
    try:
        with safe_open(capture, framework="pt") as file:
            metadata = file.metadata() or {}
    except Exception as error:  # safetensors raises types of its own, OSError among them
        raise ParityError(f"{capture}: no hidden states can be read from it: {error}") from error
    if metadata.get("format") != names.FORMAT:
        raise ParityError(f"{capture}: format {metadata.get('format')!r}, expected {names.FORMAT!r}")
    return metadata


def _read(capture: Path | str) -> tuple[dict[str, Tensor], int]:
    """The tensors of a capture and its number of layers."""
    num_layers, tensors = int(_metadata(capture)["num_layers"]), load_file(capture)
    parts = (names.INPUT, names.ATTENTION, names.MIDDLE, names.MLP)
    expected = {names.layer(index, part) for index in range(num_layers) for part in parts}
    expected |= {names.TOKEN_IDS, names.STREAM, names.NORM, names.LOGPROBS, names.AS_SERVED}
    if missing := expected - set(tensors):
        raise ParityError(f"{capture}: lacks {sorted(missing)[:3]}, expected every tensor of {names.FORMAT}")
    num_tokens = len(tensors[names.TOKEN_IDS])
    if num_tokens < 2:
        raise ParityError(f"{capture}: a sequence of {num_tokens} tokens, expected 2 or more")
    return tensors, num_layers
