"""Triton kernel of a GEMM with an FP8 weight that has scales per 128 x 128 values or per output.

Outside deterministic mode, few rows use dedicated kernels, and many quantized rows use cuBLASLt where it supports the
format. With few rows of other widths, and unquantized activations, the kernel is split over K until its
programs fill the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.block_sizes import SCALE_BLOCK
from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv
from specbatch.kernels.dispatch import is_deterministic
from specbatch.kernels.gemm.gemm_mainloop_triton import gemm_mainloop_e4m3, gemm_mainloop_fp8
from specbatch.kernels.gemm.quantized import fp8_cublas
from specbatch.kernels.gemm.quantized.few_rows_triton import MOST_ROWS
from specbatch.kernels.gemm.quantized.fp8_activations import FP8Activations
from specbatch.kernels.gemm.quantized.fp8_few_rows_triton import FP8FewRowsTile, fp8_few_rows, fp8_few_rows_tile_for
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Weight
from specbatch.kernels.gemm.quantized.w8a8_few_rows_triton import W8A8FewRowsTile, w8a8_few_rows, w8a8_few_rows_tile_for
from specbatch.kernels.gemm.split_k_triton import (
    fills_device,
    is_last_split,
    splits_for,
    sum_of_splits,
    used_splits,
    workspace,
)


class Tile(NamedTuple):
    """rows of x by outputs, in steps of k columns; splits: programs that share the K of a tile; stages: steps under way
    at once, plus one."""

    rows: int
    outputs: int
    k: int
    splits: int
    warps: int
    stages: int


def tile_for(rows: int, n: int, k: int, item: int) -> Tile | FP8FewRowsTile | W8A8FewRowsTile:
    """The tile of a GEMM of so many rows of x [rows, k], of `item` bytes a value, with a weight [n, k].

    To tune: `python -m specbatch.sweeps.microbench gemm-tiles`."""
    if item <= 2 and rows <= MOST_ROWS and k % SCALE_BLOCK == 0 and not is_deterministic():
        return (w8a8_few_rows_tile_for if item == 1 else fp8_few_rows_tile_for)(rows, n, k)
    if item == 1:
        # Always the 64 rows that a warpgroup takes, and never split, so that a row's result does not depend on the
        # number of rows. 128 are slower in most shapes.
        fills = fills_device(rows, n)
        return Tile(64, 128 if fills else 64, SCALE_BLOCK, 1, 4, 4 if fills else 6)
    block = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 or item == 4 else 128
    outputs, step, warps = (32, 32, 4) if item == 4 else (128, 64, 8) if block == 128 else (64, SCALE_BLOCK, 4)
    splits = splits_for(cdiv(rows, block) * cdiv(n, outputs), block * outputs, k, 2 if block < 64 else 3)
    stages = 2 if item == 4 else 4 if block >= 64 else 3 if splits > 1 else 6 if block == 16 else 5
    return Tile(block, outputs, step, splits, warps, stages)


def fp8_linear(
    x: torch.Tensor | FP8Activations,
    weight: FP8Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | FP8FewRowsTile | W8A8FewRowsTile | None = None,
) -> torch.Tensor:
    """`quantized_linear_ref`: x [T, K], weight [N, K] -> [T, N], in `out` if given. Rows of x, residual and out may be
    apart. tile: chosen by the shapes if None."""
    x_scales, dtype = None, x.dtype
    if isinstance(x, FP8Activations):
        if tile is None and bias is None and fp8_cublas.takes(x, weight):
            return fp8_cublas.fp8_linear(x, weight, residual, out)
        x, x_scales, _ = x
        assert x_scales.stride(0) == 1, "the scales of x must be column-major"
    (rows, k), n, values, scales = x.shape, weight.values.shape[0], weight.values, weight.scales
    assert scales is not None, "a weight without scales is for Linear"
    assert values.is_contiguous(), "the weight must be contiguous"
    assert scales.is_contiguous(), "the scales must be contiguous"
    assert x.stride(1) == 1, "the elements of a row of x must be adjacent"
    assert residual is None or residual.stride(1) == 1, "the elements of a row of the residual must be adjacent"
    y = torch.empty(rows, n, device=x.device, dtype=dtype) if out is None else out
    assert y.shape == (rows, n), f"out {tuple(y.shape)} is not {(rows, n)}"
    assert y.stride(1) == 1, "the elements of a row of out must be adjacent"
    tile = tile or tile_for(rows, n, k, x.element_size())
    if isinstance(tile, W8A8FewRowsTile):
        assert x_scales is not None, "these rows are quantized"
        return w8a8_few_rows(FP8Activations(x, x_scales, dtype), weight, bias, residual, y, tile)
    if isinstance(tile, FP8FewRowsTile):
        assert x_scales is None, "these rows are not quantized"
        return fp8_few_rows(x, weight, bias, residual, y, tile)
    blocks = cdiv(k, SCALE_BLOCK)
    splits = used_splits(blocks, tile.splits)
    tiles = cdiv(rows, tile.rows) * cdiv(n, tile.outputs)
    partial, counters = workspace(x.device)
    fp8_linear_kernel[(tiles * splits,)](
        x, x_scales, values, scales, bias, residual, y, partial, counters, rows, n, k, x.stride(0),
        0 if x_scales is None else x_scales.stride(1), 0 if residual is None else residual.stride(0), y.stride(0),
        QUANTIZED=x_scales is not None, PER_CHANNEL=weight.is_per_channel, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, SCALE_BLOCK=SCALE_BLOCK, EVEN_K=k % SCALE_BLOCK == 0, SPLITS=splits,
        BM=tile.rows, BN=tile.outputs, BK=tile.k, **pdl(x), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M", "scale_stride"])
def fp8_linear_kernel(
    x, x_scales, weight, scales, bias, residual, y, partial, counters, M, N, K, x_stride, scale_stride,
    residual_stride, y_stride,
    QUANTIZED: tl.constexpr, PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, EVEN_K: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs that share rows of the weight are neighbours."""
    blocks, blocks_k = tl.cdiv(M, BM), tl.cdiv(K, SCALE_BLOCK)
    block, split = tl.program_id(0) % blocks, tl.program_id(0) // blocks % SPLITS
    tile = tl.program_id(0) // (blocks * SPLITS)
    row = (block * BM + tl.arange(0, BM)).to(tl.int64)
    column = tile * BN + tl.arange(0, BN)
    outer = tl.minimum(column, N - 1)
    first = split * tl.cdiv(blocks_k, SPLITS)  # of the blocks of this split
    width = tl.minimum(K - first * SCALE_BLOCK, tl.cdiv(blocks_k, SPLITS) * SCALE_BLOCK)
    x_row, weight_row = x + row * x_stride + first * SCALE_BLOCK, weight + outer.to(tl.int64) * K + first * SCALE_BLOCK
    wait_for_previous_kernel(PDL)
    if QUANTIZED:  # the columns of a tile share their scales
        ks = tl.arange(0, BK)
        x_scale = x_scales + row + first * scale_stride
        scale = scales + tile * BN // SCALE_BLOCK * blocks_k + first
        total = gemm_mainloop_fp8(
            x_row[:, None] + ks[None, :], row < M, x_scale, scale_stride, weight_row[None, :] + ks[:, None], scale,
            scale, width, not PER_CHANNEL, EVEN_K, BM, BN, SCALE_BLOCK,
        )  # fmt: skip
    else:
        total = gemm_mainloop_e4m3(
            x_row, row < M, weight_row, scales + outer // SCALE_BLOCK * blocks_k + first, width, not PER_CHANNEL,
            SCALE_BLOCK, BM == 16, EVEN_K, BM, BN, BK,
        ).T  # fmt: skip
    if SPLITS > 1:
        place = tile * blocks + block
        if not is_last_split(total, partial, counters, place, split, SPLITS):
            return
        total = sum_of_splits(partial, counters, place, SPLITS, BM, BN)
    if PER_CHANNEL:
        total *= tl.load(scales + outer).to(tl.float32)[None, :]
    exists = (row < M)[:, None] & (column < N)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, column < N, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + row[:, None] * residual_stride + column[None, :], exists, other=0.0).to(tl.float32)
    tl.store(y + row[:, None] * y_stride + column[None, :], total.to(y.dtype.element_ty), exists)
