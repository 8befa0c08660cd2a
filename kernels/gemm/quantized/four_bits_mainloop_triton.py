"""GEMM main loops over K with INT4 and MXFP4 weights, which are unpacked in registers.

The weight is the first operand of the products, which a tensor core takes from registers (wgmma). Its bytes are stored
in the order of that operand (`four_bits`), so that no unpacked value goes through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.gemm.quantized.fragments_triton import in_fragment_order, pairs_in_fragment_order, split_columns
from specbatch.kernels.gemm.quantized.int4_tiles_triton import word_scale, word_zero

# 4 bits of bytes 0 and 2, then of bytes 1 and 3, become the lowest bits of the fraction of 128 (bfloat16) or 1024
# (float16), whose last place is 1: the value is that number plus the 4 bits, exactly.
_WIDEN_INT4: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b;
shr.u32 a, $2, FIRST;
shr.u32 b, $2, SECOND;
lop3.b32 $0, a, 0x000f000f, ONES, 0xea;
lop3.b32 $1, b, 0x000f000f, ONES, 0xea;
}""")
_INT4_LOW: tl.constexpr = tl.constexpr(_WIDEN_INT4.value.replace("FIRST", "0").replace("SECOND", "8"))
_INT4_HIGH: tl.constexpr = tl.constexpr(_WIDEN_INT4.value.replace("FIRST", "4").replace("SECOND", "12"))
_INT4_LOW_BF16: tl.constexpr = tl.constexpr(_INT4_LOW.value.replace("ONES", "0x43004300"))
_INT4_HIGH_BF16: tl.constexpr = tl.constexpr(_INT4_HIGH.value.replace("ONES", "0x43004300"))
_INT4_LOW_FP16: tl.constexpr = tl.constexpr(_INT4_LOW.value.replace("ONES", "0x64006400"))
_INT4_HIGH_FP16: tl.constexpr = tl.constexpr(_INT4_HIGH.value.replace("ONES", "0x64006400"))


@triton.jit
def widen_int4(words, kind: tl.constexpr, WARPS: tl.constexpr):
    """words int32 [N, W] in memory's order -> the values of their low and of their high bits in the operand's order,
    both [N, 4 * W]; in bfloat16 128 are added, in float16 1024."""
    if kind == tl.bfloat16:
        low = pairs_in_fragment_order(*_pairs(words, _INT4_LOW_BF16), kind, WARPS)
        high = pairs_in_fragment_order(*_pairs(words, _INT4_HIGH_BF16), kind, WARPS)
    elif kind == tl.float16:
        low = pairs_in_fragment_order(*_pairs(words, _INT4_LOW_FP16), kind, WARPS)
        high = pairs_in_fragment_order(*_pairs(words, _INT4_HIGH_FP16), kind, WARPS)
    else:
        low = in_fragment_order(
            _bits(words, 0).to(kind), _bits(words, 16).to(kind), _bits(words, 8).to(kind), _bits(words, 24).to(kind),
            WARPS,
        )  # fmt: skip
        high = in_fragment_order(
            _bits(words, 4).to(kind), _bits(words, 20).to(kind), _bits(words, 12).to(kind), _bits(words, 28).to(kind),
            WARPS,
        )  # fmt: skip
    return low, high


@triton.jit
def _pairs(words, CODE: tl.constexpr):
    """What assembly makes of words int32 [N, W]: a word with the two values of bytes 0 and 2, and one of 1 and 3."""
    return tl.inline_asm_elementwise(CODE, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)


@triton.jit
def _bits(words, SHIFT: tl.constexpr):
    return (words >> SHIFT) & 15


@triton.jit
def _less(values, zero):
    """values [N, H] of `widen_int4` less a zero point int32 [N], exact; two at once, which the compiler does not do by
    itself."""
    if values.dtype == tl.bfloat16:
        base = (zero.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)[:, None]
        found = _difference(values, tl.broadcast_to(base, values.shape), "sub.rn.bf16x2 $0, $1, $2;")
    elif values.dtype == tl.float16:
        base = (zero.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)[:, None]
        found = _difference(values, tl.broadcast_to(base, values.shape), "sub.rn.f16x2 $0, $1, $2;")
    else:
        found = values - zero[:, None].to(values.dtype)
    return found


