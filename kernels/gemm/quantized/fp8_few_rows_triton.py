"""Triton GEMM with FP8 weights for at most 32 rows of 16-bit activations.

A thread reads four neighbouring weights as a word, as its own of the first operand of the products: K is summed in
another order, in which the columns of x are put, too. In the order of memory each would be two reads of two bytes,
and more instructions than there is time for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.block_sizes import SCALE_BLOCK
from specbatch.kernels.common.pdl_triton import wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv
from specbatch.kernels.gemm.quantized.few_rows_triton import fetch_rows_to_l2, launch_settings, rows_of_tile, store_rows
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Weight
from specbatch.kernels.gemm.quantized.fragments_triton import fragment_rows, in_fragment_order, pairs_in_fragment_order
from specbatch.kernels.gemm.split_k_triton import is_last_split, splits_for, sum_of_splits, workspace

# e4m3 in bytes 0 and 2, then in bytes 1 and 3: exponent and fraction move to where a 16-bit float has them, and a power
# of two makes up for the other bias, of subnormal values too. The conversion is exact. $0 may have the register of $2.
_WIDEN: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, c, d, factor;
shl.b32 a, $2, LEFT;
shr.u32 b, $2, RIGHT;
shl.b32 c, $2, 8;
and.b32 a, a, MASK;
and.b32 b, b, MASK;
lop3.b32 c, c, 0x80008000, a, 0xea;
lop3.b32 d, $2, 0x80008000, b, 0xea;
mov.b32 factor, FACTOR;
mul.rn.KIND $0, c, factor;
mul.rn.KIND $1, d, factor;
}""")
_FOR_BF16: tl.constexpr = tl.constexpr(
    _WIDEN.value.replace("LEFT", "4").replace("RIGHT", "4").replace("MASK", "0x07f007f0").replace("KIND", "bf16x2")
)
_WIDEN_BF16: tl.constexpr = tl.constexpr(_FOR_BF16.value.replace("FACTOR", "0x7b807b80"))  # 2^120
_FOR_FP16: tl.constexpr = tl.constexpr(
    _WIDEN.value.replace("LEFT", "7").replace("RIGHT", "1").replace("MASK", "0x3f803f80").replace("KIND", "f16x2")
)
_WIDEN_FP16: tl.constexpr = tl.constexpr(_FOR_FP16.value.replace("FACTOR", "0x5c005c00"))  # 2^8


