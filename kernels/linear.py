"""Matrix products with few rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Up to here a CPU product is faster as weight x activations^T: the BLAS then streams the weight along its rows
# instead of packing it into a second copy first.
_SKINNY_ROWS = 64


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` for x [T, in], weight [out, in], bias [out] -> [T, out].

    The result of a skinny CPU product is a transposed view: the next product takes it as it is, without a copy.
    """
    rows = x.shape[0]
    if x.device.type != "cpu" or x.dtype != torch.float32 or rows > _SKINNY_ROWS:
        return F.linear(x, weight, bias)
    columns = x.t()
    if rows == 1:  # matrix-vector products run on one core's bandwidth; two columns take the threaded path
        columns = columns.expand(-1, 2).contiguous()
    y = torch.mm(weight, columns).t()[:rows]
    return y if bias is None else y + bias
