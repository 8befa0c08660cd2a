"""Triton kernel of `head_gemm` in deterministic mode: an element is one sum over the columns, from the first to the
last, whatever the number of tokens (see `fixed_order`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, tile_side

OUTPUTS = 64  # of a tile: the rows of a warpgroup's instruction


@dataclass(frozen=True)
class HeadTile:
    """Tokens, columns of a step, warps and pipeline stages of a program. None changes a bit."""

    tokens: int
    columns: int
    warps: int
    stages: int


def tile_for(tokens: int, item: int) -> HeadTile:
    """The tile for so many tokens, and elements of `item` bytes."""
    rows = tile_side(tokens)
    return HeadTile(min(32, rows), 32, 4, 2) if item == 4 else HeadTile(min(128, rows), 64, 4, 4)


def head_gemm(x: torch.Tensor, weight: torch.Tensor, tile: HeadTile | None = None) -> torch.Tensor:
    """`head_gemm_ref`, summed in float32; the result is contiguous."""
    (tokens, heads, k), n = x.shape, weight.shape[2]
    assert weight.shape[:2] == (heads, k), f"x has {heads} heads of {k}, the weight {tuple(weight.shape[:2])}"
    assert x.stride(2) == 1, "the elements of a head must be adjacent"
    y = torch.empty(tokens, heads, n, device=x.device, dtype=x.dtype)
    if not tokens:
        return y
    tile = tile or tile_for(tokens, x.element_size())
    head_gemm_kernel[(cdiv(tokens, tile.tokens), cdiv(n, OUTPUTS), heads)](
        x, weight, y, tokens, *x.stride()[:2], *weight.stride(), N=n, K=k, BT=tile.tokens, BN=OUTPUTS, BK=tile.columns,
        **pdl(x), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["T"])
def head_gemm_kernel(
    x, weight, y, T, x_token, x_head, weight_head, weight_k, weight_n,
    N: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weight is the first operand, as in `fixed_order_gemm_kernel`."""
    head = tl.program_id(2).to(tl.int64)
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    output, column = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    exists, inside = token < T, output < N
    rows = x + head * x_head + token[None, :] * x_token + column[:, None]
    matrix = weight + head * weight_head + output[:, None] * weight_n + column[None, :] * weight_k
    wait_for_previous_kernel(PDL)
    acc = tl.zeros([BN, BT], tl.float32)
    for k in tl.range(0, K, BK):
        left = column < K - k
        a = tl.load(matrix + k * weight_k, inside[:, None] & left[None, :], 0.0)
        b = tl.load(rows + k, left[:, None] & exists[None, :], 0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    place = y + (token[:, None] * tl.num_programs(2) + head) * N + output[None, :]
    tl.store(place, acc.T.to(y.dtype.element_ty), exists[:, None] & inside[None, :])
