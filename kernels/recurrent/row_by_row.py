"""Deterministic recurrences on a CPU: a state advances by one row at a time, with the same operations in a prompt, a
chunk, a verify and a replay.

After each row a state is rounded to the type in which it is stored, because how often it is stored depends on chunks
and accepted drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.common.rowwise import exp, row_sum
from specbatch.kernels.recurrent.gated_delta import gated_rms_norm_ref, split_inputs
from specbatch.kernels.recurrent.inputs import DeltaInputs, Pending, SsdHeads, SsdInputs
from specbatch.kernels.recurrent.mamba2 import decays, gated_group_norm_ref, prepare_tokens
from specbatch.kernels.recurrent.state_replay import StateReplay

# The state float32 [B, ...] before a row and the row's index -> the state after it, and what else the row computes.
Advance = Callable[[torch.Tensor, int], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]


def delta_prefill(inputs: DeltaInputs, spans: RaggedBatch, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `delta_prefill_ref`."""
    qkv, z, b, a, heads, state = inputs
    q, k, v, g, beta = split_inputs(qkv, b, a, heads)
    o = torch.empty_like(v)
    for begin, end, start, row in zip(spans.offsets, spans.offsets[1:], spans.starts, spans.rows, strict=False):
        s = state[row].float() if start else torch.zeros_like(state[row], dtype=torch.float32)
        for at in range(begin, end):
            s, o[at], _ = _delta_row(s, q[at], k[at], v[at], g[at], beta[at], state.dtype)
        state[row] = s
    y = gated_rms_norm_ref(o.to(qkv.dtype), z, heads)
    return y if out is None else out.copy_(y)


