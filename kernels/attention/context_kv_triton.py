"""Triton kernel of `context_kv`: keys and values of a context into the caches of all layers in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.queries import ContextKVLayout
from specbatch.kernels.attention.stored_kv_triton import to_stored
from specbatch.kernels.common.kv_slots import VerifiedRows
from specbatch.kernels.common.kv_slots_triton import kv_slot
from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2

_PROGRAM = 2048  # elements of a program: several 16-byte accesses of a thread in flight, many programs on a processor


def write_context_kv(
    kv: torch.Tensor,
    heads: ContextKVLayout,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """`write_context_kv_ref`."""
    _launch(kv, heads, keys, values, positions, slots, None, k_scales, v_scales)


def write_verified_kv(
    kv: torch.Tensor,
    heads: ContextKVLayout,
    keys: torch.Tensor,
    values: torch.Tensor,
    verified: VerifiedRows,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """`write_verified_kv_ref`. Rows that are not accepted are not stored."""
    _launch(kv, heads, keys, values, None, None, verified, k_scales, v_scales)


def _launch(
    kv: torch.Tensor,
    heads: ContextKVLayout,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor | None,
    slots: torch.Tensor | None,
    verified: VerifiedRows | None,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """By the slots of tokens, or by what a verify knows."""
    layers, half = len(heads.k_norms), next_power_of_2(heads.dim // 2)
    tile = max(1, _PROGRAM // (2 * half))
    lines = len(kv) * layers * 2 * heads.kv
    n, width, spacing = 1, 0, 0
    if verified is not None:
        n, width = len(kv) // len(verified.slots), verified.page_table.shape[1]
        spacing = verified.accepted.stride(0)
    _write_context[(cdiv(lines, tile),)](
        kv, heads.k_norms, heads.cos, heads.sin, keys, values, k_scales, v_scales, positions, slots,
        *(verified or (None,) * 4),
        lines, n, width, spacing, keys.stride(0), heads.eps,
        LAYERS=layers, KV=heads.kv, DIM=heads.dim, PAGE=keys.shape[2], TILE=tile, HALF=half, **pdl(kv), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["lines"])
def _write_context(
    kv, k_norms, cos, sin, keys, values, k_scales, v_scales, positions, slots, page_table, rows, lengths, accepted,
    lines, n, width, spacing, stride, eps,
    LAYERS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A line is one head of one layer of one token; the two halves of a head are loaded apart, as the rotation pairs
    them. stride: elements of a layer's cache; spacing: those between two numbers of `accepted`."""
    half: tl.constexpr = DIM // 2
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    kept = line < lines
    token = line // (LAYERS * 2 * KV)
    layer = line // (2 * KV) % LAYERS
    head = line % (2 * KV)
    is_k = head < KV
    column = tl.arange(0, HALF)
    inside = (column < half)[None, :]
    weight = k_norms + layer[:, None] * DIM + column[None, :]
    w1 = tl.load(weight, kept[:, None] & inside, 0.0).to(tl.float32)
    w2 = tl.load(weight + half, kept[:, None] & inside, 0.0).to(tl.float32)
    wait_for_previous_kernel(PDL)
    if slots is not None:
        position = tl.load(positions + token, kept, 0)
        slot = tl.load(slots + token, kept, 0)
    else:
        sequence, node = token // n, token % n
        kept &= node <= tl.load(accepted + sequence * spacing, kept, -1)
        position = tl.load(lengths + sequence, kept, 0) + node
        row = tl.load(rows + sequence, kept, 0)
        slot = kv_slot(page_table + row * width, position, PAGE, kept)
    mask = kept[:, None] & inside
    turned = mask & is_k[:, None]
    source = kv + line.to(tl.int64)[:, None] * DIM + column[None, :]
    first, second = tl.load(source, mask, 0.0), tl.load(source + half, mask, 0.0)
    dtype: tl.constexpr = first.dtype
    # Both halves of a table hold the same angles; only the sine's first half has its sign turned.
    angle = position[:, None] * DIM + column[None, :]
    c = tl.load(cos + angle, turned, 1.0).to(tl.float32)
    s = tl.load(sin + angle + half, turned, 0.0).to(tl.float32)
    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / DIM + eps)[:, None]
    # Rounded where the reference rounds.
    k1 = ((x1 * scale).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
    k2 = ((x2 * scale).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    place = layer.to(tl.int64)[:, None] * stride + (slot[:, None] * KV + (head % KV)[:, None]) * DIM + column[None, :]
    k_scale, v_scale = k_scales, v_scales
    if k_scales is not None:
        k_scale = tl.load(k_scales + layer * KV + head % KV)[:, None]
    if v_scales is not None:
        v_scale = tl.load(v_scales + layer * KV + head % KV)[:, None]
    stored: tl.constexpr = keys.dtype.element_ty
    tl.store(keys + place, to_stored((k1 * c - k2 * s).to(dtype), k_scale, stored), turned)
    tl.store(keys + place + half, to_stored((k2 * c + k1 * s).to(dtype), k_scale, stored), turned)
    is_value = mask & (head >= KV)[:, None]
    tl.store(values + place, to_stored(first, v_scale, stored), is_value)
    tl.store(values + place + half, to_stored(second, v_scale, stored), is_value)
