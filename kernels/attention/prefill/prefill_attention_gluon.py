"""Prefill attention for Hopper GPUs, in Gluon: warps with roles of their own, bulk copies and asynchronous products.

`attention_pipeline_gluon` has the pipeline. Keys and values come from the pages of the cache or from the tensors of the
pass. As in the Triton kernel, the rows of a tile are the query heads that share a KV head of consecutive tokens, and
the keys are split where tiles are few. A program computes several tiles, so that keys of the next are on their way when
one ends. Of the blocks of keys, those that need a mask come first and last.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from specbatch.kernels.attention.attention_pipeline_gluon import (
    accumulator_layout,
    allocate_buffers,
    attend,
    causal,
    load_blocks,
    memory_layout,
    online_softmax,
    tensor_descriptors,
)
from specbatch.kernels.attention.hopper import ROWS, TILINGS, Tiling
from specbatch.kernels.attention.prefill.prefill_attention_triton import SPLIT_KEYS, merged, outputs
from specbatch.kernels.attention.queries import LOG2E, PrefillInputs
from specbatch.kernels.common.sizes import multiprocessors

_LOG2E = gl.constexpr(LOG2E)


def prefill_attention(inputs: PrefillInputs, tile: Tiling | None = None) -> torch.Tensor:
    """Causal attention over the caches, which hold all keys already: [T, heads, dim], as that of the Triton kernel.

    float16 or bfloat16, heads of 64, 128 or 256. Unless no span has a prefix and `k_new` and `v_new` are given, the
    caches are of the same type and their pages have a multiple of 8 tokens. What the last pages hold after the end of a
    sequence does not matter.
    """
    q, k_new, v_new, k_cache, v_cache, spans, window, out, sinks, *_ = inputs
    total, heads, dim = q.shape
    kv = k_cache.shape[2]
    group = heads // kv
    tile = tile or TILINGS[dim]
    if spans.fresh and k_new is not None and v_new is not None:
        keys, values, page = k_new.flatten(1), v_new.flatten(1), 0
    else:
        keys, values, page = k_cache.view(-1, kv * dim), v_cache.view(-1, kv * dim), spans.page_size
    keys, values = tensor_descriptors(keys, values, page, tile.keys, dim)
    tokens = ROWS // group
    tiles, processors = spans.tiles(tokens), multiprocessors(q.device)
    longest = min(max(spans.ends), window + tokens) if window else max(spans.ends)
    splits = max(1, min(processors // (spans.full_tiles(tokens) * kv), longest // SPLIT_KEYS))
    out, partial, lse = outputs(q, out, splits)
    prefill_attention_kernel[(min(kv * len(tiles) * splits, processors),)](
        q, keys, values, sinks, partial, lse, spans.table, spans.table.stride(0), tiles, len(tiles), spans.page_table,
        spans.page_table.stride(0), q.stride(0), total, splits, dim**-0.5 * LOG2E,
        GROUP=group, KV=kv, DIM=dim, PAGE=page, COPY=keys.block_shape[0], WINDOW=window, TOKENS=tokens, KEYS=tile.keys,
        SPLIT=splits > 1, STAGES=tile.stages, num_warps=4,
    )  # fmt: skip
    return merged(out, partial, lse, splits)


@gluon.jit
def _tile(
    turn, table, table_stride, tiles, num_tiles, splits, KV: gl.constexpr, TOKENS: gl.constexpr, KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """The program's tile number `turn`: KV head, part of the keys, span, first row within it, start and stop of the
    span, its first row in the pass; the first key and the end of the part, and how many blocks of keys it has."""
    programs = gl.num_programs(0)
    # Tiles are sorted by length. Every second round is dealt backwards, so that all programs get about as much.
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = programs - 1 - place
    item = turn * programs + place
    head = item % KV
    part = item // KV // num_tiles
    tile = tiles + 2 * (item // KV % num_tiles)
    span = gl.load(tile)
    first = gl.load(tile + 1).to(gl.int32)
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
    source, bufs, ready, free, table, table_stride, tiles, num_tiles, page_table, page_stride, splits, turns,
    KV: gl.constexpr, TOKENS: gl.constexpr, WINDOW: gl.constexpr, PAGE: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Load the blocks of keys, or of values, of all tiles; from the tensor of the pass if PAGE is 0."""
    KEYS: gl.constexpr = bufs.type.shape[1]
    done = 0
    for turn in range(turns):
        head, _part, span, _first, _start, _stop, offset, low, high, blocks = _tile(
            turn, table, table_stride, tiles, num_tiles, splits, KV, TOKENS, KEYS, WINDOW
        )
        pages = page_table + gl.load(table + 2 * table_stride + span) * page_stride
        load_blocks(source, bufs, ready, free, done, blocks, head, low, high, offset, pages, 0, PAGE, COPY)
        done += blocks


