"""Triton GEMM with FP8 weights for at most 32 rows of FP8 activations.

The weight is the first operand of instructions that multiply 64 of its rows at once, so that few rows of x waste
nothing. It goes from the memory to shared memory, where the tensor core reads it. Before the wait for the previous
kernel its first part goes to shared memory, or with more than 16 rows to the L2 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.block_sizes import SCALE_BLOCK
from specbatch.kernels.common.pdl_triton import wait_for_previous_kernel, wait_in_loop
from specbatch.kernels.common.sizes import cdiv
from specbatch.kernels.gemm.quantized.few_rows_triton import (
    MOST_ROWS,
    even_splits,
    fetch_rows_to_l2,
    launch_settings,
    rows_of_tile,
    store_rows,
)
from specbatch.kernels.gemm.quantized.fp8_activations import FP8Activations
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Weight
from specbatch.kernels.gemm.split_k_triton import is_last_split, splits_for, sum_of_splits, workspace


class W8A8FewRowsTile(NamedTuple):
    """See `few_rows_triton.FP8Tile`; outputs: 64 or 128; early: whether its pipeline starts before the wait, too. Rows
    of x then come by way of registers, which takes more instructions."""

    outputs: int
    splits: int
    warps: int
    stages: int
    ahead: int
    early: bool

    def settings(self, x: torch.Tensor, n: int, steps: int) -> tuple[int, dict[str, Any]]:
        """`launch_settings`."""
        assert self.outputs in (64, SCALE_BLOCK), "outputs of a tile share their scales, and an instruction has 64"
        programs, found = launch_settings(self, x, n, steps)
        return programs, found | {"EARLY": self.early}


def w8a8_few_rows_tile_for(rows: int, n: int, k: int) -> W8A8FewRowsTile:
    """The tile of a GEMM of so many rows with a weight [n, k]. The order of additions, hence the number of splits,
    depends on the weight alone.

    To tune: `python -m specbatch.sweeps.microbench gemm-tiles`."""
    is_wide = n >= 16384
    programs = 6 if is_wide else 3  # per multiprocessor
    splits = even_splits(splits_for(cdiv(n, 64), 64 * MOST_ROWS, k, programs), k // SCALE_BLOCK)
    if rows_of_tile(rows) == 32:
        return W8A8FewRowsTile(64, splits, 4, 6, 16, early=False)
    return W8A8FewRowsTile(128 if is_wide else 64, splits, 4, 4 if is_wide else 6, 0, early=True)


def w8a8_few_rows(
    x: FP8Activations, weight: FP8Weight, bias: torch.Tensor | None, residual: torch.Tensor | None, y: torch.Tensor,
    tile: W8A8FewRowsTile,
) -> torch.Tensor:  # fmt: skip
    """`fp8_linear` of few quantized rows, into y [T, N]; the weight's K is a multiple of 128."""
    (rows, k), n = x.values.shape, weight.shape[0]
    assert k % SCALE_BLOCK == 0, f"{k} inputs"
    partial, counters = workspace(y.device)
    programs, settings = tile.settings(x.values, n, k // SCALE_BLOCK)
    w8a8_few_rows_kernel[(programs,)](
        x.values, x.scales, weight.values, weight.scales, bias, residual, y, partial, counters, rows, n, k,
        x.values.stride(0), x.scales.stride(1), 0 if residual is None else residual.stride(0), y.stride(0),
        PER_CHANNEL=weight.is_per_channel, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        SIDE=SCALE_BLOCK, **settings,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M", "scale_stride"])
def w8a8_few_rows_kernel(
    x, x_scales, weight, scales, bias, residual, y, partial, counters, M, N, K, x_stride, scale_stride,
    residual_stride, y_stride,
    PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SIDE: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The tensor core adds SIDE products; such sums are scaled, and added in float32."""
    split, tile = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    steps = K // SIDE
    per_split = tl.cdiv(steps, SPLITS)
    first, last = split * per_split, tl.minimum(steps, (split + 1) * per_split)
    row, column, ks = tl.arange(0, BM), tile * BN + tl.arange(0, BN), tl.arange(0, SIDE)
    exists = row < M
    weight_row = weight + tl.minimum(column, N - 1).to(tl.int64) * K
    weight_tile = weight_row[:, None] + ks[None, :]
    x_tile, x_scale = x + row.to(tl.int64)[:, None] * x_stride + ks[None, :], x_scales + row
    scale_row = scales + tile * BN // SIDE * steps
    if PDL and AHEAD > 0:
        fetch_rows_to_l2(weight_row, first * SIDE, last * SIDE, AHEAD, 64)
    scale_next = tl.load(scale_row if PER_CHANNEL else scale_row + first).to(tl.float32)
    total = tl.zeros([BN, BM], tl.float32)
    rows_next, factor_next = tl.zeros([BM, SIDE], x.dtype.element_ty), tl.zeros([BM], tl.float32)
    if not EARLY:
        wait_for_previous_kernel(PDL)
        factor_next = tl.load(x_scale + first * scale_stride, exists, other=0.0)
    for step in tl.range(first, last):
        values = tl.load(weight_tile + step * SIDE, eviction_policy="evict_first")
        after = tl.minimum(step + 1, last - 1)
        factor = factor_next
        if EARLY:
            # The compiler's pipeline reads weights ahead of the loop, hence before the wait; rows of x come after it,
            # as they pass through a branch and a variable of the loop.
            rows = rows_next
            if step == first:
                wait_in_loop(PDL)
                rows = tl.load(x_tile + first * SIDE, exists[:, None], other=0.0)
                factor = tl.load(x_scale + first * scale_stride, exists, other=0.0)
            rows_next = tl.load(x_tile + after * SIDE, exists[:, None], other=0.0)
        else:
            rows = tl.load(x_tile + step * SIDE, exists[:, None], other=0.0)
        factor_next = tl.load(x_scale + after * scale_stride, exists, other=0.0)
        if not PER_CHANNEL:
            factor *= scale_next
            scale_next = tl.load(scale_row + after).to(tl.float32)
        total += tl.dot(values, rows.T) * factor[None, :]
    if SPLITS > 1:
        if not is_last_split(total, partial, counters, tile, split, SPLITS):
            return
        total = sum_of_splits(partial, counters, tile, SPLITS, BN, BM)
    if PER_CHANNEL:
        total *= tl.load(scales + tl.minimum(column, N - 1)).to(tl.float32)[:, None]
    store_rows(total, y, bias, residual, row, column, M, N, y_stride, residual_stride, HAS_BIAS, HAS_RESIDUAL)
