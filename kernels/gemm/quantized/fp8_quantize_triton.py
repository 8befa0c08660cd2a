"""Triton kernels of FP8 quantization of activations, alone or after RMSNorm or SwiGLU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.block_sizes import FP8_MAX, SCALE_BLOCK
from specbatch.kernels.common.pdl_triton import let_next_kernel_start, pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2
from specbatch.kernels.dispatch import is_deterministic
from specbatch.kernels.elementwise.elementwise_triton import PROGRAM, normalized_rows, warps_for
from specbatch.kernels.gemm.quantized.few_rows_triton import MOST_ROWS
from specbatch.kernels.gemm.quantized.fp8_activations import SMALLEST_MAX, FP8Activations, empty_fp8


def quantize_fp8(x: torch.Tensor, before_gemm: bool = False) -> FP8Activations:
    """`quantize_fp8_ref` of x [T, K]."""
    width, tile = x.shape[1], PROGRAM // SCALE_BLOCK
    assert x.stride(1) == 1, "the elements of a row of x must be adjacent"
    y = empty_fp8(len(x), width, x.dtype, x.device)
    _quantize_fp8[(cdiv(y.scales.numel(), tile),)](
        x, *y[:2], y.scales.numel(), width, x.stride(0), y.scales.stride(1), TILE=tile, num_warps=4,
        **_quantizing(x, before_gemm=before_gemm),
    )  # fmt: skip
    return y


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float) -> FP8Activations:
    """`rms_norm_fp8_ref`: the bits of `rms_norm` and `quantize_fp8`."""
    rows, width = x.shape
    assert x.is_contiguous(), "x must be contiguous"
    y = empty_fp8(rows, width, x.dtype, x.device)
    block = max(SCALE_BLOCK, next_power_of_2(width))
    tile = max(1, PROGRAM // block)
    _rms_norm_fp8[(cdiv(rows, tile),)](
        x, weight, *y[:2], rows, width, eps, y.scales.stride(1), TILE=tile, BLOCK=block,
        num_warps=warps_for(tile * block), **_quantizing(x, before_gemm=True),
    )  # fmt: skip
    return y


def silu_and_mul_fp8(gate_up: torch.Tensor) -> FP8Activations:
    """`silu_and_mul_fp8_ref`: the bits of `silu_and_mul` and `quantize_fp8`."""
    width, tile = gate_up.shape[1] // 2, PROGRAM // SCALE_BLOCK
    assert gate_up.is_contiguous(), "gate_up must be contiguous"
    y = empty_fp8(len(gate_up), width, gate_up.dtype, gate_up.device)
    _silu_and_mul_fp8[(cdiv(y.scales.numel(), tile),)](
        gate_up, *y[:2], y.scales.numel(), width, y.scales.stride(1), TILE=tile, num_warps=4,
        **_quantizing(gate_up, before_gemm=True),
    )  # fmt: skip
    return y


def _quantizing(x: torch.Tensor, *, before_gemm: bool) -> dict[str, Any]:
    """Arguments of kernels that quantize. EARLY: the next one is a GEMM of few rows, which reads weights before it
    waits (`w8a8_few_rows_triton`). Other GEMMs gain nothing, and were slower: 121 us a layer in place of 115 (H100)."""
    found = {"SCALE_BLOCK": SCALE_BLOCK, "FP8_MAX": FP8_MAX, "SMALLEST_MAX": SMALLEST_MAX}
    return found | {"EARLY": before_gemm and len(x) <= MOST_ROWS and not is_deterministic(), **pdl(x)}


@triton.jit
def _quantized(wide, kind: tl.constexpr, FP8_MAX: tl.constexpr, SMALLEST_MAX: tl.constexpr):
    """Lines float32 [L, SCALE_BLOCK] in FP8, and their scales [L]."""
    # As whole numbers, of which that of NaN is the largest: a maximum of floating point would hide it.
    bits = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest < SMALLEST_MAX, SMALLEST_MAX, largest)
    inverse = tl.div_rn(tl.full(largest.shape, FP8_MAX, tl.float32), largest)
    return (wide * inverse[:, None]).to(kind), tl.div_rn(largest, FP8_MAX)


@triton.jit
def _lines_of_program(lines, width, TILE: tl.constexpr, SCALE_BLOCK: tl.constexpr):
    """A line is the SCALE_BLOCK columns of a row that share a scale. Which of TILE lines exist, their rows and their
    blocks of columns; then rows, columns and mask of their elements."""
    blocks = tl.cdiv(width, SCALE_BLOCK)
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, block = (line // blocks).to(tl.int64), line % blocks
    column = (block * SCALE_BLOCK)[:, None] + tl.arange(0, SCALE_BLOCK)[None, :]
    return line < lines, row, block, row[:, None], column, (line < lines)[:, None] & (column < width)


@triton.jit(do_not_specialize=["lines", "scale_stride"])
def _quantize_fp8(
    x, values, scales, lines, width, x_stride, scale_stride, SCALE_BLOCK: tl.constexpr, FP8_MAX: tl.constexpr,
    SMALLEST_MAX: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_kernel_start(PDL and EARLY)
    exists, line_row, block, row, column, mask = _lines_of_program(lines, width, TILE, SCALE_BLOCK)
    wait_for_previous_kernel(PDL)
    wide = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    quantized, scale = _quantized(wide, values.dtype.element_ty, FP8_MAX, SMALLEST_MAX)
    tl.store(scales + block * scale_stride + line_row, scale, mask=exists)
    tl.store(values + row * width + column, quantized, mask=mask)


@triton.jit(do_not_specialize=["lines", "scale_stride"])
def _silu_and_mul_fp8(
    gate_up, values, scales, lines, width, scale_stride, SCALE_BLOCK: tl.constexpr, FP8_MAX: tl.constexpr,
    SMALLEST_MAX: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_kernel_start(PDL and EARLY)
    exists, line_row, block, row, column, mask = _lines_of_program(lines, width, TILE, SCALE_BLOCK)
    wait_for_previous_kernel(PDL)
    source = gate_up + row * 2 * width + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    wide = (gate / (1 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    quantized, scale = _quantized(wide, values.dtype.element_ty, FP8_MAX, SMALLEST_MAX)
    tl.store(scales + block * scale_stride + line_row, scale, mask=exists)
    tl.store(values + row * width + column, quantized, mask=mask)


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def _rms_norm_fp8(
    x, weight, values, scales, rows, width, eps, scale_stride, SCALE_BLOCK: tl.constexpr, FP8_MAX: tl.constexpr,
    SMALLEST_MAX: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_kernel_start(PDL and EARLY)
    BLOCKS: tl.constexpr = BLOCK // SCALE_BLOCK
    stored, normal = normalized_rows(x, weight, rows, width, eps, TILE, BLOCK, PDL)
    wide = tl.reshape(normal.to(stored.dtype).to(tl.float32), [TILE * BLOCKS, SCALE_BLOCK])
    quantized, scale = _quantized(wide, values.dtype.element_ty, FP8_MAX, SMALLEST_MAX)
    line, blocks = tl.arange(0, TILE * BLOCKS), tl.cdiv(width, SCALE_BLOCK)
    row = (tl.program_id(0) * TILE + line // BLOCKS).to(tl.int64)
    column = (line % BLOCKS * SCALE_BLOCK)[:, None] + tl.arange(0, SCALE_BLOCK)[None, :]
    tl.store(scales + line % BLOCKS * scale_stride + row, scale, mask=(row < rows) & (line % BLOCKS < blocks))
    tl.store(values + row[:, None] * width + column, quantized, mask=(row < rows)[:, None] & (column < width))
