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
