"""Triton kernels of the gated delta rule; equations and names are those of `gated_delta`.

A verify reads and writes a state once: a program has some columns of one head's state in registers, replays the
accepted rows, writes it back and computes the new rows: one by the recurrence, several by GEMMs over all of them. Few
rows of a chain are replayed one by one, more by a GEMM. Then the gated norm, which also stores the keys and decays of
the new rows, once all programs of the previous kernel have read those of the last verify. A prompt pass
(`gated_delta_prefill_triton`) is in two: first what the rows of a chunk are to each other, for all chunks at once, and
the normalized q and k; then the walk of the state from chunk to chunk, for some columns each; and the same norm.

Products of float32 models are exact (no tf32). A verify of others adds in float32, since its state lives for thousands
of verifies; it rounds factors to tf32, but for a short chain the state is split into two BF16 or tf32 numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import let_next_kernel_start, pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2, tile_side
from specbatch.kernels.recurrent.inputs import DeltaHeads, DeltaInputs, Pending
from specbatch.kernels.recurrent.state_replay import StateReplay

_PROGRAM = 1024  # elements of a program of the norm
FEW = 512  # programs of a verify: with fewer, each takes less of a state
MANY = 4096  # programs of 64 columns of a state; see `columns_of_chain`
_CHAIN = 8  # chains of up to this many rows, new or replayed, count as short


def delta_verify(
    inputs: DeltaInputs, pending: Pending, replay: StateReplay, *, few: int = FEW, many: int = MANY
) -> torch.Tensor:
    """`delta_verify_ref`.

    The previous kernel must write neither the tensors of `replay` nor state and pending, which are read before it has
    ended. The writes of any earlier kernel are visible.
    """
    qkv, _, b, a, heads, state = inputs
    batch, held = len(replay.rows), pending.k.shape[1]
    rows = len(qkv) // batch
    is_many = batch * heads.values * cdiv(heads.value_dim, 32) >= few
    is_chain = replay.path is None and replay.ancestors is None and max(rows, held) <= _CHAIN
    columns = min(32 if is_many or (is_chain and rows > 1) else 16, tile_side(heads.value_dim))
    registers, block, sizes = None, tile_side(rows), kernel_sizes(heads, qkv)
    if is_chain and rows > 1:
        columns, registers = columns_of_chain(heads, batch, rows, columns, sizes["PRECISION"], many)
    o = heads.outputs(qkv, None)
    grid = cdiv(heads.value_dim, columns), heads.values, batch
    tensors = qkv, b, a, heads.a_log, heads.dt_bias, state, *pending, replay.rows, replay.counts
    strides = [x.stride(0) for x in (qkv, b, a, state, *pending)]
    if is_chain:
        common = {name: sizes[name] for name in ("KEYS", "VALUES", "K", "V", "BLOCK_K")}
        common |= {"HELD": held, "HELD_BLOCK": next_power_of_2(held), "COLUMNS": columns, **pdl(qkv)}
        if rows == 1:
            one_row_kernel[grid](*tensors, o, *strides, num_warps=1, **common)
        else:
            chain_kernel[grid](
                *tensors, o, *strides, N=rows, ROWS=max(4, next_power_of_2(rows)), PRECISION=sizes["PRECISION"],
                num_warps=columns // 16, maxnreg=registers, **common,
            )  # fmt: skip
        return normalise(o, inputs, pending, replay)
    full = columns == 32 and block == 16 and sizes["PRECISION"] == "tf32"
    _verify[grid](
        *tensors, replay.path, replay.ancestors, o, *strides, 0 if replay.path is None else replay.path.stride(0),
        N=rows, ROWS=block, HELD=tile_side(held), LEVELS=(rows - 1).bit_length(),
        COLUMNS=columns, num_warps=4 if block <= 32 else 8, **pdl(qkv),
        maxnreg=128 if full else None,  # four programs on a processor: the memory waits for none of them
        **sizes,
    )  # fmt: skip
    return normalise(o, inputs, pending, replay)


def columns_of_chain(
    heads: DeltaHeads, batch: int, rows: int, columns: int, precision: str, many: int = MANY
) -> tuple[int, int | None]:
    """Columns of a state for a program of `chain_kernel`, where others take `columns`, and the limit of its registers.

    More programs on a processor are worth some spilled registers.
    """
    if precision != "tf32":
        return columns, None
    if rows > 4:
        return columns, 128
    is_many = heads.value_dim >= 64 and batch * heads.values * cdiv(heads.value_dim, 64) >= many
    return (64, 96) if is_many else (columns, None)


def normalise(
    o: torch.Tensor, inputs: DeltaInputs, pending: Pending | None = None, replay: StateReplay | None = None
) -> torch.Tensor:
    """`gated_rms_norm_ref`, in the memory of o; keys and decays of a verify are kept.

    The previous kernel may write o, but none of the other tensors.
    """
    qkv, z, _, a, heads, _ = inputs
    sizes = kernel_sizes(heads, qkv)
    lines, tile = o.shape[0] * heads.values, max(1, _PROGRAM // next_power_of_2(heads.value_dim))
    k, g = (pending.k, pending.g) if pending is not None else (None, None)
    norm_kernel[(cdiv(lines, tile),)](
        o, qkv, z, a, heads.a_log, heads.dt_bias, heads.norm, None if replay is None else replay.rows, k, g,
        qkv.stride(0), z.stride(0), a.stride(0), 0 if k is None else k.stride(0), 0 if g is None else g.stride(0),
        lines, 1 if replay is None else len(qkv) // len(replay.rows), heads.eps,
        TILE=tile, num_warps=4, **pdl(qkv), **sizes,
    )  # fmt: skip
    return o.flatten(1)


def kernel_sizes(heads: DeltaHeads, x: torch.Tensor) -> dict[str, Any]:
    """What kernels are compiled for."""
    return {
        "KEYS": heads.keys, "VALUES": heads.values, "K": heads.key_dim, "V": heads.value_dim,
        "BLOCK_K": tile_side(heads.key_dim),
        "BLOCK_V": tile_side(heads.value_dim),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }  # fmt: skip


@triton.jit
def unit(heads, mask):
    """Heads [n, BLOCK_K] from memory, float32 and of length one."""
    x = tl.load(heads, mask, 0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def log_decay(a, a_log, dt_bias, mask):
    """g: a, a_log and dt_bias are places of the same shape."""
    rate = tl.exp(tl.load(a_log, mask, 0.0).to(tl.float32))
    x = tl.load(a, mask, 0.0).to(tl.float32) + tl.load(dt_bias, mask, 0.0).to(tl.float32)
    softplus = tl.maximum(x, 0.0) + _log1p(tl.exp(-tl.abs(x)))
    return tl.where(mask, -rate * softplus, 0.0)


@triton.jit
def _log1p(x):
    """log(1 + x) for x in 0..1, without losing what 1 + x rounds away."""
    y = 1 + x
    return tl.where(y == 1, x, tl.log(y) * (x / tl.where(y == 1, 1.0, y - 1)))


@triton.jit
def invert(a, kind: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 for a [n, n] with entries below the diagonal only, of its first 2^LEVELS rows.

    From the inverses of diagonal blocks P and Q to that of [[P, 0], [L, Q]], whose corner is -Q^-1 L P^-1: as stable as
    substitution, and GEMMs instead of n steps. kind: of the operands of tl.dot.
    """
    row, column = tl.arange(0, a.shape[0])[:, None], tl.arange(0, a.shape[0])[None, :]
    x = tl.where(row == column, 1.0, 0.0)
    if LEVELS > 0:
        x -= tl.where((row == column + 1) & (column % 2 == 0), a, 0.0)
    for level in tl.range(1, LEVELS, num_stages=1):  # not unrolled: exact dot products are long code
        corner = tl.where((row >> level == (column >> level) + 1) & ((column >> level) % 2 == 0), a, 0.0)
        part = tl.dot(x.to(kind), corner.to(kind), input_precision=PRECISION)
        x -= tl.dot(part.to(kind), x.to(kind), input_precision=PRECISION)
    return x


