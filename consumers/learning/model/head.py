"""The language-model head in float32: logprobs and entropies of chosen tokens, without holding all logits."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.consumers.learning.batch.batch import Support
from penstock.consumers.learning.model.head_kernels import ChosenLogits, Grads, Head, Results, TokenGrads

GREEDY_TEMPERATURE = 1e-5
"""Below it the engine samples greedily and its logprobs are those of temperature 1."""


class OutputHead(NamedTuple):
    """The map from hidden states [N, H] to logits [N, V]: hidden @ weight.T, then c tanh(logit / c) with c = `softcap`.

    A bias is a last column of the weight [V, H], and 1 the last of the hidden states.
    """

    weight: Tensor
    softcap: float | None = None


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    softcap: float | None = None,
    support: Support | None = None,
    token_grads: TokenGrads | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log softmax(hidden @ weight.T / temperature) at the targets, and each distribution's entropy.

    Works through tiles of tokens by vocabulary with a running log-normalizer (Milakov & Gimelshein, "Online normalizer
    calculation for softmax", 2018), so that [N, V] never exists. With z the logits over the temperature, y the target,
    p = softmax(z) and H its entropy:

        logprob = z_y - log sum_v exp(z_v)                 d logprob / d z_v = [v = y] - p_v
        H = -sum_v p_v log p_v                             d H / d z_v = -p_v (log p_v + H)

    Both results are differentiable in hidden and weight, once. Backward computes the tiles again, so that only O(N·H)
    stays in memory between the two. `token_grads` saves that second pass if the loss is a sum over tokens: forward asks
    it for the loss's derivatives of a slice of tokens and computes the gradients immediately, which keeps the weight's
    gradient in memory too. It is a promise: backward compares it with the derivatives that arrive, allows a common
    factor (loss scaling) and a rounding error of the largest one, and computes the gradients again if it is broken.

    Matmuls: float32 operands in float32, except that bfloat16 hidden and weight on CUDA are multiplied as they are and
    accumulated in float32, with the gradient of the logits rounded to bfloat16 in backward. Float32 matmuls follow
    torch's global precision, which a process must not lower to TF32 or bfloat16 if it needs the accuracy promised here.

    Args:
        hidden: [N, H], any float type.
        weight: [V, H], any float type; the head's own or the tied embedding's.
        targets: [N] int64 in [0, V).
        temperature: scalar or [N], finite and >= 0, without gradient; below 1e-5 counts as 1, as in vLLM.
        softcap: see `OutputHead`; applied before the temperature.
        support: the ids that could be sampled, of N tokens; None means all. Normalizer and entropy are over them.
        token_grads: called with (slice of tokens, their logprobs, their entropies), detached, for slices in ascending
            order that cover [0, N); returns d loss / d logprobs and d loss / d entropy (or None), of the slice's shape.
            Not called if no gradient is wanted.

    Returns:
        logprobs [N] and entropy [N] in nats, float32 (float64 if hidden or weight is float64).

    Raises:
        ValueError: a target outside the vocabulary or its support, a temperature that is negative or not finite.
    """
    dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
    scale = torch.as_tensor(temperature, dtype=dtype, device=targets.device)
    is_one = _check_values(weight, targets, scale, support)
    greedy = scale < GREEDY_TEMPERATURE
    inverse = None if is_one else torch.where(greedy, torch.ones_like(scale), scale).reciprocal().expand(targets.shape)
    with torch.autocast(hidden.device.type, enabled=False):
        return _SelectedLogprobs.apply(
            hidden, weight, targets, inverse, support, softcap, token_grads if torch.is_grad_enabled() else None
        )


def further_logprobs(
    hidden: Tensor, head: OutputHead, targets: Tensor, temperature: Tensor, logprobs: Tensor, ids: Tensor
) -> Tensor:
    """Returns the logprobs of K further ids of each token, [N, K], under gradient.

    Each differs from the target's by the difference of two logits: logprob_v = logprob_y + z_v - z_y.

    Args:
        hidden, targets, temperature: as for `selected_logprobs`, which returned `logprobs` [N] without a support.
        ids: [N, K] int64 in [0, V).
    """
    with torch.autocast(hidden.device.type, enabled=False):
        logits = ChosenLogits.apply(hidden, head.weight, torch.cat([targets[:, None], ids], 1))
    if head.softcap is not None:
        logits = (logits / head.softcap).tanh() * head.softcap
    scale = torch.where(temperature < GREEDY_TEMPERATURE, 1.0, temperature)[:, None]
    return logprobs[:, None] + (logits[:, 1:] - logits[:, :1]) / scale


