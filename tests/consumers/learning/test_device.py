"""oneDNN's float32 matmuls: used only if they keep float32's accuracy on this processor."""

import pytest
import torch
from torch import Tensor

from penstock.consumers.learning.model.device import ONEDNN_MAX_ERROR, enable_onednn_matmul
from penstock.schemas.config import ConfigError


@pytest.fixture
def matmul_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_onednn_is_accurate_or_refused(matmul_precision) -> None:
    before = torch.get_float32_matmul_precision()
    left, right = torch.randn(200, 300), torch.randn(300, 400)
    exact = left.double() @ right.double()
    try:
        enable_onednn_matmul()
    except ConfigError as error:
        assert "cannot be handed to oneDNN" in str(error)
        assert torch.get_float32_matmul_precision() == before
    else:
        error = ((left @ right).double() - exact).abs().max() / exact.abs().max()
        assert error <= ONEDNN_MAX_ERROR and torch.get_float32_matmul_precision() != before


def _multiply_with_errors(monkeypatch: pytest.MonkeyPatch, errors: dict[str, float]) -> None:
    """Gives float32 products a relative error by torch's precision, and no other."""
    multiply = Tensor.__matmul__

    def products(left: Tensor, right: Tensor) -> Tensor:
        product = multiply(left.double(), right.double()).to(left.dtype)
        error = errors[torch.get_float32_matmul_precision()] if left.dtype == torch.float32 else 0.0
        return product + error * product.abs().max()

    monkeypatch.setattr(Tensor, "__matmul__", products)


@pytest.mark.parametrize(
    ("error", "message"),
    [(2e-3, "'medium' computes with an error of 2.0e-03, above 1e-05; 'high'"), (0.0, "'medium' changes no bit")],
)
def test_onednn_is_refused_where_it_is_inaccurate_or_idle_and_else_stays_on(
    monkeypatch, matmul_precision, error, message
) -> None:
    _multiply_with_errors(monkeypatch, {"highest": 0.0, "medium": error, "high": error})
    with pytest.raises(ConfigError, match=message):
        enable_onednn_matmul()
    assert torch.get_float32_matmul_precision() == "highest"
    _multiply_with_errors(monkeypatch, {"highest": 0.0, "medium": 2e-3, "high": 2e-7})
    enable_onednn_matmul()
    assert torch.get_float32_matmul_precision() == "high"
