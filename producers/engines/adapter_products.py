"""vLLM plug-in, loaded in every engine process: the products with an adapter on CPUs.

vLLM's own copy the weights of each token's adapter before they multiply: 20 MB a token for rank 16 and a model of 135M
parameters. A run has one adapter, so that a product with its weights does.
"""

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms.cpu import CpuPlatform


class AdapterProducts(PunicaWrapperCPU):
    """Products with the only adapter of an engine; with several, vLLM's own.

    w_t_all: `[num_adapters, 1, num_out, num_in]`. x: `[num_tokens, num_in]`. y: `[num_tokens, num_out or more]`.
    """

    def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        if len(w_t_all) > 1 or self.no_lora:
            super()._apply_shrink(y, x, w_t_all, scale)
            return
        y = y.view(-1, y.shape[-1])
        product = _product(x, w_t_all, y)
        y[:, : product.shape[1]] = scale * product

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        if len(w_t_all) > 1 or self.no_lora or not add_inputs:
            super()._apply_expand(y, x, w_t_all, y_offset, y_slice_size, add_inputs)
            return
        y[:, y_offset : y_offset + y_slice_size] += _product(x, w_t_all, y)


def _product(x: torch.Tensor, weights: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns `[num_tokens, num_out]` in the type of `like`."""
    return x.to(like.dtype) @ weights[0, 0].to(like.dtype).T


def install() -> None:
    """Makes engines on CPUs multiply so."""
    name = f"{AdapterProducts.__module__}.{AdapterProducts.__qualname__}"
    setattr(CpuPlatform, "get_punica_wrapper", classmethod(lambda cls: name))  # noqa: B010