def _check_values(weight: Tensor, targets: Tensor, scale: Tensor, support: Support | None) -> bool:
    """Raises ValueError if a value cannot be used; returns whether every temperature is 1. Waits for CUDA once."""
    vocabulary = len(weight)
    outside = (targets < 0) | (targets >= vocabulary)
    bad_scale = ~(torch.isfinite(scale) & (scale >= 0))
    findings = [outside.any(), bad_scale.any(), ((scale == 1) | (scale < GREEDY_TEMPERATURE)).all()]
    if support is not None:
        unsupported = ~support.holds(targets)
        findings.append(unsupported.any())
    has_outside, has_bad_scale, is_one, *has_unsupported = torch.stack(findings).tolist()
    if has_outside:
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"selected_logprobs: targets[{row}] = {int(targets[row])}, expected a token in [0, {vocabulary})"
        )
    if has_bad_scale:
        value = float(scale[bad_scale][0] if scale.ndim else scale)
        raise ValueError(f"selected_logprobs: temperature = {value}, expected a finite number of 0 or more")
    if any(has_unsupported):
        row = int(unsupported.nonzero()[0])
        raise ValueError(
            f"selected_logprobs: the support of token {row} lacks its target {int(targets[row])}, expected every "
            "target inside the support"
        )
    return is_one


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        inverse_temperature: Tensor | None,
        support: Support | None,
        softcap: float | None,
        token_grads: TokenGrads | None,
    ) -> tuple[Tensor, Tensor]:
        head = Head(hidden, weight, targets, inverse_temperature, support, softcap)
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        ctx.promise = None
        if token_grads is not None and any(needs):
            results, ctx.promise = head.forward_with_gradients(token_grads, needs)
        else:
            results = head.forward()
        ctx.others = support, softcap
        ctx.save_for_backward(hidden, weight, targets, inverse_temperature, *results)
        ctx.set_materialize_grads(False)
        return results.logprobs, results.entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, logprobs, entropy, log_normalizer = ctx.saved_tensors
        inputs = [*tensors, *ctx.others]
        # Used by one backward only, which returns its gradients as they are; a second backward computes its own.
        promise, ctx.promise = ctx.promise, None
        nothing = (None,) * 5
        if grad_logprobs is None and grad_entropy is None:
            return None, None, *nothing
        grads = Grads(grad_logprobs, grad_entropy)
        factor = None if promise is None else _common_factor(promise.grads, grads)
        if promise is not None and factor is not None:
            pairs = zip((promise.hidden, promise.weight), inputs, strict=False)
            return *(None if grad is None else _scaled(grad, factor).to(like.dtype) for grad, like in pairs), *nothing
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        with torch.autocast(logprobs.device.type, enabled=False):
            found = Head(*inputs).backward(grads, Results(logprobs, entropy, log_normalizer), needs)
        return *found, *nothing


def _scaled(gradient: Tensor, factor: float) -> Tensor:
    return gradient if factor == 1.0 else gradient.mul_(factor)


def _common_factor(promised: Grads, arrived: Grads) -> float | None:
    """Returns c with arrived = c * promised to within rounding; None if there is none. Waits for CUDA once."""
    present = next(grad for grad in arrived if grad is not None)
    if not present.numel():
        return 1.0

    def flat(grads: Grads) -> Tensor:
        return torch.cat([torch.zeros_like(present) if grad is None else grad for grad in grads])

    want, got = flat(promised), flat(arrived)
    place = want.abs().argmax()
    largest = want.take(place)  # want[place] would wait for the place
    factor = torch.where(largest == 0, 0.0, got.take(place) / largest)
    expected, eps = want * factor, torch.finfo(want.dtype).eps
    # The second term allows for derivatives that are small by cancellation.
    allowed = 16 * eps * expected.abs() + eps * expected.abs().max()
    holds, value = torch.stack([((got - expected).abs() <= allowed).all(), factor]).tolist()
    return value if holds else None