@triton.jit
def _difference(x, y, INSTRUCTION: tl.constexpr):
    return tl.inline_asm_elementwise(INSTRUCTION, "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=2)


@triton.jit
def gemm_mainloop_int4(
    x_row, x_rows, weight_row, scale_row, first, last, ONCE: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    UNIT: tl.constexpr, BF16: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """INT4 weight (`Int4Tiles`, of UNIT outputs) @ x.T float32 [BN, BM] of the chunks from first to last, with the
    weight as first operand. x_row [BM] points to rows of x, of which x_rows bool [BM] exist, `weight_row` [BN] to the
    first word, int32, of the rows `fragment_rows`, `scale_row` [BN] to that of the scales, of which BF16 says the type,
    of the rows in their order. The matmul with a group's integers is exact, and its sums are scaled, so no value is
    rounded on the way."""
    HALF: tl.constexpr = CHUNK // 2
    GROUPS: tl.constexpr = CHUNK // GROUP
    policy: tl.constexpr = "evict_first" if ONCE else ""
    weight_tile = weight_row[:, None] + tl.arange(0, CHUNK // 8)[None, :]
    exists = x_rows[:, None]
    total = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(first, last):
        words = tl.load(weight_tile + step * (UNIT * CHUNK // 8), eviction_policy=policy)
        low, high = widen_int4(words, x_row.dtype.element_ty, WARPS)
        low_x, high_x = x_row + step * CHUNK, x_row + step * CHUNK + HALF
        scale = scale_row + step * (UNIT * GROUPS)
        if GROUPS == 1:
            word = tl.load(scale)
            zero_point = word_zero(word)
            part = _times_rows(_less(low, zero_point), low_x, exists, tl.zeros([BN, BM], tl.float32))
            part = _times_rows(_less(high, zero_point), high_x, exists, part)
            total += part * word_scale(word, BF16)[:, None]
        elif GROUPS == 2:
            total = _add_group(total, low, low_x, exists, scale, BF16)
            total = _add_group(total, high, high_x, exists, scale + 1, BF16)
        else:
            left, right = split_columns(low)
            total = _add_group(total, left, low_x, exists, scale, BF16)
            total = _add_group(total, right, low_x + GROUP, exists, scale + 1, BF16)
            left, right = split_columns(high)
            total = _add_group(total, left, high_x, exists, scale + 2, BF16)
            total = _add_group(total, right, high_x + GROUP, exists, scale + 3, BF16)
    return total


@triton.jit
def _times_rows(values, x_row, exists, total):
    """total [N, M] + values [N, K] @ the K elements at x_row [M] of each row."""
    columns = tl.arange(0, values.shape[1])
    x = tl.load(x_row[:, None] + columns[None, :], exists, other=0.0)
    return tl.dot(values, x.T, total, input_precision="ieee")


@triton.jit
def _add_group(total, values, x_row, exists, scale, BF16: tl.constexpr):
    """total and the products of a group, its scales and zero points at pointers [N]."""
    word = tl.load(scale)
    part = _times_rows(_less(values, word_zero(word)), x_row, exists, tl.zeros(total.shape, tl.float32))
    return total + part * word_scale(word, BF16)[:, None]


# 4 bits of bytes 0 and 2, then of bytes 1 and 3, each a value of e2m1: sign, exponent and fraction move to where
# bfloat16 has them. Its other bias makes each value 2^126 times too small.
# $0 and $1 may be the register of $2, so the instruction that writes the first of them is the last to read it.
_MXFP4_LOW: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, c, d;
shl.b32 a, $2, 12;
shl.b32 b, $2, 4;
shl.b32 c, $2, 6;
shr.u32 d, $2, 2;
and.b32 c, c, 0x01c001c0;
and.b32 d, d, 0x01c001c0;
lop3.b32 $0, a, 0x80008000, c, 0xea;
lop3.b32 $1, b, 0x80008000, d, 0xea;
}""")
_MXFP4_HIGH: tl.constexpr = tl.constexpr("""{
.reg .b32 a, c, d;
shl.b32 a, $2, 8;
shl.b32 c, $2, 2;
shr.u32 d, $2, 6;
and.b32 c, c, 0x01c001c0;
and.b32 d, d, 0x01c001c0;
lop3.b32 $1, $2, 0x80008000, d, 0xea;
lop3.b32 $0, a, 0x80008000, c, 0xea;
}""")


@triton.jit
def _e2m1(code):
    """float32 of 4 bits: a sign, and twice the value is 0, 1, 2, 3, 4, 6, 8 or 12."""
    rank = code & 7
    twice = tl.where(rank < 4, rank, (2 + (rank & 1)) << tl.maximum((rank >> 1) - 1, 0))
    return tl.where((code & 8) == 0, 0.5, -0.5) * twice.to(tl.float32)


@triton.jit
def _times(x, y):
    """x * y of one shape; of bfloat16 two at once, which the compiler does not do by itself."""
    if x.dtype == tl.bfloat16:
        multiply: tl.constexpr = "mul.rn.bf16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(multiply, "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2)
    return x * y


@triton.jit
def widen_mxfp4(words, kind: tl.constexpr, WARPS: tl.constexpr):
    """words int32 [N, W] in memory's order -> the values of their low and of their high bits in the operand's order,
    both [N, 4 * W]: in bfloat16 times 2^-126, and for other types of x in float32."""
    if kind == tl.bfloat16:
        low = pairs_in_fragment_order(*_pairs(words, _MXFP4_LOW), kind, WARPS)
        high = pairs_in_fragment_order(*_pairs(words, _MXFP4_HIGH), kind, WARPS)
    else:
        low = in_fragment_order(
            _e2m1(_bits(words, 0)), _e2m1(_bits(words, 16)), _e2m1(_bits(words, 8)), _e2m1(_bits(words, 24)), WARPS
        )
        high = in_fragment_order(
            _e2m1(_bits(words, 4)), _e2m1(_bits(words, 20)), _e2m1(_bits(words, 12)), _e2m1(_bits(words, 28)), WARPS
        )
    return low, high


@triton.jit
def _factors(scale, kind: tl.constexpr):
    """What the values of `widen_mxfp4` are multiplied by, for scales uint8: in bfloat16 times 2^126, which up to
    `LARGEST_PACKED_SCALE` is finite, in float32 with a subnormal 2^-127."""
    if kind == tl.bfloat16:
        power = ((scale.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
    else:
        power = tl.where(scale == 0, 0x400000, scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return power


@triton.jit
def gemm_mainloop_mxfp4(
    x_row, x_rows, weight_row, scale_row, K, ONCE: tl.constexpr, EVEN_K: tl.constexpr, CHUNK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """MXFP4 weight @ x.T float32 [BN, BM] with the weight as first operand, for which its bytes are ordered
    (`four_bits`). x_row [BM] points to rows of x, `weight_row` [BN] to the first word, int32, of the rows
    `fragment_rows`, `scale_row` [BN] to the first scale of the rows in their order. A step is a chunk: four blocks, two
    in the low bits."""
    HALF: tl.constexpr = CHUNK // 2
    BLOCK: tl.constexpr = CHUNK // 4
    kind: tl.constexpr = x_row.dtype.element_ty
    policy: tl.constexpr = "evict_first" if ONCE else ""
    weight_tile = weight_row[:, None] + tl.arange(0, CHUNK // 8)[None, :]
    ks = tl.arange(0, HALF)
    total = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(0, K, CHUNK):
        words = tl.load(weight_tile + k // 8, eviction_policy=policy)
        if EVEN_K:
            first = tl.load(x_row[:, None] + k + ks, x_rows[:, None], other=0.0)
            second = tl.load(x_row[:, None] + k + HALF + ks, x_rows[:, None], other=0.0)
        else:
            first = tl.load(x_row[:, None] + k + ks, x_rows[:, None] & (k + ks < K), other=0.0)
            second = tl.load(x_row[:, None] + k + HALF + ks, x_rows[:, None] & (k + HALF + ks < K), other=0.0)
        low, high = widen_mxfp4(words, kind, WARPS)
        scale = scale_row + k // BLOCK
        low = _times(low, _scales_of_half(scale, k, K, EVEN_K, BLOCK, kind))
        high = _times(high, _scales_of_half(scale + 2, k + HALF, K, EVEN_K, BLOCK, kind))
        total = tl.dot(low.to(first.dtype), first.T, total, input_precision="ieee")
        total = tl.dot(high.to(first.dtype), second.T, total, input_precision="ieee")
    return total


@triton.jit
def _scales_of_half(scale, k, K, EVEN_K: tl.constexpr, BLOCK: tl.constexpr, kind: tl.constexpr):
    """The scales of two blocks, from column k on, at the pointers [BN]: [BN, 2 * BLOCK]."""
    N: tl.constexpr = scale.shape[0]
    if EVEN_K:
        left, right = tl.load(scale), tl.load(scale + 1)
    else:
        column = tl.full([N], k, tl.int32)
        left, right = tl.load(scale, column < K, other=0), tl.load(scale + 1, column + BLOCK < K, other=0)
    factors = tl.join(_factors(left, kind), _factors(right, kind))
    return tl.reshape(tl.broadcast_to(factors[:, :, None], [N, 2, BLOCK]), [N, 2 * BLOCK])
