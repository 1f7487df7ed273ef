"""Gradients computed in the head's forward pass: a promise that backward checks."""

import pytest
import torch
from torch import Tensor

from penstock.consumers.learning.batch.batch import Support
from penstock.consumers.learning.model import head_kernels
from penstock.consumers.learning.model.head import selected_logprobs

N, H, V = 23, 6, 17


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"tokens": 5, "vocabulary": 7, "block_elements": 14, "row_elements": 1 << 25}
    monkeypatch.setattr(head_kernels, "CPU_TILES", head_kernels.TileSizes(**sizes))


@pytest.fixture
def recomputed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each backward that computed the tiles again."""
    calls: list[bool] = []
    original = head_kernels.Head.backward

    def backward(self, *arguments):
        calls.append(True)
        return original(self, *arguments)

    monkeypatch.setattr(head_kernels.Head, "backward", backward)
    return calls


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (N,), generator=generator), torch.rand(N, generator=generator) + 0.5


def _loss(logprobs: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
    """Sums over tokens what depends on each token alone, as a clipped policy gradient with entropy bonus does."""
    ratio = (logprobs - logprobs.detach() * 0.9).exp().clamp(0.5, 2.0)
    return -(ratio * advantages).sum() - 0.1 * (entropy * advantages).sum()


def _promise(advantages: Tensor):
    def token_grads(part: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaves = logprobs.requires_grad_(), entropy.requires_grad_()
            return torch.autograd.grad(_loss(*leaves, advantages[part].to(logprobs.dtype)), leaves)

    return token_grads


def _gradients(dtype: torch.dtype, factor: float = 1.0, promise=None, support: Support | None = None):
    hidden, weight, targets, temperature = _inputs(dtype)
    advantages = torch.linspace(-1, 1, N)
    token_grads = _promise(advantages) if promise is None else promise
    found = selected_logprobs(hidden, weight, targets, temperature, support=support, token_grads=token_grads or None)
    (_loss(*found, advantages.to(found[0].dtype)) * factor).backward()
    return hidden.grad, weight.grad


@pytest.mark.parametrize("factor", [1.0, 65536.0, 0.3, -7.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_promise_that_holds_to_a_factor_is_used_and_right(recomputed, dtype, factor) -> None:
    found = _gradients(dtype, factor)
    assert not recomputed
    expected = _gradients(dtype, factor, promise=False)
    assert recomputed
    allowed = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-3}[dtype]
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype == dtype
        assert (got - wanted).norm() <= allowed * wanted.norm()


def test_a_promise_holds_under_a_support_mask(recomputed) -> None:
    targets = _inputs()[2]
    support = torch.rand(N, V, generator=torch.Generator().manual_seed(5)) < 0.5
    rows, kept = support.scatter(1, targets[:, None], True).nonzero(as_tuple=True)
    support = Support(kept, rows.bincount(minlength=N))
    found = _gradients(torch.float64, support=support)
    assert not recomputed
    torch.testing.assert_close(found, _gradients(torch.float64, promise=False, support=support))


_right = _promise(torch.linspace(-1, 1, N))
BROKEN = {
    "of another loss": lambda part, logprobs, entropy: (torch.ones_like(logprobs), torch.ones_like(entropy)),
    "without the entropy": lambda part, logprobs, entropy: (_right(part, logprobs, entropy)[0], None),
    "of nothing": lambda part, logprobs, entropy: (torch.zeros_like(logprobs), None),
    "of nan": lambda part, logprobs, entropy: (logprobs * float("nan"), None),
    "wrong in one token": lambda part, logprobs, entropy: tuple(
        grad + (torch.arange(part.start, part.stop) == 11) * 1e-3 for grad in _right(part, logprobs, entropy)
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_promise_that_does_not_hold_costs_time_and_no_truth(recomputed, name) -> None:
    found = _gradients(torch.float64, promise=BROKEN[name])
    assert recomputed
    torch.testing.assert_close(found, _gradients(torch.float64, promise=False), rtol=0, atol=0)


def test_a_loss_without_entropy_may_promise_none_of_it(recomputed) -> None:
    hidden, weight, targets, _ = _inputs()
    found = selected_logprobs(hidden, weight, targets, token_grads=lambda part, logprobs, _: (-logprobs, None))
    (-0.5 * found[0].square().sum()).backward()
    assert not recomputed
    expected = selected_logprobs(*(leaf.detach().requires_grad_() for leaf in (hidden, weight)), targets)[0]
    assert torch.equal(found[0], expected)
    torch.testing.assert_close(hidden.grad, _recomputed_gradient(hidden, weight, targets))


def _recomputed_gradient(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    leaf = hidden.detach().requires_grad_()
    return torch.autograd.grad(-0.5 * selected_logprobs(leaf, weight, targets)[0].square().sum(), leaf)[0]


def test_slices_come_in_order_and_cover_every_token_once() -> None:
    hidden, weight, targets, _ = _inputs()
    slices: list[slice] = []

    def token_grads(part: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, None]:
        assert logprobs.shape == entropy.shape == (part.stop - part.start,)
        assert not logprobs.requires_grad and not entropy.requires_grad
        slices.append(part)
        return torch.zeros_like(logprobs), None

    expected = selected_logprobs(hidden, weight, targets)
    found = selected_logprobs(hidden, weight, targets, token_grads=token_grads)
    assert len(slices) > 1
    assert [row for part in slices for row in range(part.start, part.stop)] == list(range(N))
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


def test_a_promise_is_not_asked_for_where_no_gradient_is_wanted() -> None:
    hidden, weight, targets, _ = _inputs()

    def token_grads(*_):
        raise AssertionError("asked")

    with torch.no_grad():
        selected_logprobs(hidden, weight, targets, token_grads=token_grads)
    selected_logprobs(hidden.detach(), weight.detach(), targets, token_grads=token_grads)
    selected_logprobs(hidden[:0], weight, targets[:0], token_grads=token_grads)[0].sum().backward()


def test_a_second_backward_through_one_promise_is_right(recomputed) -> None:
    hidden, weight, targets, temperature = _inputs()
    advantages = torch.linspace(-1, 1, N).double()
    found = selected_logprobs(hidden, weight, targets, temperature, token_grads=_promise(advantages))
    loss = _loss(*found, advantages)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert not recomputed
    second = torch.autograd.grad(loss, (hidden, weight))
    assert recomputed
    torch.testing.assert_close(first, second)


def test_gradients_add_up_over_micro_batches() -> None:
    hidden, weight, targets, temperature = _inputs()
    advantages = torch.linspace(-1, 1, N).double()
    for part in (slice(0, 9), slice(9, N)):
        found = selected_logprobs(
            hidden[part], weight, targets[part], temperature[part], token_grads=_promise(advantages[part])
        )
        _loss(*found, advantages[part]).backward()
    torch.testing.assert_close((hidden.grad, weight.grad), _gradients(torch.float64, promise=False))


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_is_given_no_gradient(recomputed, frozen) -> None:
    *tensors, targets, temperature = _inputs()
    tensors[frozen].requires_grad_(False)
    advantages = torch.linspace(-1, 1, N).double()
    found = selected_logprobs(*tensors, targets, temperature, token_grads=_promise(advantages))
    _loss(*found, advantages).backward()
    assert not recomputed and tensors[frozen].grad is None
    expected = _gradients(torch.float64, promise=False)[1 - frozen]
    torch.testing.assert_close(tensors[1 - frozen].grad, expected)
