"""RMSNorm: root-mean-square normalization."""

from __future__ import annotations

import torch

from specbatch.kernels.common.rowwise import row_sum
from specbatch.kernels.dispatch import is_deterministic, op


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, the flavour of Llama and Qwen2/3.

    x [..., H], weight [H] of the type of x or float32. Normalised in float32, cast to the type of x, then multiplied by
    the weight.
    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    wide = x.float()
    squares = row_sum(wide * wide) if is_deterministic() else torch.linalg.vecdot(wide, wide)
    scale = squares.unsqueeze(-1).div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


rms_norm = op(rms_norm_ref, "specbatch.kernels.elementwise.elementwise_triton:rms_norm")  # for x [T, H]
