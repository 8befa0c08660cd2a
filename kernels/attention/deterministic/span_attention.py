"""Deterministic attention over the paged KV cache, on a CPU: the bits of a query depend on its own keys alone.

Keys are reduced in spans of 64, counted from key 0, and the spans are merged in order. Whether a key was computed in
this pass or read from the cache, as part of a prompt, a chunk or a verify, does not matter: its position decides in
which span and at which place it is added. The scores of a span and its weighted values are two GEMMs of one shape, of
16 queries each, in float32; keys that a query does not see have weight 0, and adding 0 changes no bit. In a tree the
keys of a node are its ancestors, ordered as they would be in a chain. Latents (see `latent_attention`) are keys and
values of one KV head.

The merge is that of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from specbatch.kernels.attention.qkv import write_keys, write_latent_ref
from specbatch.kernels.attention.queries import AttentionInputs, DecodeQueries, LatentLayout, Mask
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.attention.stored_kv import gather_stored
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.common.rowwise import exp, row_sum

SPAN = 64  # keys
QUERIES = 16  # of one GEMM
_AT_ONCE = 128  # rows of a prompt: what their last one does not see is not computed
_ALIGNED = 16  # columns; MKL's bits were found to depend on the place of rows that are aligned differently


def span_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [B, rows, heads, dim]; caches [pages, page_size, kv, dim]; slots int64 [B, keys]: flat slots of keys 0, 1, ...
    of each sequence; begin, end int64 [B, rows]: a query sees keys begin..end - 1, at least one; sinks float32 [heads]:
    see `QKVLayout`, added last. scale: of the scores, dim**-0.5 if None. Where v_cache holds latents [pages, page_size,
    1, rank] and k_cache the rotated part of keys, a key is [latent, rotated part]. k_scale, v_scale: see
    `AttentionInputs`.

    Returns [B, rows, heads, dim], of latents rank in place of dim.
    """
    rows, heads, dim = q.shape[1:]
    kv, width = v_cache.shape[2:]
    scale = dim**-0.5 if scale is None else scale
    # [B, kv, blocks, 16, dim]: rows and the heads that share a KV head, 16 together.
    queries = _blocks(q.float().unflatten(2, (kv, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3))
    first, last = (
        _blocks(bound[:, None, :, None].expand(-1, 1, -1, heads // kv).flatten(2)[..., None]) for bound in (begin, end)
    )
    count = end.amax(1)  # of each sequence
    most = queries.new_full((*queries.shape[:-1], 1), -torch.inf)
    total, out = torch.zeros_like(most), queries.new_zeros(*queries.shape[:-1], _aligned(width))
    for start in range(0, int(count.max()), SPAN):
        key = torch.arange(start, start + SPAN, device=q.device)
        at = slots[:, start : start + SPAN]
        at = F.pad(at, (0, SPAN - at.shape[1]))
        k, v = (_rows(*stored, at, key < count[:, None]) for stored in ((k_cache, k_scale), (v_cache, v_scale)))
        k = k if k.shape[-1] == dim else torch.cat([v, k], -1)
        k, v = (F.pad(x, (0, _aligned(x.shape[-1]) - x.shape[-1])) for x in (k, v))
        scores = _gemm(queries, k.transpose(-1, -2)) * scale
        scores = scores.masked_fill_((key < first) | (key >= last), -torch.inf)
        largest = scores.amax(-1, keepdim=True)
        seen = largest > -torch.inf
        weights = exp(scores.sub_(largest.where(seen, 0.0)))
        new = torch.maximum(most, largest)
        old_share, new_share = exp(most - new), exp(largest - new)
        total = torch.where(seen, total * old_share + row_sum(weights)[..., None] * new_share, total)
        out = torch.where(seen, out * old_share + _gemm(weights, v) * new_share, out)
        most = new
    if sinks is not None:
        sink = _blocks(sinks.view(1, kv, 1, -1).expand(len(q), -1, rows, -1).flatten(2)[..., None])[..., :1]
        new = torch.maximum(most, sink)
        old_share = exp(most - new)
        total, out = total * old_share + exp(sink - new), out * old_share
    attended: torch.Tensor = (out / total).flatten(2, 3)[:, :, : rows * heads // kv, :width]
    attended = attended.unflatten(2, (rows, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    return attended.to(q.dtype)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[B, kv, n, width] -> [B, kv, blocks, 16, width], filled up with zeros; float: to a multiple of 16 columns."""
    width = _aligned(x.shape[-1]) - x.shape[-1] if x.is_floating_point() else 0
    filled: torch.Tensor = F.pad(x, (0, width, 0, -x.shape[2] % QUERIES)).unflatten(2, (-1, QUERIES))
    return filled


def _rows(cache: torch.Tensor, scale: torch.Tensor | None, slots: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """Keys or values float32 [B, kv, 1, keys, dim] at flat slots [B, keys]; zeros where none exists."""
    found = gather_stored(cache.flatten(0, 1), slots.flatten(), torch.float32, scale).unflatten(0, slots.shape)
    held: torch.Tensor = found.masked_fill(~exists[..., None, None], 0.0)
    return held.transpose(1, 2)[:, :, None]


def _aligned(width: int) -> int:
    return width + -width % _ALIGNED


def _gemm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x [B, kv, blocks, 16, K] @ y [B, kv, 1, K, N], GEMMs of one shape."""
    shared = y.expand(-1, -1, x.shape[2], -1, -1)
    product: torch.Tensor = torch.bmm(x.flatten(0, 2), shared.flatten(0, 2)).unflatten(0, x.shape[:3])
    return product


class SpanDecodeAttention:
    """`DecodeAttentionRef`, deterministic. What is the same for all layers is computed once."""

    def __init__(self, queries: DecodeQueries) -> None:
        size, count, lengths, first = queries.page_size, queries.num_queries, queries.lengths, queries.first_node
        pages = queries.page_table.shape[1] if queries.bound is None else -(-queries.bound // size)
        table = queries.page_table[queries.slots, :pages]
        self._count = count
        row = torch.arange(count, device=lengths.device)
        sequence = torch.arange(len(lengths), device=lengths.device)[:, None]
        self._new = kv_slots(table, sequence, lengths[:, None] + first + row, size).flatten()
        keys = torch.arange(pages * size, device=lengths.device).expand(len(lengths), -1)
        if queries.ancestors is None:
            self._slots = kv_slots(table, sequence, keys, size)
            self._bounds = cache(lambda mask: _chain_bounds(lengths, row, first, mask))
            return
        # A node is a sequence of its own: the keys before the verify, then its ancestors.
        node = torch.arange(first + count, device=lengths.device)
        sees = (queries.ancestors[:, :, None] >> node & 1 == 1).flatten(0, 1)
        lineage = torch.where(sees, node, len(node)).sort(-1).values  # parents have lower numbers than children
        lengths = lengths.repeat_interleave(count)[:, None]
        keys = keys.repeat_interleave(count, 0)
        depth = (keys - lengths).clamp(0, len(node) - 1)
        keys = torch.where(keys < lengths, keys, lengths + lineage.gather(1, depth))
        self._slots = kv_slots(table, sequence.repeat_interleave(count, 0), keys.clamp(max=pages * size - 1), size)
        end = lengths + sees.sum(1, keepdim=True)
        self._bounds = cache(lambda mask: (_begin(end, mask.window), end))

    def __call__(self, inputs: AttentionInputs, mask: Mask) -> torch.Tensor:
        """As `DecodeAttentionRef.__call__`."""
        _, heads, _, k_cache, v_cache, *scales = inputs
        q = write_keys(inputs, self._new).unflatten(0, (len(self._slots), -1))
        scale = heads.scale if isinstance(heads, LatentLayout) else None
        bounds = self._bounds(mask)
        attended = span_attention(q, k_cache, v_cache, self._slots, *bounds, heads.sinks, scale, *scales)
        return attended.flatten(0, 1).flatten(1)


def _chain_bounds(
    lengths: torch.Tensor, row: torch.Tensor, first: int, mask: Mask
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which keys the rows of a chain see, as `attention_mask` has it."""
    last = lengths[:, None] + first + (row if mask.causal else torch.full_like(row, len(row) - 1))
    return _begin(lengths[:, None] + first + row + 1, mask.window).expand_as(last), last + 1


def _begin(end: torch.Tensor, window: int | None) -> torch.Tensor:
    """The first key that a query sees; `end`: one after its own."""
    return torch.zeros_like(end) if window is None else (end - window).clamp(min=0)


def span_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    spans: RaggedBatch,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of prompt chunks, whose keys and values are in the cache: q [T, heads, dim] of `spans` -> [T,
    heads, dim]. A query sees `window` keys, itself included; 0 is all. sinks and scales: see `span_attention`."""
    parts: list[torch.Tensor] = []
    for rows, row, start in zip(q.split(spans.counts), spans.rows, spans.starts, strict=True):
        for part in rows.split(_AT_ONCE):
            end = torch.arange(start + 1, start + len(part) + 1, device=q.device)[None]
            keys = torch.arange(start + len(part), device=q.device)[None]
            slots = kv_slots(spans.page_table, torch.full_like(keys, row), keys, spans.page_size)
            begin = _begin(end, window or None)
            scales = scale, k_scale, v_scale
            parts.append(span_attention(part[None], k_cache, v_cache, slots, begin, end, sinks, *scales)[0])
            start += len(part)
    return torch.cat(parts)


def span_latent_prefill(inputs: AttentionInputs, slots: torch.Tensor, spans: RaggedBatch) -> torch.Tensor:
    """`latent_prefill_ref`, deterministic."""
    _, heads, _, k_cache, v_cache, *scales = inputs
    assert isinstance(heads, LatentLayout)
    q = write_latent_ref(inputs, slots)
    return span_prefill_attention(q, k_cache, v_cache, spans, 0, None, heads.scale, *scales).flatten(1)
