"""The head's logprobs and entropies, and their gradients, against float64; gradients promised in the forward pass."""

from collections.abc import Callable

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


def _oracle(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    support: Tensor | None,
    softcap: float | None = None,
):
    """float64 logprobs, entropies, and leaves to differentiate by, from the definition."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    scale = torch.as_tensor(temperature, dtype=torch.float64, device=hidden.device).expand(targets.shape)
    logits = leaves[0] @ leaves[1].t()
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / scale[:, None]
    if support is not None:
        logits = logits.masked_fill(~support, -float("inf"))
    log_p = torch.log_softmax(logits, 1)
    safe = log_p if support is None else log_p.masked_fill(~support, 0.0)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * safe).sum(1), leaves


def _small_tiles(monkeypatch: pytest.MonkeyPatch, tokens: int, vocabulary: int, row_elements: int = 1) -> None:
    tiles = head_kernels.TileSizes(tokens, vocabulary, block_elements=2 * vocabulary + 1, row_elements=row_elements)
    monkeypatch.setattr(head_kernels, "CPU_TILES", tiles)


def _relative(got: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    return float((got.double() - wanted).norm() / max(wanted.norm(), floor))


def _check(
    inputs,
    temperature: float | Tensor,
    support: Tensor | None,
    allowed: float,
    *,
    promised: bool = False,
    softcap: float | None = None,
):
    """Compares results with the oracle's, and gradients to the part `allowed` of their norm."""
    hidden, weight, targets = inputs
    upstream = torch.randn(2, len(targets), generator=torch.Generator().manual_seed(1)).to(hidden.device)
    token_grads = (lambda part, *_: (upstream[0, part], upstream[1, part])) if promised else None
    settings = {"support": _ids(support), "softcap": softcap, "token_grads": token_grads}
    found = selected_logprobs(hidden, weight, targets, temperature, **settings)
    *expected, leaves = _oracle(hidden, weight, targets, temperature, support, softcap)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)
    torch.autograd.backward(found, tuple(upstream))
    torch.autograd.backward(expected, tuple(upstream.double()))
    for got, wanted in zip((hidden, weight), leaves, strict=True):
        # A gradient that cancels to almost nothing is measured against 0.1.
        assert got.grad.dtype == got.dtype and _relative(got.grad, wanted.grad, 0.1) <= allowed


@pytest.mark.parametrize(
    ("shape", "tile"),
    [((1, 1, 2), (1, 1)), ((7, 3, 5), (7, 5)), ((65, 33, 257), (16, 37)), ((3, 128, 1000), (16, 37)),
     ((130, 16, 31), (50, 13)), ((33, 8, 1), (512, 4096))],
)  # fmt: skip
def test_float32_is_within_its_budget_of_float64(monkeypatch, shape, tile) -> None:
    _small_tiles(monkeypatch, *tile)
    n, _, v = shape
    for temperature in (1.0, 0.3, torch.linspace(0.3, 1.5, n)):
        for masked in (False, True):
            inputs = _inputs(*shape, scale=3.0)
            _check(inputs, temperature, _support(n, v, inputs[2]) if masked else None, 2e-6)


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("masked", [False, True], ids=["everything", "support"])
@pytest.mark.parametrize("temperature", [1.0, 0.3, torch.linspace(0.3, 1.5, 65)], ids=["1", "0.3", "per token"])
def test_capped_logits_are_within_the_same_budget(monkeypatch, temperature, masked, promised) -> None:
    _small_tiles(monkeypatch, 16, 37)
    inputs = _inputs(65, 33, 257, scale=3.0)
    support = _support(65, 257, inputs[2]) if masked else None
    _check(inputs, temperature, support, 2e-6, promised=promised, softcap=2.5)


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


