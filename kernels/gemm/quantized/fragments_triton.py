"""Tiles of packed 4-bit and 8-bit weights in the order of a tensor core's operand, without a way through shared memory.

A row of 64 bytes is read by four threads, whose 16 bytes each are their own elements of the operand (`four_bits`). So a
tile is unpacked where it is and then only renamed: the compiler sees that both layouts hold every value in the same
thread, and moves none. A tile is read as words of four bytes: the compiler chooses the order of a thread's elements, so
assembly may not rely on which bytes it gets together.
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
def in_fragment_order(a, b, c, d, WARPS: tl.constexpr):
    """Values [N, W] of the bytes 0, 2, 1 and 3 of words [N, W] of the rows `fragment_rows` -> [N, 4 * W] with rows and
    columns in their order."""
    N: tl.constexpr = a.shape[0]
    W: tl.constexpr = a.shape[1]
    found = tl.reshape(_by_byte(a, b, c, d), [N // (16 * WARPS), 2, WARPS, 8, 4, W // 4, 2, 2])
    return tl.reshape(tl.permute(found, [0, 2, 1, 3, 5, 7, 4, 6]), [N, 4 * W])


@triton.jit
def chunk_in_fragment_order(a, b, c, d, e, f, g, h, WARPS: tl.constexpr):
    """`in_fragment_order` of both halves of a chunk: a to d of the low bits, e to h of the high bits -> [N, 8 * W]."""
    N: tl.constexpr = a.shape[0]
    W: tl.constexpr = a.shape[1]
    found = tl.join(_by_byte(a, b, c, d), _by_byte(e, f, g, h))
    found = tl.reshape(found, [N // (16 * WARPS), 2, WARPS, 8, 4, W // 4, 2, 2, 2])
    return tl.reshape(tl.permute(found, [0, 2, 1, 3, 8, 5, 7, 4, 6]), [N, 8 * W])


@triton.jit
def in_column_order(a, b, c, d):
    """`in_fragment_order` of rows that are in their order."""
    N: tl.constexpr = a.shape[0]
    W: tl.constexpr = a.shape[1]
    found = tl.reshape(_by_byte(a, b, c, d), [N, 4, W // 4, 2, 2])
    return tl.reshape(tl.permute(found, [0, 2, 4, 1, 3]), [N, 4 * W])


@triton.jit
def _by_byte(a, b, c, d):
    """[N, W, 2, 2]: which of a pair, and which pair."""
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def pairs_in_fragment_order(first, second, kind: tl.constexpr, WARPS: tl.constexpr):
    """`in_fragment_order` of pairs of 16-bit values in words int32 [N, W]: of bytes 0 and 2, and of 1 and 3."""
    return in_fragment_order(
        first.to(tl.int16).to(kind, bitcast=True), (first >> 16).to(tl.int16).to(kind, bitcast=True),
        second.to(tl.int16).to(kind, bitcast=True), (second >> 16).to(tl.int16).to(kind, bitcast=True), WARPS,
    )  # fmt: skip


@triton.jit
def split_columns(x):
    """[N, K] -> its left and its right half, [N, K / 2] each."""
    N: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, [N, 2, K // 2]), [0, 2, 1]))
