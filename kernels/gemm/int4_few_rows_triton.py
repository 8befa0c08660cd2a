"""Triton GEMM with INT4 weights for at most 32 rows of 16-bit activations.

Instructions limit it before memory does: while an H200 reads 128 outputs of a group at 4.6 TB/s, a scheduler can issue
450 of them, of which the pipeline, scales and products take 130. Hence masks and shifts are five for a word of eight
weights, and four multiply and subtract zero points. Scales and zero points are fetched a step ahead, and the first
weights are asked for before the wait for the previous kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import wait_for_previous_kernel
from specbatch.kernels.gemm.few_rows_triton import FewRowsTile, fetch_to_l2, fetch_words_to_l2, store_rows
from specbatch.kernels.gemm.four_bits_triton import (
    chunk_in_fragment_order,
    fragment_rows,
    split_columns,
)
from specbatch.kernels.gemm.int4 import chunk_of
from specbatch.kernels.gemm.split_k_triton import is_last_split, sum_of_splits, workspace
from specbatch.kernels.gemm.weight import Weight


def int4_few_rows(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, residual: torch.Tensor | None, y: torch.Tensor,
    tile: FewRowsTile,
) -> torch.Tensor:  # fmt: skip
    """`int4_linear` of few rows, into y [T, N]."""
    (rows, k), n, scales = x.shape, weight.shape[0], weight.scales
    assert scales is not None
    chunk = chunk_of(k)
    groups = scales.shape[1] * chunk // k
    partial, counters = workspace(x.device)
    programs, settings = tile.settings(x, n, k // chunk)
    _int4_few_rows_kernel[(programs,)](
        x, weight.values.view(torch.int32), scales, weight.zeros, bias, residual, y, partial, counters, rows, n, k,
        x.stride(0), 0 if residual is None else residual.stride(0), y.stride(0), HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, CHUNK=chunk, GROUPS=groups, **settings,
    )  # fmt: skip
    return y


# The lowest bits of a 16-bit float are a whole number of the smallest subnormal numbers, as far as the first bit of the
# exponent. So masked bits are values of four bits, 16-fold in the high half of a byte, and a multiplication by a power
# of two makes them normal. It subtracts the zero point, too, and is exact.
# Results may have the registers of $4 to $6, which are therefore not read after the first of them is written.
_UNPACK: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, c, d, high, zero, other, one, sixteenth;
shr.u32 high, $4, 8;
and.b32 a, $4, 0x000f000f;
and.b32 b, high, 0x000f000f;
and.b32 c, $4, 0x00f000f0;
and.b32 d, high, 0x00f000f0;
mov.b32 zero, $5;
mov.b32 other, $6;
mov.b32 one, ONE;
mov.b32 sixteenth, SIXTEENTH;
fma.rn.KIND $0, a, one, zero;
fma.rn.KIND $1, b, one, zero;
fma.rn.KIND $2, c, sixteenth, other;
fma.rn.KIND $3, d, sixteenth, other;
}""")
_NEGATE: tl.constexpr = tl.constexpr("""{
.reg .b32 pair, minus;
mul.lo.u32 pair, $1, 0x00010001;
mov.b32 minus, MINUS;
mul.rn.KIND $0, pair, minus;
}""")
# 2^127, 2^123 and -2^127: values become 2^-6 as large
_UNPACK_BF16: tl.constexpr = tl.constexpr(
    _UNPACK.value.replace("KIND", "bf16x2").replace("ONE", "0x7f007f00").replace("SIXTEENTH", "0x7d007d00")
)
_NEGATE_BF16: tl.constexpr = tl.constexpr(_NEGATE.value.replace("KIND", "bf16x2").replace("MINUS", "0xff00ff00"))
# 2^15, 2^11 and -2^15: values become 2^-9 as large
_UNPACK_FP16: tl.constexpr = tl.constexpr(
    _UNPACK.value.replace("KIND", "f16x2").replace("ONE", "0x78007800").replace("SIXTEENTH", "0x68006800")
)
_NEGATE_FP16: tl.constexpr = tl.constexpr(_NEGATE.value.replace("KIND", "f16x2").replace("MINUS", "0xf800f800"))


