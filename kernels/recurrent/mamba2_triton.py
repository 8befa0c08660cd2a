"""Triton kernels of the Mamba2 recurrence: `mamba2.ssd_prefill_ref` and `mamba2.ssd_verify_ref`, in two launches each.

The first has the state: a program holds some rows of one head's state in registers. In a prompt it walks over the
chunks of a span, so that no state of a chunk is ever written; in a verify it reads and writes the state once, and asks
for it before the kernel in front has ended. The second needs whole groups of heads: it gates and normalises. In a
verify it also keeps the rows' inputs, when all programs of the first have read those that were kept before.

Sums are float32, GEMMs in the type of the inputs (float32: exact, no tf32); with float16 inputs no number of a state
may exceed 65504. Only what a verify adds to a state has twice the digits: a state lives for thousands of verifies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.common.pdl_triton import let_next_kernel_start, pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2, tile_side
from specbatch.kernels.recurrent.inputs import SsdInputs
from specbatch.kernels.recurrent.state_replay import StateReplay

CHUNK = 64  # tokens of a prompt at a time
_CHAIN = 4  # rows of a chain, new or replayed, that are computed one by one
_CHAIN_ROWS = 8  # of a state, in a program of such a verify


def ssd_prefill(inputs: SsdInputs, spans: RaggedBatch, out: torch.Tensor | None = None) -> torch.Tensor:
    """`ssd_prefill_ref`."""
    xbc, dt, _, heads, memory = inputs
    y = heads.outputs(xbc, out)
    exact = xbc.dtype == torch.float32
    rows = min(64, tile_side(heads.dim))
    tiles = cdiv(heads.dim, rows)
    _prefill[(tiles * heads.count, spans.table.shape[1] - 1)](
        xbc, dt, y, memory.state, heads.a_log, heads.d, heads.dt_bias, spans.table,
        xbc.stride(0), dt.stride(0), memory.state.stride(0), spans.table.stride(0),
        HEADS=heads.count, DIM=heads.dim, GROUPS=heads.groups, STATE=heads.state,
        ROWS=rows, BLOCK_S=tile_side(heads.state), CHUNK=32 if exact else CHUNK,
        num_warps=4, num_stages=1 if exact else 2, **pdl(xbc),
    )  # fmt: skip
    return finish_rows(y, inputs)


def ssd_verify(inputs: SsdInputs, replay: StateReplay) -> torch.Tensor:
    """`ssd_verify_ref`.

    The memory, replay.rows, replay.counts and replay.path are read before the previous kernel has ended: that kernel,
    as a rule the convolution, must not write them.
    """
    xbc, dt, _, heads, (state, pending) = inputs
    y = heads.outputs(xbc, None)
    n, most = len(xbc) // len(replay.rows), pending.shape[1]
    old, new = tile_side(most), tile_side(n)
    if replay.path is None and replay.ancestors is None and max(n, most) <= _CHAIN:
        _chain[(cdiv(heads.dim, _CHAIN_ROWS) * heads.count, len(replay.rows))](
            xbc, dt, y, state, pending, heads.a_log, heads.d, heads.dt_bias, replay.rows, replay.counts,
            xbc.stride(0), dt.stride(0), state.stride(0), pending.stride(0), pending.stride(1),
            HEADS=heads.count, DIM=heads.dim, GROUPS=heads.groups, STATE=heads.state, HELD=most, N=n,
            ROWS=_CHAIN_ROWS, BLOCK_S=tile_side(heads.state), num_warps=1, **pdl(xbc),
        )  # fmt: skip
        return finish_rows(y, inputs, replay)
    rows, warps = _tile(xbc.dtype == torch.float32, max(old, new) > 16)
    _verify[(cdiv(heads.dim, rows) * heads.count, len(replay.rows))](
        xbc, dt, y, state, pending, heads.a_log, heads.d, heads.dt_bias,
        replay.rows, replay.counts, replay.path, replay.ancestors,
        n, xbc.stride(0), dt.stride(0), state.stride(0), pending.stride(0), pending.stride(1),
        replay.path.stride(0) if replay.path is not None else 0,
        HEADS=heads.count, DIM=heads.dim, GROUPS=heads.groups, STATE=heads.state, MOST=most,
        ROWS=rows, BLOCK_S=tile_side(heads.state), OLD=old, NEW=new,
        num_warps=warps, **pdl(xbc),
    )  # fmt: skip
    return finish_rows(y, inputs, replay)


def finish_rows(y: torch.Tensor, inputs: SsdInputs, replay: StateReplay | None = None) -> torch.Tensor:
    """Gate and normalise y in its place; the inputs of a verify are kept.

    The previous kernel may write y and a state, but none of the other tensors.
    """
    xbc, dt, z, heads, (_, pending) = inputs
    given: tuple[torch.Tensor | int | None, ...] = (None, None, None, None, 1)
    strides = (0, 0, 0, 0)
    if replay is not None:
        given = xbc, dt, pending, replay.rows, len(y) // len(replay.rows)
        strides = xbc.stride(0), dt.stride(0), pending.stride(0), pending.stride(1)
    width = heads.columns[0] // heads.groups
    block = next_power_of_2(max(width, heads.state))
    finish_kernel[(len(y) * heads.groups,)](
        y, z, heads.norm.weight, *given, z.stride(0), *strides, heads.norm.eps,
        HEADS=heads.count, GROUPS=heads.groups, STATE=heads.state, WIDTH=width, BLOCK=block,
        num_warps=max(1, block // 1024), enable_fp_fusion=False, **pdl(y),
    )  # fmt: skip
    return y


def _tile(exact: bool, is_large: bool) -> tuple[int, int]:
    """Rows of a state that a program of a verify has, and its warps: what the registers hold."""
    if exact:
        return 16, 8 if is_large else 4
    return (64, 4) if is_large else (16, 1)


@triton.jit
def time_step(raw, bias):
    """softplus(raw + bias). log(1 + p) by Kahan's way, which keeps the digits of a small p."""
    value = raw.to(tl.float32) + bias
    p = tl.exp(-tl.abs(value))
    one = 1 + p
    log = tl.where(one == 1, p, tl.log(one) * (p / tl.where(one == 1, 1.0, one - 1)))
    return tl.maximum(value, 0.0) + log


