"""What GEMMs of at most 32 rows with a quantized weight have in common.

Their programs are split over K. Before it waits for the previous kernel, a program fetches its first weights to the L2
cache, or with FP8 activations and at most 16 rows to shared memory. Loading them into registers at that point was
slower on an H200, as was limiting registers per thread.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import fetch_to_l2, pdl
from specbatch.kernels.common.sizes import cdiv
from specbatch.kernels.gemm.split_k_triton import used_splits

MOST_ROWS = 32


class FP8Tile(Protocol):
    """outputs of a program; splits: programs that share the K of a tile; stages of the pipeline; ahead: pieces of 64
    bytes of each row of the weight that a program fetches to the L2 cache before it waits for the previous kernel."""

    @property
    def outputs(self) -> int: ...

    @property
    def splits(self) -> int: ...

    @property
    def warps(self) -> int: ...

    @property
    def stages(self) -> int: ...

    @property
    def ahead(self) -> int: ...


def launch_settings(tile: FP8Tile, x: torch.Tensor, n: int, steps: int) -> tuple[int, dict[str, Any]]:
    """How many programs for x [rows, K], n outputs and this number of steps over K, and what a kernel is launched
    with."""
    assert len(x) <= MOST_ROWS, f"{len(x)} rows are not few"
    splits = used_splits(steps, tile.splits)
    found = {"SPLITS": splits, "BM": rows_of_tile(len(x)), "BN": tile.outputs, "AHEAD": tile.ahead, **pdl(x)}
    found |= {"num_warps": tile.warps, "num_stages": tile.stages}
    return cdiv(n, tile.outputs) * splits, found


def rows_of_tile(rows: int) -> int:
    return 16 if rows <= 16 else 32


def even_splits(most: int, steps: int) -> int:
    """At most so many programs for this number of steps over K: fewer if that gives all of them the same share, but
    more than half as many."""
    return next((splits for splits in range(most, most // 2, -1) if steps % splits == 0), most)


@triton.jit
def fetch_rows_to_l2(weight_row, first, last, AHEAD: tl.constexpr, PIECE: tl.constexpr):
    """Fetch AHEAD pieces of PIECE values, which are 64 bytes, of rows at pointers [N], from the value `first` to that
    before `last`."""
    at = tl.minimum(first + tl.arange(0, AHEAD) * PIECE, last - 1)
    fetch_to_l2(weight_row[:, None] + at[None, :])


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