def delta_verify(inputs: DeltaInputs, pending: Pending, replay: StateReplay) -> torch.Tensor:
    """As `delta_verify_ref`."""
    qkv, z, b, a, heads, state = inputs
    batch, repeats = len(replay.rows), heads.values // heads.keys
    q, k, v, g, beta = (x.unflatten(0, (batch, -1)) for x in split_inputs(qkv, b, a, heads))
    old = Pending(*(item[replay.rows].float() for item in pending))

    def replayed(s: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        old_k, old_u, old_g = (item[torch.arange(batch), row] for item in old)
        return _delta_update(s * _wide(exp(old_g)), old_k.repeat_interleave(repeats, 1), old_u, state.dtype)

    def advance(s: torch.Tensor, row: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        s, *found = _delta_row(s, q[:, row], k[:, row], v[:, row], g[:, row], beta[:, row], state.dtype)
        return s, tuple(found)

    s = _replay(state[replay.rows].float(), replay, pending.k.shape[1], replayed)
    o, u = _advance_rows(s, replay, q.shape[1], advance)
    real = replay.rows != 0
    kept = replay.rows[real]
    state[kept] = s[real].to(state.dtype)
    for item, new in zip(pending, (k[:, :, ::repeats], u, g), strict=True):
        item[kept, : q.shape[1]] = new[real].to(item.dtype)
    return gated_rms_norm_ref(o.flatten(0, 1).to(qkv.dtype), z, heads)


def _delta_row(
    s: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The state [.., values, key_dim, value_dim] after a row, its output and its u [.., values, value_dim]."""
    s = s * _wide(exp(g))
    u = beta[..., None] * (v - row_sum(s * k[..., None], -2))
    s = _delta_update(s, k, u, dtype)
    return s, row_sum(s * q[..., None], -2), u


def _delta_update(s: torch.Tensor, k: torch.Tensor, u: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (s + k[..., None] * u[..., None, :]).to(dtype).float()


def ssd_prefill(inputs: SsdInputs, spans: RaggedBatch, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `ssd_prefill_ref`."""
    xbc, dt, z, heads, memory = inputs
    x, b, c = xbc.split(heads.columns, 1)
    rows = _SsdRows(heads, x[None], b[None], dt[None], c[None], memory.state.dtype)
    y = xbc.new_empty(x.shape)
    for start, slot, first, stop in zip(spans.starts, spans.rows, spans.offsets, spans.offsets[1:], strict=False):
        state = memory.state[slot].float().unflatten(0, rows.decay.shape)[None]
        state = state if start else torch.zeros_like(state)
        for at in range(first, stop):
            state, (output,) = rows.advance(state, at)
            y[at] = output.flatten().to(y.dtype)
        memory.state[slot] = state[0].flatten(0, 1)
    y = gated_group_norm_ref(y, z, *heads.norm, heads.groups)
    return y if out is None else out.copy_(y)


def ssd_verify(inputs: SsdInputs, replay: StateReplay) -> torch.Tensor:
    """As `ssd_verify_ref`."""
    xbc, dt, z, heads, memory = inputs
    count, widths = len(replay.rows), (heads.columns[0], heads.columns[1], heads.count)
    x, b, dt_before = memory.pending[replay.rows].split(widths, 2)
    old = _SsdRows(heads, x, b, dt_before, None, memory.state.dtype)
    state = memory.state[replay.rows].float().unflatten(1, old.decay.shape)
    state = _replay(state, replay, memory.pending.shape[1], old.update)
    memory.state[replay.rows] = state.flatten(1, 2).to(memory.state.dtype)

    x, b, c, dt = (part.unflatten(0, (count, -1)) for part in (*xbc.split(heads.columns, 1), dt))
    rows = _SsdRows(heads, x, b, dt, c, memory.state.dtype)
    (y,) = _advance_rows(state, replay, x.shape[1], rows.advance)
    memory.pending[replay.rows, : x.shape[1]] = torch.cat([x, b, dt], 2)
    return gated_group_norm_ref(y.flatten(2).flatten(0, 1).to(z.dtype), z, *heads.norm, heads.groups)


class _SsdRows:
    """Rows [B, T] of a layer; x, b, dt, c as projected (c None: outputs are not needed), dtype: of stored states."""

    def __init__(
        self,
        heads: SsdHeads,
        x: torch.Tensor,
        b: torch.Tensor,
        dt: torch.Tensor,
        c: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.decay, self._d = decays(heads)
        self._tokens = prepare_tokens(heads, x, b, dt)
        self._c = None if c is None else c.float().unflatten(2, (heads.groups, heads.state))
        self._dtype = dtype

    def update(self, state: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """The state [B, G, R, P, n] after row int64 [B] of each sequence."""
        x, b, dt = (item[torch.arange(len(row)), row] for item in self._tokens)
        added = (dt[..., None] * x)[..., None] * b[:, :, None, None]
        return (state * _wide(exp(dt * self.decay)) + added).to(self._dtype).float()

    def advance(self, state: torch.Tensor, row: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The state after a row, and its output [B, G, R, P]."""
        assert self._c is not None
        state = self.update(state, torch.full((len(state),), row))
        read = row_sum(state * self._c[:, row, :, None, None])
        return state, (read + self._d[..., None] * self._tokens.x[:, row],)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x[..., None, None]


def _replay(
    state: torch.Tensor,
    replay: StateReplay,
    most: int,
    update: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The state [B, ...] after the accepted rows of the last verify, of which there are at most `most`."""
    order, there = replay.replayed_rows(most)
    for place in range(most):
        exists = there[:, place]
        new = update(state, order[:, place].where(exists, 0))
        state = torch.where(exists.view(-1, *[1] * (state.dim() - 1)), new, state)
    return state


def _advance_rows(state: torch.Tensor, replay: StateReplay, rows: int, advance: Advance) -> tuple[torch.Tensor, ...]:
    """What the rows of a verify compute, [B, rows, ...] each: row after row of a chain, in a tree each after its
    parent."""
    outputs = []
    if replay.ancestors is None:
        for row in range(rows):
            state, found = advance(state, row)
            outputs.append(found)
    else:
        states, sequence = state[:, None], torch.arange(len(state))
        sees = replay.sees(rows)
        for row in range(rows):
            node = torch.arange(1, row + 1, device=state.device)
            parent = torch.where(sees[:, row, :row], node, 0).amax(1) if row else torch.zeros_like(sequence)
            after, found = advance(states[sequence, parent], row)
            states = torch.cat([states, after[:, None]], 1)
            outputs.append(found)
    return tuple(torch.stack(item, 1) for item in zip(*outputs, strict=True))
