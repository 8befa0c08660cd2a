"""GEMM for any number of rows whose order of additions is that of `fixed_order`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, tile_side


@dataclass(frozen=True)
class Tile:
    """Rows of x, rows of the weight and columns of a step; warps and pipeline stages of a program; tiles of the weight
    that share rows of x in the L2 (0: programs that share rows of the weight are neighbours). None changes a bit."""

    rows: int
    outputs: int
    columns: int
    warps: int
    stages: int
    group: int = 0


def tile_for(rows: int, item: int) -> Tile:
    """The tile for so many rows of x, and elements of `item` bytes."""
    if item == 4:  # without tensor cores, each product added to the last; larger tiles need too many registers
        return Tile(min(32, tile_side(rows)), 64, 32, 4, 2)
    if rows <= 32:
        return Tile(16 if rows <= 16 else 32, 64, 128, 4, 7)
    if rows <= 64:
        return Tile(64, 64, 128, 4, 6)
    if rows <= 128:
        return Tile(64, 64, 128, 4, 5, 8)
    if rows <= 256:
        return Tile(128, 64, 128, 4, 4)
    return Tile(128, 128, 64, 4, 4, 8) if rows <= 512 else Tile(256, 128, 64, 8, 4, 8)


def fixed_order_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight.T + bias + residual for weight [N, K], bias [N], residual [T, N] -> [T, N], in the memory of
    `out` if given. Summed in float32, and rounded before the residual is added, too. Rows of residual and out may be
    apart.

    Rows of x and of the weight are multiples of 16 bytes.
    """
    (rows, k), n = x.shape, weight.shape[0]
    assert weight.shape[1] == k, f"x has {k} columns, the weight {weight.shape[1]}"
    assert k * x.element_size() % 16 == 0, f"rows of {k} columns are no multiples of 16 bytes"
    y = torch.empty(rows, n, device=x.device, dtype=x.dtype) if out is None else out
    assert y.stride(1) == 1, "the elements of a row of out must be adjacent"
    assert residual is None or residual.stride(1) == 1, "the elements of a row of the residual must be adjacent"
    if not rows:
        return y
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    tile = tile or tile_for(rows, x.element_size())
    fixed_order_gemm_kernel[(cdiv(rows, tile.rows) * cdiv(n, tile.outputs),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.columns]),
        TensorDescriptor.from_tensor(weight, [tile.outputs, tile.columns]),
        bias, residual, y, rows, n, k, 0 if residual is None else residual.stride(0), y.stride(0),
        BT=tile.rows, BN=tile.outputs, BK=tile.columns, GROUP=tile.group,
        **pdl(x), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["T"])
def fixed_order_gemm_kernel(
    x, weight, bias, residual, y, T, N, K, residual_stride, y_stride,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weight is the first operand: its 64 rows are those of a warpgroup's instruction, rows of x its columns."""
    index = tl.program_id(0)
    tiles_t, tiles_n = tl.cdiv(T, BT), tl.cdiv(N, BN)
    tile_t, tile_n = index % tiles_t, index // tiles_t
    if GROUP > 0:
        first = index // (GROUP * tiles_t) * GROUP
        size = tl.minimum(tiles_n - first, GROUP)
        tile_n, tile_t = first + index % (GROUP * tiles_t) % size, index % (GROUP * tiles_t) // size
    t, n = tile_t * BT, tile_n * BN
    wait_for_previous_kernel(PDL)
    acc = tl.zeros([BN, BT], tl.float32)
    for k in tl.range(0, K, BK):
        acc = tl.dot(weight.load([n, k]), x.load([t, k]).T, acc, input_precision="ieee")
    total = acc.T
    row, column = t + tl.arange(0, BT), n + tl.arange(0, BN)
    exists = (row < T)[:, None] & (column < N)[None, :]
    row = row.to(tl.int64)
    if bias is not None:
        total += tl.load(bias + column, column < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        total = total.to(y.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + row[:, None] * residual_stride + column[None, :], exists, other=0.0).to(tl.float32)
    tl.store(y + row[:, None] * y_stride + column[None, :], total.to(y.dtype.element_ty), exists)