@triton.jit
def _replayed(
    state, old_k, old_u, old_g, row, count, head, v_column, state_stride, k_stride, u_stride, g_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    HELD: tl.constexpr, HELD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns of a head's state, float32, after the accepted rows of the last verify; in memory they replace the old.

    A row takes one multiplication and addition for each element. The loop is not unrolled, for fewer registers: the
    next row is on its way while one is added.
    """
    k_column = tl.arange(0, BLOCK_K)
    in_k, in_v = k_column < K, v_column < V
    in_state = in_k[:, None] & in_v[None, :]
    folded = tl.minimum(tl.load(count + row), HELD).to(tl.int32)
    cells = state + row * state_stride + head * K * V + k_column[:, None] * V + v_column[None, :]
    s = tl.load(cells, in_state, 0.0).to(tl.float32)
    if folded > 0:
        k_cells = old_k + row * k_stride + head // (VALUES // KEYS) * K + k_column
        u_cells = old_u + row * u_stride + head * V + v_column
        step = tl.arange(0, HELD_BLOCK)
        g_cells = old_g + row * g_stride + head + step * VALUES
        g = tl.load(g_cells, step < folded, 0.0).to(tl.float32)
        next_k, next_u = tl.load(k_cells, in_k, 0.0), tl.load(u_cells, in_v, 0.0)
        s *= tl.exp(tl.sum(g, 0))
        for done in tl.range(1, folded + 1 if HELD > 1 else 2, num_stages=1):
            later = tl.sum(tl.where(step >= done, g, 0.0), 0)  # a difference of sums would lose digits
            k, u = next_k.to(tl.float32), next_u.to(tl.float32) * tl.exp(later)
            if done < folded:
                k_cells += KEYS * K
                u_cells += VALUES * V
                next_k, next_u = tl.load(k_cells, in_k, 0.0), tl.load(u_cells, in_v, 0.0)
            s += k[:, None] * u[None, :]
        if row != 0:  # several sequences may be the padding row at once; it stays as it is
            tl.store(cells, s.to(state.dtype.element_ty), in_state)
    return s


@triton.jit
def one_row_kernel(
    qkv, b, a, a_log, dt_bias, state, old_k, old_u, old_g, rows, count, o,
    qkv_stride, b_stride, a_stride, state_stride, k_stride, u_stride, g_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    HELD: tl.constexpr, HELD_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The recurrence. Few instructions between reading a state and writing it keep many loads in flight."""
    head, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key = head // (VALUES // KEYS)
    row = tl.load(rows + token)
    k_column = tl.arange(0, BLOCK_K)
    v_column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = k_column < K, v_column < V
    s = _replayed(
        state, old_k, old_u, old_g, row, count, head, v_column, state_stride, k_stride, u_stride, g_stride,
        KEYS, VALUES, K, V, BLOCK_K, HELD, HELD_BLOCK,
    )  # fmt: skip
    wait_for_previous_kernel(PDL)
    heads = qkv + token * qkv_stride
    q = tl.load(heads + key * K + k_column, in_k, 0.0).to(tl.float32)
    k = tl.load(heads + (KEYS + key) * K + k_column, in_k, 0.0).to(tl.float32)
    v = tl.load(heads + 2 * KEYS * K + head * V + v_column, in_v, 0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (K**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    beta = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
    fade = tl.exp(log_decay(a + token * a_stride + head, a_log + head, dt_bias + head, True))
    # Both sums are over the state before the row, so that neither waits for the other.
    u = beta * (v - fade * tl.sum(s * k[:, None], 0))
    out = fade * tl.sum(s * q[:, None], 0) + u * tl.sum(q * k, 0)
    tl.store(o + (token * VALUES + head) * V + v_column, out.to(o.dtype.element_ty), in_v)
    if row != 0:
        tl.store(old_u + row * u_stride + head * V + v_column, u.to(old_u.dtype.element_ty), in_v)


@triton.jit
def chain_kernel(
    qkv, b, a, a_log, dt_bias, state, old_k, old_u, old_g, rows, count, o,
    qkv_stride, b_stride, a_stride, state_stride, k_stride, u_stride, g_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, HELD: tl.constexpr, HELD_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows on the state before them. Tensor cores multiply their keys and queries with it and with each other.

    Lines are the keys of the rows, then their queries. y starts as what the state alone contributes to a line: for a
    key, u before the factor beta; for a query, o. Then each row in turn adds the effect of its u on later lines.
    """
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key = head // (VALUES // KEYS)
    row = tl.load(rows + sequence)
    k_column = tl.arange(0, BLOCK_K)
    v_column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = k_column < K, v_column < V
    s = _replayed(
        state, old_k, old_u, old_g, row, count, head, v_column, state_stride, k_stride, u_stride, g_stride,
        KEYS, VALUES, K, V, BLOCK_K, HELD, HELD_BLOCK,
    )  # fmt: skip
    line = tl.arange(0, 2 * ROWS)
    node, is_key = line % ROWS, line < ROWS
    live = node < N
    first = sequence * N
    wait_for_previous_kernel(PDL)
    beta = tl.sigmoid(tl.load(b + first * b_stride + head + node * b_stride, live, 0.0).to(tl.float32))
    g_cells = a + first * a_stride + head + node * a_stride
    g = log_decay(g_cells, a_log + head + node * 0, dt_bias + head + node * 0, live)
    qkv += first * qkv_stride
    heads = qkv + node * qkv_stride + tl.where(is_key, KEYS + key, key) * K
    x = tl.load(heads[:, None] + k_column[None, :], live[:, None] & in_k[None, :], 0.0)
    v_cells = qkv + 2 * KEYS * K + head * V + (node * qkv_stride)[None, :] + v_column[:, None]
    v = tl.load(v_cells, (live & is_key)[None, :] & in_v[:, None], 0.0).to(tl.float32)
    if x.dtype == tl.bfloat16:  # two numbers hold twice the digits of one, and bfloat16 has the range of float32
        high = s.to(tl.bfloat16)
        low = (s - high.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(tl.trans(low), tl.trans(x), tl.dot(tl.trans(high), tl.trans(x)))
    else:
        exact: tl.constexpr = "ieee" if x.dtype == tl.float32 else "tf32x3"
        y = tl.dot(tl.trans(s), tl.trans(x.to(tl.float32)), input_precision=exact)
    products = tl.dot(x, tl.trans(x), input_precision=PRECISION)

    is_same = line[:, None] == line[None, :]
    squares = tl.where(is_same, products, 0.0)
    # Negative for keys: u subtracts what it is given.
    length = tl.rsqrt(tl.sum(squares, 0) + 1e-6) * tl.where(is_key, -1.0, K**-0.5)
    last = tl.where(is_key, node - 1, node)  # last row that a line sees
    sees = is_key[:, None] & (node[:, None] <= last[None, :])
    total = tl.sum(tl.where(is_key[:, None] & (node[:, None] <= node[None, :]), g[:, None], 0.0), 0)
    own = tl.sum(tl.where(is_same, total[None, :], 0.0), 1)
    share = products * tl.rsqrt(tl.sum(squares, 1) + 1e-6)[:, None] * length[None, :]
    share *= tl.exp(tl.where(sees, total[None, :] - own[:, None], float("-inf")))
    factor = tl.where(is_key, beta, 1.0)
    y = v + y * (tl.exp(total) * length)[None, :]
    for step in tl.static_range(N):
        u = tl.sum(tl.where((line == step)[None, :], y * factor[None, :], 0.0), 1)
        y += u[:, None] * tl.sum(tl.where((line == step)[:, None], share, 0.0), 0)[None, :]
    y *= factor[None, :]
    out = o + (first * VALUES + head) * V + (node * (VALUES * V))[None, :] + v_column[:, None]
    tl.store(out, y.to(o.dtype.element_ty), (live & ~is_key)[None, :] & in_v[:, None])
    if row != 0:
        keep = old_u + row * u_stride + head * V + (node * (VALUES * V))[None, :] + v_column[:, None]
        tl.store(keep, y.to(old_u.dtype.element_ty), (live & is_key)[None, :] & in_v[:, None])


@triton.jit
def _verify(
    qkv, b, a, a_log, dt_bias, state, old_k, old_u, old_g, rows, count, kept, ancestors, o,
    qkv_stride, b_stride, a_stride, state_stride, k_stride, u_stride, g_stride, kept_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, HELD: tl.constexpr,
    LEVELS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key = head // (VALUES // KEYS)
    row = tl.load(rows + sequence)
    folded = tl.load(count + row)
    k_column = tl.arange(0, BLOCK_K)
    v_column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = (k_column < K)[None, :], (v_column < V)[None, :]
    cells = state + row * state_stride + head * K * V + k_column[:, None] * V + v_column[None, :]
    in_state = (k_column < K)[:, None] & in_v
    s = tl.load(cells, in_state, 0.0).to(tl.float32)
    if folded > 0:
        step = tl.arange(0, HELD)
        there = step < folded
        place = step.to(tl.int64)
        if kept is not None:
            place = tl.load(kept + row * kept_stride + step, there, 0)
        g = tl.load(old_g + row * g_stride + place * VALUES + head, there, 0.0).to(tl.float32)
        later = tl.sum(tl.where(step[None, :] > step[:, None], g[None, :], 0.0), 1)
        k_cells = row * k_stride + (place[:, None] * KEYS + key) * K + k_column[None, :]
        u_cells = row * u_stride + (place[:, None] * VALUES + head) * V + v_column[None, :]
        k = tl.load(old_k + k_cells, there[:, None] & in_k, 0.0)
        u = tl.load(old_u + u_cells, there[:, None] & in_v, 0.0)
        k = k.to(tl.float32) * tl.exp(later)[:, None]
        s = tl.dot(tl.trans(k), u.to(tl.float32), s * tl.exp(tl.sum(g, 0)), input_precision=PRECISION)
        if row != 0:  # several sequences may be the padding row at once; it stays as it is
            tl.store(cells, s.to(state.dtype.element_ty), in_state)

    node = tl.arange(0, ROWS)
    live = node < N
    sees = node[:, None] >= node[None, :]
    if ancestors is not None:
        word = tl.load(ancestors + sequence * N + node, live, 0)
        sees = ((word[:, None] >> node[None, :]) & 1) == 1
    token = sequence * N + node
    wait_for_previous_kernel(PDL)
    heads = qkv + token[:, None] * qkv_stride
    q = unit(heads + key * K + k_column[None, :], live[:, None] & in_k) * (K**-0.5)
    k = unit(heads + (KEYS + key) * K + k_column[None, :], live[:, None] & in_k)
    v = tl.load(heads + 2 * KEYS * K + head * V + v_column[None, :], live[:, None] & in_v, 0.0).to(tl.float32)
    beta = tl.sigmoid(tl.load(b + token * b_stride + head, live, 0.0).to(tl.float32))
    g = log_decay(a + token * a_stride + head, a_log + head + node * 0, dt_bias + head + node * 0, live)
    total = tl.sum(tl.where(sees, g[None, :], 0.0), 1)
    decay = tl.exp(tl.where(sees, total[:, None] - total[None, :], float("-inf")))
    fade = tl.exp(total)[:, None]
    lower = beta[:, None] * tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay
    inverse = invert(tl.where(node[:, None] > node[None, :], lower, 0.0), tl.float32, LEVELS, PRECISION)
    rest = beta[:, None] * (v - fade * tl.dot(k, s, input_precision=PRECISION))
    u = tl.dot(inverse, rest, input_precision=PRECISION)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
    out = tl.dot(scores, u, fade * tl.dot(q, s, input_precision=PRECISION), input_precision=PRECISION)
    mask = live[:, None] & in_v
    tl.store(o + (token[:, None] * VALUES + head) * V + v_column[None, :], out.to(o.dtype.element_ty), mask)
    if row != 0:
        keep = old_u + row * u_stride + (node[:, None] * VALUES + head) * V + v_column[None, :]
        tl.store(keep, u.to(old_u.dtype.element_ty), mask)


@triton.jit
def gated_norm(values, gate, w, eps, V: tl.constexpr):
    """norm(values) * w * silu(gate) of heads [n, BLOCK_V], in the type of values."""
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / V + eps)[:, None]
    # Cast where the reference casts: before the weight, after it, and after the gate.
    normal = (wide * scale).to(values.dtype).to(tl.float32) * w[None, :]
    normal = normal.to(values.dtype).to(tl.float32)
    gate = gate.to(tl.float32)
    return (normal * gate / (1 + tl.exp(-gate))).to(values.dtype)


@triton.jit(do_not_specialize=["lines"])
def norm_kernel(
    o, qkv, z, a, a_log, dt_bias, weight, rows, kept_k, kept_g, qkv_stride, z_stride, a_stride, k_stride, g_stride,
    lines, n, eps,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A line is one head of one token. After a verify it keeps that head's decay, and among the first also its key.

    The previous kernel may write only o: everything else is read before that kernel has ended. It may still be reading
    what the last verify kept, so all stores come after the wait.
    """
    let_next_kernel_start(PDL)
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = line < lines
    token, head = (line // VALUES).to(tl.int64), line % VALUES
    column = tl.arange(0, BLOCK_V)
    mask = real[:, None] & (column < V)[None, :]
    w = tl.load(weight + column, column < V, 0.0).to(tl.float32)
    gate = tl.load(z + token[:, None] * z_stride + head[:, None] * V + column[None, :], mask, 0.0)
    if kept_k is not None:
        row = tl.load(rows + token // n, real, 0)
        place = token % n
        g = log_decay(a + token * a_stride + head, a_log + head, dt_bias + head, real)
        k_column = tl.arange(0, BLOCK_K)
        in_key = (real & (head < KEYS))[:, None] & (k_column < K)[None, :]
        k = unit(qkv + token[:, None] * qkv_stride + (KEYS + head)[:, None] * K + k_column[None, :], in_key)
    wait_for_previous_kernel(PDL)
    cells = o + (token * VALUES + head)[:, None] * V + column[None, :]
    tl.store(cells, gated_norm(tl.load(cells, mask, 0.0), gate, w, eps, V), mask)
    if kept_k is not None:
        is_kept = real & (row != 0)
        tl.store(kept_g + row * g_stride + place * VALUES + head, g.to(kept_g.dtype.element_ty), is_kept)
        keep = kept_k + row[:, None] * k_stride + (place * KEYS + head)[:, None] * K + k_column[None, :]
        tl.store(keep, k.to(kept_k.dtype.element_ty), in_key & is_kept[:, None])
