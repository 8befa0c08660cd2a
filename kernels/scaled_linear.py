"""Matrix products with a fixed float8 weight in blocks: w8a16, the activations as they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.kernels import dispatch
from specbatch.kernels.gate import silu_product
from specbatch.kernels.linear import Linear, Norm
from specbatch.kernels.norm import rms_norm
from specbatch.kernels.weight import Weight


def scaled_linear_ref(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias + residual for x [T, in], weight [out, in] with scales, bias [out], residual [T, out]."""
    y = F.linear(x, weight.wide(x.dtype), bias)
    return y if residual is None else residual + y


class ScaledLinear(Linear):
    """A `Linear` whose weight is float8 with a scale for every 128 x 128 values."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        self.shape, self.bias = weight.values.shape, bias
        self._scaled = weight

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, in] -> [T, out], in the memory of `out` if that is given."""
        x = x if norm is None else rms_norm(x, *norm)
        if dispatch.runs_kernels(x):
            from specbatch.kernels.scaled_linear_triton import scaled_linear

            y = scaled_linear(x, self._scaled, self.bias, residual)
        else:
            y = scaled_linear_ref(x, self._scaled, self.bias, residual)
        return y if out is None else out.copy_(y)

    def gated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """silu(g) * u for [g | u] = norm(x) @ weight.T + bias: x [T, in] -> [T, out / 2]."""
        return silu_product(self(x, norm=norm))
