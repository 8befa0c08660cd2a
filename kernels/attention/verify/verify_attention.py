"""Attention of a few new tokens per sequence over the paged KV cache: decoding (one token) and verification.

q/k RMSNorm, RoPE, the write of the new keys and values to their pages, and attention: from the output of the qkv GEMM
to the input of the output projection.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache, partial

import torch

from specbatch.kernels.attention.paged_attention import (
    attention_bias,
    attention_mask,
    paged_attention_ref,
)
from specbatch.kernels.attention.qkv import split_qkv_rope_write_ref
from specbatch.kernels.attention.queries import AttentionInputs, DecodeAttention, DecodeQueries, Mask
from specbatch.kernels.common import native
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.dispatch import is_deterministic, runs_kernels


def decode_attention(queries: DecodeQueries, masks: Collection[Mask]) -> DecodeAttention:
    """Prepare the attention of a pass once for all of its layers, whose masks are `masks`."""
    attention: DecodeAttention
    if runs_kernels(queries.lengths):
        from specbatch.kernels.attention.deterministic import span_attention_triton
        from specbatch.kernels.attention.verify import verify_attention_triton

        # All else are drafts, which change no result.
        if not (is_deterministic() and all(mask.causal for mask in masks)):
            return partial(verify_attention_triton.verify_attention, queries, works={})
        attention = span_attention_triton.decode_attention(queries)
    elif is_deterministic():
        from specbatch.kernels.attention.deterministic.span_attention import SpanDecodeAttention

        attention = SpanDecodeAttention(queries)
    else:
        attention = DecodeAttentionRef(queries)
        if queries.lengths.device.type == "cpu" and native.missing() is None:
            from specbatch.kernels.attention.verify.decode_attention_native import NativeDecodeAttention

            attention = NativeDecodeAttention(queries, attention)
    return wrap_packed_rows(attention, queries)


def wrap_packed_rows(attention: DecodeAttention, queries: DecodeQueries) -> DecodeAttention:
    """For `queries` that may have packed rows, an attention that cannot read them: its input is spread over the
    rectangle of all queries, and its output is packed."""
    packed = queries.packed
    if packed is None:
        return attention
    place = torch.arange(queries.num_queries, device=queries.lengths.device)
    whole = (queries.lengths[:, None] + place).flatten()

    def attend(inputs: AttentionInputs, mask: Mask) -> torch.Tensor:
        spread = inputs._replace(projected=packed.spread(inputs.projected), positions=whole)
        return packed.pack(attention(spread, mask))

    return attend


class DecodeAttentionRef:
    """The torch reference. The slots are computed once for all layers, as is each mask."""

    def __init__(self, queries: DecodeQueries) -> None:
        size, count, lengths, first = queries.page_size, queries.num_queries, queries.lengths, queries.first_node
        pages = queries.page_table.shape[1] if queries.bound is None else -(-queries.bound // size)
        self._table = queries.page_table[queries.slots, :pages]
        keys = lengths[:, None] + first + torch.arange(count, device=lengths.device)
        sequence = torch.arange(len(lengths), device=lengths.device)[:, None]
        self._slots = kv_slots(self._table, sequence, keys, size).flatten()

        @cache
        def bias(mask: Mask, group: int, dtype: torch.dtype) -> torch.Tensor:
            seen = attention_mask(lengths, count, pages * size, queries.ancestors, first, mask.causal, mask.window)
            return attention_bias(seen, group, dtype)

        self._cached_bias = bias
        self._count = count

    def _bias(self, inputs: AttentionInputs, mask: Mask) -> torch.Tensor:
        return self._cached_bias(mask, inputs.heads.count // inputs.heads.kv, inputs.projected.dtype)

    def __call__(self, inputs: AttentionInputs, mask: Mask) -> torch.Tensor:
        """inputs of T = B * num_queries tokens -> [T, count * dim]. A tree is causal whatever the mask says."""
        _, heads, _, k_cache, v_cache, *scales = inputs
        q, *_ = split_qkv_rope_write_ref(inputs, self._slots)
        rows = q.unflatten(0, (-1, self._count))
        out = paged_attention_ref(rows, k_cache, v_cache, self._table, self._bias(inputs, mask), heads.sinks, *scales)
        return out.flatten(0, 1).flatten(1)
