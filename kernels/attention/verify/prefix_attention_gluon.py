"""`prefix_attention` for Hopper GPUs, in Gluon: warps with roles of their own, bulk copies and asynchronous products.

`attention_pipeline_gluon` has the pipeline. Items of work are those of the Triton kernel.
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
    load_blocks,
    memory_layout,
    online_softmax,
    tensor_descriptors,
)
from specbatch.kernels.attention.queries import LOG2E, AttentionInputs, DecodeQueries
from specbatch.kernels.attention.verify.prefix_attention_configs import PrefixLaunch, PrefixWork
from specbatch.kernels.common.pdl_triton import pdl


@gluon.jit
def _item(items, item):
    """First member, number of members, number of the tile, first key and end of keys."""
    at = items + item * 5
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def _produce(
    source, bufs, ready, free, page_table, slots, members, items, items_end, width, LAG: gl.constexpr,
    PAGE: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Load the blocks of keys (LAG 0) or of values (1) of all items."""
    KEYS: gl.constexpr = bufs.type.shape[1]
    head, done = gl.program_id(0), 0
    for item in range(gl.program_id(1), items_end, gl.num_programs(1)):
        first, _count, _tile, low, high = _item(items, item)
        pages = page_table + gl.load(slots + gl.load(members + first)) * width
        blocks = gl.cdiv(high - low, KEYS)
        load_blocks(source, bufs, ready, free, done, blocks, head, low, high, 0, pages, LAG, PAGE, COPY)
        done += blocks


