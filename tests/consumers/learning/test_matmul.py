"""oneDNN's float32 matmuls: used only if they keep float32's accuracy on this processor."""

import pytest
import torch
from torch import Tensor

from penstock.consumers.learning import matmul
from penstock.consumers.learning.matmul import enable_onednn_matmul, onednn_matmul
from penstock.schemas.config import ConfigError


@pytest.fixture
def matmul_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_onednn_is_accurate_or_refused_and_always_given_back(matmul_precision) -> None:
    before = torch.get_float32_matmul_precision()
    left, right = torch.randn(200, 300), torch.randn(300, 400)
    exact = left.double() @ right.double()
    try:
        with onednn_matmul():
            assert torch.get_float32_matmul_precision() != before
            error = ((left @ right).double() - exact).abs().max() / exact.abs().max()
            assert error <= matmul.ONEDNN_MAX_ERROR
    except ConfigError as error:
        assert "cannot be handed to oneDNN" in str(error)
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("error", "message"),
    [(2e-3, "'medium' computes with an error of 2.0e-03, above 1e-05; 'high'"), (0.0, "'medium' changes no bit")],
)
def test_onednn_is_refused_where_it_is_inaccurate_or_idle(monkeypatch, matmul_precision, error, message) -> None:
    exact = matmul._products(torch.float64)
    default = [product.float() for product in exact]

    def products(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        if dtype == torch.float64:
            return exact
        lowered = torch.get_float32_matmul_precision() != "highest"
        return [product + error * product.abs().max() * lowered for product in default]

    monkeypatch.setattr(matmul, "_products", products)
    with pytest.raises(ConfigError, match=message):
        enable_onednn_matmul()
    assert torch.get_float32_matmul_precision() == "highest"


def test_onednn_stays_on_once_enabled(monkeypatch, matmul_precision) -> None:
    exact = matmul._products(torch.float64)
    errors = {"highest": 0.0, "medium": 2e-3, "high": 2e-7}

    def products(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        error = errors[torch.get_float32_matmul_precision()] if dtype == torch.float32 else 0.0
        return [product + error * product.abs().max() for product in exact]

    monkeypatch.setattr(matmul, "_products", products)
    enable_onednn_matmul()
    assert torch.get_float32_matmul_precision() == "high"
