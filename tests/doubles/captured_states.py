"""Writes captures of hidden states without an engine: those that transformers computes, in an engine's format."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.schemas import hidden_states as names


@torch.no_grad()
def capture_of(model: Any, token_ids: list[int], path: Path, *, version: int = 0, **changes: torch.Tensor) -> Path:
    """Writes the hidden states that a transformers model with Qwen's layout computes; `changes` replace tensors."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, states: Any) -> None:
        found[name] = (states[0] if isinstance(states, tuple) else states)[0].clone()

    body, hooks = model.model, []
    for index, layer in enumerate(body.layers):
        parts = {
            names.INPUT: layer.register_forward_pre_hook(
                lambda m, a, k, i=index: keep(names.layer(i, names.INPUT), a[0]), with_kwargs=True
            ),
            names.ATTENTION: layer.self_attn.register_forward_hook(
                lambda m, a, o, i=index: keep(names.layer(i, names.ATTENTION), o)
            ),
            names.MIDDLE: layer.post_attention_layernorm.register_forward_pre_hook(
                lambda m, a, i=index: keep(names.layer(i, names.MIDDLE), a[0])
            ),
            names.MLP: layer.mlp.register_forward_hook(lambda m, a, o, i=index: keep(names.layer(i, names.MLP), o)),
        }
        hooks += parts.values()
    hooks.append(body.norm.register_forward_pre_hook(lambda m, a: keep(names.STREAM, a[0])))
    hooks.append(body.norm.register_forward_hook(lambda m, a, o: keep(names.NORM, o)))
    body(torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    logits = found[names.NORM].float() @ model.get_output_embeddings().weight.float().t()
    targets = torch.tensor(token_ids)[1:, None]
    found[names.LOGPROBS] = torch.log_softmax(logits[:-1], dim=-1).gather(1, targets)[:, 0]
    found[names.AS_SERVED] = found[names.NORM][-1].clone()
    found[names.TOKEN_IDS] = torch.tensor(token_ids)
    metadata = {"format": names.FORMAT, "num_layers": str(len(body.layers)), "policy_version": str(version)}
    save_file({**found, **changes}, path, metadata=metadata)
    return path
