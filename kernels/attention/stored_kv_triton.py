"""Triton counterpart of `stored_kv`: what kernels write to a KV cache, and what they read from it."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.common.block_sizes import FP8_MAX

_MAX = tl.constexpr(FP8_MAX)


@triton.jit
def to_stored(x, scale, kind: tl.constexpr):
    """`stored_kv.to_stored`: x in the type `kind`. scale: float32 that broadcasts to the shape of x, or None."""
    wide = x.to(tl.float32)
    if scale is not None:
        wide = tl.div_rn(wide, scale + tl.zeros_like(wide))
    if kind == tl.float8e4nv:
        wide = tl.clamp(wide, -_MAX, _MAX, propagate_nan=tl.PropagateNan.ALL)
    return wide.to(kind)


@triton.jit
def from_stored(x, scale, kind: tl.constexpr):
    """`stored_kv.from_stored`, of what `to_stored` returns."""
    if scale is not None:
        x = x.to(tl.float32) * scale
    return x.to(kind)


# A word has the pairs of two keys. Of both, the first values go to one word, and the second values to another.
_UNPACK = tl.constexpr("""{
.reg .b32 a;
.reg .b16 low, high;
prmt.b32 a, $2, 0, 0x3120;
mov.b32 {low, high}, a;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@triton.jit
def fp8_pairs(pairs, kind: tl.constexpr):
    """Pairs of e4m3 values in int16 -> the first of each and the second of each, float16 or float32."""
    if kind == tl.float16:
        first, second = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        first = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(kind)
        second = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(kind)
    return first, second


@triton.jit
def power_of_two(largest):
    """That of float32 values >= 0, and its inverse, at most 2^126: a value divided by it is below 2."""
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)
