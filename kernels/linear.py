"""Matrix products with a fixed weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """`x @ weight.T + bias` for x [T, in], weight [out, in], bias [out] -> [T, out].

    On a CPU a float32 weight is kept in oneDNN's blocked layout, as inductor does when it freezes a model: for up to
    some 40 rows the product then runs at the speed at which the weight can be read, about twice that of the plain one.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.shape = weight.shape
        self.bias = bias
        self._blocked = is_blocked(weight.dtype, weight.device)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._blocked else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._blocked:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self.bias)


def is_blocked(dtype: torch.dtype, device: torch.device) -> bool:
    """Is a weight of this type kept as a reordered copy of its own?"""
    has_product = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return device.type == "cpu" and dtype == torch.float32 and has_product
