"""Tiles of packed 4-bit weights as the first operand of tensor-core products, without a way through shared memory.

A row of 64 bytes is read by four threads, whose 16 bytes each are their own elements of the operand (`four_bits`). So a
tile is unpacked where it is and then only renamed: the compiler sees that both layouts hold every value in the same
thread, and moves none.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fragment_rows(N: tl.constexpr, WARPS: tl.constexpr):
    """int32 [N]: the row of the operand that is row i of the tile in memory. A warp reads 8 rows at once, those of all
    warps are neighbours, and a warp's products have 16. N is a multiple of 16 * WARPS."""
    i = tl.arange(0, N)
    return i // (16 * WARPS) * (16 * WARPS) + i // 8 % WARPS * 16 + i // (8 * WARPS) % 2 * 8 + i % 8


@triton.jit
def in_fragment_order(x, WARPS: tl.constexpr):
    """Unpacked values [N, H] of the rows `fragment_rows`, in each four those of bytes 0, 2, 1 and 3 -> [N, H] with rows
    and columns in their order."""
    N: tl.constexpr = x.shape[0]
    H: tl.constexpr = x.shape[1]
    found = tl.reshape(x, [N // (16 * WARPS), 2, WARPS, 8, 4, H // 16, 2, 2])
    return tl.reshape(tl.permute(found, [0, 2, 1, 3, 5, 6, 4, 7]), [N, H])


@triton.jit
def swap_middle(x):
    """[N, H] with columns 0, 2, 1, 3 of each four."""
    N: tl.constexpr = x.shape[0]
    H: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [N, H // 4, 2, 2]), [0, 1, 3, 2]), [N, H])


@triton.jit
def split_columns(x):
    """[N, K] -> its left and its right half, [N, K / 2] each."""
    N: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, [N, 2, K // 2]), [0, 2, 1]))