class FP8FewRowsTile(NamedTuple):
    """See `few_rows_triton.FP8Tile`."""

    outputs: int
    splits: int
    warps: int
    stages: int
    ahead: int

    def settings(self, x: torch.Tensor, n: int, steps: int) -> tuple[int, dict[str, Any]]:
        """`launch_settings`."""
        assert min(self.outputs // 16, self.warps) >= 4, "weights are in the order of a warpgroup's operand"
        programs, found = launch_settings(self, x, n, steps)
        return programs, found | {"WARPS": min(self.warps, self.outputs // 16)}


def fp8_few_rows_tile_for(rows: int, n: int, k: int) -> FP8FewRowsTile:
    """The tile of a GEMM of so many rows with a weight [n, k].

    To tune: `python -m specbatch.sweeps.microbench gemm-tiles`."""
    is_wide = n >= 16384
    outputs, resident = (128, 3 if rows <= 16 else 2) if is_wide else (64, 2)
    splits = splits_for(cdiv(n, outputs), outputs * rows_of_tile(rows), k, resident)
    return FP8FewRowsTile(outputs, splits, 4, 4, 8)


def fp8_few_rows(
    x: torch.Tensor, weight: FP8Weight, bias: torch.Tensor | None, residual: torch.Tensor | None, y: torch.Tensor,
    tile: FP8FewRowsTile,
) -> torch.Tensor:  # fmt: skip
    """`fp8_linear` of few rows, into y [T, N]; the weight's K is a multiple of 128."""
    (rows, k), n = x.shape, weight.shape[0]
    assert k % SCALE_BLOCK == 0, f"{k} inputs"
    assert tile.outputs <= SCALE_BLOCK, "outputs of a tile share their scales"
    partial, counters = workspace(x.device)
    programs, settings = tile.settings(x, n, k // SCALE_BLOCK)
    fp8_few_rows_kernel[(programs,)](
        x, weight.values.view(torch.int32), weight.scales, bias, residual, y, partial, counters, rows, n, k,
        x.stride(0), 0 if residual is None else residual.stride(0), y.stride(0), PER_CHANNEL=weight.is_per_channel,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, SIDE=SCALE_BLOCK, **settings,
    )  # fmt: skip
    return y


@triton.jit
def widened(words, kind: tl.constexpr, WARPS: tl.constexpr):
    """Words int32 [N, W] of e4m3, without NaN, of the rows `fragment_rows` -> values [N, 4 * W] of the rows in their
    order, the columns as `in_order_of_words`."""
    if kind == tl.float32:
        found = in_fragment_order(_byte(words, 0), _byte(words, 16), _byte(words, 8), _byte(words, 24), WARPS)
    else:
        code: tl.constexpr = _WIDEN_BF16 if kind == tl.bfloat16 else _WIDEN_FP16
        first, second = tl.inline_asm_elementwise(
            code, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        found = pairs_in_fragment_order(first, second, kind, WARPS)
    return found


@triton.jit
def _byte(words, SHIFT: tl.constexpr):
    return ((words >> SHIFT) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def in_order_of_words(rows):
    """Rows of x [M, K], K the columns of a step -> their columns in the order of `widened`: of each 16, thread t of
    four has those of a word of its own."""
    M: tl.constexpr = rows.shape[0]
    K: tl.constexpr = rows.shape[1]
    by_word = tl.reshape(rows, [M, 4, K // 16, 2, 2])
    return tl.reshape(tl.permute(by_word, [0, 2, 4, 1, 3]), [M, K])


@triton.jit(do_not_specialize=["M"])
def fp8_few_rows_kernel(
    x, weight, scales, bias, residual, y, partial, counters, M, N, K, x_stride, residual_stride, y_stride,
    PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SIDE: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weights are exact in the type of x, and sums of products are scaled: no value is rounded on the way."""
    WORDS: tl.constexpr = SIDE // 4
    kind: tl.constexpr = x.dtype.element_ty
    split, tile = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    steps = K // SIDE
    per_split = tl.cdiv(steps, SPLITS)
    first, last = split * per_split, tl.minimum(steps, (split + 1) * per_split)
    row, column = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    exists = (row < M)[:, None]
    stored = tl.minimum(tile * BN + fragment_rows(BN, WARPS), N - 1).to(tl.int64)
    x_tile = x + row.to(tl.int64)[:, None] * x_stride + tl.arange(0, SIDE)[None, :]
    weight_row = weight + tl.multiple_of(stored * (K // 4), 4)
    weight_tile = weight_row[:, None] + tl.arange(0, WORDS)[None, :]
    scale_row = scales + tile * BN // SIDE * steps
    if PDL and AHEAD > 0:
        fetch_rows_to_l2(weight_row, first * WORDS, last * WORDS, AHEAD, 16)
    scale_next = tl.load(scale_row if PER_CHANNEL else scale_row + first).to(tl.float32)
    total = tl.zeros([BN, BM], tl.float32)
    wait_for_previous_kernel(PDL)
    for step in tl.range(first, last):
        words = tl.load(weight_tile + step * WORDS, eviction_policy="evict_first")
        rows = tl.load(x_tile + step * SIDE, exists, other=0.0)
        values, rows = widened(words, kind, WARPS), in_order_of_words(rows)
        if PER_CHANNEL:
            total = tl.dot(values, rows.T, total, input_precision="ieee")
        else:
            scale = scale_next
            scale_next = tl.load(scale_row + tl.minimum(step + 1, last - 1)).to(tl.float32)
            total += tl.dot(values, rows.T, input_precision="ieee") * scale
    if SPLITS > 1:
        if not is_last_split(total, partial, counters, tile, split, SPLITS):
            return
        total = sum_of_splits(partial, counters, tile, SPLITS, BN, BM)
    if PER_CHANNEL:
        total *= tl.load(scales + tl.minimum(column, N - 1)).to(tl.float32)[:, None]
    store_rows(total, y, bias, residual, row, column, M, N, y_stride, residual_stride, HAS_BIAS, HAS_RESIDUAL)
