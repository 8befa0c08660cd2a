"""Matrix products with few rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Up to here a CPU product is faster as weight x activations^T: the BLAS then reads the weight where it lies instead
# of packing it into a second copy first.
_SKINNY_ROWS = 16


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` for x [T, in], weight [out, in], bias [out] -> contiguous [T, out]."""
    rows = x.shape[0]
    if x.device.type != "cpu" or x.dtype != torch.float32 or rows > _SKINNY_ROWS:
        return F.linear(x, weight, bias)
    if rows == 1:  # two columns take the threaded matrix path; the matrix-vector product does not
        x = x.expand(2, -1)
    # Only the transposed view of contiguous rows takes the fast path.
    y = torch.mm(weight, x.contiguous().t())[:, :rows].t().contiguous()
    return y if bias is None else y + bias
