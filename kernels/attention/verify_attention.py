"""Attention of a few new tokens per sequence over the paged KV cache: decoding (one token) and verification.

q/k RMSNorm, RoPE, the write of the new keys and values to their pages, and attention: from the output of the qkv GEMM
to the input of the output projection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch

from specbatch.kernels.attention.paged_attention import (
    attention_bias,
    attention_mask,
    paged_attention_ref,
    write_kv_ref,
)
from specbatch.kernels.attention.qkv import QKVLayout, split_qkv_rope_ref
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.dispatch import op, runs_kernels


class Mask(NamedTuple):
    """Which keys the queries of a decode pass see in one layer: all keys from before the pass, and of the pass itself
    those up to their own, or all if not `causal`. With a `window`, only keys less than that many positions back."""

    causal: bool = True
    window: int | None = None


class DecodeQueries(NamedTuple):
    """The new tokens of a decode pass, `num_queries` for each of B sequences.

    page_table int64 [R, P] of all slots; rows int64 [B]: the slot of each sequence (0: padding); lengths int64 [B]: KV
    length before the pass; bound: no KV is longer than this after the pass. Query i is stored at key lengths + i.
    ancestors int64 [B, num_queries], for a tree: bit j of a query's word is set if it sees key lengths + j. first:
    nodes of the tree that earlier passes left in the cache; query i is then stored at key lengths + first + i.
    """

    page_table: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    num_queries: int
    page_size: int
    bound: int
    ancestors: torch.Tensor | None = None
    first: int = 0


class DecodeAttention(Protocol):
    """Attention of one decode pass, for all layers of a model."""

    def __call__(
        self,
        qkv: torch.Tensor,
        heads: QKVLayout,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        mask: Mask,
    ) -> torch.Tensor:
        """qkv [T, (count + 2 kv) * dim] for T = B * num_queries, at `positions` int64 [T]; one layer's caches [pages,
        page_size, kv, dim] -> [T, count * dim]. A tree ignores the mask."""
        ...


def decode_attention(queries: DecodeQueries, masks: Iterable[Mask], group: int, dtype: torch.dtype) -> DecodeAttention:
    """Prepare the attention of a pass once for all of its layers, whose masks are `masks`.

    group: query heads per KV head; dtype: of the activations.
    """
    return _DecodeKernel(queries) if runs_kernels(queries.lengths) else _DecodeRef(queries, masks, group, dtype)


class _DecodeKernel:
    def __init__(self, queries: DecodeQueries) -> None:
        self._queries = queries

    def __call__(
        self,
        qkv: torch.Tensor,
        heads: QKVLayout,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        mask: Mask,
    ) -> torch.Tensor:
        queries = self._queries
        sequences = (queries.page_table, queries.rows, queries.lengths, queries.num_queries)
        if queries.ancestors is None:  # positions follow from the lengths
            causal, window = mask
            return verify_attention(qkv, heads, k_cache, v_cache, *sequences, causal=causal, window=window)
        ancestors, first = queries.ancestors, queries.first
        return verify_attention(
            qkv, heads, k_cache, v_cache, *sequences, positions=positions, ancestors=ancestors, first=first
        )


class _DecodeRef:
    """The mask and the slots are the same for all layers and are computed once."""

    def __init__(self, queries: DecodeQueries, masks: Iterable[Mask], group: int, dtype: torch.dtype) -> None:
        size, count, lengths = queries.page_size, queries.num_queries, queries.lengths
        pages = -(-queries.bound // size)
        self._table = queries.page_table[queries.rows, :pages]
        keys = lengths[:, None] + queries.first + torch.arange(count, device=lengths.device)
        sequence = torch.arange(len(lengths), device=lengths.device)[:, None]
        self._slots = kv_slots(self._table, sequence, keys, size).flatten()
        tree = (queries.ancestors, queries.first)

        def bias(mask: Mask) -> torch.Tensor:
            seen = attention_mask(lengths, count, pages * size, *tree, causal=mask.causal, window=mask.window)
            return attention_bias(seen, group, dtype)

        self._biases = {mask: bias(mask) for mask in set(masks)}
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
        q, k, v = split_qkv_rope_ref(qkv, heads, positions)
        write_kv_ref(k, v, k_cache, v_cache, self._slots)
        rows = q.unflatten(0, (-1, self._count))
        return paged_attention_ref(rows, k_cache, v_cache, self._table, self._biases[mask]).flatten(0, 1).flatten(1)


def verify_attention_ref(
    qkv: torch.Tensor,
    heads: QKVLayout,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    n: int,
    *,
    positions: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
    first: int = 0,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of n new rows per sequence over its pages and themselves; their K and V are written to the cache.

    qkv [B * n, (count + 2 kv) * dim] in the model's type; caches [pages, page_size, kv, dim] in the model's type or
    float8_e4m3fn (a plain cast); page_table int64 [R, P] of all device rows; rows int64 [B], the device row of each
    sequence (0: padding); lengths int64 [B], the KV length before. Row i is stored at key lengths + i and has that
    position too, unless `positions` int64 [B * n] gives another (a tree: its depth). Row i sees all old keys, and of
    the new ones those up to itself, or the bits of `ancestors` int64 [B, n], or with `causal` false all. With
    `window` a row sees only keys after lengths + i - window. Keys beyond the P pages are not stored.
    first: nodes of a tree that earlier passes left in the cache. Row i is then stored at key lengths + first + i, and
    bit j of `ancestors`, which must be given, is key lengths + j.
    Returns [B * n, count * dim].
    """
    batch, page_size = lengths.shape[0], k_cache.shape[1]
    chain = lengths[:, None] + first + torch.arange(n, device=qkv.device)
    q, k, v = split_qkv_rope_ref(qkv, heads, chain.flatten() if positions is None else positions)
    table = page_table[rows]
    slots = kv_slots(page_table, rows[:, None], chain, page_size)
    bits = torch.uint8 if k_cache.itemsize == 1 else k_cache.dtype  # torch copies no rows of float8
    k, v = k.to(k_cache.dtype).view(bits), v.to(v_cache.dtype).view(bits)
    write_kv_ref(k, v, k_cache.view(bits), v_cache.view(bits), slots.flatten())
    keys = table.shape[1] * page_size
    seen = attention_mask(lengths, n, keys, ancestors, first, causal=causal, window=window)
    bias = attention_bias(seen, heads.count // heads.kv, qkv.dtype)
    q = q.reshape(batch, n, heads.count, heads.dim)
    out = paged_attention_ref(q, k_cache.to(qkv.dtype), v_cache.to(qkv.dtype), table, bias)
    return out.reshape(qkv.shape[0], -1)


verify_attention = op(verify_attention_ref, "specbatch.kernels.attention.verify_attention_triton:verify_attention")
