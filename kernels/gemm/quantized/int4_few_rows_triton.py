"""Triton GEMM with INT4 weights for at most 32 rows of 16-bit activations.

Memory limits it as long as a program reads long pieces and a step has few instructions. Hence the layout of weights
(`Int4Tiles`); for large matrices steps of two chunks, whose MMAs are awaited once; scales and zero points in one
word, which goes through the pipeline as the values do (two bytes could not); and five instructions that mask and shift
a word of eight weights, before four that subtract zero points and multiply by scales at once.

In BF16 a weight is value * scale - zero * scale, of which the second product is rounded, and then the difference: to
the reference's rounding it adds an error of at most zero * scale / 256. FP16 has the reference's weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import fetch_to_l2, pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv
from specbatch.kernels.gemm.quantized.few_rows_triton import MOST_ROWS, rows_of_tile, store_rows
from specbatch.kernels.gemm.quantized.fragments_triton import chunk_in_fragment_order, fragment_rows
from specbatch.kernels.gemm.quantized.int4 import Int4Tiles
from specbatch.kernels.gemm.quantized.int4_tiles_triton import first_of_row, word_scale, word_zero
from specbatch.kernels.gemm.split_k_triton import is_last_split, splits_for, sum_of_splits, used_splits, workspace

_WARPS = 4
_AHEAD = 2  # chunks that a program fetches to the L2 cache before it waits for the previous kernel


class Int4FewRowsTile(NamedTuple):
    """outputs of a program, 64 or 128; splits: programs that share the K of a tile; chunks of a step, one if their
    number is odd; stages of the pipeline."""

    outputs: int
    splits: int
    chunks: int
    stages: int


def int4_few_rows_tile_for(rows: int, n: int, k: int) -> Int4FewRowsTile:
    """The tile of a GEMM of so many rows with a weight [n, k].

    To tune: `python -m specbatch.sweeps.microbench gemm-tiles`."""
    if rows > 16 or (n < 16384 and k <= 4096):
        return Int4FewRowsTile(64, splits_for(cdiv(n, 64), 64 * rows_of_tile(rows), k, 3), 1, 5)
    return Int4FewRowsTile(128, splits_for(cdiv(n, 128), 128 * rows_of_tile(rows), k, 2), 2, 3)


def int4_few_rows(
    x: torch.Tensor, weight: Int4Tiles, bias: torch.Tensor | None, residual: torch.Tensor | None, y: torch.Tensor,
    tile: Int4FewRowsTile,
) -> torch.Tensor:  # fmt: skip
    """`int4_linear` of few rows, into y [T, N]."""
    (rows, k), n = x.shape, weight.shape[0]
    assert rows <= MOST_ROWS, f"{rows} rows are not few"
    assert x.element_size() == 4 or weight.scales.dtype == x.dtype, f"scales are {weight.scales.dtype}, x {x.dtype}"
    chunks = 1 if k // weight.chunk % 2 else tile.chunks
    steps = k // (weight.chunk * chunks)
    splits = used_splits(steps, tile.splits)
    partial, counters = workspace(x.device)
    int4_few_rows_kernel[(cdiv(n, tile.outputs) * splits,)](
        x, *weight.words(), bias, residual, y, partial, counters, rows, n, k, x.stride(0),
        0 if residual is None else residual.stride(0), y.stride(0), HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, BF16=weight.scales.dtype == torch.bfloat16, CHUNK=weight.chunk,
        GROUPS=weight.chunk // weight.group, UNIT=weight.unit, CHUNKS=chunks, SPLITS=splits, BM=rows_of_tile(rows),
        BN=tile.outputs, WARPS=_WARPS, STAGES=tile.stages, AHEAD=_AHEAD, **pdl(x), num_warps=_WARPS,
        num_stages=tile.stages,
    )  # fmt: skip
    return y


# The lowest bits of a 16-bit float are a whole number of the smallest subnormal numbers, as far as the first bit of the
# exponent. So masked bits are values of four bits, 16-fold in the high half of a byte, and a multiplication by a power
# of two makes them normal; zero points are such numbers, too, and negative.
# Results may have the registers of what is given, which is therefore not read after the first of them is written.
_SPLIT: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, c, d, high, low_zero, high_zero, low_scale, high_scale;
shr.u32 high, $4, 8;
and.b32 a, $4, 0x000f000f;
and.b32 b, high, 0x000f000f;
and.b32 c, $4, 0x00f000f0;
and.b32 d, high, 0x00f000f0;
mov.b32 low_zero, $5;
mov.b32 high_zero, $6;
mov.b32 low_scale, $7;
mov.b32 high_scale, $8;
""")
_UNPACK_BF16: tl.constexpr = tl.constexpr(
    _SPLIT.value
    + """fma.rn.bf16x2 $0, a, low_scale, low_zero;
fma.rn.bf16x2 $1, b, low_scale, low_zero;
fma.rn.bf16x2 $2, c, high_scale, high_zero;
fma.rn.bf16x2 $3, d, high_scale, high_zero;
}"""
)
# float16 has too few exponents for scales of 2^-9 as large: the difference is made first, which is exact. The products
# with 2^15 and 2^11 are 2^-9 as large as the values.
_UNPACK_FP16: tl.constexpr = tl.constexpr(
    _SPLIT.value
    + """.reg .b32 one, sixteenth;
mov.b32 one, 0x78007800;
mov.b32 sixteenth, 0x68006800;
fma.rn.f16x2 a, a, one, low_zero;
fma.rn.f16x2 b, b, one, low_zero;
fma.rn.f16x2 c, c, sixteenth, high_zero;
fma.rn.f16x2 d, d, sixteenth, high_zero;
mul.rn.f16x2 $0, a, low_scale;
mul.rn.f16x2 $1, b, low_scale;
mul.rn.f16x2 $2, c, high_scale;
mul.rn.f16x2 $3, d, high_scale;
}"""
)
_PAIRS: tl.constexpr = tl.constexpr("""{
.reg .b32 scale, zero, one, sixteenth, factor;
prmt.b32 scale, $3, $3, 0x1010;
prmt.b32 zero, $3, $3, 0x3232;
""")
# Pairs of -zero * scale * 2^-29, scale * 2^104 and scale * 2^100: weights become 2^-29 as large, and no scale of a
# float16 is too large for it.
_FACTORS_BF16: tl.constexpr = tl.constexpr(
    _PAIRS.value
    + """mov.b32 one, 0x73807380;
mov.b32 sixteenth, 0x71807180;
mul.rn.bf16x2 one, scale, one;
mul.rn.bf16x2 $0, zero, one;
mov.b32 $1, one;
mul.rn.bf16x2 $2, scale, sixteenth;
}"""
)
# Pairs of -zero * 2^-9 and, twice, scale * 2^9
_FACTORS_FP16: tl.constexpr = tl.constexpr(
    _PAIRS.value
    + """mov.b32 one, 0x78007800;
mov.b32 factor, 0x60006000;
mul.rn.f16x2 scale, scale, factor;
mul.rn.f16x2 $0, zero, one;
mov.b32 $1, scale;
mov.b32 $2, scale;
}"""
)


