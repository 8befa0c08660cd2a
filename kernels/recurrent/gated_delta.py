"""The gated delta rule (Qwen3-Next, Qwen3.5): from the convolved [q | k | v] to the normalized and gated heads.

Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024). For each value head, with keys of length one:

    S <- exp(g) S;  u = beta (v - k^T S);  S <- S + k u^T;  o = q^T S

Rows that build on one state S0 are computed together (Yang et al., "Parallelizing Linear Transformers with the Delta
Rule", 2024). G_i is the sum of g over row i and the rows before it, D_ij = exp(G_i - G_j) where i sees j, else 0:

    u = (I + A)^-1 (beta (v - e^G (k S0))),   A_ij = beta_i (k_i . k_j) D_ij for j != i
    o = e^G (q S0) + (q k^T D) u

"Before" is the order of a prompt's chunk or that of a verify's chain, or a tree's ancestors. The state after some rows
of a path is e^G S0 + sum e^(G - G_i) k_i u_i^T with G their sum: k, u and g of a verify are kept for that.

Inputs may be columns of wider GEMM outputs (any row stride), states and pending inputs one layer of a pool (any stride
between device rows). Arithmetic is float32.
"""

from __future__ import annotations

import torch

from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.common.rowwise import exp, row_sum, sigmoid, silu, softplus
from specbatch.kernels.dispatch import op
from specbatch.kernels.recurrent.inputs import CHUNK, DeltaHeads, DeltaInputs, Pending
from specbatch.kernels.recurrent.state_replay import StateReplay


def delta_prefill_ref(inputs: DeltaInputs, spans: RaggedBatch, out: torch.Tensor | None = None) -> torch.Tensor:
    """Inputs of the tokens of `spans` -> [T, values * value_dim], what the output projection reads; in `out` if given,
    which is contiguous.

    The state is read where a span continues from one, then set to that after the last token of the span.
    """
    qkv, z, b, a, heads, state = inputs
    q, k, v, g, beta = (x.transpose(0, 1) for x in split_inputs(qkv, b, a, heads))
    o = torch.empty_like(v)
    for begin, end, start, row in zip(spans.offsets, spans.offsets[1:], spans.starts, spans.rows, strict=False):
        s = state[row].float() if start else torch.zeros_like(state[row], dtype=torch.float32)
        for first in range(begin, end, CHUNK):
            chunk = slice(first, min(first + CHUNK, end))
            sees = torch.ones(chunk.stop - first, chunk.stop - first, dtype=torch.bool, device=qkv.device).tril()
            o[:, chunk], u = _together(q[:, chunk], k[:, chunk], v[:, chunk], g[:, chunk], beta[:, chunk], s, sees)
            s = _state_after(s, k[:, chunk], u, g[:, chunk])
        state[row] = s
    y = gated_rms_norm_ref(o.transpose(0, 1).to(qkv.dtype), z, heads)
    return y if out is None else out.copy_(y)


def delta_verify_ref(inputs: DeltaInputs, pending: Pending, replay: StateReplay) -> torch.Tensor:
    """`delta_prefill_ref` for B * N rows of a verify, after the accepted rows of the last one.

    The state takes those in; pending, of M >= N rows, then holds the rows of this verify. Device row 0 is left alone.
    """
    qkv, z, b, a, heads, state = inputs
    batch, rows = len(replay.rows), replay.rows[:, None]
    q, k, v, g, beta = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in split_inputs(qkv, b, a, heads))
    count = q.shape[2]
    order, there = replay.replayed_rows(pending.k.shape[1])
    order = order.where(there, 0)
    old = (item[rows, order].float() for item in pending)
    old_k, old_u, old_g = (x.where(there.view(*there.shape, *[1] * (x.ndim - 2)), 0).transpose(1, 2) for x in old)
    s = _state_after(state[replay.rows].float(), old_k.repeat_interleave(heads.values // heads.keys, 1), old_u, old_g)
    o, u = _together(q, k, v, g, beta, s, replay.sees(count)[:, None])
    real = replay.rows != 0
    kept = replay.rows[real]
    state[kept] = s[real].to(state.dtype)
    for item, new in zip(pending, (k[:, :: heads.values // heads.keys], u, g), strict=True):
        item[kept, :count] = new[real].transpose(1, 2).to(item.dtype)
    return gated_rms_norm_ref(o.transpose(1, 2).flatten(0, 1).to(qkv.dtype), z, heads)


def gated_rms_norm_ref(o: torch.Tensor, z: torch.Tensor, heads: DeltaHeads) -> torch.Tensor:
    """o [T, values, value_dim], z [T, values * value_dim] -> norm(o) * silu(z) [T, values * value_dim].

    Normalised in float32, cast, multiplied by the weight in the type of o, gated in float32 and cast.
    """
    wide = o.float()
    scale = torch.rsqrt(row_sum(wide.square())[..., None] / wide.shape[-1] + heads.eps)
    normal = (wide * scale).to(o.dtype) * heads.norm
    return (normal.flatten(1).float() * silu(z.float())).to(o.dtype)


def split_inputs(qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, heads: DeltaHeads) -> tuple[torch.Tensor, ...]:
    """q, k [T, values, key_dim], v [T, values, value_dim], g and beta [T, values], float32."""
    key = heads.keys * heads.key_dim
    q, k, v = qkv.float().split([key, key, heads.values * heads.value_dim], 1)
    q, k = (x.unflatten(1, (heads.keys, -1)) for x in (q, k))
    q, k = (x * torch.rsqrt(row_sum(x.square())[..., None] + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(heads.values // heads.keys, 1) for x in (q * heads.key_dim**-0.5, k))
    g = -exp(heads.a_log) * softplus(a.float() + heads.dt_bias)
    return q, k, v.unflatten(1, (heads.values, -1)), g, sigmoid(b.float())


def _together(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    s: torch.Tensor,
    sees: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and u [.., n, value_dim] of n rows on the state s [.., key_dim, value_dim]; sees bool [.., n, n]; q, k, v [..,
    n, dim]; g, beta [.., n]."""
    total = (sees.float() @ g[..., None])[..., 0]
    decay = (total[..., :, None] - total[..., None, :]).where(sees, -torch.inf).exp()
    lower = (beta[..., None] * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    fade = total.exp()[..., None]
    u = torch.linalg.solve_triangular(lower, beta[..., None] * (v - fade * (k @ s)), upper=False, unitriangular=True)
    return fade * (q @ s) + (q @ k.transpose(-1, -2) * decay) @ u, u


def _state_after(s: torch.Tensor, k: torch.Tensor, u: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The state after a path of n rows on s: k, u [.., n, dim], g [.., n]."""
    total = g.cumsum(-1)
    later = (total[..., -1:] - total).exp()[..., None]
    return total[..., -1, None, None].exp() * s + (k * later).transpose(-1, -2) @ u


delta_prefill = op(
    delta_prefill_ref,
    "specbatch.kernels.recurrent.gated_delta_prefill_triton:delta_prefill",
    "specbatch.kernels.recurrent.row_by_row:delta_prefill",
    "specbatch.kernels.recurrent.row_by_row_triton:delta_prefill",
)
delta_verify = op(
    delta_verify_ref,
    "specbatch.kernels.recurrent.gated_delta_triton:delta_verify",
    "specbatch.kernels.recurrent.row_by_row:delta_verify",
    "specbatch.kernels.recurrent.row_by_row_triton:delta_verify",
)
