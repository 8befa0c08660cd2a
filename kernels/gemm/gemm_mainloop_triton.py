"""GEMM main loops over K, with BF16, FP16, FP8 or MXFP4 weights and BF16, FP16 or FP8 activations."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import wait_for_previous_kernel

# Four values of e4m3 in a word: each byte becomes the high one of two, its exponent and fraction move to where bfloat16
# has them, and 2^120 makes up for the other bias, of subnormal values too. The conversion is exact. The compiler's own
# way is one instruction a value on a unit that is slower than the memory.
_WIDEN: tl.constexpr = tl.constexpr("""{
.reg .b32 low, high, a, b, scale;
prmt.b32 low, 0, $2, 0x5040;
prmt.b32 high, 0, $2, 0x7060;
shr.u32 a, low, 4;
shr.u32 b, high, 4;
and.b32 a, a, 0x07f007f0;
and.b32 b, b, 0x07f007f0;
lop3.b32 a, low, 0x80008000, a, 0xea;
lop3.b32 b, high, 0x80008000, b, 0xea;
mov.b32 scale, 0x7b807b80;
mul.rn.bf16x2 $0, a, scale;
mul.rn.bf16x2 $1, b, scale;
}""")


# The lower or higher 4 bits of four bytes, each a value of e2m1: sign, exponent and fraction move to where bfloat16 has
# them, and 2^126 makes up for the other bias.
_WIDEN_4: tl.constexpr = tl.constexpr("""{
.reg .b32 x, a, b, c, d, scale;
SHIFT
and.b32 x, x, 0x0f0f0f0f;
prmt.b32 a, x, 0, 0x4140;
prmt.b32 b, x, 0, 0x4342;
shl.b32 c, a, 6;
shl.b32 d, b, 6;
and.b32 c, c, 0x01c001c0;
and.b32 d, d, 0x01c001c0;
shl.b32 a, a, 12;
shl.b32 b, b, 12;
lop3.b32 a, a, 0x80008000, c, 0xea;
lop3.b32 b, b, 0x80008000, d, 0xea;
mov.b32 scale, 0x7e807e80;
mul.rn.bf16x2 $0, a, scale;
mul.rn.bf16x2 $1, b, scale;
}""")
_WIDEN_LOW: tl.constexpr = tl.constexpr(_WIDEN_4.value.replace("SHIFT", "mov.b32 x, $2;"))
_WIDEN_HIGH: tl.constexpr = tl.constexpr(_WIDEN_4.value.replace("SHIFT", "shr.b32 x, $2, 4;"))


@triton.jit
def _e2m1(code):
    """float32 of 4 bits: a sign, and twice the value is 0, 1, 2, 3, 4, 6, 8 or 12."""
    rank = (code & 7).to(tl.int32)
    twice = tl.where(rank < 4, rank, (2 + (rank & 1)) << tl.maximum((rank >> 1) - 1, 0))
    return tl.where((code & 8) == 0, 0.5, -0.5) * twice.to(tl.float32)


@triton.jit
def _times(x, y):
    """x * y; of bfloat16 two at once, which the compiler does not do by itself."""
    if x.dtype == tl.bfloat16:
        multiply: tl.constexpr = "mul.rn.bf16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(multiply, "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2)
    return x * y


@triton.jit
def dequantize_mxfp4(values, scales, kind: tl.constexpr):
    """values uint8 [N, K / 2] of `pack_mxfp4` and scales uint8 [N, K / 32] -> the first halves of all blocks, and the
    second ones, both [N, K / 2]."""
    N: tl.constexpr = values.shape[0]
    HALF: tl.constexpr = values.shape[1]
    if kind == tl.bfloat16:
        low = tl.inline_asm_elementwise(_WIDEN_LOW, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(_WIDEN_HIGH, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4)
        bits = tl.where(scales == 0, 0x40, scales.to(tl.int16) << 7)  # 2^-127 is subnormal
        power = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        low, high = _e2m1(values), _e2m1(values >> 4)
        bits = tl.where(scales == 0, 0x400000, scales.to(tl.int32) << 23)
        power = bits.to(tl.float32, bitcast=True)
    low = _times(tl.reshape(low, [N, HALF // 16, 16]), power[:, :, None])
    high = _times(tl.reshape(high, [N, HALF // 16, 16]), power[:, :, None])
    return tl.reshape(low, [N, HALF]).to(kind), tl.reshape(high, [N, HALF]).to(kind)


@triton.jit
def dequantize_e4m3(values, kind: tl.constexpr):
    """Values of float8_e4m3fn, none of them NaN, in another type."""
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4)
    return values.to(kind)


@triton.jit
def gemm_mainloop(
    x_tile, x_rows, weight_tile, scale_row, K, SCALED: tl.constexpr, SIDE: tl.constexpr, ONCE: tl.constexpr,
    EARLY: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x @ weight.T float32 [BM, BN] from pointers to their first BK columns, [BM, BK] and [BK, BN].

    x_rows bool [BM]: the rows there are; the others are 0, and not read.
    SCALED: FP8 weights, whose every SIDE columns share a scale in `scale_row` [BN]; BK divides SIDE. The weights
    are exact in the type of x, and sums are scaled instead of weights: no value is rounded on the way. FP8 weights
    without SCALED are multiplied as they are.
    ONCE: no other program reads these weights. EARLY: the wait for the previous kernel is here, after the first loads
    of weights.
    """
    ks = tl.arange(0, BK)
    policy: tl.constexpr = "evict_first" if ONCE else ""
    total = tl.zeros([BM, BN], tl.float32)
    a_next = tl.zeros([BM, BK], x_tile.dtype.element_ty)
    for k in tl.range(0, K, BK):
        if EARLY:
            # The compiler's pipeline fetches weights ahead of the loop, hence before the wait; rows of x come after
            # it, as they pass through a branch and a variable of the loop.
            a = a_next
            if k == 0:
                wait_for_previous_kernel(PDL)
                a = tl.load(x_tile, x_rows[:, None] & (ks < K)[None, :], other=0.0)
            a_next = tl.load(x_tile + k + BK, x_rows[:, None] & (k + BK + ks < K)[None, :], other=0.0)
        elif EVEN_K:
            a = tl.load(x_tile + k, x_rows[:, None], other=0.0)
        else:
            a = tl.load(x_tile + k, x_rows[:, None] & (k + ks < K)[None, :], other=0.0)
        if EVEN_K:
            b = tl.load(weight_tile + k, eviction_policy=policy)
        else:
            b = tl.load(weight_tile + k, (k + ks < K)[:, None], other=0.0, eviction_policy=policy)
        if SCALED:
            scale = tl.load(scale_row + k // SIDE).to(tl.float32)
            total += tl.dot(a, dequantize_e4m3(b, a.dtype), input_precision="ieee") * scale[None, :]
        else:
            total = tl.dot(a, b if b.dtype == a.dtype else dequantize_e4m3(b, a.dtype), total, input_precision="ieee")
    return total


@triton.jit
def gemm_mainloop_mxfp4(
    x_row, x_rows, weight_row, scale_row, K, ONCE: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`gemm_mainloop` for MXFP4 weights: x_row [BM] points to rows of x, `weight_row` and `scale_row` [BN] to the first
    byte and scale of each row. The first and second halves of blocks are multiplied apart from each other, as they are
    unpacked. Scales are too narrow for the compiler's pipeline: they are loaded a step ahead."""
    pairs, groups = tl.arange(0, BK // 2), tl.arange(0, BK // 32)
    columns = (pairs // 16 * 32 + pairs % 16)[None, :]
    half = tl.multiple_of(K // 2, 16)  # blocks are not cut
    policy: tl.constexpr = "evict_first" if ONCE else ""
    total = tl.zeros([BM, BN], tl.float32)
    scales = scale_row[:, None] + groups[None, :]
    next_scale = tl.load(scales, (groups < K // 32)[None, :], other=0)
    for k in tl.range(0, K, BK):
        scale = next_scale
        next_scale = tl.load(scales + (k + BK) // 32, ((k + BK) // 32 + groups < K // 32)[None, :], other=0)
        x, values = x_row[:, None] + k + columns, weight_row[:, None] + k // 2 + pairs[None, :]
        if EVEN_K:
            first, second = tl.load(x, x_rows[:, None], other=0.0), tl.load(x + 16, x_rows[:, None], other=0.0)
            packed = tl.load(values, eviction_policy=policy)
        else:
            inside = x_rows[:, None] & (k + columns < K)
            first, second = tl.load(x, inside, other=0.0), tl.load(x + 16, inside, other=0.0)
            packed = tl.load(values, (k // 2 + pairs < half)[None, :], other=0, eviction_policy=policy)
        low, high = dequantize_mxfp4(packed, scale, first.dtype)
        total = tl.dot(first, low.T, total, input_precision="ieee")
        total = tl.dot(second, high.T, total, input_precision="ieee")
    return total


@triton.jit
def gemm_mainloop_fp8(
    x_tile, x_rows, x_scale, weight_tile, even_scale, odd_scale, K, SCALED: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """`gemm_mainloop` for FP8 x (`FP8Activations`): the tensor core accumulates over SCALE_BLOCK columns,
    whose scales are in `x_scale` [BM, 1] for x, and if SCALED of the weight one for all even rows and one for all odd
    ones."""
    ks, is_even = tl.arange(0, SIDE), tl.arange(0, BN)[None, :] % 2 == 0
    total = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, K, SIDE):
        if EVEN_K:
            a = tl.load(x_tile + k, x_rows[:, None], other=0.0)
            b = tl.load(weight_tile + k)
        else:
            a = tl.load(x_tile + k, x_rows[:, None] & (k + ks < K)[None, :], other=0.0)
            b = tl.load(weight_tile + k, (k + ks < K)[:, None], other=0.0)
        scale = tl.load(x_scale + k // SIDE, x_rows[:, None], other=0.0)
        if SCALED:
            even, odd = tl.load(even_scale + k // SIDE).to(tl.float32), tl.load(odd_scale + k // SIDE).to(tl.float32)
            total += tl.dot(a, b) * tl.where(is_even, scale * even, scale * odd)
        else:
            total += tl.dot(a, b) * scale
    return total
