"""Values of e4m3 in registers, in the types that tensor cores multiply."""

from __future__ import annotations

import triton
import triton.language as tl

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


@triton.jit
def dequantize_e4m3(values, kind: tl.constexpr):
    """Values of float8_e4m3fn, none of them NaN, in another type."""
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4)
    return values.to(kind)