@gluon.jit
def _queries(
    qkv, lengths, firsts, positions, members, q_norm, cos, sin, count, tile, head, n, first_node, eps,
    GROUP_NUMBER: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Half of the query rows of a tile [64, DIM], normalized and rotated; rounds where the references do."""
    HALF: gl.constexpr = DIM // 2
    MEMORY: gl.constexpr = memory_layout(HALF)
    dtype: gl.constexpr = qkv.dtype.element_ty
    row = tile * 128 + GROUP_NUMBER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MEMORY))
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, MEMORY))
    place, node = row // (n * GROUP), row % (n * GROUP) // GROUP
    live = place < count
    sequence = gl.load(members + place, mask=live, other=0)
    token = sequence * n + node
    if firsts is not None:  # packed rows, of which a sequence may have fewer than n
        token = gl.load(firsts + sequence, mask=live, other=0).to(gl.int32) + node
        live = live & (token < gl.load(firsts + sequence + 1, mask=live, other=0).to(gl.int32))
    if positions is not None:
        position = gl.load(positions + token, mask=live, other=0).to(gl.int32)
    else:
        position = gl.load(lengths + sequence, mask=live, other=0).to(gl.int32) + first_node + node
    mask = live[:, None]
    start = qkv + (token * WIDTH + (head * GROUP + row % GROUP) * DIM)[:, None] + column[None, :]
    x = gl.load(start, mask=mask, other=0.0).to(gl.float32)
    y = gl.load(start + HALF, mask=mask, other=0.0).to(gl.float32)
    angle = (position * DIM)[:, None] + column[None, :]
    # The tables hold cosines and sines twice, the first half's sine negative.
    c = gl.load(cos + angle, mask=mask, other=0.0).to(gl.float32)
    s = gl.load(sin + angle + HALF, mask=mask, other=0.0).to(gl.float32)
    if q_norm is not None:
        by = gl.rsqrt((gl.sum(x * x, 1) + gl.sum(y * y, 1)) / DIM + eps)[:, None]
        x = (x * by).to(dtype).to(gl.float32) * gl.load(q_norm + column).to(gl.float32)[None, :]
        y = (y * by).to(dtype).to(gl.float32) * gl.load(q_norm + HALF + column).to(gl.float32)[None, :]
        x, y = x.to(dtype).to(gl.float32), y.to(dtype).to(gl.float32)
    one = ((x * c).to(dtype).to(gl.float32) - y * s).to(dtype)
    two = ((y * c).to(dtype).to(gl.float32) + x * s).to(dtype)
    return one, two


@gluon.jit
def _consume(
    q_bufs, k_bufs, v_bufs, barriers, qkv, lengths, firsts, positions, members, items, items_end, q_norm, cos, sin,
    outputs, sums, n, first_node, lines, eps, scale, GROUP_NUMBER: gl.constexpr, GROUP: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Half of the rows of all items."""
    k_ready, _k_free, v_ready, free = barriers
    STAGES: gl.constexpr = k_bufs.type.shape[0]
    KEYS: gl.constexpr = k_bufs.type.shape[1]
    DIM: gl.constexpr = k_bufs.type.shape[2]
    SCORES: gl.constexpr = accumulator_layout(KEYS)
    OUT: gl.constexpr = accumulator_layout(DIM)
    dtype: gl.constexpr = qkv.dtype.element_ty
    q_buf = q_bufs.index(GROUP_NUMBER)
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([64, KEYS], gl.float32, SCORES)
    head, done = gl.program_id(0), 0
    for item in range(gl.program_id(1), items_end, gl.num_programs(1)):
        first, count, tile, low, high = _item(items, item)
        blocks = gl.cdiv(high - low, KEYS)
        one, two = _queries(
            qkv, lengths, firsts, positions, members + first, q_norm, cos, sin, count, tile, head, n, first_node, eps,
            GROUP_NUMBER, GROUP, DIM, WIDTH,
        )  # fmt: skip
        q_buf.slice(0, DIM // 2, 1).store(one)
        q_buf.slice(DIM // 2, DIM // 2, 1).store(two)
        fence_async_shared()

        stage, phase = done % STAGES, (done // STAGES) & 1
        mbarrier.wait(k_ready.index(stage), phase)
        scores = warpgroup_mma(q_buf, k_bufs.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(free.index(stage))
        there = low + (blocks - 1) * KEYS + column < high
        scores = gl.where(there[None, :], scores, float("-inf"))
        peak = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
        acc = gl.zeros([64, DIM], gl.float32, OUT)
        weights, peak, total, _shrink = online_softmax(scores, peak, total, scale, False)
        p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, OUT, 2))
        mbarrier.wait(k_ready.index((done + 1) % STAGES), ((done + 1) // STAGES) & 1, pred=blocks > 1)
        p, acc, peak, total = attend(
            1, blocks, done, blocks, low, q_buf, k_bufs, v_bufs, barriers, p, acc, peak, total, None, None, scale,
            False, 0,
        )  # fmt: skip
        done += blocks
        last = (done - 1) % STAGES
        mbarrier.wait(v_ready.index(last), ((done - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_bufs.index(last), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])

        acc *= gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUT))[:, None]
        line = item * 128 + GROUP_NUMBER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
        line = line + lines * head.to(gl.int64)
        feature = gl.arange(0, DIM, layout=gl.SliceLayout(0, OUT))
        gl.store(outputs + line[:, None] * DIM + feature[None, :], acc)
        gl.store(sums + line, gl.convert_layout(peak + gl.log2(total), gl.SliceLayout(1, OUT)))


@gluon.jit
def prefix_attention_kernel(
    qkv, keys, values, page_table, slots, lengths, firsts, positions, members, items, items_end, q_norm, cos, sin,
    outputs, sums, n, first_node, width, lines, eps, scale, GROUP: gl.constexpr, KV: gl.constexpr, DIM: gl.constexpr,
    PAGE: gl.constexpr, COPY: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = KV * (GROUP if SHARED else GROUP + 2) * DIM  # of a row of qkv
    q_bufs, k_bufs, v_bufs = allocate_buffers(keys.dtype, DIM, KEYS, STAGES)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    barriers = (k_ready, None, v_ready, free)
    if PDL:  # as `wait_for_previous_kernel`
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,~{memory}", [],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    end = gl.load(items_end)
    gl.warp_specialize(
        [
            (_consume, (
                q_bufs, k_bufs, v_bufs, barriers, qkv, lengths, firsts, positions, members, items, end, q_norm, cos,
                sin, outputs, sums, n, first_node, lines, eps, scale, 0, GROUP, WIDTH,
            )),
            (_consume, (
                q_bufs, k_bufs, v_bufs, barriers, qkv, lengths, firsts, positions, members, items, end, q_norm, cos,
                sin, outputs, sums, n, first_node, lines, eps, scale, 1, GROUP, WIDTH,
            )),
            (_produce, (
                keys, k_bufs, k_ready, free, page_table, slots, members, items, end, width, 0, PAGE, COPY,
            )),
            (_produce, (
                values, v_bufs, v_ready, free, page_table, slots, members, items, end, width, 1, PAGE, COPY,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


def prefix_attention(
    queries: DecodeQueries,
    inputs: AttentionInputs,
    launch: PrefixLaunch,
    work: PrefixWork,
    outputs: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """As the Triton kernel, to `outputs` and `sums` of `PrefixPartials`. float16 or bfloat16, also the caches; heads of
    64, 128 or 256; pages of a multiple of 8 tokens."""
    qkv, heads, positions = inputs[:3]
    prefixes, tile, size = queries.prefixes, launch.tile, queries.page_size
    assert prefixes is not None
    k_rows, v_rows = (x.view(-1, heads.kv * heads.dim) for x in (inputs.k_cache, inputs.v_cache))
    keys, values = tensor_descriptors(k_rows, v_rows, size, tile.block_n, heads.dim)
    prefix_attention_kernel[(heads.kv, launch.programs)](
        qkv, keys, values, queries.page_table, queries.slots, queries.lengths,
        None if queries.packed is None else queries.packed.firsts, None if queries.ancestors is None else positions,
        prefixes.members, work.items, work.end, heads.q_norm, heads.cos, heads.sin, outputs, sums,
        queries.num_queries, queries.first_node, queries.page_table.shape[1], launch.lines, heads.eps,
        heads.dim**-0.5 * LOG2E,
        GROUP=heads.count // heads.kv, KV=heads.kv, DIM=heads.dim, PAGE=size, COPY=keys.block_shape[0],
        KEYS=tile.block_n, STAGES=tile.stages, SHARED=heads.shared, num_warps=tile.warps, **pdl(qkv),
    )  # fmt: skip
