"""Skinny GEMM: a few rows times a weight, at the speed at which the weight can be read.

One program owns `BN` rows of the weight (or a part of their K) and streams them through the tensor cores against the
rows of x, padded to 16, 32, 64 or 128. RMSNorm of x, bias, residual and the activation of an MLP are fused,
so that a layer's GEMMs need no kernel between them. One row in 16 bits has a kernel of its own: `one_row_triton`.

Where a GEMM is split over K, every program leaves float32 partial sums in a workspace; the last to arrive at a tile
adds them in the order of the splits, so that results do not depend on timing.

Programmatic dependent launch hides the boundary between two kernels: the programs of the next start as soon as there is
room beside those of the one before and fill their shared memory with weights, so that memory hardly pauses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import wait_in_loop
from specbatch.kernels.common.sizes import cdiv, tile_side
from specbatch.kernels.dispatch import runs_kernels
from specbatch.kernels.elementwise.norm import rms_norm
from specbatch.kernels.gemm.dense.one_row_triton import OneRowTile, one_row_gemm, takes_one_row
from specbatch.kernels.gemm.dense.skinny_gemm_configs import Tile, puts_weight_first, tile_for
from specbatch.kernels.gemm.split_k_triton import used_splits, workspace

FEW = 16  # rows, whatever the weight
MOST, MOST_OUTPUTS = 32, 65536  # rows, and outputs of a layer's weights


@triton.jit
def _sums_of_products(x, weight, total, WEIGHT_FIRST: tl.constexpr):
    """total + x [BM, BK] @ weight [BK, BN] as [BM, BN]; or weight [BN, BK] @ x.T as [BN, BM]."""
    if WEIGHT_FIRST:
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, weight, total, input_precision="ieee")
    return total


@triton.jit
def skinny_kernel(
    x,
    weight,
    bias,
    norm,
    residual,
    y,
    partial,
    counters,
    M,
    N,  # columns of y
    K,
    x_stride,
    residual_stride,
    eps,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDED: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """WEIGHT_FIRST: the weight is the first operand of products, so that its rows fill the 64 of an instruction, and
    x the second; sums of squares are then not products but elementwise."""
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    blocks = tl.cdiv(tl.cdiv(K, BK), SPLITS)
    k_from = split * blocks * BK
    k_to = tl.minimum(K, k_from + blocks * BK)
    up_offset = (tl.zeros([], tl.int64) + N) * K

    rows = tl.arange(0, BM)
    columns = tile * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    weight_rows = tl.minimum(columns, N - 1).to(tl.int64)
    if WEIGHT_FIRST:
        weight_tile = weight + weight_rows[:, None] * K + ks[None, :]
        total = tl.zeros([BN, BM], tl.float32)
        total_up = tl.zeros([BN, BM], tl.float32)
    else:
        weight_tile = weight + weight_rows[None, :] * K + ks[:, None]
        total = tl.zeros([BM, BN], tl.float32)
        total_up = tl.zeros([BM, BN], tl.float32)
    x_tile = x + rows[:, None].to(tl.int64) * x_stride + ks[None, :]
    row_exists = rows[:, None] < M
    exists = row_exists & (columns[None, :] < N)
    residual_tile = (
        residual + rows[:, None].to(tl.int64) * residual_stride + columns[None, :] if HAS_RESIDUAL else x_tile
    )
    gram = tl.zeros([BM, BM], tl.float32)  # its diagonal: the rows' sums of squares
    squares = tl.zeros([BM, BK], tl.float32)  # or its columns' sums
    a_next = tl.zeros([BM, BK], x.dtype.element_ty)
    added = tl.zeros([BM, BN], x.dtype.element_ty)
    if HAS_NORM:
        scale_next = tl.load(norm + k_from + ks, mask=k_from + ks < K, other=0.0)
    for k in tl.range(k_from, k_to, BK):
        # The compiler's pipeline fetches the first weight tiles ahead of the loop, hence before the wait. Rows of x
        # come after it: in a branch and through a variable of the loop, where the pipeline leaves them.
        a = a_next
        if k == k_from:
            wait_in_loop(PDL)
            a = tl.load(x_tile + k, mask=row_exists & (k + ks < k_to)[None, :], other=0.0)
            if HAS_RESIDUAL:
                added = tl.load(residual_tile, mask=exists, other=0.0)
        a_next = tl.load(x_tile + k + BK, mask=row_exists & (k + BK + ks < k_to)[None, :], other=0.0)
        if EVEN_K:
            b = tl.load(weight_tile + k, eviction_policy="evict_first")
        else:
            inside = (k + ks < k_to)[None, :] if WEIGHT_FIRST else (k + ks < k_to)[:, None]
            b = tl.load(weight_tile + k, mask=inside, other=0.0)
        if HAS_NORM:
            if WEIGHT_FIRST:
                squares += a.to(tl.float32) * a.to(tl.float32)
            else:
                gram = tl.dot(a, tl.trans(a), gram, input_precision="ieee")
            scale = scale_next
            scale_next = tl.load(norm + k + BK + ks, mask=k + BK + ks < K, other=0.0)
            a = (a * scale[None, :]).to(x.dtype.element_ty)  # weights that are 1 + w are float32
        total = _sums_of_products(a, b, total, WEIGHT_FIRST)
        if GATED:
            up_tile = weight_tile + up_offset
            if EVEN_K:
                b_up = tl.load(up_tile + k, eviction_policy="evict_first")
            else:
                b_up = tl.load(up_tile + k, mask=inside, other=0.0)
            total_up = _sums_of_products(a, b_up, total_up, WEIGHT_FIRST)
    if WEIGHT_FIRST:
        total, total_up = tl.trans(total), tl.trans(total_up)
        square = tl.sum(squares, 1)
    else:
        square = tl.sum(tl.where(rows[:, None] == rows[None, :], gram, 0.0), 1)

    if SPLITS > 1:
        # per tile and split: BM x BN sums (twice where gated), then BM sums of squares
        SIZE: tl.constexpr = BM * BN * (2 if GATED else 1) + BM
        inner = rows[:, None] * BN + tl.arange(0, BN)[None, :]
        mine = partial + (tile * SPLITS + split) * SIZE
        tl.store(mine + inner, total, mask=exists)
        if GATED:
            tl.store(mine + BM * BN + inner, total_up, mask=exists)
        if HAS_NORM:
            tl.store(mine + SIZE - BM + rows, square, mask=rows < M)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        total = tl.zeros([BM, BN], tl.float32)
        total_up = tl.zeros([BM, BN], tl.float32)
        square = tl.zeros([BM], tl.float32)
        for other in tl.static_range(SPLITS):
            theirs = partial + (tile * SPLITS + other) * SIZE
            total += tl.load(theirs + inner, mask=exists, other=0.0, cache_modifier=".cg")
            if GATED:
                total_up += tl.load(theirs + BM * BN + inner, mask=exists, other=0.0, cache_modifier=".cg")
            if HAS_NORM:
                square += tl.load(theirs + SIZE - BM + rows, mask=rows < M, other=0.0, cache_modifier=".cg")
        tl.store(counters + tile, 0)

    if HAS_NORM:
        scaling = tl.rsqrt(square / K + eps)[:, None]
        total *= scaling
        total_up *= scaling
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total_up += tl.load(bias + N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if ROUNDED:  # as a kernel after the GEMM reads it
        total, total_up = total.to(y.dtype.element_ty).to(tl.float32), total_up.to(y.dtype.element_ty).to(tl.float32)
    if GATED and ROUNDED:  # as `silu_and_mul` computes it
        total = total / (1 + tl.exp(-total)) * total_up
    elif GATED:
        total = total * tl.sigmoid(total) * total_up
    if SQUARED:
        total = tl.where(total < 0, 0.0, total)  # a maximum would hide NaN
        total *= total
    if HAS_RESIDUAL:
        total += added.to(tl.float32)
    tl.store(y + rows[:, None].to(tl.int64) * N + columns[None, :], total.to(y.dtype.element_ty), mask=exists)


def is_skinny(rows: int, weight: torch.Tensor) -> bool:
    """Are these kernels the right choice for so many rows and this weight [N, K]? (else the library's GEMM is)

    Measured on an H200 and an H100 (`sweeps/microbench/gemm.py`): up to 16 rows a layer of Qwen3-8B takes less time
    than the library's GEMMs alone; with 32, less than the library's GEMMs and the kernels of norms and activations
    between them, which a head does not need.
    """
    (n, k), is_half = weight.shape, weight.dtype in (torch.bfloat16, torch.float16)
    is_few = rows <= FEW or (rows <= MOST and n <= MOST_OUTPUTS)
    return runs_kernels(weight) and weight.is_contiguous() and is_half and is_few and k % 8 == 0


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    squared: bool = False,
    rounded: bool = False,
    tile: Tile | OneRowTile | None = None,
) -> torch.Tensor:
    """RMSNorm(x) @ weight.T + bias + residual, summed in float32; `squared`: relu(..)^2 + residual.

    x [M, K] with M <= 128, weight [N, K] contiguous, bias [N], residual [M, N] -> [M, N], all of one type; norm: weight
    [K], of that type or float32, and eps. Each of bias, norm and residual may be absent. Rows of x and of residual may
    be apart, their elements not. rounded: round the product to the type of x before the residual is added, as the
    library does. tile: chosen by the shapes if None.
    """
    return skinny_gemm(x, weight, bias, norm, residual, gated=False, squared=squared, rounded=rounded, tile=tile)


def skinny_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    rounded: bool = False,
    tile: Tile | OneRowTile | None = None,
) -> torch.Tensor:
    """silu(g) * u for [g | u] = RMSNorm(x) @ weight.T + bias.

    x [M, K], weight [2 I, K] with the rows of g before those of u, bias [2 I], norm as in `skinny_linear` -> [M, I].
    rounded: round g and u to the type of x, so that the result is that of a GEMM and `silu_and_mul`.
    """
    return skinny_gemm(x, weight, bias, norm, None, gated=True, rounded=rounded, tile=tile)


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    residual: torch.Tensor | None,
    *,
    gated: bool,
    squared: bool = False,
    rounded: bool = False,
    tile: Tile | OneRowTile | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """`skinny_gated`, or else `skinny_linear`. pdl: whether the launch is a dependent one; None: on a CUDA device."""
    (m, k), n = x.shape, weight.shape[0] // (2 if gated else 1)
    assert m <= 128, f"{m} rows are not few"
    assert x.stride(1) == 1, "the elements of a row of x must be adjacent"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert weight.shape[1] == k, f"x has {k} columns, the weight {weight.shape[1]}"
    assert residual is None or residual.stride(1) == 1, "the elements of a row of the residual must be adjacent"
    pdl = x.is_cuda if pdl is None else pdl
    if isinstance(tile, OneRowTile) or (tile is None and not rounded and takes_one_row(x, weight)):
        return one_row_gemm(x, weight, bias, norm, residual, gated=gated, squared=squared, tile=tile, pdl=pdl)
    if norm is not None and x.dtype == torch.float16:  # x * norm before its scaling may exceed 65504
        x, norm = rms_norm(x.contiguous(), *norm), None
    norm_weight, eps = norm or (None, 0.0)
    block_m = tile_side(m)
    tile = tile or tile_for(n, k, block_m, gated, x.element_size())
    partial, counters = workspace(x.device)
    y = torch.empty(m, n, device=x.device, dtype=x.dtype)
    tiles = cdiv(n, tile.n)
    blocks = cdiv(k, tile.k)
    splits = used_splits(blocks, tile.splits)
    skinny_kernel[(tiles * splits,)](
        x, weight, bias, norm_weight, residual, y, partial, counters, m, n, k, x.stride(0),
        0 if residual is None else residual.stride(0), eps,
        GATED=gated, SQUARED=squared, HAS_BIAS=bias is not None, HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None, ROUNDED=rounded, WEIGHT_FIRST=puts_weight_first(block_m), SPLITS=splits,
        EVEN_K=k % tile.k == 0, BM=block_m, BN=tile.n, BK=tile.k, PDL=pdl, launch_pdl=pdl,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y
