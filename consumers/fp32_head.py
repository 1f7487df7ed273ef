"""The language-model head in float32: logprobs and entropies of chosen tokens, without ever holding all the logits."""

from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 32 * 1024 * 1024
"""Memory of one chunk of logits."""
GREEDY_TEMPERATURE = 1e-5
"""Below it the engine samples greedily and its logprobs are those of temperature 1."""


def selected_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of each distribution.

    Computed in float32 (float64 for float64 inputs), in chunks of tokens, and once more in backward, so that no more
    than one chunk of logits [n, V] is alive at a time. Both results are differentiable in hidden and weight, once.

    Args:
        hidden: [N, H], any float type.
        weight: [V, H].
        targets: [N] int64 in [0, V).
        temperature: scalar or [N]; below 1e-5 counts as 1, as in vLLM.

    Returns:
        logprobs [N] and entropy [N] in nats, float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes that do not fit.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"selected_logprobs: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets "
            f"{tuple(targets.shape)}; expected [N, H], [V, H], [N]"
        )
    dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
    scale = torch.as_tensor(temperature, dtype=dtype, device=hidden.device)
    if scale.ndim and scale.shape != targets.shape:
        raise ValueError(
            f"selected_logprobs: temperature {tuple(scale.shape)}, expected a scalar or {tuple(targets.shape)}"
        )
    scale = torch.where(scale < GREEDY_TEMPERATURE, torch.ones_like(scale), scale).expand(targets.shape)
    return _SelectedLogprobs.apply(hidden, weight, targets, scale)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = weight.to(temperature.dtype)
        logprobs, entropy, log_normalizer = (temperature.new_empty(targets.shape) for _ in range(3))
        for chunk in _chunks(len(targets), len(weight), temperature.element_size()):
            logits = _logits(hidden[chunk], wide, temperature[chunk])
            normalizer = logits.logsumexp(1)
            log_normalizer[chunk] = normalizer
            logprobs[chunk] = logits.gather(1, targets[chunk, None]).squeeze(1) - normalizer
            log_p = logits.sub_(normalizer[:, None])
            entropy[chunk] = -(log_p.exp() * log_p).sum(1)
        ctx.save_for_backward(hidden, weight, targets, temperature, entropy, log_normalizer)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, entropy, log_normalizer = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None
        wide = weight.to(temperature.dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(wide) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(len(targets), len(weight), temperature.element_size()):
            log_p = _logits(hidden[chunk], wide, temperature[chunk]).sub_(log_normalizer[chunk, None])
            p = log_p.exp()
            grad_logits = torch.zeros_like(p)
            if grad_logprobs is not None:
                # d logp[y] / dz = onehot(y) - p
                grad_logits.addcmul_(p, grad_logprobs[chunk, None], value=-1.0)
                grad_logits.scatter_add_(1, targets[chunk, None], grad_logprobs[chunk, None])
            if grad_entropy is not None:
                # dH / dz = -p * (log p + H)
                grad_logits.addcmul_(p.mul_(log_p.add_(entropy[chunk, None])), grad_entropy[chunk, None], value=-1.0)
            grad_logits.div_(temperature[chunk, None])
            if grad_hidden is not None:
                grad_hidden[chunk] = (grad_logits @ wide).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), hidden[chunk].to(wide.dtype))
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    return (hidden.to(weight.dtype) @ weight.t()).div_(temperature[:, None])


def _chunks(num_tokens: int, vocabulary: int, element_bytes: int) -> list[slice]:
    size = max(1, _CHUNK_BYTES // (vocabulary * element_bytes))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]
