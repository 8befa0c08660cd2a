"""Triton kernel of a GEMM with an FP8 weight that has scales per 128 x 128 values or per output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.elementwise.fp8_quantize import FP8Activations
from specbatch.kernels.gemm.gemm_mainloop_triton import gemm_mainloop, gemm_mainloop_fp8
from specbatch.kernels.gemm.weight import SCALE_BLOCK, Weight

_PROGRAMS = 132  # multiprocessors of an H200


def fp8_linear(
    x: torch.Tensor | FP8Activations,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fp8_linear_ref`: x [T, K], weight [N, K] -> [T, N], in `out` if given. Rows of x, residual and out may be
    apart."""
    x_scales, dtype = None, x.dtype
    if isinstance(x, FP8Activations):
        x, x_scales, _ = x
    (rows, k), n, values, scales = x.shape, weight.values.shape[0], weight.values, weight.scales
    assert scales is not None, "a weight without scales is for Linear"
    assert values.is_contiguous(), "the weight must be contiguous"
    assert scales.is_contiguous(), "the scales must be contiguous"
    assert x.stride(1) == 1, "the elements of a row of x must be adjacent"
    assert residual is None or residual.stride(1) == 1, "the elements of a row of the residual must be adjacent"
    y = torch.empty(rows, n, device=x.device, dtype=dtype) if out is None else out
    assert y.shape == (rows, n), f"out {tuple(y.shape)} is not {(rows, n)}"
    assert y.stride(1) == 1, "the elements of a row of out must be adjacent"
    block = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    if x_scales is not None:
        # Always the 64 that a warpgroup takes: fewer would be another instruction, which may add in another order, and
        # 128 are slower in most shapes.
        block, inner, warps = 64, SCALE_BLOCK, 4
        fills = triton.cdiv(rows, block) * triton.cdiv(n, 128) >= _PROGRAMS * 2 // 3
        columns, stages = (128, 4) if fills else (64, 6)
    elif block == 16:  # the widest tile that gives every processor one; 24 KiB of weights in shared memory
        columns = next((width for width in (64, 32) if n >= width * _PROGRAMS), 16)
        inner, warps, stages = SCALE_BLOCK, 4, 192 // columns
    else:
        columns, inner, warps, stages = (64, SCALE_BLOCK, 4, 4) if block == 32 else (128, 64, block // 16, 4)
    if x.element_size() == 4:
        inner, stages = 32, 2
    tiles = triton.cdiv(rows, block), triton.cdiv(n, columns)
    _fp8_linear_kernel[(tiles[0] * tiles[1],)](
        x, x_scales, values, scales, bias, residual, y, rows, n, k, x.stride(0),
        0 if residual is None else residual.stride(0), y.stride(0), QUANTIZED=x_scales is not None,
        PER_CHANNEL=weight.is_per_channel, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        SCALE_BLOCK=SCALE_BLOCK, EVEN_K=k % inner == 0, BM=block, BN=columns, BK=inner, **pdl(x),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M"])
def _fp8_linear_kernel(
    x, x_scales, weight, scales, bias, residual, y, M, N, K, x_stride, residual_stride, y_stride,
    QUANTIZED: tl.constexpr, PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs that share rows of the weight are neighbours."""
    blocks = tl.cdiv(M, BM)
    row = (tl.program_id(0) % blocks * BM + tl.arange(0, BM)).to(tl.int64)
    column = tl.program_id(0) // blocks * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    outer = tl.minimum(column, N - 1)
    if BM > 16:
        wait_for_previous_kernel(PDL)
    x_tile = x + row[:, None] * x_stride + ks[None, :]
    weight_tile = weight + outer.to(tl.int64)[None, :] * K + ks[:, None]
    blocks_k = tl.cdiv(K, SCALE_BLOCK)
    if QUANTIZED:  # the columns of a tile share their scales
        x_scale = x_scales + row[:, None] * blocks_k
        scale = scales + tl.program_id(0) // blocks * BN // SCALE_BLOCK * blocks_k
        total = gemm_mainloop_fp8(
            x_tile, row < M, x_scale, weight_tile, scale, scale, K, not PER_CHANNEL, EVEN_K, BM, BN, SCALE_BLOCK
        )
    else:
        total = gemm_mainloop(
            x_tile, row < M, weight_tile, scales + outer // SCALE_BLOCK * blocks_k,
            K, not PER_CHANNEL, SCALE_BLOCK, BM == 16, BM == 16, EVEN_K, BM, BN, BK, PDL,
        )  # fmt: skip
    if PER_CHANNEL:
        total *= tl.load(scales + outer).to(tl.float32)[None, :]
    exists = (row < M)[:, None] & (column < N)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, column < N, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + row[:, None] * residual_stride + column[None, :], exists, other=0.0).to(tl.float32)
    tl.store(y + row[:, None] * y_stride + column[None, :], total.to(y.dtype.element_ty), exists)
