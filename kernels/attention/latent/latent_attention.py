"""Multi-head latent attention (MLA) over a paged cache of latents, absorbed: one KV head for all query heads.

A token's keys and values of all heads are linear functions of its latent. Their matrices are applied to the queries
and to the output instead, so that attention reads latents alone: a key is [latent, rotated part] and its value is the
latent (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1). The rotated part of keys is in the cache of keys, the latent in
that of values: rank + rope numbers a token.

Prompts are computed alike. Keys and values of all heads would take fewer operations per score, but memory for each head
of each token, and chunks and cached prefixes would have to be expanded again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from specbatch.kernels.attention.paged_attention import attention_bias
from specbatch.kernels.attention.qkv import write_latent_ref
from specbatch.kernels.attention.queries import (
    AttentionInputs,
    DecodeAttention,
    DecodeQueries,
    LatentLayout,
    Mask,
)
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.attention.stored_kv import gather_stored
from specbatch.kernels.attention.verify.verify_attention import DecodeAttentionRef, wrap_packed_rows
from specbatch.kernels.dispatch import is_deterministic, op, runs_kernels


def _attend(q: torch.Tensor, inputs: AttentionInputs, pages: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """q [B, rows, heads, dim] of `inputs`, whose keys are written; pages [B, P]; bias from `attention_bias` over the
    first of their keys. Returns [B, rows, heads, rank]."""
    assert isinstance(inputs.heads, LatentLayout)
    batch, rows, heads, _ = q.shape
    turned, latent = (
        gather_stored(cache, pages.flatten(), q.dtype, scale)
        .view(batch, -1, 1, cache.shape[-1])
        .transpose(1, 2)[:, :, : bias.shape[-1]]
        for cache, scale in ((inputs.k_cache, inputs.k_scale), (inputs.v_cache, inputs.v_scale))
    )
    packed, keys = q.transpose(1, 2).flatten(1, 2)[:, None], torch.cat([latent, turned], -1)
    out = F.scaled_dot_product_attention(packed, keys, latent, attn_mask=bias, scale=inputs.heads.scale)
    return out.view(batch, heads, rows, -1).transpose(1, 2)


class LatentDecodeRef(DecodeAttentionRef):
    """The torch reference for latents; its passes are causal."""

    def __call__(self, inputs: AttentionInputs, mask: Mask) -> torch.Tensor:
        """As `DecodeAttentionRef.__call__` -> [T, count * rank]."""
        rows = write_latent_ref(inputs, self._slots).unflatten(0, (-1, self._count))
        return _attend(rows, inputs, self._table, self._bias(inputs, mask)).flatten(0, 1).flatten(1)


def latent_decode_attention(queries: DecodeQueries) -> DecodeAttention:
    """`decode_attention` for latents."""
    attention: DecodeAttention
    if runs_kernels(queries.lengths):
        from specbatch.kernels.attention.deterministic import span_latents_triton
        from specbatch.kernels.attention.latent import latent_attention_triton

        if is_deterministic():
            attention = span_latents_triton.span_latent_verify(queries)
        else:
            slots = latent_attention_triton.token_slots(queries)
            whole = replace(queries, packed=None)  # what `wrap_packed_rows` makes of them
            attention = partial(latent_attention_triton.latent_verify, whole, slots, works={})
    elif is_deterministic():
        from specbatch.kernels.attention.deterministic.span_attention import SpanDecodeAttention

        attention = SpanDecodeAttention(queries)
    else:
        attention = LatentDecodeRef(queries)
    return wrap_packed_rows(attention, queries)


def latent_prefill_ref(inputs: AttentionInputs, slots: torch.Tensor, spans: RaggedBatch) -> torch.Tensor:
    """Causal attention of prompt chunks: `write_latent_ref`, then attention to the latents of each of `spans` -> [T,
    count * rank]."""
    q, parts = write_latent_ref(inputs, slots), list[torch.Tensor]()
    for rows, row, start, end in zip(q.split(spans.counts), spans.rows, spans.starts, spans.ends, strict=True):
        pages = spans.page_table[row, : -(-end // spans.page_size)]
        mask = torch.ones(len(rows), end, dtype=torch.bool, device=q.device).tril(start)
        bias = attention_bias(mask[None], inputs.heads.count, q.dtype)
        parts.append(_attend(rows[None], inputs, pages[None], bias)[0])
    return torch.cat(parts).flatten(1)


latent_prefill = op(
    latent_prefill_ref,
    "specbatch.kernels.attention.latent.latent_attention_triton:latent_prefill",
    deterministic="specbatch.kernels.attention.deterministic.span_attention:span_latent_prefill",
    deterministic_kernel="specbatch.kernels.attention.deterministic.span_latents_triton:span_latent_prefill",
)
