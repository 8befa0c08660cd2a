"""Triton kernels of the deterministic recurrences: `row_by_row` on a CUDA device.

One kernel for each recurrence walks over the rows of a prompt's chunk, over the replayed and the new rows of a chain,
and over the path to a node of a tree, which is a sequence of its own. A program has some columns (Mamba2: rows) of one
head's state in registers. It does the same operations on a row wherever that row is: a state is rounded to the type in
which it is stored after every row, nothing is added up over rows, and multiplications and additions are not fused
(`enable_fp_fusion`), because the compiler may choose differently in two places. The order of a sum within a row follows
from the layout in which the compiler holds a state, so tiles and warps do not depend on the number of rows or
sequences; `tests/kernels/test_compiled.py` compares the layouts of all variants.

What does not need the state is computed for all rows at once: before the walk the decays and lengths of keys, after it
the gated norm, which also keeps the inputs of a verify's rows when all programs have read those of the last one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, tile_side
from specbatch.kernels.recurrent.gated_delta_triton import gated_norm, log_decay
from specbatch.kernels.recurrent.inputs import DeltaInputs, Pending, SsdInputs
from specbatch.kernels.recurrent.mamba2_triton import finish_rows, time_step
from specbatch.kernels.recurrent.state_replay import StateReplay

COLUMNS = 16  # of a head's state, in a program of the gated delta rule
ROWS = 16  # of a head's state, in a program of Mamba2
LINES = 16  # heads of tokens in a program of what needs no state
_GATES = tl.constexpr(5)  # of a value head: decay, beta, the factors of q and k, their product


def delta_prefill(inputs: DeltaInputs, spans: RaggedBatch, out: torch.Tensor | None = None) -> torch.Tensor:
    """`delta_prefill_ref`."""
    gates, o = _delta_gates(inputs), inputs.heads.outputs(inputs.qkv, out)
    _launch_delta(inputs, gates, o, spans.table.shape[1] - 1, spans=spans)
    return _delta_finish(o, inputs, gates)


def delta_verify(inputs: DeltaInputs, pending: Pending, replay: StateReplay) -> torch.Tensor:
    """`delta_verify_ref`."""
    gates, o = _delta_gates(inputs), inputs.heads.outputs(inputs.qkv, None)
    total, batch = len(o), len(replay.rows)
    if replay.ancestors is None:
        _launch_delta(inputs, gates, o, batch, pending, replay, rows=total // batch)
    else:  # nodes share a state, so it is replayed before any of them reads it
        _launch_delta(inputs, gates, o, batch, pending, replay, rows=0)
        _launch_delta(inputs, gates, o, total, pending, replay, rows=total // batch, is_tree=True)
    return _delta_finish(o, inputs, gates, pending, replay)


def ssd_prefill(inputs: SsdInputs, spans: RaggedBatch, out: torch.Tensor | None = None) -> torch.Tensor:
    """`ssd_prefill_ref`."""
    y = inputs.heads.outputs(inputs.xbc, out)
    _launch_ssd(inputs, y, spans.table.shape[1] - 1, spans=spans)
    return finish_rows(y, inputs)


def ssd_verify(inputs: SsdInputs, replay: StateReplay) -> torch.Tensor:
    """`ssd_verify_ref`."""
    y, batch = inputs.heads.outputs(inputs.xbc, None), len(replay.rows)
    n = len(y) // batch
    if replay.ancestors is None:
        _launch_ssd(inputs, y, batch, replay, rows=n)
    else:
        _launch_ssd(inputs, y, batch, replay, rows=0)
        _launch_ssd(inputs, y, len(y), replay, rows=n, is_tree=True)
    return finish_rows(y, inputs, replay)


def _delta_gates(inputs: DeltaInputs) -> torch.Tensor:
    """float32 [T, values, 5]."""
    qkv, _, b, a, heads, _ = inputs
    gates = torch.empty(len(qkv), heads.values, _GATES.value, device=qkv.device)
    lines = len(qkv) * heads.values
    delta_gates_kernel[(cdiv(lines, LINES),)](
        qkv, b, a, heads.a_log, heads.dt_bias, gates, lines, qkv.stride(0), b.stride(0), a.stride(0),
        KEYS=heads.keys, VALUES=heads.values, K=heads.key_dim, BLOCK_K=tile_side(heads.key_dim), TILE=LINES,
        num_warps=4, enable_fp_fusion=False, **pdl(qkv),
    )  # fmt: skip
    return gates


def _launch_delta(
    inputs: DeltaInputs,
    gates: torch.Tensor,
    o: torch.Tensor,
    sequences: int,
    pending: Pending | None = None,
    replay: StateReplay | None = None,
    *,
    spans: RaggedBatch | None = None,
    rows: int = 1,
    is_tree: bool = False,
) -> None:
    """spans: of a prompt; else `rows` of each sequence. sequences: also nodes of trees, whose states are replayed."""
    qkv, _, _, _, heads, state = inputs
    table = None if spans is None else spans.table
    slots, counts, path, ancestors = replay or (None, None, None, None)
    old = pending or (None, None, None)
    delta_walk_kernel[(sequences * heads.values * cdiv(heads.value_dim, COLUMNS),)](
        qkv, gates, state, *old, table, slots, counts, path, ancestors if is_tree else None, o,
        rows, qkv.stride(0), state.stride(0), *(0 if item is None else item.stride(0) for item in (*old, table, path)),
        KEYS=heads.keys, VALUES=heads.values, K=heads.key_dim, V=heads.value_dim, BLOCK_K=tile_side(heads.key_dim),
        COLUMNS=COLUMNS, REPLAY=replay is not None and not is_tree, num_warps=1, enable_fp_fusion=False, **pdl(qkv),
    )  # fmt: skip


def _delta_finish(
    o: torch.Tensor,
    inputs: DeltaInputs,
    gates: torch.Tensor,
    pending: Pending | None = None,
    replay: StateReplay | None = None,
) -> torch.Tensor:
    """`gated_rms_norm_ref`, in the memory of o; keys and decays of a verify are kept."""
    qkv, z, _, _, heads, _ = inputs
    k, g = (None, None) if pending is None else (pending.k, pending.g)
    lines = len(o) * heads.values
    delta_finish_kernel[(cdiv(lines, LINES),)](
        o, qkv, z, gates, heads.norm, None if replay is None else replay.rows, k, g,
        lines, 1 if replay is None else len(o) // len(replay.rows), qkv.stride(0), z.stride(0),
        0 if k is None else k.stride(0), 0 if g is None else g.stride(0), heads.eps,
        KEYS=heads.keys, VALUES=heads.values, K=heads.key_dim, V=heads.value_dim, BLOCK_K=tile_side(heads.key_dim),
        BLOCK_V=tile_side(heads.value_dim), TILE=LINES, num_warps=4, enable_fp_fusion=False, **pdl(o),
    )  # fmt: skip
    return o.flatten(1)


def _launch_ssd(
    inputs: SsdInputs,
    y: torch.Tensor,
    sequences: int,
    replay: StateReplay | None = None,
    *,
    spans: RaggedBatch | None = None,
    rows: int = 1,
    is_tree: bool = False,
) -> None:
    """As `_launch_delta`."""
    xbc, dt, _, heads, (state, pending) = inputs
    table = None if spans is None else spans.table
    slots, counts, path, ancestors = replay or (None, None, None, None)
    ssd_walk_kernel[(sequences * heads.count * cdiv(heads.dim, ROWS),)](
        xbc, dt, y, state, pending, heads.a_log, heads.d, heads.dt_bias, table, slots, counts, path,
        ancestors if is_tree else None, rows, xbc.stride(0), dt.stride(0), state.stride(0), pending.stride(0),
        pending.stride(1), *(0 if item is None else item.stride(0) for item in (table, path)),
        HEADS=heads.count, DIM=heads.dim, GROUPS=heads.groups, STATE=heads.state, BLOCK_S=tile_side(heads.state),
        ROWS=ROWS, REPLAY=replay is not None and not is_tree, num_warps=1, enable_fp_fusion=False, **pdl(xbc),
    )  # fmt: skip


@triton.jit
def _place(program, TILES, HEADS):
    """The tile, head and sequence of a program: one side of a grid, because the others end at 65535."""
    return program % TILES, program // TILES % HEADS, (program // (TILES * HEADS)).to(tl.int64)


@triton.jit
def _walk_rows(item, table, slots, ancestors, table_stride, n):
    """What a program walks over: the slot of its sequence, the first row and their number, whether the slot holds a
    state, and the nodes on its path as bits."""
    word = item  # unless it is a tree, nothing reads it
    if table is not None:
        start = tl.load(table + item)
        count = (tl.load(table + table_stride + item) - start).to(tl.int32)
        slot, first = tl.load(table + 2 * table_stride + item), tl.load(table + 3 * table_stride + item)
        is_known = start > 0
    elif ancestors is not None:
        slot, first, count = tl.load(slots + item // n), item // n * n, (item % n).to(tl.int32) + 1
        word = tl.load(ancestors + item)
        is_known = slot >= 0
    else:
        slot, first, count = tl.load(slots + item), item * n, n
        is_known = slot >= 0
    return slot, first, count, is_known, word


@triton.jit(do_not_specialize=["lines", "b_stride", "a_stride"])
def delta_gates_kernel(
    qkv, b, a, a_log, dt_bias, gates, lines, qkv_stride, b_stride, a_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A line is one value head of one token."""
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = line < lines
    token, head = (line // VALUES).to(tl.int64), line % VALUES
    column = tl.arange(0, BLOCK_K)
    mask = real[:, None] & (column < K)[None, :]
    wait_for_previous_kernel(PDL)
    heads = qkv + token[:, None] * qkv_stride + (head // (VALUES // KEYS) * K)[:, None] + column[None, :]
    q = tl.load(heads, mask, 0.0).to(tl.float32)
    k = tl.load(heads + KEYS * K, mask, 0.0).to(tl.float32)
    q_factor = tl.rsqrt(tl.sum(q * q, 1) + 1e-6) * (K**-0.5)
    k_factor = tl.rsqrt(tl.sum(k * k, 1) + 1e-6)
    place = gates + line.to(tl.int64) * _GATES
    tl.store(place, log_decay(a + token * a_stride + head, a_log + head, dt_bias + head, real), real)
    tl.store(place + 1, tl.sigmoid(tl.load(b + token * b_stride + head, real, 0.0).to(tl.float32)), real)
    tl.store(place + 2, q_factor, real)
    tl.store(place + 3, k_factor, real)
    tl.store(place + 4, tl.sum((q * q_factor[:, None]) * (k * k_factor[:, None]), 1), real)


@triton.jit
def _delta_inputs(qkv, gates, token, exists, head, k_column, v_column, qkv_stride, KEYS, VALUES, K, V):
    """q, k and v of a row as they are stored, and its gates."""
    heads, key = qkv + token * qkv_stride, head // (VALUES // KEYS)
    in_k, in_v = k_column < tl.where(exists, K, 0), v_column < tl.where(exists, V, 0)
    q = tl.load(heads + key * K + k_column, in_k, 0.0)
    k = tl.load(heads + (KEYS + key) * K + k_column, in_k, 0.0)
    v = tl.load(heads + 2 * KEYS * K + head * V + v_column, in_v, 0.0)
    place = gates + (token * VALUES + head) * _GATES
    g, beta = tl.load(place, exists, 0.0), tl.load(place + 1, exists, 0.0)
    q_factor, k_factor = tl.load(place + 2, exists, 0.0), tl.load(place + 3, exists, 0.0)
    return q, k, v, g, beta, q_factor, k_factor, tl.load(place + 4, exists, 0.0)


@triton.jit
def _delta_update(s, fade, k, u, stored):
    return (s * fade + k[:, None] * u[None, :]).to(stored).to(tl.float32)


@triton.jit(do_not_specialize=["n", "table_stride"])
def delta_walk_kernel(
    qkv, gates, state, old_k, old_u, old_g, table, slots, counts, path, ancestors, o,
    n, qkv_stride, state_stride, k_stride, u_stride, g_stride, table_stride, path_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr, REPLAY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state. Several sequences may be the padding slot, 0, at once; it stays as it is."""
    stored: tl.constexpr = state.dtype.element_ty
    tile, head, item = _place(tl.program_id(0), (V + COLUMNS - 1) // COLUMNS, VALUES)
    wait_for_previous_kernel(PDL)
    slot, first, count, is_known, word = _walk_rows(item, table, slots, ancestors, table_stride, n)
    k_column = tl.arange(0, BLOCK_K)
    v_column = tile * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = k_column < K, v_column < V
    cells = state + slot * state_stride + head * K * V + k_column[:, None] * V + v_column[None, :]
    in_state = in_k[:, None] & in_v[None, :]
    s = tl.load(cells, (k_column < tl.where(is_known, K, 0))[:, None] & in_v[None, :], 0.0).to(tl.float32)
    if REPLAY:
        replayed = tl.where(slot == 0, 0, tl.load(counts + slot)).to(tl.int32)
        for step in range(replayed):
            place = slot * 0 + step
            if path is not None:
                place = tl.load(path + slot * path_stride + step)
            k = tl.load(old_k + slot * k_stride + (place * KEYS + head // (VALUES // KEYS)) * K + k_column, in_k, 0.0)
            u = tl.load(old_u + slot * u_stride + (place * VALUES + head) * V + v_column, in_v, 0.0)
            g = tl.load(old_g + slot * g_stride + place * VALUES + head)
            s = _delta_update(s, tl.exp(g), k, u, stored)
        if replayed > 0:
            tl.store(cells, s.to(stored), in_state)

    q, k, v, g, beta, q_factor, k_factor, product = _delta_inputs(
        qkv, gates, first, count > 0, head, k_column, v_column, qkv_stride, KEYS, VALUES, K, V
    )
    for step in range(count):
        # The next row is on its way while this one is computed.
        coming = _delta_inputs(
            qkv, gates, first + step + 1, step + 1 < count, head, k_column, v_column, qkv_stride, KEYS, VALUES, K, V
        )
        is_seen = step >= 0
        if ancestors is not None:
            is_seen = ((word >> step) & 1) == 1
        if is_seen:
            fade, unit = tl.exp(g), k.to(tl.float32) * k_factor
            # Both sums are over the state before the row, so that neither waits for the other.
            u = beta * (v.to(tl.float32) - fade * tl.sum(s * unit[:, None], 0))
            out = fade * tl.sum(s * (q.to(tl.float32) * q_factor)[:, None], 0) + u * product
            s = _delta_update(s, fade, unit, u, stored)
            token = first + step
            is_wanted = in_v
            if ancestors is not None:
                is_wanted = v_column < tl.where(step == count - 1, V, 0)
            tl.store(o + (token * VALUES + head) * V + v_column, out.to(o.dtype.element_ty), is_wanted)
            if old_u is not None:
                keep = old_u + slot * u_stride + (step * VALUES + head) * V + v_column
                tl.store(keep, u, is_wanted & (v_column < tl.where(slot != 0, V, 0)))
        q, k, v, g, beta, q_factor, k_factor, product = coming
    if table is not None:
        tl.store(cells, s.to(stored), (k_column < tl.where(count > 0, K, 0))[:, None] & in_v[None, :])


@triton.jit(do_not_specialize=["lines", "n", "z_stride"])
def delta_finish_kernel(
    o, qkv, z, gates, weight, slots, kept_k, kept_g, lines, n, qkv_stride, z_stride, k_stride, g_stride, eps,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A line is one value head of one token. After a verify it keeps that head's decay, and its key if it is the first
    that has it."""
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = line < lines
    token, head = (line // VALUES).to(tl.int64), line % VALUES
    column = tl.arange(0, BLOCK_V)
    mask = real[:, None] & (column < V)[None, :]
    w = tl.load(weight + column, column < V, 0.0).to(tl.float32)
    wait_for_previous_kernel(PDL)
    cells = o + line.to(tl.int64)[:, None] * V + column[None, :]
    gate = tl.load(z + token[:, None] * z_stride + (head * V)[:, None] + column[None, :], mask, 0.0)
    tl.store(cells, gated_norm(tl.load(cells, mask, 0.0), gate, w, eps, V), mask)
    if kept_k is not None:
        slot, place = tl.load(slots + token // n, real, 0), token % n
        real = real & (slot != 0)
        of_line = gates + line.to(tl.int64) * _GATES
        tl.store(kept_g + slot * g_stride + place * VALUES + head, tl.load(of_line, real, 0.0), real)
        column = tl.arange(0, BLOCK_K)
        key = head // (VALUES // KEYS)
        mask = (real & (head % (VALUES // KEYS) == 0))[:, None] & (column < K)[None, :]
        k = tl.load(qkv + token[:, None] * qkv_stride + ((KEYS + key) * K)[:, None] + column[None, :], mask, 0.0)
        k = k.to(tl.float32) * tl.load(of_line + 3, real, 0.0)[:, None]
        keep = kept_k + slot[:, None] * k_stride + ((place * KEYS + key) * K)[:, None] + column[None, :]
        tl.store(keep, k, mask)


@triton.jit
def _ssd_inputs(line, dt, exists, head, group, row, column, HEADS, DIM, GROUPS, STATE):
    """x, B and dt of a row as they are stored; C follows B in a row of `STATE` columns for each group."""
    x = tl.load(line + head * DIM + row, row < tl.where(exists, DIM, 0), 0.0)
    b = tl.load(line + HEADS * DIM + group * STATE + column, column < tl.where(exists, STATE, 0), 0.0)
    return x, b, tl.load(dt, exists, 0.0)


@triton.jit
def _ssd_update(h, x, b, step, decay, stored):
    """The state after a row; step: its dt after bias and softplus."""
    added = (x.to(tl.float32) * step)[:, None] * b.to(tl.float32)[None, :]
    return (h * tl.exp(step * decay) + added).to(stored).to(tl.float32)


@triton.jit(do_not_specialize=["n", "table_stride", "dt_stride"])
def ssd_walk_kernel(
    xbc, dt, y, state, pending, a_log, d, dt_bias, table, slots, counts, path, ancestors,
    n, xbc_stride, dt_stride, state_stride, slot_stride, pending_stride, table_stride, path_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr, REPLAY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some rows of one head's state."""
    stored: tl.constexpr = state.dtype.element_ty
    tile, head, item = _place(tl.program_id(0), (DIM + ROWS - 1) // ROWS, HEADS)
    group = head // (HEADS // GROUPS)
    decay = -tl.exp(tl.load(a_log + head))
    skip, bias = tl.load(d + head), tl.load(dt_bias + head)
    wait_for_previous_kernel(PDL)
    slot, first, count, is_known, word = _walk_rows(item, table, slots, ancestors, table_stride, n)
    row = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_S)
    of_head, inside = row < DIM, column < STATE
    cells = state + slot * state_stride + (head * DIM + row)[:, None] * STATE + column[None, :]
    in_state = of_head[:, None] & inside[None, :]
    h = tl.load(cells, (row < tl.where(is_known, DIM, 0))[:, None] & inside[None, :], 0.0).to(tl.float32)
    if REPLAY:
        replayed = tl.where(slot == 0, 0, tl.load(counts + slot)).to(tl.int32)
        for step in range(replayed):
            place = slot * 0 + step
            if path is not None:
                place = tl.load(path + slot * path_stride + step)
            line = pending + slot * slot_stride + place * pending_stride
            of_dt = line + HEADS * DIM + GROUPS * STATE + head
            x, b, raw = _ssd_inputs(line, of_dt, slot >= 0, head, group, row, column, HEADS, DIM, GROUPS, STATE)
            h = _ssd_update(h, x, b, time_step(raw, bias), decay, stored)
        if replayed > 0:
            tl.store(cells, h.to(stored), in_state)

    line, of_dt = xbc + first * xbc_stride, dt + first * dt_stride + head
    x, b, raw = _ssd_inputs(line, of_dt, count > 0, head, group, row, column, HEADS, DIM, GROUPS, STATE)
    c = tl.load(line + HEADS * DIM + (GROUPS + group) * STATE + column, column < tl.where(count > 0, STATE, 0), 0.0)
    for step in range(count):
        line += xbc_stride
        of_dt += dt_stride
        exists = step + 1 < count
        next_x, next_b, next_raw = _ssd_inputs(
            line, of_dt, exists, head, group, row, column, HEADS, DIM, GROUPS, STATE
        )  # on their way while this row is computed
        next_c = tl.load(
            line + HEADS * DIM + (GROUPS + group) * STATE + column, column < tl.where(exists, STATE, 0), 0.0
        )
        is_seen = step >= 0
        if ancestors is not None:
            is_seen = ((word >> step) & 1) == 1
        if is_seen:
            h = _ssd_update(h, x, b, time_step(raw, bias), decay, stored)
            out = tl.sum(h * c.to(tl.float32)[None, :], 1) + skip * x.to(tl.float32)
            is_wanted = of_head
            if ancestors is not None:
                is_wanted = row < tl.where(step == count - 1, DIM, 0)
            of_y = (first + step) * (HEADS * DIM) + head * DIM + row
            tl.store(y + of_y, out.to(y.dtype.element_ty), is_wanted)
        x, b, raw, c = next_x, next_b, next_raw, next_c
    if table is not None:
        tl.store(cells, h.to(stored), (row < tl.where(count > 0, DIM, 0))[:, None] & inside[None, :])
