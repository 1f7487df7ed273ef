"""Records the hidden states of one sequence in a running vLLM engine by hooks in its workers."""

from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.schemas import hidden_states as names

LOGITS_CHUNK_TOKENS = 64
"""Tokens whose logits are in memory at once."""


class HiddenStateCapture:
    """Mixed into vLLM's worker. Usage: `begin`, replay the sequence, `as_served`, replay it again, `end`.

    The first replay runs without vLLM's compiled graph and CUDA graphs, in which hooks do not fire. The second runs
    like any request, so that the two can be compared.
    """

    def penstock_begin_capture(self, token_ids: list[int]) -> None:
        """Begins to record the model's hidden states for `token_ids`.

        Raises:
            RuntimeError: the model lacks the recorded modules, or they are on several pipeline ranks.
        """
        worker: Any = self
        self.penstock_end_capture(None, 0)
        worker._penstock_recorder = _Recorder(worker.get_model(), token_ids)
        worker._penstock_recorder.attach()

    def penstock_capture_as_served(self) -> None:
        """Removes the hooks and enables the compiled graph: only the head's input is recorded from now on."""
        worker: Any = self
        worker._penstock_recorder.attach_as_served()

    def penstock_end_capture(self, path: str | None, policy_version: int) -> None:
        """Restores the engine; with a path, the first worker writes the recorded tensors there.

        Raises:
            RuntimeError: something other than the one sequence was computed meanwhile.
        """
        worker: Any = self
        recorder: _Recorder | None = getattr(worker, "_penstock_recorder", None)
        if recorder is None:
            return
        worker._penstock_recorder = None
        recorder.detach()
        if path is not None:
            tensors = recorder.tensors()
            if worker.rank == 0:
                metadata = {
                    "format": names.FORMAT,
                    "num_layers": str(len(recorder.layers)),
                    "policy_version": str(policy_version),
                }
                save_file(tensors, path, metadata=metadata)


