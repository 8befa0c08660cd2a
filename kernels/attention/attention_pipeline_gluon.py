"""The pipeline of attention for Hopper GPUs, in Gluon: TMA loads of keys and values, barriers, and the main loop.

Shah et al., "FlashAttention-3" (2024). Two producer warps of a program copy blocks of keys and of values to shared
memory, by TMA. Two consumer warpgroups have 64 query rows each. While one of them computes the softmax of a block, the
tensor cores multiply for the other; and a warpgroup computes the softmax of a block while the weights of the block
before are multiplied by its values. Blocks are taken from the last, which may not be full, to the first.

Block n of a program is in stage n % STAGES. The barriers of a stage are (k_ready, k_free, v_ready, v_free). Where
k_free is None, the n-th completion of v_free frees the keys of block n and the values of block n - 1.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name before Triton 3.8


def tensor_descriptors(
    keys: torch.Tensor, values: torch.Tensor, page: int, block: int, dim: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of keys and values [T, KV heads * dim], for copies into blocks [block, dim]: whole blocks, or the largest parts
    that pages of `page` tokens divide into, if not 0."""
    rows = min(page & -page, block) if page else block
    layout = gl.NVMMASharedLayout.get_default_for([block, dim], gl.bfloat16)
    k, v = (TensorDescriptor.from_tensor(x, [rows, dim], layout) for x in (keys, values))
    return k, v


@gluon.constexpr_function
def accumulator_layout(columns):
    """Of the product [64, columns] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def memory_layout(columns):
    """Of rows [.., columns] that a warpgroup loads from or stores to memory, 8 elements a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def allocate_buffers(dtype: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for the queries of both warpgroups, and for STAGES blocks of keys and of values."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DIM], dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [2, 64, DIM], layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], layout)
    return q_bufs, k_bufs, v_bufs


@gluon.jit
def _lines(at, offset, pages, end, KEYS: gl.constexpr, PAGE: gl.constexpr, COPY: gl.constexpr):
    """Where the keys at, at + COPY, .. of a block are."""
    lines = ()
    for j in gl.static_range(KEYS // COPY):
        if PAGE == 0:
            lines += (offset.to(gl.int32) + at + j * COPY,)  # type: ignore[assignment]
        else:  # after the end, the last ones again
            key = gl.minimum(at + j * COPY, end - 1)
            line = gl.load(pages + key // PAGE).to(gl.int32) * PAGE + key % PAGE // COPY * COPY
            lines += (line,)  # type: ignore[assignment]
    return lines


@gluon.jit
def load_blocks(
    source, bufs, ready, free, done, blocks, head, low, high, offset, pages, LAG: gl.constexpr, PAGE: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """Copy the blocks of the keys low..high - 1, or of their values, COPY rows at a time: from pages of PAGE tokens, or
    from row `offset` on if PAGE is 0. done: blocks so far; LAG: completions of `free` in excess of the block's number.
    """
    STAGES: gl.constexpr = bufs.type.shape[0]
    KEYS: gl.constexpr = bufs.type.shape[1]
    DIM: gl.constexpr = bufs.type.shape[2]
    lines = _lines(low + (blocks - 1) * KEYS, offset, pages, high, KEYS, PAGE, COPY)
    for i in range(blocks):
        stage, freed = (done + i) % STAGES, done + i + LAG
        mbarrier.wait(free.index(freed % STAGES), ((freed // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), KEYS * DIM * 2)
        for j in gl.static_range(KEYS // COPY):
            place = bufs.index(stage).slice(j * COPY, COPY, 0)
            copy_tile(source, [lines[j], head * DIM], ready.index(stage), place)
        lines = _lines(low + gl.maximum(blocks - 2 - i, 0) * KEYS, offset, pages, high, KEYS, PAGE, COPY)


@gluon.jit
def causal(scores, key, position, WINDOW: gl.constexpr):
    """Scores, of keys after `position` or before its window -inf."""
    visible = key[None, :] <= position[:, None]
    if WINDOW > 0:
        visible &= key[None, :] > position[:, None] - WINDOW
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def online_softmax(scores, peak, total, scale, MASK: gl.constexpr):
    """Weights of a block of scores, base 2, the new peak and sum of each row, and by what its old sums shrink. MASK:
    there may be rows that have seen no key yet."""
    ROWS: gl.constexpr = scores.shape[0]
    KEYS: gl.constexpr = scores.shape[1]
    SIDE: gl.constexpr = gl.SliceLayout(1, accumulator_layout(KEYS))
    # A thread has two of 8 columns. To reduce them one by one at first leaves fewer operations waiting for each other.
    top = gl.max(gl.max(scores.reshape([ROWS, KEYS // 8, 8]), 1), 1)
    new = gl.maximum(peak, gl.convert_layout(top, SIDE) * scale)
    base = new
    if MASK:  # a row that has seen no key yet has the peak -inf; any finite number does in its place
        base = gl.where(new == float("-inf"), 0.0, new)
    weights = gl.exp2(scores * scale - base[:, None])
    shrink = gl.exp2(peak - base)
    more = gl.sum(gl.sum(weights.reshape([ROWS, KEYS // 8, 8]), 1), 1)
    return weights, new, total * shrink + gl.convert_layout(more, SIDE), shrink


@gluon.jit
def attend(
    begin, end, done, blocks, low, q_buf, k_bufs, v_bufs, barriers, p, acc, peak, total, position, column, scale,
    MASK: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Blocks begin..end - 1, where block begin - 1 has the weights p, not multiplied by values yet."""
    k_ready, k_free, v_ready, v_free = barriers
    STAGES: gl.constexpr = k_bufs.type.shape[0]
    KEYS: gl.constexpr = k_bufs.type.shape[1]
    OUT: gl.constexpr = accumulator_layout(v_bufs.type.shape[2])
    nothing = gl.zeros([64, KEYS], gl.float32, accumulator_layout(KEYS))
    for i in range(begin, end):
        number = done + i
        stage, before = number % STAGES, (number - 1) % STAGES
        scores = warpgroup_mma(q_buf, k_bufs.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), ((number - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_bufs.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        if k_free is not None:
            mbarrier.arrive(k_free.index(stage))
        if MASK:
            scores = causal(scores, low + (blocks - 1 - i) * KEYS + column, position, WINDOW)
        weights, peak, total, shrink = online_softmax(scores, peak, total, scale, MASK)
        new_p = gl.convert_layout(weights.to(p.dtype), gl.DotOperandLayout(0, OUT, 2))
        # The keys of the next block are there, as a rule. To wait for them here, which is a branch, keeps the assembler
        # from moving the softmax to after the wait for the product.
        after = number + 1
        mbarrier.wait(k_ready.index(after % STAGES), (after // STAGES) & 1, pred=i + 1 < blocks)
        acc, p, new_p = warpgroup_mma_wait(0, deps=[acc, p, new_p])
        if k_free is None:
            mbarrier.arrive(v_free.index(stage))
        else:
            mbarrier.arrive(v_free.index(before))
        acc *= gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
        p = new_p
    return p, acc, peak, total
