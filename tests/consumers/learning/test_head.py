"""The head's logprobs and entropies, and their gradients, against float64."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.consumers.learning.batch.batch import Support
from penstock.consumers.learning.model import head_kernels
from penstock.consumers.learning.model.head import selected_logprobs


def _inputs(n: int, h: int, v: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, device: str = "cpu"):
    generator = torch.Generator().manual_seed(n * 1000 + v)
    hidden = (torch.randn(n, h, generator=generator) * scale).to(device, dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=generator) * h**-0.5).to(device, dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=generator).to(device)
    return hidden, weight, targets


def _support(n: int, v: int, targets: Tensor) -> Tensor:
    """About two thirds of the vocabulary, the target always."""
    support = torch.rand(n, v, generator=torch.Generator().manual_seed(3)).to(targets.device) < 0.67
    return support.scatter(1, targets[:, None], True)


def _ids(support: Tensor | None) -> Support | None:
    """The ids of a mask [n, v], the last first."""
    if support is None:
        return None
    kept = [row.nonzero()[:, 0].flip(0) for row in support]
    return Support(torch.cat([*kept, support.new_zeros(0, dtype=torch.int64)]), support.sum(1))


def _oracle(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, support: Tensor | None):
    """float64 logprobs, entropies, and leaves to differentiate by, from the definition."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    scale = torch.as_tensor(temperature, dtype=torch.float64, device=hidden.device).expand(targets.shape)
    logits = leaves[0] @ leaves[1].t() / scale[:, None]
    if support is not None:
        logits = logits.masked_fill(~support, -float("inf"))
    log_p = torch.log_softmax(logits, 1)
    safe = log_p if support is None else log_p.masked_fill(~support, 0.0)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * safe).sum(1), leaves


def _small_tiles(monkeypatch: pytest.MonkeyPatch, tokens: int, vocabulary: int) -> None:
    tiles = head_kernels.TileSizes(tokens, vocabulary, block_elements=2 * vocabulary + 1, row_elements=1)
    monkeypatch.setattr(head_kernels, "CPU_TILES", tiles)


def _relative(got: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    return float((got.double() - wanted).norm() / max(wanted.norm(), floor))


@pytest.mark.parametrize("masked", [False, True], ids=["everything", "support"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "per token"])
def test_gradients_of_logprobs_and_entropy_pass_gradcheck(monkeypatch, temperature, masked) -> None:
    _small_tiles(monkeypatch, 3, 4)
    hidden, weight, targets = _inputs(5, 4, 7, torch.float64)
    if temperature == "per token":
        temperature = torch.tensor([0.5, 1.0, 2.0, 0.9, 1.3], dtype=torch.float64)
    support = _support(5, 7, targets) if masked else None
    assert torch.autograd.gradcheck(
        lambda h, w: selected_logprobs(h, w, targets, temperature, support=_ids(support)), (hidden, weight)
    )


SHAPES = [(1, 1, 2), (7, 3, 5), (65, 33, 257), (3, 128, 1000), (130, 16, 31), (33, 8, 1)]


@pytest.mark.parametrize(("n", "h", "v"), SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 0.3, "per token"])
@pytest.mark.parametrize("masked", [False, True], ids=["everything", "support"])
def test_float32_is_within_its_budget_of_float64(monkeypatch, n, h, v, temperature, masked) -> None:
    _small_tiles(monkeypatch, 16, 37)
    hidden, weight, targets = _inputs(n, h, v, scale=3.0)
    if temperature == "per token":
        temperature = torch.linspace(0.3, 1.5, n)
    support = _support(n, v, targets) if masked else None
    found = selected_logprobs(hidden, weight, targets, temperature, support=_ids(support))
    assert found[0].dtype == found[1].dtype == torch.float32
    *expected, leaves = _oracle(hidden, weight, targets, temperature, support)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)
    upstream = torch.randn(2, n, generator=torch.Generator().manual_seed(1)).double()
    torch.autograd.backward(found, tuple(upstream.float()))
    torch.autograd.backward(expected, tuple(upstream))
    for got, wanted in zip((hidden, weight), leaves, strict=True):
        # A gradient that cancels to almost nothing is measured against 0.1.
        assert _relative(got.grad, wanted.grad, 0.1) <= 2e-6


