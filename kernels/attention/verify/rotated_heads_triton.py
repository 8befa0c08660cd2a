"""Heads from the rows of a qkv GEMM within Triton kernels: load, RMSNorm and RoPE, in two halves.

Halves are loaded, rotated and multiplied apart from each other, each padded to a power of two for itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves(x, start, live, DIM: tl.constexpr, HALF: tl.constexpr):
    """Both halves [R, HALF] of the heads that begin at `start` [R]."""
    column = tl.arange(0, HALF)
    mask = live[:, None] & (column < DIM // 2)
    first = x + start[:, None] + column
    return tl.load(first, mask, 0.0), tl.load(first + DIM // 2, mask, 0.0)


@triton.jit
def turn(cos, sin, position, live, DIM: tl.constexpr, HALF: tl.constexpr):
    """Cosines and sines [R, HALF] of `position` [R]. The tables hold them twice, the first half's sine negative."""
    column = tl.arange(0, HALF)
    mask = live[:, None] & (column < DIM // 2)
    angle = position[:, None] * DIM + column
    return tl.load(cos + angle, mask, 0.0), tl.load(sin + angle + DIM // 2, mask, 0.0)


@triton.jit
def rotate(one, two, cos, sin, norm, eps, DIM: tl.constexpr, HALF: tl.constexpr):
    """RMSNorm (where `norm` is given) and RoPE of the halves of heads; rounds where the references do."""
    dtype: tl.constexpr = one.dtype
    x, y = one.to(tl.float32), two.to(tl.float32)
    if norm is not None:
        column = tl.arange(0, HALF)
        inside = column < DIM // 2
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + eps)[:, None]
        x = (x * scale).to(dtype).to(tl.float32) * tl.load(norm + column, inside, 0.0).to(tl.float32)
        y = (y * scale).to(dtype).to(tl.float32) * tl.load(norm + DIM // 2 + column, inside, 0.0).to(tl.float32)
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    first = (x * cos).to(dtype).to(tl.float32) - y * sin
    second = (y * cos).to(dtype).to(tl.float32) + x * sin
    return first.to(dtype), second.to(dtype)


@triton.jit
def whole_heads(one, two):
    """Heads [R, 2 * HALF] of their halves."""
    return tl.reshape(tl.permute(tl.join(one, two), (0, 2, 1)), (one.shape[0], 2 * one.shape[1]))
