"""GEMM main loops over K, with BF16, FP16 or FP8 weights and BF16, FP16 or FP8 activations."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.common.e4m3_triton import dequantize_e4m3
from specbatch.kernels.common.pdl_triton import wait_in_loop


@triton.jit
def gemm_mainloop(
    x_tile, x_rows, weight_tile, K, ONCE: tl.constexpr, EARLY: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x @ weight.T float32 [BM, BN] from pointers to their first BK columns, [BM, BK] and [BK, BN].

    x_rows bool [BM]: the rows there are; the others are 0, and not read.
    ONCE: no other program reads these weights. EARLY: the wait for the previous kernel is here, after the first loads
    of weights.
    """
    ks = tl.arange(0, BK)
    policy: tl.constexpr = "evict_first" if ONCE else ""
    total = tl.zeros([BM, BN], tl.float32)
    a_next = tl.zeros([BM, BK], x_tile.dtype.element_ty)
    for k in tl.range(0, K, BK):
        if EARLY:
            # The compiler's pipeline fetches weights ahead of the loop, hence before the wait; rows of x come after
            # it, as they pass through a branch and a variable of the loop.
            a = a_next
            if k == 0:
                wait_in_loop(PDL)
                a = tl.load(x_tile, x_rows[:, None] & (ks < K)[None, :], other=0.0)
            a_next = tl.load(x_tile + k + BK, x_rows[:, None] & (k + BK + ks < K)[None, :], other=0.0)
        elif EVEN_K:
            a = tl.load(x_tile + k, x_rows[:, None], other=0.0)
        else:
            a = tl.load(x_tile + k, x_rows[:, None] & (k + ks < K)[None, :], other=0.0)
        if EVEN_K:
            b = tl.load(weight_tile + k, eviction_policy=policy)
        else:
            b = tl.load(weight_tile + k, (k + ks < K)[:, None], other=0.0, eviction_policy=policy)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def gemm_mainloop_e4m3(
    x_row, x_rows, weight_row, scale_row, K, SCALED: tl.constexpr, SIDE: tl.constexpr, ONCE: tl.constexpr,
    EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """FP8 weight @ x.T float32 [BN, BM] with 16-bit or float32 x, from pointers to the rows of x [BM], and to those of
    the weight and of its scales [BN]. The weight is the first operand, which a tensor core takes from registers: what
    is converted there needs no way through shared memory.

    SCALED: every SIDE columns share a scale; BK divides SIDE. The weights are exact in the type of x, and sums are
    scaled instead of weights: no value is rounded on the way.
    """
    ks = tl.arange(0, BK)[None, :]
    policy: tl.constexpr = "evict_first" if ONCE else ""
    total = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(0, K, BK):
        if EVEN_K:
            x = tl.load(x_row[:, None] + k + ks, x_rows[:, None], other=0.0)
            weight = tl.load(weight_row[:, None] + k + ks, eviction_policy=policy)
        else:
            x = tl.load(x_row[:, None] + k + ks, x_rows[:, None] & (k + ks < K), other=0.0)
            weight = tl.load(weight_row[:, None] + k + ks, k + ks < K, other=0.0, eviction_policy=policy)
        if SCALED:
            part = tl.dot(dequantize_e4m3(weight, x.dtype), x.T, input_precision="ieee")
            total += part * tl.load(scale_row + k // SIDE).to(tl.float32)[:, None]
        else:
            total = tl.dot(dequantize_e4m3(weight, x.dtype), x.T, total, input_precision="ieee")
    return total


@triton.jit
def gemm_mainloop_fp8(
    x_tile, x_rows, x_scale, scale_stride, weight_tile, even_scale, odd_scale, K, SCALED: tl.constexpr,
    EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """`gemm_mainloop` for FP8 x (`FP8Activations`): the tensor core accumulates over SCALE_BLOCK columns, whose scales
    are in `x_scale` [BM] for x, those of the next columns scale_stride further, and if SCALED of the weight one for all
    even rows and one for all odd ones."""
    ks, is_even = tl.arange(0, SIDE), tl.arange(0, BN)[None, :] % 2 == 0
    total = tl.zeros([BM, BN], tl.float32)
    # Each step reads its own cache lines of scales, which would stall the pipeline: they are loaded one step ahead.
    scale_next = tl.load(x_scale, x_rows, other=0.0)
    for k in tl.range(0, K, SIDE):
        if EVEN_K:
            a = tl.load(x_tile + k, x_rows[:, None], other=0.0)
            b = tl.load(weight_tile + k)
        else:
            a = tl.load(x_tile + k, x_rows[:, None] & (k + ks < K)[None, :], other=0.0)
            b = tl.load(weight_tile + k, (k + ks < K)[:, None], other=0.0)
        scale = scale_next[:, None]
        after = tl.minimum(k // SIDE + 1, tl.cdiv(K, SIDE) - 1)
        scale_next = tl.load(x_scale + after * scale_stride, x_rows, other=0.0)
        if SCALED:
            even, odd = tl.load(even_scale + k // SIDE).to(tl.float32), tl.load(odd_scale + k // SIDE).to(tl.float32)
            total += tl.dot(a, b) * tl.where(is_even, scale * even, scale * odd)
        else:
            total += tl.dot(a, b) * scale
    return total
