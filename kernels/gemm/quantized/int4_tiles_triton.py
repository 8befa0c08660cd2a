"""Where Triton kernels find rows of `Int4Tiles`, and what their words of a scale and a zero point say."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_of_row(row, chunks, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """The place of the first of the WIDTH words that a row, int64, has in a tile; those of the next of its chunks are
    UNIT * WIDTH further."""
    found = (row // UNIT * (chunks * UNIT) + row % UNIT) * WIDTH
    return tl.multiple_of(found, 4) if WIDTH % 4 == 0 else found


@triton.jit
def word_scale(word, BF16: tl.constexpr):
    """float32 of the scales, bfloat16 or float16, in words int32."""
    if BF16:
        found = (word << 16).to(tl.float32, bitcast=True)
    else:
        found = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return found


@triton.jit
def word_zero(word):
    """int32 of the zero points in words int32."""
    return word >> 16 & 15
