"""The Mamba2 recurrence of Nemotron-H: from the output of the convolution to the input of the output projection.

Every head has a state h [dim, n], which a token fades and adds to, with a step dt and a decay A < 0 of the head:

    dt = softplus(dt + dt_bias)      h <- e^(dt A) h + (dt x) B^T      y = h C + D x

Unrolled over a few tokens, with a_i the sum of dt A up to token i, this is a small attention without a softmax:

    y_i = e^(a_i) h C_i + sum over j <= i of e^(a_i - a_j) (C_i . B_j) dt_j x_j + D x_i

A prompt goes through it chunk by chunk; the rows of a verify are one chunk, of which each row has only its ancestors
before it. Dao and Gu, "Transformers are SSMs" (2024); y is then gated by z and normalised, group by group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.common.rowwise import exp, row_sum, silu, softplus
from specbatch.kernels.dispatch import op
from specbatch.kernels.recurrent.inputs import SsdHeads, SsdInputs
from specbatch.kernels.recurrent.state_replay import StateReplay

_CHUNK = 64  # tokens; any number is right


def gated_group_norm_ref(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, groups: int
) -> torch.Tensor:
    """RMSNorm of y * silu(z) over each of `groups` parts of a row, times `weight`; gated first.

    y, z [T, d], weight [d]; in float32, cast once, to the type of z.
    """
    u: torch.Tensor = (y.float() * silu(z.float())).unflatten(1, (groups, -1))
    u = u * torch.rsqrt(row_sum(u.square())[..., None] / u.shape[-1] + eps)
    return (u.flatten(1) * weight.float()).to(z.dtype)


class _Tokens(NamedTuple):
    """Inputs in float32; the H heads of a layer are G groups of R: x [B, T, G, R, P], b [B, T, G, n] and, after bias
    and softplus, dt [B, T, G, R]."""

    x: torch.Tensor
    b: torch.Tensor
    dt: torch.Tensor


def prepare_tokens(heads: SsdHeads, x: torch.Tensor, b: torch.Tensor, dt: torch.Tensor) -> _Tokens:
    """x [B, T, H * P], b [B, T, G * n], dt [B, T, H] as they come."""
    grouped = (heads.groups, heads.count // heads.groups)
    return _Tokens(
        x.float().unflatten(2, (*grouped, heads.dim)),
        b.float().unflatten(2, (heads.groups, heads.state)),
        softplus(dt.float() + heads.dt_bias).unflatten(2, grouped),
    )


def _advance(state: torch.Tensor, tokens: _Tokens, decay: torch.Tensor) -> torch.Tensor:
    """The state [B, G, R, P, n] after these tokens."""
    a = (tokens.dt * decay).cumsum(1)
    share = tokens.dt * (a[:, -1:] - a).exp()
    added = torch.einsum("btgr,btgrp,btgn->bgrpn", share, tokens.x, tokens.b)
    return a[:, -1, ..., None, None].exp() * state + added


def _outputs(
    state: torch.Tensor, tokens: _Tokens, c: torch.Tensor, sees: torch.Tensor, decay: torch.Tensor, d: torch.Tensor
) -> torch.Tensor:
    """y [B, T, G, R, P] of tokens after `state`, of which token i comes after those j where sees [B, T, T].

    c [B, T, G, n]; decay, d [G, R].
    """
    a = torch.einsum("bij,bjgr->bigr", sees.float(), tokens.dt * decay)
    fade = (a[:, :, None] - a[:, None]).masked_fill(~sees[..., None, None], -torch.inf).exp()
    weights = torch.einsum("bign,bjgn->bijg", c, tokens.b)[..., None] * fade * tokens.dt[:, None]
    y = a.exp()[..., None] * torch.einsum("bign,bgrpn->bigrp", c, state)
    return y + torch.einsum("bijgr,bjgrp->bigrp", weights, tokens.x) + d[..., None] * tokens.x


def ssd_prefill_ref(inputs: SsdInputs, spans: RaggedBatch, out: torch.Tensor | None = None) -> torch.Tensor:
    """Inputs of the tokens of `spans` -> [T, count * dim], in `out` if given, which is contiguous.

    A span that starts at 0 begins without a state, any other with that of its slot. The slot then holds the state after
    the last token.
    """
    xbc, dt, z, heads, memory = inputs
    x, b, c = xbc.split(heads.columns, 1)
    decay, d = decays(heads)
    y = xbc.new_empty(x.shape)
    for start, row, first, stop in zip(spans.starts, spans.rows, spans.offsets, spans.offsets[1:], strict=False):
        state = memory.state[row].float().unflatten(0, decay.shape)[None]
        if start == 0:
            state = torch.zeros_like(state)
        for at in range(first, stop, _CHUNK):
            part = slice(at, min(at + _CHUNK, stop))
            tokens = prepare_tokens(heads, x[None, part], b[None, part], dt[None, part])
            sees = torch.ones(1, len(x[part]), len(x[part]), device=x.device).tril().bool()
            there = c[None, part].float().unflatten(2, (heads.groups, heads.state))
            y[part] = _outputs(state, tokens, there, sees, decay, d)[0].flatten(1)
            state = _advance(state, tokens, decay)
        memory.state[row] = state[0].flatten(0, 1)
    y = gated_group_norm_ref(y, z, *heads.norm, heads.groups)
    return y if out is None else out.copy_(y)


def ssd_verify_ref(inputs: SsdInputs, replay: StateReplay) -> torch.Tensor:
    """Inputs of N rows of each sequence -> [B * N, count * dim].

    What was kept of the last verify goes into the state first; these rows are then pending.
    """
    xbc, dt, z, heads, memory = inputs
    decay, d = decays(heads)
    count, widths = len(replay.rows), (heads.columns[0], heads.columns[1], heads.count)
    order, kept = replay.replayed_rows(memory.pending.shape[1])
    # What is not kept may be anything, NaN too; a step of 0 leaves the state as it is.
    past = memory.pending[replay.rows[:, None], order.where(kept, 0)].where(kept[..., None], 0)
    tokens = prepare_tokens(heads, *past.split(widths, 2))
    tokens = tokens._replace(dt=tokens.dt.where(kept[..., None, None], 0))
    state = _advance(memory.state[replay.rows].float().unflatten(1, decay.shape), tokens, decay)
    memory.state[replay.rows] = state.flatten(1, 2).to(memory.state.dtype)

    x, b, c, dt = (part.unflatten(0, (count, -1)) for part in (*xbc.split(heads.columns, 1), dt))
    rows = x.shape[1]
    there = c.float().unflatten(2, (heads.groups, heads.state))
    y = _outputs(state, prepare_tokens(heads, x, b, dt), there, replay.sees(rows), decay, d)
    memory.pending[replay.rows, :rows] = torch.cat([x, b, dt], 2)
    return gated_group_norm_ref(y.flatten(2).flatten(0, 1).to(z.dtype), z, *heads.norm, heads.groups)


def decays(heads: SsdHeads) -> tuple[torch.Tensor, torch.Tensor]:
    """A and D, [G, R] each."""
    return -exp(heads.a_log).unflatten(0, (heads.groups, -1)), heads.d.unflatten(0, (heads.groups, -1))


ssd_prefill = op(
    ssd_prefill_ref,
    "specbatch.kernels.recurrent.mamba2_triton:ssd_prefill",
    "specbatch.kernels.recurrent.row_by_row:ssd_prefill",
    "specbatch.kernels.recurrent.row_by_row_triton:ssd_prefill",
)
ssd_verify = op(
    ssd_verify_ref,
    "specbatch.kernels.recurrent.mamba2_triton:ssd_verify",
    "specbatch.kernels.recurrent.row_by_row:ssd_verify",
    "specbatch.kernels.recurrent.row_by_row_triton:ssd_verify",
)
