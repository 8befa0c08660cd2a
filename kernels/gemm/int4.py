"""INT4 weights: 4-bit whole numbers in groups of inputs that share a scale and a zero point (AWQ, GPTQ).

A weight is (value - zero) * scale: Lin et al., "AWQ" (2023); Frantar et al., "GPTQ" (2022).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.kernels.dispatch import is_deterministic, op
from specbatch.kernels.gemm.fixed_rows import linear_in_blocks
from specbatch.kernels.gemm.four_bits import CHUNK, pack_four_bits, unpack_four_bits
from specbatch.kernels.gemm.weight import Weight


def chunk_of(inputs: int) -> int:
    """How many inputs of an output are packed together: 128, or 64 or 32 where that does not divide their number."""
    return min(CHUNK, inputs & -inputs)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """values uint8 [..., in] below 16 -> uint8 [..., in / 2]: `pack_four_bits`."""
    return pack_four_bits(values, chunk_of(values.shape[-1]))


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., in / 2] from `pack_int4` -> its values uint8 [..., in]."""
    return unpack_four_bits(packed, chunk_of(2 * packed.shape[-1]))


def dequantize_int4(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """values uint8 [..., in / 2] from `pack_int4`; scales [..., in / group], float16, bfloat16 or float32; zeros uint8,
    as many -> [..., in], rounded once from float32."""
    found = unpack_int4(values).unflatten(-1, (scales.shape[-1], -1)).float() - zeros.float()[..., None]
    weight: torch.Tensor = found * scales.float()[..., None]
    return weight.flatten(-2).to(dtype)


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