@triton.jit
def _factors(scales, kind: tl.constexpr, BF16: tl.constexpr):
    """What `_weights` takes, of a group whose words of a scale and a zero point are at pointers [N]: [N, 1] each."""
    word = tl.load(scales)[:, None]
    if kind == tl.float32:
        scale = word_scale(word, BF16)
        zero, low, high = word_zero(word).to(tl.float32), scale, scale
    else:
        code: tl.constexpr = _FACTORS_BF16 if kind == tl.bfloat16 else _FACTORS_FP16
        zero, low, high = tl.inline_asm_elementwise(
            code, "=r,=r,=r,r", [word], dtype=(tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
    return zero, low, high


@triton.jit
def _weights(words, low_zero, high_zero, low, high, kind: tl.constexpr, WARPS: tl.constexpr):
    """Words int32 [N, W] of the rows `fragment_rows`, and the `_factors`, [N, W] or [N, 1], of zero points of their low
    and of their high bits, and of scales of both -> weights [N, 8 * W] of the rows in their order; in bfloat16 2^-29 as
    large."""
    if kind == tl.float32:
        found = chunk_in_fragment_order(
            _bits(words, 0, low_zero, low), _bits(words, 16, low_zero, low), _bits(words, 8, low_zero, low),
            _bits(words, 24, low_zero, low), _bits(words, 4, high_zero, high), _bits(words, 20, high_zero, high),
            _bits(words, 12, high_zero, high), _bits(words, 28, high_zero, high), WARPS,
        )  # fmt: skip
    else:
        code: tl.constexpr = _UNPACK_BF16 if kind == tl.bfloat16 else _UNPACK_FP16
        a, b, c, d = tl.inline_asm_elementwise(
            code, "=r,=r,=r,=r,r,r,r,r,r", [words, low_zero, high_zero, low, high],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        found = chunk_in_fragment_order(
            _first(a, kind), _second(a, kind), _first(b, kind), _second(b, kind), _first(c, kind), _second(c, kind),
            _first(d, kind), _second(d, kind), WARPS,
        )  # fmt: skip
    return found


@triton.jit
def _bits(words, SHIFT: tl.constexpr, zero, scale):
    return (((words >> SHIFT) & 15).to(tl.float32) - zero) * scale


@triton.jit
def _first(pair, kind: tl.constexpr):
    return pair.to(tl.int16).to(kind, bitcast=True)


@triton.jit
def _second(pair, kind: tl.constexpr):
    return (pair >> 16).to(tl.int16).to(kind, bitcast=True)


@triton.jit
def _chunk(words, scales, GROUPS: tl.constexpr, kind: tl.constexpr, BF16: tl.constexpr, WARPS: tl.constexpr):
    """`_weights` of a chunk, its words of scales at pointers [N] to the first of GROUPS."""
    low_zero, low, high = _factors(scales, kind, BF16)
    high_zero = low_zero
    if GROUPS == 2:
        high_zero, _, high = _factors(scales + 1, kind, BF16)
    elif GROUPS == 4:
        # Of a thread's four words two are of groups 0 and 2, low bits and high bits, and two of groups 1 and 3.
        is_second = (tl.arange(0, words.shape[1]) % 4 >= 2)[None, :]
        second_zero, second, _ = _factors(scales + 1, kind, BF16)
        low_zero, low = tl.where(is_second, second_zero, low_zero), tl.where(is_second, second, low)
        high_zero, _, high = _factors(scales + 2, kind, BF16)
        second_zero, _, second = _factors(scales + 3, kind, BF16)
        high_zero, high = tl.where(is_second, second_zero, high_zero), tl.where(is_second, second, high)
    return _weights(words, low_zero, high_zero, low, high, kind, WARPS)


@triton.jit(do_not_specialize=["M"])
def int4_few_rows_kernel(
    x, weight, scales, bias, residual, y, partial, counters, M, N, K, x_stride, residual_stride, y_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BF16: tl.constexpr,  # scales are; else float16
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,  # of a chunk
    UNIT: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WARPS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weight is the first operand of the MMAs, as in `gemm_mainloop_int4`."""
    WORDS: tl.constexpr = CHUNK // 8
    kind: tl.constexpr = x.dtype.element_ty
    FACTOR: tl.constexpr = 536870912.0 if kind == tl.bfloat16 else 1.0  # 2^29
    split, tile = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    chunks = K // CHUNK
    per_split = tl.cdiv(chunks // CHUNKS, SPLITS) * CHUNKS
    first, last = split * per_split, tl.minimum(chunks, (split + 1) * per_split)
    row, column = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    exists = (row < M)[:, None]
    stored = tl.minimum(tile * BN + fragment_rows(BN, WARPS), N - 1).to(tl.int64)
    x_tile = x + row.to(tl.int64)[:, None] * x_stride + tl.arange(0, CHUNK)[None, :]
    weight_row = weight + first_of_row(stored, chunks, WORDS, UNIT)
    weight_tile = weight_row[:, None] + tl.arange(0, WORDS)[None, :]
    scale_row = scales + first_of_row(stored, chunks, GROUPS, UNIT)
    if PDL:
        for i in tl.static_range(AHEAD):
            fetch_to_l2(weight_row + tl.minimum(first + i, last - 1) * (UNIT * WORDS))
    total = tl.zeros([BN, BM], tl.float32)
    wait_for_previous_kernel(PDL)
    for step in tl.range(first, last, CHUNKS, num_stages=STAGES):
        for i in tl.static_range(CHUNKS):
            chunk = step + i
            words = tl.load(weight_tile + chunk * (UNIT * WORDS), eviction_policy="evict_first")
            weights = _chunk(words, scale_row + chunk * (UNIT * GROUPS), GROUPS, kind, BF16, WARPS)
            rows = tl.load(x_tile + chunk * CHUNK, exists, other=0.0)
            if CHUNKS > 1:
                total = tl.dot(weights, rows.T, total, input_precision="ieee")
            else:  # an accumulator in the registers of the MMAs makes the assembler wait for each of them
                zeros = tl.zeros([BN, BM], tl.float32)
                total += tl.dot(weights, rows.T, zeros, input_precision="ieee") * FACTOR
    if CHUNKS > 1:
        total *= FACTOR
    if SPLITS > 1:
        if not is_last_split(total, partial, counters, tile, split, SPLITS):
            return
        total = sum_of_splits(partial, counters, tile, SPLITS, BN, BM)
    store_rows(total, y, bias, residual, row, column, M, N, y_stride, residual_stride, HAS_BIAS, HAS_RESIDUAL)
