"""What GEMMs of at most 32 rows of 16-bit activations with a weight that is unpacked in registers have in common.

Their programs are split over K. Before it waits for the previous kernel, a program fetches its first weights to the L2
cache. Loading them to registers by then was slower on an H200, as was a limit of the registers of a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_ROWS = 32


def rows_of_tile(rows: int) -> int:
    return 16 if rows <= 16 else 32


@triton.jit
def fetch_to_l2(at):
    """Fetch what is at pointers to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_rows(
    total, y, bias, residual, row, column, M, N, y_stride, residual_stride, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """total float32 [outputs, rows] and bias and residual to y."""
    result, inside, far = total.T, (row < M)[:, None] & (column < N)[None, :], row.to(tl.int64)[:, None]
    if HAS_BIAS:
        result += tl.load(bias + column, column < N, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        result += tl.load(residual + far * residual_stride + column[None, :], inside, other=0.0).to(tl.float32)
    tl.store(y + far * y_stride + column[None, :], result.to(y.dtype.element_ty), inside)