def test_the_error_is_that_of_one_softmax_and_a_little(monkeypatch) -> None:
    _small_tiles(monkeypatch, 32, 511)
    hidden, weight, targets = _inputs(64, 256, 8000, scale=3.0)
    *expected, leaves = _oracle(hidden, weight, targets, 1.0, None)
    sum(expected).sum().backward()
    whole = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    log_p = torch.log_softmax(whole[0] @ whole[1].t(), 1)
    naive = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    sum(naive).sum().backward()
    found = selected_logprobs(hidden, weight, targets)
    sum(found).sum().backward()
    for got, other, wanted in zip(found, naive, expected, strict=True):
        assert (got - wanted).abs().max() <= 1.5 * (other - wanted).abs().max() + 1e-6
    for got, other, wanted in zip((hidden, weight), whole, leaves, strict=True):
        assert _relative(got.grad, wanted.grad) <= 1.5 * _relative(other.grad, wanted.grad) + 1e-7


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_bfloat16_inputs_give_float32_results_and_bfloat16_gradients(temperature) -> None:
    hidden, weight, targets = _inputs(40, 32, 101, torch.bfloat16)
    found = selected_logprobs(hidden, weight, targets, temperature)
    assert found[0].dtype == torch.float32
    *expected, leaves = _oracle(hidden, weight, targets, temperature, None)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)
    sum(found).sum().backward()
    sum(expected).sum().backward()
    for got, wanted in zip((hidden, weight), leaves, strict=True):
        assert got.grad.dtype == torch.bfloat16
        assert _relative(got.grad, wanted.grad) <= 3e-3


def test_a_float32_head_on_bfloat16_hidden_states_keeps_the_weights_digits() -> None:
    hidden, _, targets = _inputs(9, 32, 101, torch.bfloat16)
    weight = _inputs(9, 32, 101)[1]
    found = selected_logprobs(hidden, weight, targets)
    *expected, leaves = _oracle(hidden, weight, targets, 1.0, None)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=2e-5)
    sum(found).sum().backward()
    sum(expected).sum().backward()
    assert _relative(weight.grad, leaves[1].grad) <= 2e-6


@pytest.mark.parametrize("tile", [(1, 1), (7, 5), (50, 13), (512, 4096)])
def test_tiles_change_nothing_but_the_order_of_accumulation(monkeypatch, tile) -> None:
    hidden, weight, targets = _inputs(50, 8, 13, torch.float64)
    support = _support(50, 13, targets)
    whole = torch.stack(selected_logprobs(hidden, weight, targets, 0.8, support=_ids(support)))
    whole_gradients = torch.autograd.grad(whole.sum(), (hidden, weight))
    _small_tiles(monkeypatch, *tile)
    tiled = torch.stack(selected_logprobs(hidden, weight, targets, 0.8, support=_ids(support)))
    torch.testing.assert_close(tiled, whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.autograd.grad(tiled.sum(), (hidden, weight)), whole_gradients)


def test_a_tied_head_gets_the_gradients_of_both_of_its_uses() -> None:
    _, embedding, targets = _inputs(6, 4, 9, torch.float64)
    ids = torch.tensor([1, 1, 8, 0, 3, 5])
    found = selected_logprobs(torch.nn.functional.embedding(ids, embedding), embedding, targets)
    (gradient,) = torch.autograd.grad(sum(found).sum(), embedding)
    log_p = torch.log_softmax(embedding[ids] @ embedding.t(), 1)
    expected = log_p.gather(1, targets[:, None])[:, 0] - (log_p.exp() * log_p).sum(1)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), embedding)[0])


def test_a_token_without_ids_has_the_whole_vocabulary() -> None:
    hidden, weight, targets = _inputs(6, 4, 9, torch.float64)
    support = _support(6, 9, targets)
    ids = _ids(support[:3])
    ids = Support(ids.kept, torch.cat([ids.counts, torch.zeros(3, dtype=torch.int64)]))
    support[3:] = True
    found = selected_logprobs(hidden, weight, targets, support=ids)
    torch.testing.assert_close(found, tuple(_oracle(hidden, weight, targets, 1.0, support)[:2]))


