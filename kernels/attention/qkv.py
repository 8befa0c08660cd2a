"""Splits the output of the qkv GEMM into heads, applies q/k RMSNorm and RoPE, and writes keys and values or latents."""

from __future__ import annotations

import torch

from specbatch.kernels.attention.paged_attention import write_kv_ref
from specbatch.kernels.attention.queries import AttentionInputs, LatentLayout, QKVLayout
from specbatch.kernels.attention.stored_kv import from_stored, to_stored
from specbatch.kernels.dispatch import op
from specbatch.kernels.elementwise.norm import rms_norm_ref
from specbatch.kernels.elementwise.rope import apply_rope_ref


def split_qkv_ref(qkv: torch.Tensor, heads: QKVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """qkv [T, (count + 2 kv) * dim] -> q and k [T, count + kv, dim], normalised (where the model does), v [T, kv, dim].
    With shared keys, kv is 0 here."""
    rows = qkv.view(-1, heads.count + 2 * heads.own_kv, heads.dim)
    qk, v = rows[:, : heads.count + heads.own_kv], rows[:, heads.count + heads.own_kv :]
    if heads.q_norm is not None and heads.k_norm is not None:
        q, k = qk[:, : heads.count], qk[:, heads.count :]
        qk = torch.cat([rms_norm_ref(q, heads.q_norm, heads.eps), rms_norm_ref(k, heads.k_norm, heads.eps)], 1)
    return qk, v


def split_qkv_rope_ref(
    qkv: torch.Tensor, heads: QKVLayout, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_qkv_ref` at `positions` int64 [T] -> q [T, count, dim], rotated as k [T, kv, dim], and v [T, kv, dim]."""
    qk, v = split_qkv_ref(qkv, heads)
    qk = apply_rope_ref(qk, heads.cos[positions][:, None], heads.sin[positions][:, None])
    return qk[:, : heads.count], qk[:, heads.count :], v


def split_qkv_rope_write_ref(
    inputs: AttentionInputs, slots: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_qkv_rope_ref`; k and v, if they are not shared, are also written to flat `slots` int64 [T] of the caches,
    and returned as they are read from there: attention that takes them in place of the caches' computes the same.

    q and k are written to the memory of `out`, if given; v is a view of the input. With shared keys, only q is.
    """
    qkv, heads, positions, k_cache, v_cache, *scales = inputs
    q, k, v = split_qkv_rope_ref(qkv, heads, positions)
    if heads.shared:
        return (q if out is None else out[0].copy_(q)), k, v
    if heads.k_offset is not None:
        k = k.float() - heads.k_offset
    write_kv_ref(k, v, k_cache, v_cache, slots, *scales)
    if k_cache.dtype != qkv.dtype or heads.k_offset is not None:
        k, rounded = (
            from_stored(to_stored(x, k_cache.dtype, scale), qkv.dtype, scale)
            for x, scale in zip((k, v), scales, strict=True)
        )
        v.copy_(rounded)
    return (q, k, v) if out is None else (out[0].copy_(q), out[1].copy_(k), v)


split_qkv_rope = op(split_qkv_rope_write_ref, "specbatch.kernels.attention.qkv_triton:split_qkv_rope")


def split_latent_ref(
    projected: torch.Tensor, heads: LatentLayout, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """projected [T, (count + 1) * dim] at `positions` int64 [T] -> rotated queries [T, count, dim], the rotated part of
    keys [T, 1, dim - rank], latents [T, 1, rank]."""
    latents, turning = projected.view(-1, heads.count + 1, heads.dim).split([heads.rank, heads.dim - heads.rank], -1)
    pairs = turning.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if heads.interleaved else turning
    turned = apply_rope_ref(pairs, heads.cos[positions][:, None], heads.sin[positions][:, None])
    if heads.interleaved:
        turned = turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat([latents[:, :-1], turned[:, :-1]], -1), turned[:, -1:], latents[:, -1:]


def write_latent_ref(inputs: AttentionInputs, slots: torch.Tensor) -> torch.Tensor:
    """`split_latent_ref`; keys and latents are written to flat `slots` int64 [T] of the caches. Returns the queries;
    the memory of `projected` may be used up."""
    projected, heads, positions, k_cache, v_cache, *scales = inputs
    assert isinstance(heads, LatentLayout)
    queries, key, latent = split_latent_ref(projected, heads, positions)
    write_kv_ref(key, latent, k_cache, v_cache, slots, *scales)
    return queries


write_latent = op(write_latent_ref, "specbatch.kernels.attention.qkv_triton:write_latent")


def write_keys(inputs: AttentionInputs, slots: torch.Tensor) -> torch.Tensor:
    """Write what later queries need of these tokens to `slots` int64 [T] of the caches. Returns their own queries,
    rotated, [T, count, dim]."""
    if isinstance(inputs.heads, LatentLayout):
        return write_latent(inputs, slots)
    return split_qkv_rope(inputs, slots)[0]