@triton.jit
def offsets(zero, kind: tl.constexpr):
    """What `differences` takes for zero points uint8 [N]: a pair of negative numbers in a word; of float32 the zero
    point."""
    if kind == tl.float32:
        found = zero.to(tl.int32)
    else:
        code: tl.constexpr = _NEGATE_BF16 if kind == tl.bfloat16 else _NEGATE_FP16
        found = tl.inline_asm_elementwise(code, "=r,r", [zero.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1)
    return found


@triton.jit
def differences(words, low, high, kind: tl.constexpr, WARPS: tl.constexpr):
    """Words int32 [N, W] of the rows `fragment_rows`, and the `offsets` [N, W] of the zero points of their low and of
    their high bits -> values less zero points [N, 8 * W] of the rows in their order, exact; see `unscaled`."""
    if kind == tl.float32:
        found = chunk_in_fragment_order(
            _bits(words, 0, low), _bits(words, 16, low), _bits(words, 8, low), _bits(words, 24, low),
            _bits(words, 4, high), _bits(words, 20, high), _bits(words, 12, high), _bits(words, 28, high), WARPS,
        )  # fmt: skip
    else:
        code: tl.constexpr = _UNPACK_BF16 if kind == tl.bfloat16 else _UNPACK_FP16
        a, b, c, d = tl.inline_asm_elementwise(
            code, "=r,=r,=r,=r,r,r,r", [words, low, high], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
        found = chunk_in_fragment_order(
            _first(a, kind), _second(a, kind), _first(b, kind), _second(b, kind), _first(c, kind), _second(c, kind),
            _first(d, kind), _second(d, kind), WARPS,
        )  # fmt: skip
    return found


@triton.jit
def _bits(words, SHIFT: tl.constexpr, zero):
    return (((words >> SHIFT) & 15) - zero).to(tl.float32)


@triton.jit
def _first(pair, kind: tl.constexpr):
    return pair.to(tl.int16).to(kind, bitcast=True)


@triton.jit
def _second(pair, kind: tl.constexpr):
    return (pair >> 16).to(tl.int16).to(kind, bitcast=True)


@triton.jit
def unscaled(scale, kind: tl.constexpr):
    """A scale in float32, with what makes up for the factor of `differences`."""
    factor: tl.constexpr = 64.0 if kind == tl.bfloat16 else 512.0 if kind == tl.float16 else 1.0
    return scale.to(tl.float32) * factor


@triton.jit
def _times(values, rows):
    """values [N, K] of `differences` @ rows [M, K].T, float32 [N, M]."""
    zeros = tl.zeros([values.shape[0], rows.shape[0]], tl.float32)
    return tl.dot(values, rows.T, zeros, input_precision="ieee")


@triton.jit
def _add_groups(
    total, words, x_tile, exists, scale, zero, GROUPS: tl.constexpr, kind: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """total [N, M] and the products of a chunk of two or four groups, their scales and zero points at pointers [N], and
    x at pointers [M, K] to the columns of the first of them."""
    WORDS: tl.constexpr = words.shape[1]
    SIZE: tl.constexpr = 8 * WORDS // GROUPS
    if GROUPS == 2:
        low = tl.broadcast_to(offsets(tl.load(zero), kind)[:, None], words.shape)
        high = tl.broadcast_to(offsets(tl.load(zero + 1), kind)[:, None], words.shape)
        left, right = split_columns(differences(words, low, high, kind, WARPS))
        total = _add_group(total, left, x_tile, exists, scale, kind)
        total = _add_group(total, right, x_tile + SIZE, exists, scale + 1, kind)
    else:
        is_second = (tl.arange(0, WORDS) % 4 >= 2)[None, :]  # a thread's first two words are columns of the first group
        low = tl.where(is_second, offsets(tl.load(zero + 1), kind)[:, None], offsets(tl.load(zero), kind)[:, None])
        high = tl.where(is_second, offsets(tl.load(zero + 3), kind)[:, None], offsets(tl.load(zero + 2), kind)[:, None])
        left, right = split_columns(differences(words, low, high, kind, WARPS))
        first, second = split_columns(left)
        total = _add_group(total, first, x_tile, exists, scale, kind)
        total = _add_group(total, second, x_tile + SIZE, exists, scale + 1, kind)
        first, second = split_columns(right)
        total = _add_group(total, first, x_tile + 2 * SIZE, exists, scale + 2, kind)
        total = _add_group(total, second, x_tile + 3 * SIZE, exists, scale + 3, kind)
    return total


@triton.jit
def _add_group(total, values, x_tile, exists, scale, kind: tl.constexpr):
    part = _times(values, tl.load(x_tile, exists, other=0.0))
    return total + part * unscaled(tl.load(scale), kind)[:, None]


@triton.jit(do_not_specialize=["M"])
def _int4_few_rows_kernel(
    x, weight, scales, zeros, bias, residual, y, partial, counters, M, N, K, x_stride, residual_stride, y_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weight is the first operand of the products, as in `gemm_mainloop_int4`: a group's products with its whole
    numbers are exact, and their sums are scaled. GROUPS: of a chunk."""
    WORDS: tl.constexpr = CHUNK // 8
    SIZE: tl.constexpr = CHUNK // GROUPS
    kind: tl.constexpr = x.dtype.element_ty
    split, tile = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    steps = K // CHUNK
    per_split = tl.cdiv(steps, SPLITS)
    first, last = split * per_split, tl.minimum(steps, (split + 1) * per_split)
    row, column = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    exists = (row < M)[:, None]
    stored = tl.minimum(tile * BN + fragment_rows(BN, WARPS), N - 1).to(tl.int64)
    x_tile = x + row.to(tl.int64)[:, None] * x_stride + tl.arange(0, SIZE)[None, :]
    weight_row = weight + tl.multiple_of(stored * (K // 8), 4)
    weight_tile = weight_row[:, None] + tl.arange(0, WORDS)[None, :]
    scale_row = scales + tl.minimum(column, N - 1).to(tl.int64) * (steps * GROUPS)
    zero_row = zeros + stored * (steps * GROUPS)
    if PDL and AHEAD > 0:
        fetch_words_to_l2(weight_row, first * WORDS, last * WORDS, AHEAD)
        fetch_to_l2(scale_row + (last - 1) * GROUPS)
        fetch_to_l2(zero_row + (last - 1) * GROUPS)
    scale_next = unscaled(tl.load(scale_row + first * GROUPS), kind)
    offset_next = offsets(tl.load(zero_row + first * GROUPS), kind)
    total = tl.zeros([BN, BM], tl.float32)
    wait_for_previous_kernel(PDL)
    for step in tl.range(first, last):
        words = tl.load(weight_tile + step * WORDS, eviction_policy="evict_first")
        if GROUPS > 1:
            scale, zero = scale_row + step * GROUPS, zero_row + step * GROUPS
            total = _add_groups(total, words, x_tile + step * CHUNK, exists, scale, zero, GROUPS, kind, WARPS)
        else:
            rows = tl.load(x_tile + step * CHUNK, exists, other=0.0)
            scale, offset = scale_next, tl.broadcast_to(offset_next[:, None], words.shape)
            following = tl.minimum(step + 1, last - 1)
            scale_next = unscaled(tl.load(scale_row + following), kind)
            offset_next = offsets(tl.load(zero_row + following), kind)
            total += _times(differences(words, offset, offset, kind, WARPS), rows) * scale[:, None]
    if SPLITS > 1:
        if not is_last_split(total, partial, counters, tile, split, SPLITS):
            return
        total = sum_of_splits(partial, counters, tile, SPLITS, BN, BM)
    store_rows(total, y, bias, residual, row, column, M, N, y_stride, residual_stride, HAS_BIAS, HAS_RESIDUAL)
