"""Torch references: split the output of the qkv GEMM into heads, apply q/k RMSNorm and RoPE, write K and V."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbatch.kernels.attention.paged_attention import write_kv_ref
from specbatch.kernels.dispatch import op
from specbatch.kernels.elementwise.norm import rms_norm_ref
from specbatch.kernels.elementwise.rope import apply_rope_ref


@dataclass(frozen=True)
class QKVLayout:
    """How a row of qkv splits: `count` query heads, `kv` key heads and `kv` value heads of `dim` each.

    q_norm, k_norm: RMSNorm weights [dim] with `eps`, or both None; cos, sin: tables [positions, dim] of `rope_table`,
    in the model's type. window: a query sees that many keys, itself included; None is all. sinks: float32 [count], the
    logit of each query head's attention sink, which is in the softmax's denominator and has no value (Xiao et al.,
    2023; gpt-oss); None is none. shared: rows have query heads only. The keys and values are those of an earlier layer,
    which has written them to the cache, also those of this pass; k_norm is not used.
    """

    count: int
    kv: int
    dim: int
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    window: int | None = None
    sinks: torch.Tensor | None = None
    shared: bool = False

    @property
    def own_kv(self) -> int:
        """Key heads in a row of qkv, and as many value heads."""
        return 0 if self.shared else self.kv


def split_qkv_rope_ref(
    qkv: torch.Tensor, heads: QKVLayout, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [T, (count + 2 kv) * dim] at `positions` int64 [T] -> q [T, count, dim], k and v [T, kv, dim].

    q and k are normalised (where the model does) and rotated. With shared keys, kv is 0 here.
    """
    rows = qkv.view(-1, heads.count + 2 * heads.own_kv, heads.dim)
    qk, v = rows[:, : heads.count + heads.own_kv], rows[:, heads.count + heads.own_kv :]
    if heads.q_norm is not None and heads.k_norm is not None:
        q, k = qk[:, : heads.count], qk[:, heads.count :]
        qk = torch.cat([rms_norm_ref(q, heads.q_norm, heads.eps), rms_norm_ref(k, heads.k_norm, heads.eps)], 1)
    qk = apply_rope_ref(qk, heads.cos[positions][:, None], heads.sin[positions][:, None])
    return qk[:, : heads.count], qk[:, heads.count :], v


def split_qkv_rope_write_ref(
    qkv: torch.Tensor,
    heads: QKVLayout,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_qkv_rope_ref`; k and v, if they are not shared, are also written to flat `slots` int64 [T] of one layer's
    cache.

    q and k are written to the memory of `out`, if given; v is a view of qkv. With shared keys, only q is.
    """
    q, k, v = split_qkv_rope_ref(qkv, heads, positions)
    if heads.shared:
        return (q if out is None else out[0].copy_(q)), k, v
    write_kv_ref(k, v, k_cache, v_cache, slots)
    return (q, k, v) if out is None else (out[0].copy_(q), out[1].copy_(k), v)


split_qkv_rope = op(split_qkv_rope_write_ref, "specbatch.kernels.attention.qkv_triton:split_qkv_rope")
