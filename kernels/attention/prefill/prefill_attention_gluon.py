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

from specbatch.kernels.attention.prefill.prefill_attention_triton import merge_parts
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
    persistent: bool = True


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
    items = kv * len(tiles) * splits
    programs = min(items, multiprocessors(q.device)) if tile.persistent else items
    prefill_attention_kernel[(programs,)](
        q, keys, values, sinks, partial, lse, spans.table, spans.table.stride(0), tiles, len(tiles), spans.page_table,
        spans.page_table.stride(0), q.stride(0), total, splits, dim**-0.5 * LOG2E,
        GROUP=group, KV=kv, DIM=dim, PAGE=page, CHUNK=chunk, WINDOW=window, TOKENS=tokens, KEYS=tile.keys,
        SPLIT=splits > 1, STAGES=tile.stages, PINGPONG=tile.pingpong, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        rows = max(1, 1024 // dim)
        merge_parts[(cdiv(total * heads, rows),)](
            partial, lse, out, total * heads, splits, DIM=dim, BLOCK_D=dim, ROWS=rows, num_warps=4
        )
    return out


@gluon.jit
def _work(
    turn,
    table,
    table_stride,
    tiles,
    num_tiles,
    splits,
    KV: gl.constexpr,
    TOKENS: gl.constexpr,
    KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Of the program's `turn`th tile: its KV head, part of the keys, span, first row in the span, start and stop of the
    span, first row of the span in the pass; the keys begin at `low`, and so many blocks of them are attended to."""
    programs = gl.num_programs(0)
    # Tiles are sorted by length: every other round is dealt backwards, so that each program gets as much.
    mine = gl.program_id(0)
    if turn % 2 == 1:
        mine = programs - 1 - mine
    item = turn * programs + mine
    head = item % KV
    part = item // KV // num_tiles
    tile = item // KV % num_tiles
    span = gl.load(tiles + 2 * tile)
    first = gl.load(tiles + 2 * tile + 1).to(gl.int32)
    start = gl.load(table + span).to(gl.int32)
    stop = gl.load(table + table_stride + span).to(gl.int32)
    offset = gl.load(table + 3 * table_stride + span)
    low, high = 0, gl.minimum(start + first + TOKENS, stop)
    if WINDOW > 0:
        low = gl.maximum(start + first - WINDOW + 1, 0) // KEYS * KEYS
    share = gl.cdiv(gl.cdiv(high - low, KEYS), splits) * KEYS
    low += part * share
    high = gl.minimum(low + share, high)
    blocks = gl.maximum(gl.cdiv(high - low, KEYS), 0)
    return head, part, span, first, start, stop, offset, low, high, blocks


@gluon.jit
def _produce(
    keys,
    values,
    k_bufs,
    v_bufs,
    bars,
    table,
    table_stride,
    tiles,
    num_tiles,
    page_table,
    page_stride,
    splits,
    rounds,
    KV: gl.constexpr,
    TOKENS: gl.constexpr,
    WINDOW: gl.constexpr,
    PAGE: gl.constexpr,
    CHUNK: gl.constexpr,
):
    k_ready, k_empty, v_ready, v_empty, turns = bars
    STAGES: gl.constexpr = k_bufs.type.shape[0]
    KEYS: gl.constexpr = k_bufs.type.shape[1]
    DIM: gl.constexpr = k_bufs.type.shape[2]
    BYTES: gl.constexpr = KEYS * DIM * 2
    done = 0
    for turn in range(rounds):
        head, part, span, first, start, stop, offset, low, high, blocks = _work(
            turn, table, table_stride, tiles, num_tiles, splits, KV, TOKENS, KEYS, WINDOW
        )
        pages = page_table + gl.load(table + 2 * table_stride + span) * page_stride
        column = head * DIM
        for i in range(blocks):
            at = low + (blocks - 1 - i) * KEYS
            stage = (done + i) % STAGES
            phase = ((done + i) // STAGES) & 1
            rows = ()
            for j in gl.static_range(KEYS // CHUNK):
                if PAGE == 0:
                    rows += (offset.to(gl.int32) + at + j * CHUNK,)
                else:
                    key = gl.minimum(at + j * CHUNK, high - 1)
                    rows += (gl.load(pages + key // PAGE).to(gl.int32) * PAGE + key % PAGE // CHUNK * CHUNK,)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_ready.index(stage), BYTES)
            for j in gl.static_range(KEYS // CHUNK):
                copy_tile(keys, [rows[j], column], k_ready.index(stage), k_bufs.index(stage).slice(j * CHUNK, CHUNK, 0))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_ready.index(stage), BYTES)
            for j in gl.static_range(KEYS // CHUNK):
                copy_tile(
                    values, [rows[j], column], v_ready.index(stage), v_bufs.index(stage).slice(j * CHUNK, CHUNK, 0)
                )
        done += blocks


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
    done,
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
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, v_bufs.type.shape[2], 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    for i in range(first, stop_at):
        number = done + i
        stage = number % STAGES
        before = (number - 1) % STAGES
        if PINGPONG:
            mbarrier.wait(turns.index(WG), (number & 1) ^ (1 - WG))
        s = warpgroup_mma(
            q_buf,
            k_bufs.index(stage).permute((1, 0)),
            gl.zeros([ROWS, KEYS], gl.float32, S),
            use_acc=False,
            is_async=True,
        )
        mbarrier.wait(v_ready.index(before), ((number - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_bufs.index(before), acc, is_async=True)
        if PINGPONG:
            mbarrier.arrive(turns.index(1 - WG))
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(stage))
        key = low + (blocks - 1 - i) * KEYS + column
        weights, peak, total, shrink = _softmax(s, key, position, peak, total, scale, MASK, WINDOW)
        fresh = gl.convert_layout(weights.to(p.dtype), P)
        # A wait here, long over as a rule, keeps ptxas from moving the softmax behind the multiplication.
        mbarrier.wait(k_ready.index((number + 1) % STAGES), ((number + 1) // STAGES) & 1, pred=i + 1 < blocks)
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
    rows,
    scale,
    table,
    table_stride,
    tiles,
    num_tiles,
    splits,
    rounds,
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
    feature = gl.arange(0, DIM, layout=gl.SliceLayout(0, MEMORY))
    row_s = WG * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
    done = 0
    for turn in range(rounds):
        head, part, span, first, start, stop, offset, low, high, blocks = _work(
            turn, table, table_stride, tiles, num_tiles, splits, KV, TOKENS, KEYS, WINDOW
        )
        # Blocks from the last to the first: the diagonal runs through those before `right`, the window's edge through
        # those from `left` on.
        right = gl.minimum(gl.maximum(blocks - gl.maximum(start + first + 1 - low, 0) // KEYS, 1), blocks)
        left = blocks
        if WINDOW > 0:
            left = gl.maximum(blocks - gl.cdiv(gl.maximum(start + first + TOKENS - WINDOW - low, 0), KEYS), right)
        token = first + row // GROUP
        query_head = head * GROUP + row % GROUP
        real = (row < TOKENS * GROUP) & (start + token < stop)
        place = (offset + token) * q_stride + query_head * DIM
        q_buf.store(gl.load(q + place[:, None] + feature[None, :], mask=real[:, None], other=0.0))
        fence_async_shared()

        position = start + first + row_s // GROUP
        peak = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))
        total = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, S))
        if sinks is not None:
            if part == 0:
                peak = gl.load(sinks + head * GROUP + row_s % GROUP) * _LOG2E
                total = gl.full([ROWS], 1.0, gl.float32, layout=gl.SliceLayout(1, S))
        acc = gl.zeros([ROWS, DIM], gl.float32, O)
        if blocks > 0:
            stage = done % STAGES
            mbarrier.wait(k_ready.index(stage), (done // STAGES) & 1)
            if PINGPONG:
                mbarrier.wait(turns.index(WG), (done & 1) ^ (1 - WG))
            s = warpgroup_mma(
                q_buf,
                k_bufs.index(stage).permute((1, 0)),
                gl.zeros([ROWS, KEYS], gl.float32, S),
                use_acc=False,
                is_async=True,
            )
            if PINGPONG:
                mbarrier.arrive(turns.index(1 - WG))
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(stage))
            weights, peak, total, shrink = _softmax(
                s, low + (blocks - 1) * KEYS + column, position, peak, total, scale, True, WINDOW
            )
            p = gl.convert_layout(weights.to(q.dtype.element_ty), P)
            if low + blocks * KEYS > stop:  # the values after the end are of another sequence, and may be NaN
                mbarrier.wait(v_ready.index(stage), (done // STAGES) & 1)
                line = low + (blocks - 1) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, MEMORY))
                v = v_bufs.index(stage).load(MEMORY)
                v_bufs.index(stage).store(gl.where((line < stop)[:, None], v, 0.0))
                fence_async_shared()
            mbarrier.wait(k_ready.index((done + 1) % STAGES), ((done + 1) // STAGES) & 1, pred=blocks > 1)
            p, acc, peak, total = _steps(
                1,
                right,
                done,
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
                done,
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
                    done,
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
            done += blocks
            last = (done - 1) % STAGES
            mbarrier.wait(v_ready.index(last), ((done - 1) // STAGES) & 1)
            acc = warpgroup_mma(p, v_bufs.index(last), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            mbarrier.arrive(v_empty.index(last))
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
            place_out = (offset + token) * (KV * GROUP) + query_head
            gl.store(out + place_out[:, None] * DIM + feature[None, :], q_buf.load(MEMORY), mask=real[:, None])


@gluon.jit(do_not_specialize=["table_stride", "rows", "num_tiles", "splits"])
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
    num_tiles,
    page_table,
    page_stride,
    q_stride,
    rows,
    splits,
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
    programs = gl.num_programs(0)
    items = num_tiles * KV * splits
    rounds = items // programs
    rest = gl.program_id(0)
    if rounds % 2 == 1:
        rest = programs - 1 - rest
    if rest < items % programs:
        rounds += 1
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
                    rows,
                    scale,
                    table,
                    table_stride,
                    tiles,
                    num_tiles,
                    splits,
                    rounds,
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
                    rows,
                    scale,
                    table,
                    table_stride,
                    tiles,
                    num_tiles,
                    splits,
                    rounds,
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
                    table,
                    table_stride,
                    tiles,
                    num_tiles,
                    page_table,
                    page_stride,
                    splits,
                    rounds,
                    KV,
                    TOKENS,
                    WINDOW,
                    PAGE,
                    CHUNK,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
