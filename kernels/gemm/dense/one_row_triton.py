"""GEMM of one row: a program reads whole rows of the weight into registers and multiplies them by x in float32.

The weight is read before the wait for the previous kernel, all of it that the multiprocessors hold at once, and no sum
is split among programs: nothing is left to do after the last byte but one sum over a program's threads. Tensor cores
would need rows of x in multiples of 8; with two rows of x and more `skinny_gemm_triton` is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv

MOST_K = 32768


@dataclass(frozen=True)
class OneRowTile:
    """Rows of the weight (of both halves together where gated) that a program reads, with so many warps."""

    rows: int
    warps: int


def takes_one_row(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Is this the kernel for x [M, K] and weight [N, K]? Registers hold what a program reads of the weight, and words
    of 32 bits are read."""
    is_half, is_aligned = x.element_size() == 2, x.data_ptr() % 4 == 0 == weight.data_ptr() % 4
    return len(x) == 1 and is_half and is_aligned and x.shape[1] <= MOST_K and x.shape[1] % 2 == 0


def one_row_tile_for(k: int, gated: bool) -> OneRowTile:
    """The tile for a weight of k columns: four rows, or as many as fit in 64 registers of each thread.

    Measured in a chain of layers on an H100; half the rows take 0.5 us a layer of Qwen3-8B longer.
    """
    warps = 4 if k <= 8192 else 8
    rows = 4
    while rows > 1 + gated and rows * k > 4096 * warps:
        rows //= 2
    return OneRowTile(rows, warps)


@triton.jit
def _words(at):
    """Pointers to words of 32 bits. Elements of 16 bits the compiler would unpack before the wait, to hold each in a
    register of its own."""
    return at.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _chunks(at, K: tl.constexpr, C: tl.constexpr, POLICY: tl.constexpr):
    """K words from pointers [R, 1] on: a tuple of [R, C], the last filled up with 0."""
    found, column = (), tl.arange(0, C)[None, :]
    for i in tl.static_range((K + C - 1) // C):
        if (i + 1) * C > K:
            chunk = tl.load(at + (i * C + column), i * C + column < K, other=0, eviction_policy=POLICY)
        else:
            chunk = tl.load(at + (i * C + column), eviction_policy=POLICY)
        found = found + (chunk,)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no stars)
    return found


@triton.jit
def _halves(values, kind: tl.constexpr):
    """The even and the odd elements, float32 [R, C], of words [R, C], or [R, 2 C] if elements have 32 bits."""
    if kind == tl.float32:
        pairs = tl.reshape(values, [values.shape[0], values.shape[1] // 2, 2])
        low, high = tl.split(pairs.to(tl.float32, bitcast=True))
    elif kind == tl.bfloat16:
        low, high = (values << 16).to(tl.float32, bitcast=True), (values & -65536).to(tl.float32, bitcast=True)
    else:
        low = values.to(tl.int16).to(kind, bitcast=True).to(tl.float32)
        high = (values >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _sums_of_threads(products):
    """float32 [R, C] -> [R, C / 4]: sums of elements next to each other, which a thread holds."""
    R: tl.constexpr = products.shape[0]
    C: tl.constexpr = products.shape[1]
    return tl.sum(tl.reshape(products, [R, C // 4, 4]), 2)


@triton.jit(do_not_specialize=["N"])
def one_row_kernel(
    x, weight, bias, norm, residual, y, N, eps, K: tl.constexpr, GATED: tl.constexpr, SQUARED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """R rows of the weight, of each half where gated. C: pairs of columns that all threads load at once."""
    kind: tl.constexpr = x.dtype.element_ty
    HALVES: tl.constexpr = 2 if GATED else 1
    CHUNKS: tl.constexpr = (K // 2 + C - 1) // C
    column = tl.program_id(0) * R + tl.arange(0, R)
    row = tl.arange(0, HALVES * R)
    row = tl.minimum(tl.program_id(0) * R + row % R, N - 1) + row // R * N
    start = tl.zeros([1, 1], tl.int32)
    w = _chunks(_words(weight) + row.to(tl.int64)[:, None] * (K // 2), K // 2, C, "evict_first")
    if HAS_NORM:
        WIDTH: tl.constexpr = norm.dtype.element_ty.primitive_bitwidth // 16
        scales = _chunks(_words(norm) + start, WIDTH * (K // 2), WIDTH * C, "")
    if HAS_BIAS:
        biases = tl.load(bias + row).to(tl.float32)
    wait_for_previous_kernel(PDL)
    row_of_x = _chunks(_words(x) + start, K // 2, C, "")
    if HAS_RESIDUAL:
        added = tl.load(residual + column, column < N, other=0.0).to(tl.float32)
    sums = tl.zeros([HALVES * R, C // 4], tl.float32)
    squares = tl.zeros([1, C // 4], tl.float32)
    for i in tl.static_range(CHUNKS):
        low, high = _halves(row_of_x[i], kind)
        if HAS_NORM:
            squares += _sums_of_threads(low * low + high * high)
            scale_low, scale_high = _halves(scales[i], norm.dtype.element_ty)
            low *= scale_low
            high *= scale_high
        w_low, w_high = _halves(w[i], kind)
        sums += _sums_of_threads(w_low * low + w_high * high)
    total = tl.sum(sums, 1)
    if HAS_NORM:
        total *= tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)
    if HAS_BIAS:
        total += biases
    if GATED:
        total, up = tl.split(tl.permute(tl.reshape(total, [2, R]), (1, 0)))
        total = total * tl.sigmoid(total) * up
    if SQUARED:
        total = tl.where(total < 0, 0.0, total)  # a maximum would hide NaN
        total *= total
    if HAS_RESIDUAL:
        total += added
    tl.store(y + column, total.to(y.dtype.element_ty), column < N)


def one_row_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    residual: torch.Tensor | None,
    *,
    gated: bool,
    squared: bool = False,
    tile: OneRowTile | None = None,
    pdl: bool,
) -> torch.Tensor:
    """x [1, K] @ weight [N, K].T with what `skinny_linear` and `skinny_gated` fuse -> [1, N], or [1, N / 2] if gated.

    All sums, and x times the weight of its norm, are float32.
    """
    norm_weight, eps = norm or (None, 0.0)
    assert len(x) == 1, f"{len(x)} rows are not one"
    assert norm_weight is None or norm_weight.data_ptr() % 4 == 0, "words of 32 bits are read of the norm's weight"
    k, n = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    tile = tile or one_row_tile_for(k, gated)
    rows = tile.rows // (2 if gated else 1)
    y = torch.empty(1, n, device=x.device, dtype=x.dtype)
    one_row_kernel[(cdiv(n, rows),)](
        x, weight, bias, norm_weight, residual, y, n, eps, K=k, GATED=gated, SQUARED=squared,
        HAS_BIAS=bias is not None, HAS_NORM=norm_weight is not None, HAS_RESIDUAL=residual is not None,
        R=rows, C=128 * tile.warps, PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    return y