def test_a_support_of_the_target_alone_leaves_no_choice_and_no_gradient() -> None:
    hidden, weight, targets = _inputs(6, 4, 9)
    support = torch.zeros(6, 9, dtype=torch.bool).scatter(1, targets[:, None], True)
    logprobs, entropy = selected_logprobs(hidden, weight, targets, support=_ids(support))
    assert torch.equal(logprobs, torch.zeros(6)) and torch.equal(entropy, torch.zeros(6))
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.abs().max() <= 1e-6 and weight.grad.abs().max() <= 1e-6


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


def _ones(part: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(logprobs), torch.ones_like(entropy)


@pytest.mark.parametrize("masked", [False, True], ids=["everything", "support"])
@pytest.mark.parametrize("promised", [False, True], ids=["recompute", "in forward"])
def test_neither_logits_nor_support_of_all_tokens_are_ever_held(monkeypatch, promised, masked) -> None:
    n, h, v = 120, 4, 50
    _small_tiles(monkeypatch, 10, 20)
    hidden, weight, targets = _inputs(n, h, v)
    token_grads = _ones if promised else None
    support = Support(targets, torch.ones_like(targets)) if masked else None
    with _LargestTensor() as largest:
        found = selected_logprobs(hidden, weight, targets, 0.9, support=support, token_grads=token_grads)
        sum(found).sum().backward()
    assert largest.elements <= n * h


@pytest.mark.parametrize("v", [50, 5000])
def test_between_forward_and_backward_memory_is_that_of_the_inputs(v) -> None:
    n, h = 40, 8
    hidden, weight, targets = _inputs(n, h, v)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        selected_logprobs(hidden, weight, targets, 0.7)
    inputs = {tensor.data_ptr() for tensor in (hidden, weight, targets)}
    assert sum(tensor.numel() for tensor in saved if tensor.data_ptr() not in inputs) <= 5 * n
    assert {hidden.data_ptr(), weight.data_ptr()} <= {tensor.data_ptr() for tensor in saved}


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
    logprobs, entropy = selected_logprobs(
        hidden, weight, targets, 0.5, support=_ids(torch.ones(0, 5, dtype=torch.bool))
    )
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros(5, 3))


def test_huge_logits_stay_finite() -> None:
    hidden, weight, targets = _inputs(6, 3, 5, scale=1e5)
    logprobs, entropy = selected_logprobs(hidden, weight, targets)
    (logprobs.sum() + entropy.sum()).backward()
    for tensor in (logprobs, entropy, hidden.grad, weight.grad):
        assert torch.isfinite(tensor).all()


def test_a_nan_stays_in_its_own_token() -> None:
    hidden, weight, targets = _inputs(4, 3, 5)
    with torch.no_grad():
        hidden[1, 2] = float("nan")
    logprobs, entropy = selected_logprobs(hidden, weight, targets)
    expected = torch.tensor([False, True, False, False])
    assert torch.equal(logprobs.isnan(), expected) and torch.equal(entropy.isnan(), expected)