@gluon.jit
def _consume(
    q_bufs, k_bufs, v_bufs, barriers, q, q_stride, sinks, out, lse, rows, scale, table, table_stride, tiles, num_tiles,
    splits, turns, GROUP_NUMBER: gl.constexpr, GROUP: gl.constexpr, KV: gl.constexpr, TOKENS: gl.constexpr,
    WINDOW: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Half of the rows of all tiles."""
    STAGES: gl.constexpr = k_bufs.type.shape[0]
    KEYS: gl.constexpr = k_bufs.type.shape[1]
    DIM: gl.constexpr = k_bufs.type.shape[2]
    HALF: gl.constexpr = q_bufs.type.shape[1]
    SCORES: gl.constexpr = accumulator_layout(KEYS)
    OUT: gl.constexpr = accumulator_layout(DIM)
    MEMORY: gl.constexpr = memory_layout(DIM)
    k_ready, k_free, v_ready, v_free = barriers
    q_buf = q_bufs.index(GROUP_NUMBER)
    row = GROUP_NUMBER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, MEMORY))
    feature = gl.arange(0, DIM, layout=gl.SliceLayout(0, MEMORY))
    score_row = GROUP_NUMBER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([HALF, KEYS], gl.float32, SCORES)
    done = 0
    for turn in range(turns):
        head, part, _span, first, start, stop, offset, low, _high, blocks = _tile(
            turn, table, table_stride, tiles, num_tiles, splits, KV, TOKENS, KEYS, WINDOW
        )
        # In the order in which blocks are taken: the diagonal crosses those before `right`, the edge of the window
        # those from `left` on.
        right = gl.minimum(gl.maximum(blocks - gl.maximum(start + first + 1 - low, 0) // KEYS, 1), blocks)
        left = blocks
        if WINDOW > 0:
            left = gl.maximum(blocks - gl.cdiv(gl.maximum(start + first + TOKENS - WINDOW - low, 0), KEYS), right)
        token = first + row // GROUP
        query_head = head * GROUP + row % GROUP
        real = (row < TOKENS * GROUP) & (start + token < stop)
        source = q + ((offset + token) * q_stride + query_head * DIM)[:, None] + feature[None, :]
        q_buf.store(gl.load(source, mask=real[:, None], other=0.0))
        fence_async_shared()

        position = start + first + score_row // GROUP
        peak = gl.full([HALF], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = gl.full([HALF], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
        if sinks is not None:  # the first key, with a value of 0
            begins = part == 0
            peak = gl.where(begins, gl.load(sinks + head * GROUP + score_row % GROUP) * _LOG2E, peak)
            total = gl.where(begins, 1.0, total)
        acc = gl.zeros([HALF, DIM], gl.float32, OUT)
        if blocks > 0:
            stage, phase = done % STAGES, (done // STAGES) & 1
            mbarrier.wait(k_ready.index(stage), phase)
            scores = warpgroup_mma(q_buf, k_bufs.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_free.index(stage))
            at = low + (blocks - 1) * KEYS
            scores = causal(scores, at + column, position, WINDOW)
            weights, peak, total, _shrink = online_softmax(scores, peak, total, scale, True)
            p = gl.convert_layout(weights.to(q.dtype.element_ty), gl.DotOperandLayout(0, OUT, 2))
            if at + KEYS > stop:  # values of another sequence follow: a weight of 0 is not enough if they are NaN
                mbarrier.wait(v_ready.index(stage), phase)
                line = at + gl.arange(0, KEYS, layout=gl.SliceLayout(1, MEMORY))
                v_buf = v_bufs.index(stage)
                v_buf.store(gl.where((line < stop)[:, None], v_buf.load(MEMORY), 0.0))
                fence_async_shared()
            mbarrier.wait(k_ready.index((done + 1) % STAGES), ((done + 1) // STAGES) & 1, pred=blocks > 1)
            p, acc, peak, total = attend(
                1, right, done, blocks, low, q_buf, k_bufs, v_bufs, barriers, p, acc, peak, total, position, column,
                scale, True, WINDOW,
            )  # fmt: skip
            p, acc, peak, total = attend(
                right, left, done, blocks, low, q_buf, k_bufs, v_bufs, barriers, p, acc, peak, total, position, column,
                scale, False, WINDOW,
            )  # fmt: skip
            if WINDOW > 0:
                p, acc, peak, total = attend(
                    left, blocks, done, blocks, low, q_buf, k_bufs, v_bufs, barriers, p, acc, peak, total, position,
                    column, scale, True, WINDOW,
                )  # fmt: skip
            done += blocks
            last = (done - 1) % STAGES
            mbarrier.wait(v_ready.index(last), ((done - 1) // STAGES) & 1)
            acc = warpgroup_mma(p, v_bufs.index(last), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            mbarrier.arrive(v_free.index(last))
        acc *= gl.convert_layout(1.0 / gl.where(total > 0, total, 1.0), gl.SliceLayout(1, OUT))[:, None]
        if SPLIT:
            out_row = GROUP_NUMBER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, OUT))
            out_token = first + out_row // GROUP
            is_real = (out_row < TOKENS * GROUP) & (start + out_token < stop)
            line = (offset + out_token + part.to(gl.int64) * rows) * (KV * GROUP) + head * GROUP + out_row % GROUP
            column_out = gl.arange(0, DIM, layout=gl.SliceLayout(0, OUT))
            gl.store(out + line[:, None] * DIM + column_out[None, :], acc, mask=is_real[:, None])
            gl.store(lse + line, gl.convert_layout(peak + gl.log2(total), gl.SliceLayout(1, OUT)), mask=is_real)
        else:  # by way of shared memory, in whole lines
            q_buf.store(acc.to(q.dtype.element_ty))
            line = (offset + token) * (KV * GROUP) + query_head
            gl.store(out + line[:, None] * DIM + feature[None, :], q_buf.load(MEMORY), mask=real[:, None])


# What is not specialized changes from pass to pass.
@gluon.jit(do_not_specialize=["table_stride", "page_stride", "num_tiles", "rows", "splits"])
def prefill_attention_kernel(
    q, keys, values, sinks, out, lse, table, table_stride, tiles, num_tiles, page_table, page_stride, q_stride, rows,
    splits, scale, GROUP: gl.constexpr, KV: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, COPY: gl.constexpr,
    WINDOW: gl.constexpr, TOKENS: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_bufs, k_bufs, v_bufs = allocate_buffers(keys.dtype, DIM, KEYS, STAGES)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    barriers = (k_ready, k_free, v_ready, v_free)
    programs, work = gl.num_programs(0), num_tiles * KV * splits
    turns = work // programs
    place = gl.program_id(0)
    if turns % 2 == 1:
        place = programs - 1 - place
    if place < work % programs:
        turns += 1
    gl.warp_specialize(
        [
            (_consume, (
                q_bufs, k_bufs, v_bufs, barriers, q, q_stride, sinks, out, lse, rows, scale, table, table_stride, tiles,
                num_tiles, splits, turns, 0, GROUP, KV, TOKENS, WINDOW, SPLIT,
            )),
            (_consume, (
                q_bufs, k_bufs, v_bufs, barriers, q, q_stride, sinks, out, lse, rows, scale, table, table_stride, tiles,
                num_tiles, splits, turns, 1, GROUP, KV, TOKENS, WINDOW, SPLIT,
            )),
            (_produce, (
                keys, k_bufs, k_ready, k_free, table, table_stride, tiles, num_tiles, page_table, page_stride, splits,
                turns, KV, TOKENS, WINDOW, PAGE, COPY,
            )),
            (_produce, (
                values, v_bufs, v_ready, v_free, table, table_stride, tiles, num_tiles, page_table, page_stride, splits,
                turns, KV, TOKENS, WINDOW, PAGE, COPY,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
