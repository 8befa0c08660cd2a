"""Triton kernels of `split_qkv_rope` and `write_latent`: QK-Norm, RoPE and the write to the KV cache in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.queries import AttentionInputs, LatentLayout
from specbatch.kernels.attention.stored_kv_triton import from_stored, to_stored
from specbatch.kernels.common.pdl_triton import let_next_kernel_start, pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2

_PROGRAM = 2048  # elements of a program: several 16-byte accesses of a thread in flight, many programs on a processor


def split_qkv_rope(
    inputs: AttentionInputs, slots: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_qkv_rope_write_ref`."""
    qkv, heads, positions, k_cache, v_cache, k_scale, v_scale = inputs
    q, k_new = out or (qkv.new_empty(len(qkv), n, heads.dim) for n in (heads.count, heads.own_kv))
    rows, dim, kv = qkv.shape[0], heads.dim, heads.own_kv
    half = next_power_of_2(dim // 2)
    tile = max(1, _PROGRAM // (2 * half))
    lines = rows * (heads.count + 2 * kv)
    _split_qkv_rope[(cdiv(lines, tile),)](
        qkv, heads.q_norm, heads.k_norm, heads.cos, heads.sin, positions, slots, q, k_cache, v_cache, k_scale,
        v_scale, heads.k_offset, k_new, lines, heads.eps, COUNT=heads.count, KV=kv, DIM=dim,
        NORM=heads.q_norm is not None, TILE=tile, HALF=half, num_warps=4 if tile * 2 * half <= 4096 else 8, **pdl(qkv),
    )  # fmt: skip
    return q, k_new[:, :kv], qkv.view(len(qkv), -1, dim)[:, heads.count + kv :]


@triton.jit(do_not_specialize=["lines"])
def _split_qkv_rope(
    qkv, q_norm, k_norm, cos, sin, positions, slots, q, k_cache, v_cache, k_scale, v_scale, k_offset, k_new,
    lines, eps, COUNT: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    TILE: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A line is one head of one token; the two halves of a head are loaded apart, as the rotation pairs them."""
    let_next_kernel_start(PDL)
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
    wait_for_previous_kernel(PDL)
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
    to_v = (real & is_v)[:, None] & inside[None, :]
    value = (slot * KV + head - COUNT - KV)[:, None] * DIM + column[None, :]
    k_by, v_by = k_scale, v_scale
    if k_scale is not None:
        k_by = tl.load(k_scale + head - COUNT, real & is_k, 1.0)[:, None]
    if v_scale is not None:
        v_by = tl.load(v_scale + head - COUNT - KV, real & is_v, 1.0)[:, None]
    kept: tl.constexpr = k_cache.dtype.element_ty
    k1, k2 = y1, y2
    if k_offset is not None:
        less = k_offset + (head - COUNT)[:, None] * DIM + column[None, :]
        k1, k2 = k1.to(tl.float32) - tl.load(less, to_k, 0.0), k2.to(tl.float32) - tl.load(less + half, to_k, 0.0)
    k1, k2 = to_stored(k1, k_by, kept), to_stored(k2, k_by, kept)
    v1, v2 = to_stored(y1, v_by, kept), to_stored(y2, v_by, kept)
    tl.store(k_cache + key, k1, mask=to_k)
    tl.store(k_cache + key + half, k2, mask=to_k)
    tl.store(v_cache + value, v1, mask=to_v)
    tl.store(v_cache + value + half, v2, mask=to_v)
    if kept != dtype or k_offset is not None:  # later passes read what is stored, so this one does, too
        y1, y2 = from_stored(k1, k_by, dtype), from_stored(k2, k_by, dtype)
        tl.store(source, from_stored(v1, v_by, dtype), mask=to_v)
        tl.store(source + half, from_stored(v2, v_by, dtype), mask=to_v)
    keep = k_new + (token * KV + head - COUNT)[:, None] * DIM + column[None, :]
    tl.store(keep, y1, mask=to_k)
    tl.store(keep + half, y2, mask=to_k)


def write_latent(inputs: AttentionInputs, slots: torch.Tensor) -> torch.Tensor:
    """`write_latent_ref`, in place: the queries are a view of `projected`."""
    projected, heads, positions, k_cache, v_cache, k_scale, v_scale = inputs
    assert isinstance(heads, LatentLayout)
    half = (heads.dim - heads.rank) // 2
    _write_latent[(len(projected),)](
        projected, positions, slots, heads.cos, heads.sin, k_cache, v_cache, k_scale, v_scale,
        COUNT=heads.count, ROWS=next_power_of_2(heads.count + 1), RANK=heads.rank,
        BLOCK_R=next_power_of_2(heads.rank), HALF=half, BLOCK_H=next_power_of_2(half),
        INTERLEAVED=heads.interleaved, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return projected.view(len(projected), heads.count + 1, heads.dim)[:, :-1]


@triton.jit
def _write_latent(
    projected, positions, slots, cos, sin, k_cache, v_cache, k_scale, v_scale,
    COUNT: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """A token per program: rotates queries and key in place, and stores key and latent. The last of COUNT + 1 rows is
    that of the key."""
    dim: tl.constexpr = RANK + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    position, slot = tl.load(positions + token), tl.load(slots + token)
    row, pair = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_H)[None, :]
    there = (row <= COUNT) & (pair < HALF)
    step: tl.constexpr = 2 if INTERLEAVED else 1
    apart: tl.constexpr = 1 if INTERLEAVED else HALF
    first = projected + (token * (COUNT + 1) + row) * dim + RANK + step * pair
    x1, x2 = tl.load(first, there, 0.0), tl.load(first + apart, there, 0.0)
    dtype: tl.constexpr = x1.dtype
    # Both halves of a table hold the same angles; only the sine's first half has its sign turned.
    angle = position * (2 * HALF) + pair
    c = tl.load(cos + angle, pair < HALF, 0.0).to(tl.float32)
    s = tl.load(sin + angle + HALF, pair < HALF, 0.0).to(tl.float32)
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    y1, y2 = (x1 * c - x2 * s).to(dtype), (x2 * c + x1 * s).to(dtype)
    tl.store(first, y1, there)
    tl.store(first + apart, y2, there)
    is_key = there & (row == COUNT)
    stored: tl.constexpr = k_cache.dtype.element_ty
    place = k_cache + slot * (2 * HALF) + step * pair + row * 0
    k_by, v_by = k_scale, v_scale
    if k_scale is not None:
        k_by = tl.load(k_scale)
    if v_scale is not None:
        v_by = tl.load(v_scale)
    tl.store(place, to_stored(y1, k_by, stored), is_key)
    tl.store(place + apart, to_stored(y2, k_by, stored), is_key)
    column = tl.arange(0, BLOCK_R)
    latent = tl.load(projected + (token * (COUNT + 1) + COUNT) * dim + column, column < RANK, 0.0)
    tl.store(v_cache + slot * RANK + column, to_stored(latent, v_by, stored), column < RANK)
