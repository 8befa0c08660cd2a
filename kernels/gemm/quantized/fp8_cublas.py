"""cuBLASLt GEMM for many rows of FP8 activations and FP8 weights with a scale per 128 x 128 values (W8A8).

On an H200 it was the faster GEMM from 36 rows on, but for small weights (`results/h200/experiments.md`). Up to 32 rows
have a kernel of their own. The recipe is that of DeepSeek-V3 (section 3.3): activations are scaled per row and 128
columns, and sums of 128 products are scaled and added in float32.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from specbatch.kernels.common.block_sizes import SCALE_BLOCK
from specbatch.kernels.dispatch import is_deterministic
from specbatch.kernels.gemm.quantized.fp8_activations import FP8Activations, allocated_rows
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Weight

_MIN_ROWS = 33
SMALL_WEIGHT, _SMALL_ROWS = 1 << 22, 512  # elements; with so many rows our kernel takes less time
_COLUMN_MULTIPLE = 4 * SCALE_BLOCK  # rows of the weight's scales start at multiples of 16 bytes


def takes(x: FP8Activations, weight: FP8Weight) -> bool:
    """Whether cuBLASLt supports these operands and is faster than our kernel."""
    rows, (n, k) = len(x.values), weight.values.shape
    if is_deterministic() or rows < _MIN_ROWS:  # cuBLASLt chooses an algorithm by the number of rows
        return False
    if n * k <= SMALL_WEIGHT and rows <= _SMALL_ROWS:
        return False
    is_block_scaled = not weight.is_per_channel and weight.scales.dtype == torch.float32
    is_aligned = n % SCALE_BLOCK == 0 and k % _COLUMN_MULTIPLE == 0 and weight.scales.is_contiguous()
    # no rows of other activations
    is_whole = bool(x.scales.stride(1) == allocated_rows(rows) and x.scales.storage_offset() == 0)
    return is_block_scaled and is_aligned and is_whole and is_supported(weight.values.device)


@cache
def is_supported(device: torch.device) -> bool:
    """cuBLASLt supports this scaling mode since CUDA 12.9, on compute capability 9.0 only."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    version = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    return version >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def fp8_linear(
    x: FP8Activations, weight: FP8Weight, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`quantized_linear_ref` for operands that `takes` accepts: [T, N], in `out` if given; else in the memory of the
    residual, if there is one."""
    rows, k = x.values.shape
    whole = allocated_rows(rows)
    values = x.values.as_strided((whole, k), (k, 1))
    scales = x.scales.as_strided((whole, k // SCALE_BLOCK), (1, whole))
    gemm = partial(torch._scaled_mm, values, weight.values.t(), scales, weight.scales.t(), out_dtype=x.dtype)
    if out is not None and residual is None and whole == rows and out.is_contiguous():
        return gemm(out=out)
    y = gemm()[:rows]
    if residual is not None:
        return torch.add(residual, y, out=residual if out is None else out)
    return y if out is None else out.copy_(y)
