"""Multi-head latent attention (MLA) over a paged cache of latents, absorbed: one KV head for all query heads.

A token's keys and values of all heads are linear functions of its latent. Their matrices are applied to the queries
and to the output instead, so that attention reads latents alone: a key is [latent, rotated part] and its value is the
latent (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1). The rotated part of keys is in the cache of keys, the latent in
that of values: rank + rope numbers a token.

Prompts are computed alike. Keys and values of all heads would take fewer operations per score, but memory for each head
of each token, and chunks and cached prefixes would have to be expanded again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from specbatch.kernels.attention.paged_attention import attention_bias, write_kv_ref
from specbatch.kernels.attention.qkv import QKVLayout, split_qkv_rope
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.attention.verify.verify_attention import (
    DecodeAttention,
    DecodeAttentionRef,
    DecodeQueries,
    Mask,
    of_packed_rows,
)
from specbatch.kernels.dispatch import is_deterministic, op, runs_kernels
from specbatch.kernels.elementwise.rope import apply_rope_ref


@dataclass(frozen=True, kw_only=True)
class LatentLayout(QKVLayout):
    """How a row of projected inputs splits: `count` queries and one key of `dim` numbers each, which are `rank` of the
    latent and then those that rope rotates, by cos and sin [positions, dim - rank].

    scale: of the scores. interleaved: rope pairs channels 2i and 2i + 1, not i and i + half; they stay where they are.
    """

    rank: int
    scale: float
    interleaved: bool

    @property
    def width(self) -> int:
        """Of a row."""
        return (self.count + 1) * self.dim


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


def write_latent_ref(
    projected: torch.Tensor,
    heads: LatentLayout,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """`split_latent_ref`; keys and latents are written to flat `slots` int64 [T] of one layer's caches [pages,
    page_size, 1, dim - rank] and [pages, page_size, 1, rank]. Returns the queries; the memory of `projected` may be
    used up."""
    queries, key, latent = split_latent_ref(projected, heads, positions)
    if k_cache.dtype == projected.dtype:
        write_kv_ref(key, latent, k_cache, v_cache, slots)
    else:  # torch copies no rows of FP8
        key, latent, keys, values = (x.to(k_cache.dtype).view(torch.uint8) for x in (key, latent, k_cache, v_cache))
        write_kv_ref(key, latent, keys, values, slots)
    return queries


write_latent = op(write_latent_ref, "specbatch.kernels.attention.latent.latent_attention_triton:write_latent")


def write_keys(
    projected: torch.Tensor,
    heads: QKVLayout,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Write what later queries need of these tokens to `slots` int64 [T] of one layer's caches. Returns their own
    queries, rotated, [T, count, dim]."""
    if isinstance(heads, LatentLayout):
        return write_latent(projected, heads, positions, slots, k_cache, v_cache)
    return split_qkv_rope(projected, heads, positions, slots, k_cache, v_cache)[0]


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [B, rows, heads, dim]; pages [B, P]; bias from `attention_bias` over the first of their keys.

    Returns [B, rows, heads, rank]."""
    batch, rows, heads, _ = q.shape
    keys = bias.shape[-1]
    turned, latent = (
        cache[pages].flatten(1, 2).transpose(1, 2)[:, :, :keys].to(q.dtype) for cache in (k_cache, v_cache)
    )
    packed = q.transpose(1, 2).flatten(1, 2)[:, None]
    out = F.scaled_dot_product_attention(packed, torch.cat([latent, turned], -1), latent, attn_mask=bias, scale=scale)
    return out.view(batch, heads, rows, -1).transpose(1, 2)


class LatentDecodeRef(DecodeAttentionRef):
    """The torch reference for latents; its passes are causal."""

    def __call__(
        self,
        qkv: torch.Tensor,
        heads: QKVLayout,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        mask: Mask,
    ) -> torch.Tensor:
        """As `DecodeAttentionRef.__call__`; qkv [T, (count + 1) * dim] -> [T, count * rank]."""
        assert isinstance(heads, LatentLayout)
        q = write_latent_ref(qkv, heads, positions, self._slots, k_cache, v_cache)
        rows = q.unflatten(0, (-1, self._count))
        return _attend(rows, k_cache, v_cache, self._table, self._bias(mask), heads.scale).flatten(0, 1).flatten(1)


def latent_decode_attention(queries: DecodeQueries, group: int, dtype: torch.dtype) -> DecodeAttention:
    """`decode_attention` for latents; group: number of heads."""
    attention: DecodeAttention
    if runs_kernels(queries.lengths):
        from specbatch.kernels.attention.deterministic import span_latents_triton
        from specbatch.kernels.attention.latent import latent_attention_triton

        if is_deterministic():
            attention = span_latents_triton.span_latent_verify(queries)
        else:
            slots = latent_attention_triton.slots_of(queries)
            attention = partial(latent_attention_triton.latent_verify, queries, slots)
    elif is_deterministic():
        from specbatch.kernels.attention.deterministic.span_attention import SpanDecodeAttention

        attention = SpanDecodeAttention(queries)
    else:
        attention = LatentDecodeRef(queries, group, dtype)
    return of_packed_rows(attention, queries)


def latent_prefill_ref(
    projected: torch.Tensor,
    heads: LatentLayout,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    spans: RaggedBatch,
) -> torch.Tensor:
    """Causal attention of prompt chunks: `write_latent_ref` of projected [T, (count + 1) * dim], then attention to the
    latents of each of `spans` -> [T, count * rank]."""
    q, parts = write_latent_ref(projected, heads, positions, slots, k_cache, v_cache), list[torch.Tensor]()
    for rows, row, start, end in zip(q.split(spans.counts), spans.rows, spans.starts, spans.ends, strict=True):
        pages = spans.page_table[row, : -(-end // spans.page_size)]
        mask = torch.ones(len(rows), end, dtype=torch.bool, device=q.device).tril(start)
        bias = attention_bias(mask[None], heads.count, q.dtype)
        parts.append(_attend(rows[None], k_cache, v_cache, pages[None], bias, heads.scale)[0])
    return torch.cat(parts).flatten(1)


latent_prefill = op(
    latent_prefill_ref,
    "specbatch.kernels.attention.latent.latent_attention_triton:latent_prefill",
    deterministic="specbatch.kernels.attention.deterministic.span_attention:span_latent_prefill",
    deterministic_kernel="specbatch.kernels.attention.deterministic.span_latents_triton:span_latent_prefill",
)
