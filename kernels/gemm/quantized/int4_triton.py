"""Triton kernels for INT4 weights: a GEMM that unpacks them in registers, for few rows, and dequantization for many.

With few rows the GEMM is split over K until its programs fill the device; with fewer still it is `int4_few_rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv
from specbatch.kernels.dispatch import is_deterministic
from specbatch.kernels.gemm.quantized.few_rows_triton import MOST_ROWS, store_rows
from specbatch.kernels.gemm.quantized.four_bits_mainloop_triton import gemm_mainloop_int4
from specbatch.kernels.gemm.quantized.fragments_triton import fragment_rows, in_column_order
from specbatch.kernels.gemm.quantized.int4 import Int4Tiles
from specbatch.kernels.gemm.quantized.int4_few_rows_triton import Int4FewRowsTile, int4_few_rows, int4_few_rows_tile_for
from specbatch.kernels.gemm.quantized.int4_tiles_triton import first_of_row, word_scale, word_zero
from specbatch.kernels.gemm.split_k_triton import is_last_split, splits_for, sum_of_splits, used_splits, workspace

_MANY = 256  # rows from which to write and read a dequantized weight takes less time than to unpack it for each tile
_DEQUANTIZED = 64  # rows of a program


class Tile(NamedTuple):
    """rows of x by outputs; splits: programs that share the K of a tile; stages of the pipeline."""

    rows: int
    outputs: int
    splits: int
    warps: int
    stages: int


def tile_for(rows: int, n: int, k: int, item: int) -> Tile | Int4FewRowsTile:
    """The tile of a GEMM of so many rows of x [rows, k], of `item` bytes a value, with a weight [n, k].

    To tune: `python -m specbatch.sweeps.microbench gemm-tiles`."""
    if item == 2 and rows <= MOST_ROWS and not is_deterministic():  # a row is summed as among many
        return int4_few_rows_tile_for(rows, n, k)
    block = 16 if rows <= 16 else 32 if rows <= 32 or item == 4 else 64 if rows <= 64 else 128
    outputs = 32 if item == 4 else 64
    programs = cdiv(n, outputs) * cdiv(rows, block)
    resident, least = (3, 512) if block < 64 else (2, 2048)
    splits = 1 if is_deterministic() else splits_for(programs, block * outputs, k, resident, least)
    stages = 2 if item == 4 else {16: 4, 32: 6, 64: 4 if splits > 1 else 3, 128: 3}[block]
    return Tile(block, outputs, splits, 4, stages)


def int4_linear(
    x: torch.Tensor,
    weight: Int4Tiles,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | Int4FewRowsTile | None = None,
) -> torch.Tensor:
    """`quantized_linear_ref`: x [T, K], weight [N, K] -> [T, N], in `out` if given. Rows of x, residual and out may be
    apart. tile: chosen by the shapes if None."""
    (rows, k), (n, inputs) = x.shape, weight.shape
    assert k == inputs, f"x has {k} columns, and the weight {inputs} inputs"
    assert x.stride(1) == 1, "the elements of a row of x must be adjacent"
    assert bias is None or bias.shape == (n,), f"the bias {tuple(bias.shape)} is not {(n,)}"
    y = torch.empty(rows, n, device=x.device, dtype=x.dtype) if out is None else out
    for name, tensor in (("residual", residual), ("out", y)):
        assert tensor is None or tensor.shape == (rows, n), f"{name} {tuple(tensor.shape)} is not {(rows, n)}"
        assert tensor is None or tensor.stride(1) == 1, f"the elements of a row of {name} must be adjacent"
    if rows >= _MANY and not is_deterministic():
        matrix = dequantize(weight, x.dtype).t()
        torch.mm(x, matrix, out=y) if bias is None else torch.addmm(bias, x, matrix, out=y)
        return y if residual is None else y.add_(residual)
    tile = tile or tile_for(rows, n, k, x.element_size())
    if isinstance(tile, Int4FewRowsTile):
        return int4_few_rows(x, weight, bias, residual, y, tile)
    steps = k // weight.chunk
    splits = used_splits(steps, tile.splits)
    programs = cdiv(rows, tile.rows) * cdiv(n, tile.outputs)
    partial, counters = workspace(x.device)
    int4_linear_kernel[(programs * splits,)](
        x, *weight.words(), bias, residual, y, partial, counters, rows, n, k, x.stride(0),
        0 if residual is None else residual.stride(0), y.stride(0), HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, GROUP=weight.group, CHUNK=weight.chunk, UNIT=weight.unit,
        BF16=weight.scales.dtype == torch.bfloat16, SPLITS=splits, BM=tile.rows, BN=tile.outputs,
        WARPS=min(tile.warps, tile.outputs // 16), **pdl(x), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M"])
def int4_linear_kernel(
    x, weight, scales, bias, residual, y, partial, counters, M, N, K, x_stride, residual_stride, y_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr,
    BF16: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs that share rows of the weight are neighbours."""
    blocks = tl.cdiv(M, BM)
    block, split = tl.program_id(0) % blocks, tl.program_id(0) // blocks % SPLITS
    tile = tl.program_id(0) // (blocks * SPLITS)
    row = (block * BM + tl.arange(0, BM)).to(tl.int64)
    stored = tl.minimum(tile * BN + fragment_rows(BN, WARPS), N - 1).to(tl.int64)
    column = tile * BN + tl.arange(0, BN)
    chunks = K // CHUNK
    first_word = first_of_row(stored, chunks, CHUNK // 8, UNIT)
    first_scale = first_of_row(tl.minimum(column, N - 1).to(tl.int64), chunks, CHUNK // GROUP, UNIT)
    per_split = tl.cdiv(chunks, SPLITS)
    wait_for_previous_kernel(PDL)
    total = gemm_mainloop_int4(
        x + row * x_stride, row < M, weight + first_word, scales + first_scale, split * per_split,
        tl.minimum(chunks, (split + 1) * per_split), BM == 16, GROUP, CHUNK, UNIT, BF16, BM, BN, WARPS,
    )  # fmt: skip
    if SPLITS > 1:
        place = tile * blocks + block
        if not is_last_split(total, partial, counters, place, split, SPLITS):
            return
        total = sum_of_splits(partial, counters, place, SPLITS, BN, BM)
    store_rows(total, y, bias, residual, row, column, M, N, y_stride, residual_stride, HAS_BIAS, HAS_RESIDUAL)


def dequantize(weight: Int4Tiles, dtype: torch.dtype) -> torch.Tensor:
    """`Int4Tiles.dequantize` of a weight [N, K]."""
    n, k = weight.shape
    found = torch.empty(n, k, device=weight.values.device, dtype=dtype)
    _dequantize_kernel[(cdiv(n, _DEQUANTIZED) * (k // weight.chunk),)](
        *weight.words(), found, n, k, GROUP=weight.group,
        CHUNK=weight.chunk, UNIT=weight.unit, BF16=weight.scales.dtype == torch.bfloat16, ROWS=_DEQUANTIZED,
        **pdl(found), num_warps=4,
    )  # fmt: skip
    return found


@triton.jit
def _dequantize_kernel(
    words, scales, found, N, K, GROUP: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr, BF16: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = CHUNK // 2
    PART: tl.constexpr = GROUP if GROUP < HALF else HALF
    GROUPS: tl.constexpr = CHUNK // GROUP
    chunks = K // CHUNK
    chunk, row = tl.program_id(0) % chunks, (tl.program_id(0) // chunks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    exists = row < N
    word = first_of_row(row, chunks, CHUNK // 8, UNIT)[:, None] + chunk * (UNIT * CHUNK // 8) + tl.arange(0, CHUNK // 8)
    packed = tl.load(words + word, exists[:, None], other=0)
    first_group = scales + first_of_row(row, chunks, GROUPS, UNIT)[:, None] + chunk * (UNIT * GROUPS)
    wait_for_previous_kernel(PDL)  # which may still read this memory
    for half in tl.static_range(2):
        values = in_column_order(
            packed >> 4 * half & 15, packed >> 4 * half + 16 & 15, packed >> 4 * half + 8 & 15,
            packed >> 4 * half + 24 & 15,
        )  # fmt: skip
        column = chunk * CHUNK + half * HALF
        group = first_group + half * HALF // GROUP + tl.arange(0, HALF // PART)[None, :]
        pair = tl.load(group, exists[:, None], other=0)[:, :, None]
        zero, scale = word_zero(pair).to(tl.float32), word_scale(pair, BF16)
        value = tl.reshape((tl.reshape(values, [ROWS, HALF // PART, PART]).to(tl.float32) - zero) * scale, [ROWS, HALF])
        to = found + row[:, None] * K + column + tl.arange(0, HALF)
        tl.store(to, value.to(found.dtype.element_ty), exists[:, None])
