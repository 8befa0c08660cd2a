"""FP8 quantization of activations, with one scale per row and 128 columns, for GEMMs with FP8 weights.

This is `activation_scheme: dynamic` in a checkpoint's config (DeepSeek-V3, section 3.3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.kernels.common.block_sizes import FP8_MAX, SCALE_BLOCK
from specbatch.kernels.dispatch import op
from specbatch.kernels.elementwise.activations import silu_and_mul_ref
from specbatch.kernels.elementwise.norm import rms_norm_ref
from specbatch.kernels.gemm.quantized.fp8_activations import SMALLEST_MAX, FP8Activations, empty_fp8


def quantize_fp8_ref(x: torch.Tensor, before_gemm: bool = False) -> FP8Activations:
    """x [T, K], its rows apart or not, each block of 128 columns divided by its largest value / 448 and rounded to
    nearest even. Where a block holds NaN or infinity its scale does, too, so that every GEMM with it shows that.
    before_gemm: the next kernel is that of `fp8_linear`, which may then start early."""
    width = x.shape[1]
    blocks = F.pad(x.float(), (0, -width % SCALE_BLOCK)).unflatten(1, (-1, SCALE_BLOCK))
    largest = blocks.abs().amax(-1).clamp(min=SMALLEST_MAX)
    limit = torch.full_like(largest, FP8_MAX)  # with a number in its place, torch multiplies by an inverse on a GPU
    values = (blocks * (limit / largest)[..., None]).flatten(1)[:, :width]
    found = empty_fp8(len(x), width, x.dtype, x.device)
    found.values.copy_(values.to(torch.float8_e4m3fn))
    found.scales.copy_(largest / limit)
    return found


def rms_norm_fp8_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> FP8Activations:
    """`rms_norm_ref` of x [T, H], contiguous, quantized before `fp8_linear`."""
    return quantize_fp8_ref(rms_norm_ref(x, weight, eps))


def silu_and_mul_fp8_ref(gate_up: torch.Tensor) -> FP8Activations:
    """`silu_and_mul_ref` of gate_up [T, 2 * I], contiguous, quantized before `fp8_linear`."""
    return quantize_fp8_ref(silu_and_mul_ref(gate_up))


quantize_fp8 = op(quantize_fp8_ref, "specbatch.kernels.gemm.quantized.fp8_quantize_triton:quantize_fp8")
rms_norm_fp8 = op(rms_norm_fp8_ref, "specbatch.kernels.gemm.quantized.fp8_quantize_triton:rms_norm_fp8")
silu_and_mul_fp8 = op(silu_and_mul_fp8_ref, "specbatch.kernels.gemm.quantized.fp8_quantize_triton:silu_and_mul_fp8")
