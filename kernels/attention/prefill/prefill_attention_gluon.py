"""Gluon attention of prompt chunks on Hopper: a warp copies keys and values, two warpgroups multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specbatch.kernels.attention.prefill.prefill_attention_triton import _merge
from specbatch.kernels.attention.queries import PrefillInputs
from specbatch.kernels.common.sizes import cdiv, multiprocessors

LOG2E = 1.4426950408889634
# Triton 3.6 calls it async_copy_global_to_shared.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_LOG2E = gl.constexpr(LOG2E)
ROWS = 128  # query rows of a program: two warpgroups with 64 each
SPLIT_KEYS = 512


@dataclass(frozen=True)
class Tiling:
    keys: int
    stages: int
    pingpong: bool = True


TILINGS = {64: Tiling(128, 2), 128: Tiling(128, 2), 256: Tiling(64, 2)}


def prefill_attention(inputs: PrefillInputs, tile: Tiling | None = None) -> torch.Tensor:
    q, k_new, v_new, k_cache, v_cache, spans, window, out, sinks = inputs
    total, heads, dim = q.shape
    kv = k_cache.shape[2]
    group = heads // kv
    tile = tile or TILINGS[dim]
    page = 0
    if spans.fresh and k_new is not None and v_new is not None:
        keys, values, chunk = k_new.flatten(1), v_new.flatten(1), tile.keys
    else:
        keys, values, page = k_cache.view(-1, kv * dim), v_cache.view(-1, kv * dim), spans.page_size
        chunk = min(page & -page, tile.keys)
    layout = gl.NVMMASharedLayout.get_default_for([tile.keys, dim], gl.bfloat16)
    keys, values = (TensorDescriptor.from_tensor(x, [chunk, dim], layout) for x in (keys, values))
    tokens = ROWS // group
    tiles = spans.tiles(tokens)
    longest = min(max(spans.ends), window + tokens) if window else max(spans.ends)
    splits = max(1, min(multiprocessors(q.device) // (spans.full_tiles(tokens) * kv), longest // SPLIT_KEYS))
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(splits, total, heads, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, total, heads, dtype=torch.float32, device=q.device)
    prefill_attention_kernel[(kv, len(tiles), splits)](
        q, keys, values, sinks, partial, lse, spans.table, spans.table.stride(0), tiles, spans.page_table,
        spans.page_table.stride(0), q.stride(0), total, dim**-0.5 * LOG2E,
        GROUP=group, KV=kv, DIM=dim, PAGE=page, CHUNK=chunk, WINDOW=window, TOKENS=tokens, KEYS=tile.keys,
        SPLIT=splits > 1, STAGES=tile.stages, PINGPONG=tile.pingpong, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        rows = max(1, 1024 // dim)
        _merge[(cdiv(total * heads, rows),)](
            partial, lse, out, total * heads, splits, DIM=dim, BLOCK_D=dim, ROWS=rows, num_warps=4
        )
    return out


@gluon.jit
def _produce(
    keys,
    values,
    k_bufs,
    v_bufs,
    bars,
    pages,
    offset,
    column,
    low,
    blocks,
    last,
    PAGE: gl.constexpr,
    CHUNK: gl.constexpr,
):
    k_ready, k_empty, v_ready, v_empty, turns = bars
    STAGES: gl.constexpr = k_bufs.type.shape[0]
    KEYS: gl.constexpr = k_bufs.type.shape[1]
    BYTES: gl.constexpr = KEYS * k_bufs.type.shape[2] * 2
    for i in range(blocks):
        at = low + (blocks - 1 - i) * KEYS
        stage = i % STAGES
        phase = (i // STAGES) & 1
        rows = ()
        for j in gl.static_range(KEYS // CHUNK):
            if PAGE == 0:
                rows += (offset + at + j * CHUNK,)
            else:
                key = gl.minimum(at + j * CHUNK, last)
                rows += (gl.load(pages + key // PAGE).to(gl.int32) * PAGE + key % PAGE // CHUNK * CHUNK,)
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), BYTES)
        for j in gl.static_range(KEYS // CHUNK):
            copy_tile(
                keys, [rows[j], column], k_ready.index(stage), k_bufs.index(stage).slice(j * CHUNK, CHUNK, 0)
            )
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), BYTES)
        for j in gl.static_range(KEYS // CHUNK):
            copy_tile(
                values, [rows[j], column], v_ready.index(stage), v_bufs.index(stage).slice(j * CHUNK, CHUNK, 0)
            )


@gluon.jit
def _softmax(s, key, position, peak, total, scale, MASK: gl.constexpr, WINDOW: gl.constexpr):
    if MASK:
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible &= key[None, :] > position[:, None] - WINDOW
        s = gl.where(visible, s, float("-inf"))
    new = gl.maximum(peak, gl.max(s, 1) * scale)
    base = new
    if MASK:
        base = gl.where(new == float("-inf"), 0.0, new)
    p = gl.exp2(s * scale - base[:, None])
    shrink = gl.exp2(peak - base)
    return p, new, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _steps(
    first,
    stop_at,
    low,
    blocks,
    q_buf,
    k_bufs,
    v_bufs,
    bars,
    p,
    acc,
    peak,
    total,
    position,
    column,
    scale,
    WG: gl.constexpr,
    MASK: gl.constexpr,
    WINDOW: gl.constexpr,
    PINGPONG: gl.constexpr,
):
    k_ready, k_empty, v_ready, v_empty, turns = bars
    STAGES: gl.constexpr = k_bufs.type.shape[0]
    KEYS: gl.constexpr = k_bufs.type.shape[1]
    ROWS: gl.constexpr = q_buf.type.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O: gl.constexpr = acc.type.layout
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    for i in range(first, stop_at):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        before = (i - 1) % STAGES
        before_phase = ((i - 1) // STAGES) & 1
        if PINGPONG:
            mbarrier.wait(turns.index(WG), ((i - 1) & 1) ^ (1 - WG))
        s = warpgroup_mma(
            q_buf,
            k_bufs.index(stage).permute((1, 0)),
            gl.zeros([ROWS, KEYS], gl.float32, S),
            use_acc=False,
            is_async=True,
        )
        mbarrier.wait(v_ready.index(before), before_phase)
        acc = warpgroup_mma(p, v_bufs.index(before), acc, is_async=True)
        if PINGPONG:
            mbarrier.arrive(turns.index(1 - WG))
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(stage))
        key = low + (blocks - 1 - i) * KEYS + column
        weights, peak, total, shrink = _softmax(s, key, position, peak, total, scale, MASK, WINDOW)
        fresh = gl.convert_layout(weights.to(p.dtype), P)
        # A wait here, long over as a rule, keeps ptxas from moving the softmax behind the multiplication.
        mbarrier.wait(k_ready.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1, pred=i + 1 < blocks)
        acc, p, fresh = warpgroup_mma_wait(0, deps=[acc, p, fresh])
        mbarrier.arrive(v_empty.index(before))
        acc *= gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
        p = fresh
    return p, acc, peak, total


@gluon.jit
def _consume(
    q_bufs,
    k_bufs,
    v_bufs,
    bars,
    q,
    q_stride,
    sinks,
    out,
    lse,
    offset,
    start,
    first,
    stop,
    low,
    high,
    blocks,
    right,
    left,
    head,
    rows,
    part,
    scale,
    WG: gl.constexpr,
    GROUP: gl.constexpr,
    KV: gl.constexpr,
    TOKENS: gl.constexpr,
    WINDOW: gl.constexpr,
    SPLIT: gl.constexpr,
    PINGPONG: gl.constexpr,
):
    k_ready, k_empty, v_ready, v_empty, turns = bars
    STAGES: gl.constexpr = k_bufs.type.shape[0]
    KEYS: gl.constexpr = k_bufs.type.shape[1]
    DIM: gl.constexpr = k_bufs.type.shape[2]
    ROWS: gl.constexpr = q_bufs.type.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    q_buf = q_bufs.index(WG)

    row = WG * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MEMORY))
    token = first + row // GROUP
    query_head = head * GROUP + row % GROUP
    real = (row < TOKENS * GROUP) & (start + token < stop)
    feature = gl.arange(0, DIM, layout=gl.SliceLayout(0, MEMORY))
    place = (offset + token) * q_stride + query_head * DIM
    q_buf.store(gl.load(q + place[:, None] + feature[None, :], mask=real[:, None], other=0.0))
    fence_async_shared()

    row_s = WG * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    position = start + first + row_s // GROUP
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
    peak = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))
    total = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, S))
    if sinks is not None:
        if part == 0:
            peak = gl.load(sinks + head * GROUP + row_s % GROUP) * _LOG2E
            total = gl.full([ROWS], 1.0, gl.float32, layout=gl.SliceLayout(1, S))
    acc = gl.zeros([ROWS, DIM], gl.float32, O)
    if blocks > 0:
        mbarrier.wait(k_ready.index(0), 0)
        s = warpgroup_mma(
            q_buf, k_bufs.index(0).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, S), use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(0))
        weights, peak, total, shrink = _softmax(
            s, low + (blocks - 1) * KEYS + column, position, peak, total, scale, True, WINDOW
        )
        p = gl.convert_layout(weights.to(q.dtype.element_ty), P)
        if low + blocks * KEYS > stop:  # the values after the end are of another sequence, and may be NaN
            mbarrier.wait(v_ready.index(0), 0)
            line = low + (blocks - 1) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, MEMORY))
            v = v_bufs.index(0).load(MEMORY)
            v_bufs.index(0).store(gl.where((line < stop)[:, None], v, 0.0))
            fence_async_shared()
        mbarrier.wait(k_ready.index(1 % STAGES), (1 // STAGES) & 1, pred=blocks > 1)
        p, acc, peak, total = _steps(
            1,
            right,
            low,
            blocks,
            q_buf,
            k_bufs,
            v_bufs,
            bars,
            p,
            acc,
            peak,
            total,
            position,
            column,
            scale,
            WG,
            True,
            WINDOW,
            PINGPONG,
        )
        p, acc, peak, total = _steps(
            right,
            left,
            low,
            blocks,
            q_buf,
            k_bufs,
            v_bufs,
            bars,
            p,
            acc,
            peak,
            total,
            position,
            column,
            scale,
            WG,
            False,
            WINDOW,
            PINGPONG,
        )
        if WINDOW > 0:
            p, acc, peak, total = _steps(
                left,
                blocks,
                low,
                blocks,
                q_buf,
                k_bufs,
                v_bufs,
                bars,
                p,
                acc,
                peak,
                total,
                position,
                column,
                scale,
                WG,
                True,
                WINDOW,
                PINGPONG,
            )
        mbarrier.wait(v_ready.index((blocks - 1) % STAGES), ((blocks - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_bufs.index((blocks - 1) % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    inverse = 1.0 / gl.where(total > 0, total, 1.0)
    acc *= gl.convert_layout(inverse, gl.SliceLayout(1, O))[:, None]
    if SPLIT:
        row_o = WG * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O))
        token_o = first + row_o // GROUP
        real_o = (row_o < TOKENS * GROUP) & (start + token_o < stop)
        place_o = (offset + token_o + part.to(gl.int64) * rows) * (KV * GROUP) + head * GROUP + row_o % GROUP
        feature_o = gl.arange(0, DIM, layout=gl.SliceLayout(0, O))
        gl.store(out + place_o[:, None] * DIM + feature_o[None, :], acc, mask=real_o[:, None])
        sums = gl.convert_layout(peak + gl.log2(total), gl.SliceLayout(1, O))
        gl.store(lse + place_o, sums, mask=real_o)
    else:
        q_buf.store(acc.to(q.dtype.element_ty))
        place = (offset + token) * (KV * GROUP) + query_head
        gl.store(out + place[:, None] * DIM + feature[None, :], q_buf.load(MEMORY), mask=real[:, None])


@gluon.jit(do_not_specialize=["table_stride", "rows"])
def prefill_attention_kernel(
    q,
    keys,
    values,
    sinks,
    out,
    lse,
    table,
    table_stride,
    tiles,
    page_table,
    page_stride,
    q_stride,
    rows,
    scale,
    GROUP: gl.constexpr,
    KV: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    CHUNK: gl.constexpr,
    WINDOW: gl.constexpr,
    TOKENS: gl.constexpr,
    KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    PINGPONG: gl.constexpr,
):
    head = gl.program_id(0)
    part = gl.program_id(2)
    span = gl.load(tiles + 2 * gl.program_id(1))
    first = gl.load(tiles + 2 * gl.program_id(1) + 1).to(gl.int32)
    start = gl.load(table + span).to(gl.int32)
    stop = gl.load(table + table_stride + span).to(gl.int32)
    pages = page_table + gl.load(table + 2 * table_stride + span) * page_stride
    offset = gl.load(table + 3 * table_stride + span)

    low, high = 0, gl.minimum(start + first + TOKENS, stop)
    plain, full = 0, start + first + 1
    if WINDOW > 0:
        low = gl.maximum(start + first - WINDOW + 1, 0) // KEYS * KEYS
        plain = start + first + TOKENS - WINDOW
    if SPLIT:
        share = gl.cdiv(gl.cdiv(high - low, KEYS), gl.num_programs(2)) * KEYS
        low += part * share
        high = gl.minimum(low + share, high)
    blocks = gl.maximum(gl.cdiv(high - low, KEYS), 0)
    # blocks from the last to the first: up to `right` the diagonal runs through them, from `left` the window's edge.
    right = gl.minimum(gl.maximum(blocks - gl.maximum(full - low, 0) // KEYS, 1), blocks)
    left = blocks
    if WINDOW > 0:
        left = gl.maximum(blocks - gl.cdiv(gl.maximum(plain - low, 0), KEYS), right)

    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DIM], keys.dtype)
    q_bufs = gl.allocate_shared_memory(keys.dtype, [2, 64, DIM], layout)
    k_bufs = gl.allocate_shared_memory(keys.dtype, [STAGES, KEYS, DIM], layout)
    v_bufs = gl.allocate_shared_memory(keys.dtype, [STAGES, KEYS, DIM], layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    bars = (k_ready, k_empty, v_ready, v_empty, turns)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_bufs,
                    k_bufs,
                    v_bufs,
                    bars,
                    q,
                    q_stride,
                    sinks,
                    out,
                    lse,
                    offset,
                    start,
                    first,
                    stop,
                    low,
                    high,
                    blocks,
                    right,
                    left,
                    head,
                    rows,
                    part,
                    scale,
                    0,
                    GROUP,
                    KV,
                    TOKENS,
                    WINDOW,
                    SPLIT,
                    PINGPONG,
                ),
            ),
            (
                _consume,
                (
                    q_bufs,
                    k_bufs,
                    v_bufs,
                    bars,
                    q,
                    q_stride,
                    sinks,
                    out,
                    lse,
                    offset,
                    start,
                    first,
                    stop,
                    low,
                    high,
                    blocks,
                    right,
                    left,
                    head,
                    rows,
                    part,
                    scale,
                    1,
                    GROUP,
                    KV,
                    TOKENS,
                    WINDOW,
                    SPLIT,
                    PINGPONG,
                ),
            ),
            (
                _produce,
                (
                    keys,
                    values,
                    k_bufs,
                    v_bufs,
                    bars,
                    pages,
                    offset.to(gl.int32),
                    head * DIM,
                    low,
                    blocks,
                    high - 1,
                    PAGE,
                    CHUNK,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
