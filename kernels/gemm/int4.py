"""INT4 weights: 4-bit whole numbers in groups of inputs that share a scale and a zero point (AWQ, GPTQ).

A weight is (value - zero) * scale: Lin et al., "AWQ" (2023); Frantar et al., "GPTQ" (2022).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.kernels.dispatch import is_deterministic, op
from specbatch.kernels.gemm.fixed_rows import linear_in_blocks
from specbatch.kernels.gemm.weight import Weight


def pack_int4(values: torch.Tensor, group: int) -> torch.Tensor:
    """values uint8 [out, in] below 16 -> uint8 [out, in / 2]: values j and j + group / 2 of a group in its byte j, the
    first in the low bits. Each half of a group is then multiplied by adjacent columns."""
    low, high = values.unflatten(1, (-1, 2, group // 2)).unbind(2)
    packed: torch.Tensor = low | high << 4
    return packed.flatten(1).contiguous()


def dequantize_int4(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """values uint8 [out, in / 2] from `pack_int4`; scales [out, in / group], float16, bfloat16 or float32; zeros uint8,
    as many -> [out, in], rounded once from float32."""
    packed = values.unflatten(1, (scales.shape[1], -1))
    found = torch.stack([packed & 15, packed >> 4], 2).flatten(2).float() - zeros.float()[..., None]
    return (found * scales.float()[..., None]).flatten(1).to(dtype)


def int4_linear_ref(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias + residual for x [T, in], INT4 weight [out, in], bias [out], residual [T, out]; in the memory
    of `out` [T, out] if given."""
    linear = linear_in_blocks if is_deterministic() else F.linear
    y = linear(x, weight.dequantize(x.dtype), bias)
    y = y if residual is None else residual + y
    return y if out is None else out.copy_(y)


int4_linear = op(int4_linear_ref, "specbatch.kernels.gemm.int4_triton:int4_linear")
