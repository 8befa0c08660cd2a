"""Triton counterpart of `stored_kv`, and what kernels need to multiply an FP8 cache.

They multiply it in 16 bits, where e4m3 is exact, and add in float32. Instructions for FP8 add in short accumulators, in
which many keys are lost without sums of two levels.

Kernels of few rows multiply in float16, to which Hopper converts two values by one instruction; to bfloat16 they only
come by way of that, or by integer operations (`dequantize_e4m3`) where many rows share them. Queries in bfloat16 are
exact in float16 but for their range: rows are divided by a power of two (`power_of_two`), for which the scale of the
scores makes up. Probabilities are rounded at 2^-11, in bfloat16 at 2^-9; those below 2^-25 become 0, of 2^16 keys at
most 2^-9 of the sum.
"""

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
        wide *= tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    if kind == tl.float8e4nv:
        wide = tl.clamp(wide, -_MAX, _MAX, propagate_nan=tl.PropagateNan.ALL)
    return wide.to(kind)


@triton.jit
def from_stored(x, scale, kind: tl.constexpr):
    """`stored_kv.from_stored`, of what `to_stored` returns."""
    if scale is not None:
        x = x.to(tl.float32) * scale
    return x.to(kind)


# A word has the pairs of two neighbours: of two keys in the operand of values, of four channels in that of keys. First
# values of both go to one word and second values to another, as a tensor core takes them.
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
    """Pairs of e4m3 values in int16 -> the first of each and the second of each, float16 or float32.

    Pairs of channels, loaded as one number, come to a warp's tensor core by `ldmatrix`, which transposes values of 16
    bits. Values of 8 bits would be read from shared memory one by one."""
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


@triton.jit
def latent_scales(scale, k_scale, v_scale):
    """What turns products with stored keys into scores of latent attention: the scale of those with the turned part,
    and the ratio of the scale of those with latents to it. k_scale and v_scale: those of the two caches, or None."""
    latent, turned = scale, scale
    if v_scale is not None:  # latents are keys, too
        latent = scale * tl.load(v_scale)
    if k_scale is not None:
        turned = scale * tl.load(k_scale)
    return turned, latent / turned
