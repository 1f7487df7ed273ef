"""The head's logprobs and entropies, and their gradients, against float64."""

import pytest
import torch
from fp64_oracle import logprobs_and_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from consumers import fp32_head
from consumers.fp32_head import selected_logprobs


def _inputs(n: int, h: int, v: int, dtype: torch.dtype = torch.float32, scale: float = 1.0):
    generator = torch.Generator().manual_seed(n * 1000 + v)
    hidden = (torch.randn(n, h, generator=generator) * scale).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=generator) * h**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=generator)
    return hidden, weight, targets


def _small_chunks(monkeypatch: pytest.MonkeyPatch, tokens: int, vocabulary: int, element_bytes: int = 4) -> None:
    monkeypatch.setattr(fp32_head, "_CHUNK_BYTES", tokens * vocabulary * element_bytes)


@pytest.mark.parametrize("temperature", [1.0, 0.7, "per token"])
def test_gradients_of_logprobs_and_entropy_pass_gradcheck(monkeypatch, temperature) -> None:
    _small_chunks(monkeypatch, 3, 7, 8)
    hidden, weight, targets = _inputs(5, 4, 7, torch.float64)
    if temperature == "per token":
        temperature = torch.tensor([0.5, 1.0, 2.0, 0.9, 1.3], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: selected_logprobs(h, w, targets, temperature), (hidden, weight))


@pytest.mark.parametrize(("n", "h", "v"), [(1, 1, 2), (7, 3, 5), (65, 33, 257), (3, 128, 1000), (130, 16, 31)])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_float32_is_within_its_budget_of_float64(monkeypatch, n, h, v, temperature) -> None:
    _small_chunks(monkeypatch, 16, v)
    hidden, weight, targets = _inputs(n, h, v, scale=3.0)
    logprobs, entropy = selected_logprobs(hidden, weight, targets, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    wide_hidden, wide_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    expected = logprobs_and_entropy(wide_hidden @ wide_weight.t(), targets, temperature)
    torch.testing.assert_close((logprobs.double(), entropy.double()), expected, rtol=0, atol=2e-5)
    upstream = torch.randn(2, n, generator=torch.Generator().manual_seed(1)).double()
    torch.autograd.backward((logprobs, entropy), tuple(upstream.float()))
    torch.autograd.backward(expected, tuple(upstream))
    for got, wanted in ((hidden.grad, wide_hidden.grad), (weight.grad, wide_weight.grad)):
        # The single row's gradient cancels to 0.008: there the error is measured against 0.1.
        assert (got.double() - wanted).norm() <= 2e-6 * max(wanted.norm(), 0.1)


def test_bfloat16_inputs_give_float32_results_and_bfloat16_gradients() -> None:
    hidden, weight, targets = _inputs(40, 32, 101, torch.bfloat16)
    logprobs, entropy = selected_logprobs(hidden, weight, targets)
    assert logprobs.dtype == torch.float32
    wide_hidden, wide_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    expected = logprobs_and_entropy(wide_hidden @ wide_weight.t(), targets, 1.0)
    torch.testing.assert_close((logprobs.double(), entropy.double()), expected, rtol=0, atol=2e-5)
    (logprobs.sum() + entropy.sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    for got, wanted in ((hidden.grad, wide_hidden.grad), (weight.grad, wide_weight.grad)):
        assert (got.double() - wanted).norm() <= 3e-3 * wanted.norm()


def test_chunks_change_nothing_but_the_order_of_accumulation(monkeypatch) -> None:
    hidden, weight, targets = _inputs(50, 8, 13, torch.float64)
    whole = torch.stack(selected_logprobs(hidden, weight, targets))
    whole_gradients = torch.autograd.grad(whole.sum(), (hidden, weight))
    _small_chunks(monkeypatch, 7, 13, 8)
    chunked = torch.stack(selected_logprobs(hidden, weight, targets))
    torch.testing.assert_close(chunked, whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.autograd.grad(chunked.sum(), (hidden, weight)), whole_gradients)


class _LargestTensor(TorchDispatchMode):
    """Remembers the elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_the_logits_of_all_tokens_are_never_held(monkeypatch) -> None:
    n, h, v = 300, 4, 50
    _small_chunks(monkeypatch, 10, v)
    hidden, weight, targets = _inputs(n, h, v)
    with _LargestTensor() as largest:
        logprobs, entropy = selected_logprobs(hidden, weight, targets)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.elements <= max(10 * v, n * h)


def test_a_greedy_temperature_counts_as_1() -> None:
    hidden, weight, targets = _inputs(4, 3, 5)
    expected = selected_logprobs(hidden, weight, targets, 1.0)
    torch.testing.assert_close(selected_logprobs(hidden, weight, targets, 0.0), expected, rtol=0, atol=0)
    mixed = torch.tensor([0.0, 9e-6, 1.0, 0.5])
    got = selected_logprobs(hidden, weight, targets, mixed)[0]
    assert torch.equal(got[:3], expected[0][:3])
    assert got[3] != expected[0][3]


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    hidden, weight, targets = _inputs(0, 3, 5)
    logprobs, entropy = selected_logprobs(hidden, weight, targets)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros(5, 3))


def test_huge_logits_stay_finite() -> None:
    hidden, weight, targets = _inputs(6, 3, 5, scale=1e5)
    logprobs, entropy = selected_logprobs(hidden, weight, targets)
    (logprobs.sum() + entropy.sum()).backward()
    for tensor in (logprobs, entropy, hidden.grad, weight.grad):
        assert torch.isfinite(tensor).all()


def test_entropy_is_not_charged_when_nobody_asks_for_its_gradient() -> None:
    hidden, weight, targets = _inputs(4, 3, 5, torch.float64)
    selected_logprobs(hidden, weight, targets)[0].sum().backward()
    expected = torch.autograd.grad(logprobs_and_entropy(hidden @ weight.t(), targets, 1.0)[0].sum(), (hidden, weight))
    torch.testing.assert_close((hidden.grad, weight.grad), expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, targets = _inputs(4, 3, 5)
    with pytest.raises(ValueError, match=r"expected \[N, H\], \[V, H\], \[N\]"):
        selected_logprobs(hidden, weight, targets[:3])
    with pytest.raises(ValueError, match="temperature"):
        selected_logprobs(hidden, weight, targets, torch.ones(3))