class _Recorder:
    """Hooks on one model, and their recordings of the sequence `token_ids`, [N] int64.

    A forward pass of the engine computes a part of the sequence followed by padding: `_step` finds how much.
    """

    def __init__(self, model: Any, token_ids: list[int]) -> None:
        self._model = model
        self._token_ids = torch.tensor(token_ids)
        body = next((m for m in model.modules() if _is_body(m)), None)
        if body is None:
            raise RuntimeError(
                f"{type(model).__name__}: hidden states are recorded of models with embed_tokens, layers of self_attn, "
                "post_attention_layernorm and mlp, and norm, all of them in this process (no pipeline parallelism)"
            )
        self._body: Any = body
        self.layers: list[Any] = list(self._body.layers)
        self._compiled = [(m, m.do_not_compile) for m in model.modules() if hasattr(m, "do_not_compile")]
        self._hooks: list[Any] = []
        self._parts: dict[str, list[Tensor]] = {}
        self._seen = self._num_rows = 0
        self._served: Tensor | None = None

    def attach(self) -> None:
        for module, _ in self._compiled:
            module.do_not_compile = True
        hook = self._hooks.append
        hook(self._body.embed_tokens.register_forward_hook(self._step))
        for index, layer in enumerate(self.layers):
            self._record_layer(index, layer)
        hook(self._body.norm.register_forward_pre_hook(self._keep_sum(names.STREAM)))
        hook(self._body.norm.register_forward_hook(self._keep_output(names.NORM)))

    def attach_as_served(self) -> None:
        self.detach()
        compute_logits = self._model.compute_logits

        def keep(hidden_states: Tensor, *arguments: Any) -> Any:
            self._served = hidden_states[-1].detach().to("cpu", copy=True)
            return compute_logits(hidden_states, *arguments)

        self._model.compute_logits = keep

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module, before in self._compiled:
            module.do_not_compile = before
        # Uncovers the method of the class again.
        vars(self._model).pop("compute_logits", None)

    @torch.inference_mode()
    def tensors(self) -> dict[str, Tensor]:
        """Returns all recordings by the names of `penstock.schemas.hidden_states`. Must be called on every rank."""
        num_tokens = len(self._token_ids)
        found = {name: torch.cat(parts) for name, parts in self._parts.items()}
        wrong = {name: len(tensor) for name, tensor in found.items() if len(tensor) != num_tokens}
        if wrong or self._seen != num_tokens or self._served is None:
            raise RuntimeError(
                f"hidden states: {self._seen} of {num_tokens} tokens of the sequence were computed, in rows {wrong}; "
                "expected an engine that computes nothing else meanwhile"
            )
        found |= {
            names.TOKEN_IDS: self._token_ids,
            names.AS_SERVED: self._served,
            names.LOGPROBS: self._logprobs(found[names.NORM]),
        }
        return {name: tensor.contiguous() for name, tensor in found.items()}

    def _logprobs(self, norm: Tensor) -> Tensor:
        """Computes logprobs, [N - 1] float32, with the engine's own head."""
        device = next(self._model.parameters()).device
        found = []
        for start in range(0, len(norm) - 1, LOGITS_CHUNK_TOKENS):
            stop = min(start + LOGITS_CHUNK_TOKENS, len(norm) - 1)
            logits = self._model.compute_logits(norm[start:stop].to(device))
            if logits is not None:  # only the first rank of a tensor-parallel group receives them
                targets = self._token_ids[start + 1 : stop + 1, None].to(device)
                found.append(torch.log_softmax(logits.float(), dim=-1).gather(1, targets)[:, 0].cpu())
        return torch.cat(found) if found else torch.empty(0)

    def _record_layer(self, index: int, layer: Any) -> None:
        hook = self._hooks.append
        hook(layer.register_forward_pre_hook(self._keep_sum(names.layer(index, names.INPUT)), with_kwargs=True))
        hook(layer.self_attn.register_forward_hook(self._keep_output(names.layer(index, names.ATTENTION))))
        middle = self._keep_sum(names.layer(index, names.MIDDLE))
        hook(layer.post_attention_layernorm.register_forward_pre_hook(middle))
        hook(layer.mlp.register_forward_hook(self._keep_output(names.layer(index, names.MLP))))

    def _step(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Begins a forward pass: its first rows are the sequence's next tokens, the others are padding."""
        ids = arguments[0].detach().cpu()[: len(self._token_ids) - self._seen]
        differing = (ids != self._token_ids[self._seen : self._seen + len(ids)]).nonzero()
        self._num_rows = int(differing[0]) if len(differing) else len(ids)
        self._seen += self._num_rows

    def _keep(self, name: str, rows: Tensor) -> None:
        # A copy: the fused kernels work in place.
        self._parts.setdefault(name, []).append(rows[: self._num_rows].detach().to("cpu", copy=True))

    def _keep_output(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            self._keep(name, output[0] if isinstance(output, tuple) else output)

        return hook

    def _keep_sum(self, name: str) -> Any:
        """Returns a hook that records the residual stream before a module; vLLM passes it as two summands."""

        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any] | None = None) -> None:
            given = [value for value in (*arguments, *(keywords or {}).values()) if _is_states(value)]
            self._keep(name, given[0] if len(given) == 1 else given[0] + given[1])

        return hook


def _is_states(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_body(module: Any) -> bool:
    parts = ("self_attn", "post_attention_layernorm", "mlp")
    other = "pre_feedforward_layernorm"  # Gemma's: the norm after the attention means something else there
    layers = getattr(module, "layers", None)
    return (
        isinstance(layers, nn.ModuleList)
        and len(layers) > 0
        and hasattr(module, "embed_tokens")
        and hasattr(module, "norm")
        and all(hasattr(layer, part) for layer in layers for part in parts)
        and not any(hasattr(layer, other) for layer in layers)
    )
