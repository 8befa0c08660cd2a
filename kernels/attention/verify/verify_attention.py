"""Attention of a few new tokens per sequence over the paged KV cache: decoding (one token) and verification.

q/k RMSNorm, RoPE, the write of the new keys and values to their pages, and attention: from the output of the qkv GEMM
to the input of the output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch

from specbatch.kernels.attention.paged_attention import (
    attention_bias,
    attention_mask,
    paged_attention_ref,
    write_kv_ref,
)
from specbatch.kernels.attention.qkv import QKVLayout, split_qkv_rope_ref
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.common.packed_rows import PackedRows
from specbatch.kernels.dispatch import is_deterministic, runs_kernels


class Mask(NamedTuple):
    """Which keys the queries of a decode pass see in one layer: all keys from before the pass, and of the pass itself
    those up to their own, or all if not `causal`. With a `window`, only keys less than that many positions back; in a
    tree a node's position is its depth."""

    causal: bool = True
    window: int | None = None


@dataclass(frozen=True)
class DecodeQueries:
    """The tokens of a decode or verify pass, `num_queries` for each of B sequences (1 is plain decoding).

    page_table   int64 [R, P], of all slots
    slots        int64 [B]: the slot of each sequence, 0 for padding
    lengths      int64 [B]: KV length before the pass. Query i is stored at key lengths + i, which in a chain is its
                 position too. Keys beyond the P pages are not stored
    bound        no KV is longer than this after the pass (None: as long as the page table allows)
    ancestors    int64 [B, num_queries], for a tree: bit j of a query's word is set if it sees key lengths + j
    first_node   a tree may be computed in several passes: so many of its nodes are in the cache already, and query i is
                 stored at key lengths + first_node + i
    packed       of a verify with chains of different lengths, the rows that it has: at most `num_queries` for each
                 sequence, R in all; None: all. The cache holds no valid keys for the other queries
    """

    page_table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    num_queries: int
    page_size: int
    bound: int | None = None
    ancestors: torch.Tensor | None = None
    first_node: int = 0
    packed: PackedRows | None = None


# Attention of a pass in one layer, with the arguments of `DecodeAttentionRef.__call__`. Of packed rows T is R.
DecodeAttention = Callable[
    [torch.Tensor, QKVLayout, torch.Tensor, torch.Tensor, torch.Tensor, Mask],
    torch.Tensor,
]


def decode_attention(
    queries: DecodeQueries, masks: Collection[Mask], group: int, dtype: torch.dtype
) -> DecodeAttention:
    """Prepare the attention of a pass once for all of its layers, whose masks are `masks`.

    group: query heads per KV head; dtype: of the activations.
    """
    attention: DecodeAttention
    if runs_kernels(queries.lengths):
        from specbatch.kernels.attention.deterministic import span_attention_triton
        from specbatch.kernels.attention.verify import verify_attention_triton

        # All else are drafts, which change no result.
        if not (is_deterministic() and all(mask.causal for mask in masks)):
            return partial(verify_attention_triton.verify_attention, queries)
        attention = span_attention_triton.decode_attention(queries)
    elif is_deterministic():
        from specbatch.kernels.attention.deterministic.span_attention import SpanDecodeAttention

        attention = SpanDecodeAttention(queries)
    else:
        attention = DecodeAttentionRef(queries, group, dtype)
    return of_packed_rows(attention, queries)


def of_packed_rows(attention: DecodeAttention, queries: DecodeQueries) -> DecodeAttention:
    """For `queries` that may have packed rows, an attention that cannot read them: its input is spread over the
    rectangle of all queries, and its output is packed."""
    packed = queries.packed
    if packed is None:
        return attention
    place = torch.arange(queries.num_queries, device=queries.lengths.device)
    whole = (queries.lengths[:, None] + place).flatten()

    return lambda qkv, heads, _, *more: packed.pack(attention(packed.spread(qkv), heads, whole, *more))


class DecodeAttentionRef:
    """The torch reference. The slots are computed once for all layers, as is each mask."""

    def __init__(self, queries: DecodeQueries, group: int, dtype: torch.dtype) -> None:
        size, count, lengths, first = queries.page_size, queries.num_queries, queries.lengths, queries.first_node
        pages = queries.page_table.shape[1] if queries.bound is None else -(-queries.bound // size)
        self._table = queries.page_table[queries.slots, :pages]
        keys = lengths[:, None] + first + torch.arange(count, device=lengths.device)
        sequence = torch.arange(len(lengths), device=lengths.device)[:, None]
        self._slots = kv_slots(self._table, sequence, keys, size).flatten()

        @cache
        def bias(mask: Mask) -> torch.Tensor:
            seen = attention_mask(lengths, count, pages * size, queries.ancestors, first, mask.causal, mask.window)
            return attention_bias(seen, group, dtype)

        self._bias = bias
        self._count = count

    def __call__(
        self,
        qkv: torch.Tensor,
        heads: QKVLayout,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        mask: Mask,
    ) -> torch.Tensor:
        """qkv [T, (count + 2 kv) * dim] for T = B * num_queries, in the model's type, at `positions` int64 [T]; one
        layer's caches [pages, page_size, kv, dim], in the model's type or float8_e4m3fn (a plain cast) -> [T, count *
        dim]. With shared keys, qkv is [T, count * dim]. A tree is causal whatever the mask says."""
        q, k, v = split_qkv_rope_ref(qkv, heads, positions)
        if not heads.shared and k_cache.dtype == qkv.dtype:
            write_kv_ref(k, v, k_cache, v_cache, self._slots)
        elif not heads.shared:  # torch copies no rows of FP8
            k, v, keys, values = (x.to(k_cache.dtype).view(torch.uint8) for x in (k, v, k_cache, v_cache))
            write_kv_ref(k, v, keys, values, self._slots)
        k_cache, v_cache = k_cache.to(qkv.dtype), v_cache.to(qkv.dtype)
        rows = q.unflatten(0, (-1, self._count))
        out = paged_attention_ref(rows, k_cache, v_cache, self._table, self._bias(mask), heads.sinks)
        return out.flatten(0, 1).flatten(1)
