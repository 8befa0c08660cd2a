"""Triton kernels between the products of many rows: RMSNorm, activations, rounding to float8, and from qkv to heads and
the cache.

Each is bound by memory: a program handles some 2048 elements, so that a thread has several 16-byte accesses in flight
and many programs share a processor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.qkv import QKVLayout
from specbatch.kernels.dispatch import pdl
from specbatch.kernels.elementwise.fp8_quantize import FP8_MAX, SMALLEST_MAX, FP8Activations
from specbatch.kernels.gemm.weight import SCALE_BLOCK

PROGRAM = 2048  # elements of a program


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_ref` for x [T, H], weight [H]."""
    rows, width = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    tile = max(1, PROGRAM // block)
    _rms_norm[(triton.cdiv(rows, tile),)](
        x, weight, y, rows, width, eps, TILE=tile, BLOCK=block, num_warps=_warps(tile * block), **pdl(x)
    )
    return y


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up [T, I], computed in float32 and rounded once."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, width)
    block = min(triton.next_power_of_2(width), 2 * PROGRAM)
    grid = (rows * triton.cdiv(width, block),)  # one side: the others end at 65535
    _silu_and_mul[grid](gate_up, y, width, BLOCK=block, num_warps=max(1, block // 512), **pdl(gate_up))
    return y


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 in the place of x, contiguous; computed in float32 and rounded once."""
    _relu_squared[(triton.cdiv(x.numel(), PROGRAM),)](x, x.numel(), BLOCK=PROGRAM, num_warps=4, **pdl(x))
    return x


def quantize_fp8(x: torch.Tensor) -> FP8Activations:
    """`rounded_ref` of x [T, K]."""
    (rows, width), device = x.shape, x.device
    assert x.stride(1) == 1, "the elements of a row of x must be adjacent"
    values = torch.empty(rows, width, device=device, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, triton.cdiv(width, SCALE_BLOCK), device=device)
    tile = PROGRAM // SCALE_BLOCK
    _quantize_fp8[(triton.cdiv(scales.numel(), tile),)](
        x, values, scales, scales.numel(), width, x.stride(0), SCALE_BLOCK=SCALE_BLOCK,
        FP8_MAX=FP8_MAX, SMALLEST_MAX=SMALLEST_MAX,
        TILE=tile, num_warps=4, **pdl(x),
    )  # fmt: skip
    return FP8Activations(values, scales, x.dtype)


def split_qkv_rope(
    qkv: torch.Tensor,
    heads: QKVLayout,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q: torch.Tensor,
    k_new: torch.Tensor,
) -> None:
    """`split_heads_ref` and `write_kv_ref` in one pass: qkv [T, (count + 2 kv) * dim] -> q [T, count, dim].

    K and V go to flat `slots` int64 [T] of the caches [pages, page_size, kv, dim], cast to their type (float8_e4m3fn
    too). `k_new` [T, kv, dim] also receives the keys, in the type of qkv, for who attends to them outside the cache.
    """
    rows, dim = qkv.shape[0], heads.dim
    half = triton.next_power_of_2(dim // 2)
    tile = max(1, PROGRAM // (2 * half))
    lines = rows * (heads.count + 2 * heads.kv)
    _split_qkv_rope[(triton.cdiv(lines, tile),)](
        qkv, heads.q_norm, heads.k_norm, heads.cos, heads.sin, positions, slots, q, k_cache, v_cache, k_new,
        lines, heads.eps, COUNT=heads.count, KV=heads.kv, DIM=dim, NORM=heads.q_norm is not None,
        TILE=tile, HALF=half, num_warps=_warps(tile * 2 * half), **pdl(qkv),
    )  # fmt: skip


def _warps(elements: int) -> int:
    return 4 if elements <= 4096 else 8


@triton.jit(do_not_specialize=["rows"])  # it changes from pass to pass
def _rms_norm(x, weight, y, rows, width, eps, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offsets = row.to(tl.int64)[:, None] * width + column[None, :]
    mask = (row < rows)[:, None] & inside[None, :]
    values = tl.load(x + offsets, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    # FP8Activations twice, as the reference does: before the weight and after.
    normal = (wide * scale[:, None]).to(values.dtype).to(tl.float32)
    tl.store(y + offsets, normal * w[None, :], mask=mask)


@triton.jit
def _silu_and_mul(gate_up, y, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = gate_up + row * 2 * width + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, gate / (1 + tl.exp(-gate)) * up, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _relu_squared(x, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    value = tl.where(value < 0, 0.0, value)  # a maximum would hide NaN
    tl.store(x + at, value * value, mask=at < count)


@triton.jit(do_not_specialize=["lines"])
def _quantize_fp8(
    x, values, scales, lines, width, x_stride, SCALE_BLOCK: tl.constexpr, FP8_MAX: tl.constexpr,
    SMALLEST_MAX: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A line is what shares a scale."""
    blocks = tl.cdiv(width, SCALE_BLOCK)
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = (line // blocks).to(tl.int64)[:, None]
    column = (line % blocks * SCALE_BLOCK)[:, None] + tl.arange(0, SCALE_BLOCK)[None, :]
    mask = (line < lines)[:, None] & (column < width)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    wide = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    # As whole numbers, of which that of NaN is the largest: a maximum of floating point would hide it.
    bits = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest < SMALLEST_MAX, SMALLEST_MAX, largest)
    tl.store(scales + line, tl.div_rn(largest, FP8_MAX), mask=line < lines)
    inverse = tl.div_rn(tl.full([TILE], FP8_MAX, tl.float32), largest)
    tl.store(values + row * width + column, (wide * inverse[:, None]).to(values.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["lines"])
def _split_qkv_rope(
    qkv, q_norm, k_norm, cos, sin, positions, slots, q, k_cache, v_cache, k_new,
    lines, eps, COUNT: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    TILE: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A line is one head of one token; the two halves of a head are loaded apart, as the rotation pairs them."""
    half: tl.constexpr = DIM // 2
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = line < lines
    token = (line // (COUNT + 2 * KV)).to(tl.int64)
    head = line % (COUNT + 2 * KV)
    is_q, is_v = head < COUNT, head >= COUNT + KV
    is_k = (head >= COUNT) & (head < COUNT + KV)
    column = tl.arange(0, HALF)
    inside = column < half
    mask = real[:, None] & inside[None, :]
    turned = mask & (head < COUNT + KV)[:, None]
    if NORM:
        wq1 = tl.load(q_norm + column, mask=inside, other=0.0).to(tl.float32)
        wq2 = tl.load(q_norm + half + column, mask=inside, other=0.0).to(tl.float32)
        wk1 = tl.load(k_norm + column, mask=inside, other=0.0).to(tl.float32)
        wk2 = tl.load(k_norm + half + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = qkv + line.to(tl.int64)[:, None] * DIM + column[None, :]
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + half, mask=mask, other=0.0)
    dtype: tl.constexpr = first.dtype
    # Both halves of a table hold the same angles; only the sine's first half has its sign turned.
    angle = tl.load(positions + token, mask=real, other=0)[:, None] * DIM + column[None, :]
    c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle + half, mask=turned, other=0.0).to(tl.float32)
    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / DIM + eps)[:, None]
        w1 = tl.where(is_q[:, None], wq1[None, :], wk1[None, :])
        w2 = tl.where(is_q[:, None], wq2[None, :], wk2[None, :])
        # Values keep theirs; rounded where the reference rounds.
        x1 = tl.where(is_v[:, None], x1, ((x1 * scale).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32))
        x2 = tl.where(is_v[:, None], x2, ((x2 * scale).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32))
    y1 = (x1 * c - x2 * s).to(dtype)
    y2 = (x2 * c + x1 * s).to(dtype)

    to_q = (real & is_q)[:, None] & inside[None, :]
    place = q + (token * COUNT + head)[:, None] * DIM + column[None, :]
    tl.store(place, y1, mask=to_q)
    tl.store(place + half, y2, mask=to_q)
    slot = tl.load(slots + token, mask=real, other=0)
    to_k = (real & is_k)[:, None] & inside[None, :]
    key = (slot * KV + head - COUNT)[:, None] * DIM + column[None, :]
    kept: tl.constexpr = k_cache.dtype.element_ty
    tl.store(k_cache + key, y1.to(kept), mask=to_k)
    tl.store(k_cache + key + half, y2.to(kept), mask=to_k)
    to_v = (real & is_v)[:, None] & inside[None, :]
    value = (slot * KV + head - COUNT - KV)[:, None] * DIM + column[None, :]
    tl.store(v_cache + value, y1.to(kept), mask=to_v)
    tl.store(v_cache + value + half, y2.to(kept), mask=to_v)
    keep = k_new + (token * KV + head - COUNT)[:, None] * DIM + column[None, :]
    tl.store(keep, y1, mask=to_k)
    tl.store(keep + half, y2, mask=to_k)