def test_a_result_that_nobody_asks_a_gradient_of_gets_none() -> None:
    for which in (0, 1):
        hidden, weight, targets = _inputs(4, 3, 5, torch.float64)
        selected_logprobs(hidden, weight, targets)[which].sum().backward()
        *expected, leaves = _oracle(hidden, weight, targets, 1.0, None)
        expected[which].sum().backward()
        torch.testing.assert_close((hidden.grad, weight.grad), tuple(leaf.grad for leaf in leaves))


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, targets = _inputs(4, 3, 5, torch.float64)
    logprobs, _ = selected_logprobs(hidden, weight, targets)
    (gradient,) = torch.autograd.grad(logprobs.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_autocast_does_not_reach_into_the_head() -> None:
    hidden, weight, targets = _inputs(20, 64, 100)
    expected = selected_logprobs(hidden, weight, targets)
    gradients = torch.autograd.grad(sum(expected).sum(), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        got = selected_logprobs(hidden, weight, targets)
        got_gradients = torch.autograd.grad(sum(got).sum(), (hidden, weight))
    torch.testing.assert_close((got, got_gradients), (expected, gradients), rtol=0, atol=0)


BAD = {
    r"targets\[2\] = 5, expected a token in \[0, 5\)": {"targets": torch.tensor([0, 4, 5, 1])},
    r"targets\[0\] = -100, expected": {"targets": torch.tensor([-100, 4, 2, 1])},
    r"temperature = -0\.5, expected a finite number": {"temperature": -0.5},
    "temperature = nan, expected": {"temperature": float("nan")},
    "temperature = inf, expected": {"temperature": torch.tensor([1.0, float("inf"), 1.0, 1.0])},
    "the support of token 2 lacks its target 1": {
        "support": Support(torch.tensor([3, 0, 0, 4, 2]), torch.tensor([1, 1, 2, 1]))
    },
}


@pytest.mark.parametrize("message", BAD)
def test_an_argument_that_does_not_fit_is_named(message) -> None:
    arguments = {"hidden": torch.ones(4, 3), "weight": torch.ones(5, 3), "targets": torch.tensor([3, 0, 1, 2])}
    selected_logprobs(**arguments)
    with pytest.raises(ValueError, match=message):
        selected_logprobs(**{**arguments, **BAD[message]})


def _cuda_matmuls_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def mm(left, right, *, out_dtype, out):
        assert left.dtype == right.dtype == torch.bfloat16 and out.dtype == out_dtype == torch.float32
        out.copy_(left.float() @ right.float())

    def addmm(into, left, right, *, out_dtype, out):
        assert left.dtype == right.dtype == torch.bfloat16 and into.dtype == out_dtype == torch.float32 and out is into
        into.addmm_(left.float(), right.float())

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    operands = head_kernels._BfloatOperands
    monkeypatch.setattr(head_kernels, "_Operands", lambda hidden, weight, inverse, _: operands(hidden, weight, inverse))


@pytest.mark.parametrize("temperature", [1.0, "per token"])
@pytest.mark.parametrize("promised", [False, True], ids=["recompute", "in forward"])
def test_the_cuda_path_is_within_its_budget_where_only_its_matmuls_are_replaced(
    monkeypatch, temperature, promised
) -> None:
    _small_tiles(monkeypatch, 16, 40)
    _cuda_matmuls_on_cpu(monkeypatch)
    _check_bfloat16("cpu", temperature, promised)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, "per token"])
@pytest.mark.parametrize("promised", [False, True], ids=["recompute", "in forward"])
def test_bfloat16_on_cuda_is_within_its_budget(monkeypatch, temperature, promised) -> None:
    monkeypatch.setattr(head_kernels, "CUDA_TILES", head_kernels.CUDA_TILES._replace(tokens=32, vocabulary=64))
    _check_bfloat16("cuda", temperature, promised)


def _check_bfloat16(device: str, temperature: float | str, promised: bool) -> None:
    n, v = 100, 300
    hidden, weight, targets = _inputs(n, 64, v, torch.bfloat16, device=device)
    scale = torch.linspace(0.5, 1.5, n, device=device) if temperature == "per token" else temperature
    upstream = torch.randn(2, n, generator=torch.Generator().manual_seed(1)).to(device)
    found = selected_logprobs(
        hidden,
        weight,
        targets,
        scale,
        support=_ids(_support(n, v, targets)),
        token_grads=(lambda part, *_: (upstream[0, part], upstream[1, part])) if promised else None,
    )
    *expected, leaves = _oracle(hidden, weight, targets, scale, _support(n, v, targets))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)
    torch.autograd.backward(found, tuple(upstream))
    torch.autograd.backward(expected, tuple(upstream.double()))
    for got, wanted in zip((hidden, weight), leaves, strict=True):
        assert got.grad.dtype == torch.bfloat16
        assert _relative(got.grad, wanted.grad) <= 3e-3


@pytest.mark.gpu
def test_float32_on_cuda_is_within_its_budget() -> None:
    hidden, weight, targets = _inputs(100, 64, 300, device="cuda")
    found = selected_logprobs(hidden, weight, targets, 0.8)
    *expected, leaves = _oracle(hidden, weight, targets, 0.8, None)
    sum(found).sum().backward()
    sum(expected).sum().backward()
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)
    for got, wanted in zip((hidden, weight), leaves, strict=True):
        assert _relative(got.grad, wanted.grad) <= 2e-6