@triton.jit(do_not_specialize=["table_stride"])  # it changes from pass to pass
def _prefill(
    xbc, dt, y, state, a_log, d, dt_bias, table, xbc_stride, dt_stride, state_stride, table_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a head's state walk over the chunks of a span."""
    TILES: tl.constexpr = (DIM + ROWS - 1) // ROWS
    head = tl.program_id(0) // TILES
    group = head // (HEADS // GROUPS)
    row = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_S)
    inside = column < STATE
    decay = -tl.exp(tl.load(a_log + head))
    skip = tl.load(d + head)
    bias = tl.load(dt_bias + head)
    wait_for_previous_kernel(PDL)
    span = tl.program_id(1)
    start = tl.load(table + span)
    count = (tl.load(table + table_stride + span) - start).to(tl.int32)
    if count == 0:
        return
    slot = tl.load(table + 2 * table_stride + span)
    first = tl.load(table + 3 * table_stride + span)

    # A new sequence never reads the old state of its slot.
    mask = (row < DIM)[:, None] & inside[None, :]
    place = state + slot * state_stride + (head * DIM + row)[:, None] * STATE + column[None, :]
    known = (row < tl.where(start > 0, DIM, 0))[:, None] & inside[None, :]
    h = tl.load(place, mask=known, other=0.0).to(tl.float32)
    token = tl.arange(0, CHUNK)
    of_x = token[:, None] * xbc_stride + (head * DIM + row)[None, :]
    of_b = token[:, None] * xbc_stride + (HEADS * DIM + group * STATE + column)[None, :]
    of_head = (row < DIM)[None, :]
    xbc += first * xbc_stride
    dt += first * dt_stride + head
    y += first * (HEADS * DIM) + head * DIM
    # B and C are copied a chunk ahead by the pipeline; what goes through registers is loaded a chunk ahead by hand.
    x = tl.load(xbc + of_x, mask=(token < count)[:, None] & of_head, other=0.0)
    raw = tl.load(dt + token * dt_stride, mask=token < count, other=0.0)
    for at in range(0, count, CHUNK):
        real = token < count - at
        b = tl.load(xbc + of_b, mask=real[:, None] & inside[None, :], other=0.0)
        c = tl.load(xbc + GROUPS * STATE + of_b, mask=real[:, None] & inside[None, :], other=0.0)
        xbc += CHUNK * xbc_stride
        dt += CHUNK * dt_stride
        follows = token < count - at - CHUNK
        next_x = tl.load(xbc + of_x, mask=follows[:, None] & of_head, other=0.0)
        next_raw = tl.load(dt + token * dt_stride, mask=follows, other=0.0)

        step = tl.where(real, time_step(raw, bias), 0.0)  # past the end the state does not change
        a = tl.cumsum(step * decay, 0)
        total = tl.sum(step * decay, 0)
        gap = tl.where(token[:, None] >= token[None, :], a[:, None] - a[None, :], float("-inf"))
        weight = tl.dot(c, tl.trans(b), input_precision="ieee") * tl.exp(gap)
        out = tl.dot(c, tl.trans(h.to(c.dtype)), input_precision="ieee") * tl.exp(a)[:, None]
        scaled = x.to(tl.float32) * step[:, None]
        out = tl.dot(weight.to(x.dtype), scaled.to(x.dtype), out, input_precision="ieee") + skip * x.to(tl.float32)
        of_y = token[:, None] * (HEADS * DIM) + row[None, :]
        tl.store(y + of_y, out.to(y.dtype.element_ty), mask=real[:, None] & of_head)

        share = (scaled * tl.exp(total - a)[:, None]).to(x.dtype)
        h = tl.dot(tl.trans(share), b, h * tl.exp(total), input_precision="ieee")
        y += CHUNK * HEADS * DIM
        x, raw = next_x, next_raw
    tl.store(place, h.to(state.dtype.element_ty), mask=mask)