@pytest.mark.parametrize(
    "path", ["cpu", "only the matmuls of cuda replaced", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_bfloat16_inputs_give_float32_results_and_bfloat16_gradients(monkeypatch, path) -> None:
    device = "cuda" if path == "cuda" else "cpu"
    monkeypatch.setattr(head_kernels, "CUDA_TILES", head_kernels.CUDA_TILES._replace(tokens=32, vocabulary=64))
    _small_tiles(monkeypatch, 16, 40)
    if path.startswith("only"):
        _cuda_matmuls_on_cpu(monkeypatch)
    for temperature in (1.0, torch.linspace(0.5, 1.5, 100, device=device)):
        for promised in (False, True):
            inputs = _inputs(100, 64, 300, torch.bfloat16, device=device)
            _check(inputs, temperature, _support(100, 300, inputs[2]), 3e-3, promised=promised)
    if path == "cuda":
        _check(_inputs(100, 64, 300, device="cuda"), 0.8, None, 2e-6)


def test_a_float32_head_on_bfloat16_hidden_states_keeps_the_weights_digits() -> None:
    hidden, _, targets = _inputs(9, 32, 101, torch.bfloat16)
    weight = _inputs(9, 32, 101)[1]
    found = selected_logprobs(hidden, weight, targets)
    *expected, leaves = _oracle(hidden, weight, targets, 1.0, None)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=2e-5)
    sum(found).sum().backward()
    sum(expected).sum().backward()
    assert _relative(weight.grad, leaves[1].grad) <= 2e-6


def test_a_support_may_be_the_whole_vocabulary_or_the_target_alone() -> None:
    hidden, weight, targets = _inputs(6, 4, 9, torch.float64)
    support = _support(6, 9, targets)
    ids = _ids(support[:3])
    ids = Support(ids.kept, torch.cat([ids.counts, torch.zeros(3, dtype=torch.int64)]))
    support[3:] = True  # a token without ids
    found = selected_logprobs(hidden, weight, targets, support=ids)
    torch.testing.assert_close(found, tuple(_oracle(hidden, weight, targets, 1.0, support)[:2]))
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


def test_neither_logits_nor_support_of_all_tokens_are_ever_held(monkeypatch) -> None:
    n, h, v = 120, 4, 50
    _small_tiles(monkeypatch, 10, 20)
    for token_grads in (None, _ones):
        hidden, weight, targets = _inputs(n, h, v)
        for support in (None, Support(targets, torch.ones_like(targets))):
            with _LargestTensor() as largest:
                found = selected_logprobs(hidden, weight, targets, 0.9, support=support, token_grads=token_grads)
                sum(found).sum().backward()
            assert largest.elements <= n * h
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        selected_logprobs(hidden, weight, targets, 0.7)
    inputs = {tensor.data_ptr() for tensor in (hidden, weight, targets)}
    assert sum(tensor.numel() for tensor in saved if tensor.data_ptr() not in inputs) <= 5 * n
    assert {hidden.data_ptr(), weight.data_ptr()} <= {tensor.data_ptr() for tensor in saved}


def test_greedy_no_huge_and_nan_inputs_have_the_results_that_are_theirs() -> None:
    hidden, weight, targets = _inputs(4, 3, 5)
    expected = selected_logprobs(hidden, weight, targets, 1.0)
    torch.testing.assert_close(selected_logprobs(hidden, weight, targets, 0.0), expected, rtol=0, atol=0)
    got = selected_logprobs(hidden, weight, targets, torch.tensor([0.0, 9e-6, 1.0, 0.5]))[0]
    assert torch.equal(got[:3], expected[0][:3]) and got[3] != expected[0][3], "a greedy temperature counts as 1"
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(selected_logprobs(hidden, weight, targets), expected, rtol=0, atol=0)
    with torch.no_grad():
        hidden[1, 2] = float("nan")
    for result in selected_logprobs(hidden, weight, targets):
        assert result.isnan().tolist() == [False, True, False, False]
    hidden, weight, targets = _inputs(6, 3, 5, scale=1e5)
    found = selected_logprobs(hidden, weight, targets)
    sum(found).sum().backward()
    assert all(torch.isfinite(tensor).all() for tensor in (*found, hidden.grad, weight.grad))
    hidden, weight, targets = _inputs(0, 3, 5)
    found = selected_logprobs(hidden, weight, targets, 0.5, support=_ids(torch.ones(0, 5, dtype=torch.bool)))
    sum(found).sum().backward()
    assert found[0].shape == found[1].shape == (0,) and torch.equal(weight.grad, torch.zeros(5, 3))


def test_a_result_that_nobody_asks_a_gradient_of_gets_none_and_a_second_derivative_is_refused() -> None:
    for which in (0, 1):
        hidden, weight, targets = _inputs(4, 3, 5, torch.float64)
        selected_logprobs(hidden, weight, targets)[which].sum().backward()
        *expected, leaves = _oracle(hidden, weight, targets, 1.0, None)
        expected[which].sum().backward()
        torch.testing.assert_close((hidden.grad, weight.grad), tuple(leaf.grad for leaf in leaves))
    logprobs, _ = selected_logprobs(hidden, weight, targets)
    (gradient,) = torch.autograd.grad(logprobs.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_an_argument_that_does_not_fit_is_named() -> None:
    arguments = {"hidden": torch.ones(4, 3), "weight": torch.ones(5, 3), "targets": torch.tensor([3, 0, 1, 2])}
    lacking = Support(torch.tensor([3, 0, 0, 4, 2]), torch.tensor([1, 1, 2, 1]))
    for message, changed in (
        (r"targets\[2\] = 5, expected a token in \[0, 5\)", {"targets": torch.tensor([0, 4, 5, 1])}),
        (r"targets\[0\] = -100, expected", {"targets": torch.tensor([-100, 4, 2, 1])}),
        (r"temperature = -0\.5, expected a finite number", {"temperature": -0.5}),
        ("temperature = nan, expected", {"temperature": float("nan")}),
        ("temperature = inf, expected", {"temperature": torch.tensor([1.0, float("inf"), 1.0, 1.0])}),
        ("the support of token 2 lacks its target 1", {"support": lacking}),
    ):
        with pytest.raises(ValueError, match=message):
            selected_logprobs(**arguments | changed)


N, H, V = 23, 6, 17
ADVANTAGES = torch.linspace(-1, 1, N)


@pytest.fixture
def recomputed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each backward that computed the tiles again, which are small."""
    _small_tiles(monkeypatch, 5, 7, 1 << 25)
    calls: list[bool] = []
    original = head_kernels.Head.backward

    def backward(self, *arguments):
        calls.append(True)
        return original(self, *arguments)

    monkeypatch.setattr(head_kernels.Head, "backward", backward)
    return calls


def _loss(logprobs: Tensor, entropy: Tensor, advantages: Tensor = ADVANTAGES) -> Tensor:
    """Sums over tokens what depends on each token alone, as a clipped policy gradient with entropy bonus does."""
    advantages = advantages.to(logprobs.dtype)
    ratio = (logprobs - logprobs.detach() * 0.9).exp().clamp(0.5, 2.0)
    return -(ratio * advantages).sum() - 0.1 * (entropy * advantages).sum()


def _right(part: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaves = logprobs.requires_grad_(), entropy.requires_grad_()
        return torch.autograd.grad(_loss(*leaves, ADVANTAGES[part]), leaves)


def _gradients(
    promise: Callable | None,
    dtype: torch.dtype = torch.float64,
    factor: float = 1.0,
    support: Support | None = None,
    frozen: int | None = None,
) -> list[Tensor | None]:
    *leaves, targets = _inputs(N, H, V, dtype)
    if frozen is not None:
        leaves[frozen].requires_grad_(False)
    (factor * _loss(*selected_logprobs(*leaves, targets, 0.8, support=support, token_grads=promise))).backward()
    return [leaf.grad for leaf in leaves]


def test_a_promise_that_holds_to_a_factor_is_used_and_right(recomputed) -> None:
    support = _ids(_support(N, V, _inputs(N, H, V)[2]))
    double, single, half = torch.float64, torch.float32, torch.bfloat16
    for dtype, factor, kept, frozen, allowed in (
        (double, 1.0, None, None, 1e-14),
        (double, -7.1, support, None, 1e-14),
        (double, 0.3, None, 0, 1e-14),
        (double, 0.3, None, 1, 1e-14),
        (single, 65536.0, None, None, 1e-6),
        (half, 0.3, None, None, 2e-3),
    ):
        case = dtype, factor, frozen
        recomputed.clear()
        found = _gradients(_right, dtype, factor, kept, frozen)
        assert not recomputed, case
        expected = _gradients(None, dtype, factor, kept, frozen)
        assert recomputed, case
        for place, (got, wanted) in enumerate(zip(found, expected, strict=True)):
            assert (got is None) == (wanted is None) == (place == frozen), case
            assert got is None or (got.dtype == dtype and (got - wanted).norm() <= allowed * wanted.norm()), case


BROKEN = {
    "of another loss": _ones,
    "without the entropy": lambda part, logprobs, entropy: (_right(part, logprobs, entropy)[0], None),
    "of nothing": lambda part, logprobs, entropy: (torch.zeros_like(logprobs), None),
    "of nan": lambda part, logprobs, entropy: (logprobs * float("nan"), None),
    "wrong in one token": lambda part, logprobs, entropy: tuple(
        grad + (torch.arange(part.start, part.stop) == 11) * 1e-3 for grad in _right(part, logprobs, entropy)
    ),
}


def test_a_promise_that_does_not_hold_costs_time_and_no_truth(recomputed) -> None:
    expected = _gradients(None)
    for name, promise in BROKEN.items():
        recomputed.clear()
        found = _gradients(promise)
        assert recomputed, name
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)


def test_a_promise_is_asked_for_in_slices_that_cover_every_token_once_and_only_where_a_gradient_is_wanted(
    recomputed,
) -> None:
    hidden, weight, targets = _inputs(N, H, V, torch.float64)
    slices: list[slice] = []

    def without_entropy(part: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, None]:
        assert logprobs.shape == entropy.shape == (part.stop - part.start,)
        assert not logprobs.requires_grad and not entropy.requires_grad
        slices.append(part)
        return -logprobs, None

    expected, found = (
        selected_logprobs(hidden, weight, targets, token_grads=promise) for promise in (None, without_entropy)
    )
    assert len(slices) > 1 and [row for part in slices for row in range(part.start, part.stop)] == list(range(N))
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    first, again, wanted = (
        torch.autograd.grad(-0.5 * logprobs.square().sum(), (hidden, weight), retain_graph=True)
        for logprobs in (found[0], found[0], expected[0])
    )
    assert len(recomputed) == 2, "the first backward uses the promise, a second one through it computes again"
    torch.testing.assert_close(first, wanted)
    torch.testing.assert_close(again, wanted)
    slices.clear()
    with torch.no_grad():
        selected_logprobs(hidden, weight, targets, token_grads=without_entropy)
    selected_logprobs(hidden.detach(), weight.detach(), targets, token_grads=without_entropy)
    selected_logprobs(hidden[:0], weight, targets[:0], token_grads=without_entropy)[0].sum().backward()
    assert not slices
