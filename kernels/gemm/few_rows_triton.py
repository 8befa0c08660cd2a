"""What GEMMs of at most 32 rows of 16-bit activations with a weight that is unpacked in registers have in common.

Their programs are split over K. Before it waits for the previous kernel, a program fetches its first weights to the L2
cache. Loading them to registers by then was slower on an H200, as was a limit of the registers of a thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl
from specbatch.kernels.gemm.split_k_triton import splits_for

MOST_ROWS = 32


class FewRowsTile(NamedTuple):
    """outputs of a program; splits: programs that share the K of a tile; stages of the pipeline; ahead: pieces of 64
    bytes of each row of the weight that a program fetches to the L2 cache before it waits for the previous kernel."""

    outputs: int
    splits: int
    warps: int
    stages: int
    ahead: int

    def settings(self, x: torch.Tensor, n: int, steps: int) -> tuple[int, dict[str, Any]]:
        """How many programs for x [rows, K], n outputs and this number of steps over K, and what a kernel is launched
        with."""
        assert len(x) <= MOST_ROWS, f"{len(x)} rows are not few"
        assert min(self.outputs // 16, self.warps) >= 4, "weights are in the order of a warpgroup's operand"
        splits = triton.cdiv(steps, triton.cdiv(steps, self.splits))  # no program without a part of K
        found = {"SPLITS": splits, "BM": rows_of_tile(len(x)), "BN": self.outputs}
        found |= {"WARPS": min(self.warps, self.outputs // 16), "AHEAD": self.ahead, **pdl(x)}
        found |= {"num_warps": self.warps, "num_stages": self.stages}
        return triton.cdiv(n, self.outputs) * splits, found


def rows_of_tile(rows: int) -> int:
    return 16 if rows <= 16 else 32


def few_rows_tile_for(rows: int, n: int, k: int) -> FewRowsTile:
    """The tile of a GEMM of so many rows with a weight [n, k].

    To tune: `python -m specbatch.sweeps.microbench gemm-tiles`."""
    is_wide = n >= 16384
    outputs, resident = (128, 3 if rows <= 16 else 2) if is_wide else (64, 2)
    splits = splits_for(triton.cdiv(n, outputs), outputs * rows_of_tile(rows), k, resident)
    return FewRowsTile(outputs, splits, 4, 4, 8)


@triton.jit
def fetch_to_l2(at):
    """Fetch what is at pointers to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fetch_words_to_l2(weight_row, first, last, AHEAD: tl.constexpr):
    """Fetch AHEAD pieces of 64 bytes of rows of int32 at pointers [N], from the word `first` to that before `last`."""
    word = tl.minimum(first + tl.arange(0, AHEAD) * 16, last - 1)
    fetch_to_l2(weight_row[:, None] + word[None, :])


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