@triton.jit
def _chain(
    xbc, dt, y, state, pending, a_log, d, dt_bias, rows, count,
    xbc_stride, dt_stride, state_stride, slot_stride, pending_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, HELD: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_verify` of a chain of few rows, one by one. Few instructions between reading a state and writing it: many
    are on their way at once."""
    TILES: tl.constexpr = (DIM + ROWS - 1) // ROWS
    head = tl.program_id(0) // TILES
    group = head // (HEADS // GROUPS)
    sequence = tl.program_id(1).to(tl.int64)
    slot = tl.load(rows + sequence)
    row = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_S)
    of_head, inside = row < DIM, column < STATE
    place = state + slot * state_stride + (head * DIM + row)[:, None] * STATE + column[None, :]
    mask = of_head[:, None] & inside[None, :]
    h = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    folded = tl.load(count + slot)
    decay = -tl.exp(tl.load(a_log + head))
    skip = tl.load(d + head)
    bias = tl.load(dt_bias + head)
    of_b = HEADS * DIM + group * STATE + column
    if folded > 0:
        for past in tl.static_range(HELD):
            line = pending + slot * slot_stride + past * pending_stride
            x = tl.load(line + head * DIM + row, row < tl.where(folded > past, DIM, 0), 0.0).to(tl.float32)
            b = tl.load(line + of_b, column < tl.where(folded > past, STATE, 0), 0.0).to(tl.float32)
            step = time_step(tl.load(line + HEADS * DIM + GROUPS * STATE + head), bias)
            step = tl.where(folded > past, step, 0.0)
            h = h * tl.exp(step * decay) + (x * step)[:, None] * b[None, :]
        tl.store(place, h.to(state.dtype.element_ty), mask=mask)
    wait_for_previous_kernel(PDL)
    for node in tl.static_range(N):
        token = sequence * N + node
        line = xbc + token * xbc_stride
        x = tl.load(line + head * DIM + row, of_head, 0.0).to(tl.float32)
        b = tl.load(line + of_b, inside, 0.0).to(tl.float32)
        c = tl.load(line + GROUPS * STATE + of_b, inside, 0.0).to(tl.float32)
        step = time_step(tl.load(dt + token * dt_stride + head), bias)
        h = h * tl.exp(step * decay) + (x * step)[:, None] * b[None, :]
        out = tl.sum(h * c[None, :], 1) + skip * x
        tl.store(y + token * (HEADS * DIM) + head * DIM + row, out.to(y.dtype.element_ty), of_head)


@triton.jit(do_not_specialize=["n"])
def _verify(
    xbc, dt, y, state, pending, a_log, d, dt_bias, rows, count, kept, ancestors,
    n, xbc_stride, dt_stride, state_stride, slot_stride, pending_stride, kept_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, MOST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_S: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a head's state: replays the accepted tokens of the last verify, then computes the new ones."""
    TILES: tl.constexpr = (DIM + ROWS - 1) // ROWS
    head = tl.program_id(0) // TILES
    group = head // (HEADS // GROUPS)
    sequence = tl.program_id(1).to(tl.int64)
    slot = tl.load(rows + sequence)
    row = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_S)
    of_head, inside = row < DIM, column < STATE
    place = state + slot * state_stride + (head * DIM + row)[:, None] * STATE + column[None, :]
    mask = of_head[:, None] & inside[None, :]
    h = tl.load(place, mask=mask, other=0.0)
    past = tl.arange(0, OLD)
    is_kept = past < tl.minimum(tl.load(count + slot), MOST)
    order = past
    if kept is not None:
        order = tl.load(kept + slot * kept_stride + past, mask=is_kept, other=0).to(tl.int32)
    decay = -tl.exp(tl.load(a_log + head))
    skip = tl.load(d + head)
    bias = tl.load(dt_bias + head)
    node = tl.arange(0, NEW)
    real = node < n
    wait_for_previous_kernel(PDL)

    line = pending + slot * slot_stride
    of_old = order * pending_stride
    of_b = HEADS * DIM + group * STATE + column
    old_x = tl.load(line + of_old[:, None] + (head * DIM + row)[None, :], is_kept[:, None] & of_head[None, :], 0.0)
    old_b = tl.load(line + of_old[:, None] + of_b[None, :], is_kept[:, None] & inside[None, :], 0.0)
    raw = tl.load(line + HEADS * DIM + GROUPS * STATE + head + of_old, is_kept, 0.0)
    line = xbc + sequence * n * xbc_stride
    of_new = node[:, None] * xbc_stride
    x = tl.load(line + of_new + (head * DIM + row)[None, :], real[:, None] & of_head[None, :], 0.0)
    b = tl.load(line + of_new + of_b[None, :], real[:, None] & inside[None, :], 0.0)
    c = tl.load(line + GROUPS * STATE + of_new + of_b[None, :], real[:, None] & inside[None, :], 0.0)
    new_raw = tl.load(dt + sequence * n * dt_stride + head + node * dt_stride, real, 0.0)
    if ancestors is not None:
        word = tl.load(ancestors + sequence * n + node, real, 0)
        sees = ((word[:, None] >> node[None, :]) & 1) == 1
    else:
        sees = node[:, None] >= node[None, :]

    step = tl.where(is_kept, time_step(raw, bias), 0.0)
    total = tl.sum(step * decay, 0)
    share = old_x.to(tl.float32) * (step * tl.exp(total - tl.cumsum(step * decay, 0)))[:, None]
    h = h.to(tl.float32) * tl.exp(total)
    high = share.to(old_b.dtype)
    if old_b.dtype != tl.float32:
        low = (share - high.to(tl.float32)).to(old_b.dtype)
        h = tl.dot(tl.trans(low), old_b, h)
    h = tl.dot(tl.trans(high), old_b, h, input_precision="ieee")
    tl.store(place, h.to(state.dtype.element_ty), mask=mask)

    step = tl.where(real, time_step(new_raw, bias), 0.0)
    a = tl.sum(tl.where(sees, (step * decay)[None, :], 0.0), 1)  # over the path from the root
    gap = tl.where(sees, a[:, None] - a[None, :], float("-inf"))
    weight = tl.dot(c, tl.trans(b), input_precision="ieee") * tl.exp(gap) * step[None, :]
    out = tl.dot(c, tl.trans(h.to(c.dtype)), input_precision="ieee") * tl.exp(a)[:, None]
    out = tl.dot(weight.to(x.dtype), x, out, input_precision="ieee") + skip * x.to(tl.float32)
    place = y + sequence * n * (HEADS * DIM) + node[:, None] * (HEADS * DIM) + (head * DIM + row)[None, :]
    tl.store(place, out.to(y.dtype.element_ty), mask=real[:, None] & of_head[None, :])


@triton.jit(do_not_specialize=["n"])
def finish_kernel(
    y, z, norm, xbc, dt, pending, rows, n, z_stride, xbc_stride, dt_stride, slot_stride, pending_stride, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One group of one row: gate, normalise, keep x, B and dt.

    The previous kernel may write only y: everything else is read before that kernel has ended. It may still be reading
    what the last verify kept, so all stores come after the wait.
    """
    let_next_kernel_start(PDL)
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    each: tl.constexpr = HEADS // GROUPS
    weight = tl.load(norm + group * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + group * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    divisor = 1 + tl.exp(-gate)
    if pending is not None:
        line = pending + tl.load(rows + token // n) * slot_stride + token % n * pending_stride
        source = xbc + token * xbc_stride
        x = tl.load(source + group * WIDTH + at, mask=inside)
        b = tl.load(source + GROUPS * WIDTH + group * STATE + at, mask=at < STATE)
        step = tl.load(dt + token * dt_stride + group * each + at, mask=at < each)
    wait_for_previous_kernel(PDL)
    place = y + token * (GROUPS * WIDTH) + group * WIDTH + at
    u = tl.load(place, mask=inside, other=0.0).to(tl.float32) * gate / divisor
    scale = tl.rsqrt(tl.sum(u * u, 0) / WIDTH + eps)
    tl.store(place, (u * scale * weight).to(y.dtype.element_ty), mask=inside)
    if pending is not None:
        tl.store(line + group * WIDTH + at, x, mask=inside)
        tl.store(line + GROUPS * WIDTH + group * STATE + at, b, mask=at < STATE)
        tl.store(line + GROUPS * (WIDTH + STATE) + group * each + at, step, mask=at < each)
