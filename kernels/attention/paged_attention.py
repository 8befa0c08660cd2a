"""Attention over the paged KV cache, and writing to it.

One layer's cache is two tensors [pages, page_size, kv_heads, head_dim]. A token's flat slot is
page * page_size + offset; page 0 belongs to padding rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specbatch.kernels.attention.stored_kv import copyable, gather_stored, to_stored


def write_kv_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store k, v [T, kv_heads, head_dim] at flat `slots` [T] of one layer's cache. Scales: see `AttentionInputs`."""
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        copyable(cache).view(-1, *x.shape[1:]).index_copy_(0, slots, copyable(to_stored(x, cache.dtype, scale)))


def attention_mask(
    lengths: torch.Tensor,
    rows: int,
    keys: int,
    ancestors: torch.Tensor | None = None,
    first: int = 0,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """The attention mask of a verify: which keys each query row sees: bool [B, rows, keys].

    lengths [B] is the KV length before the verify; row i is key lengths + first + i. `ancestors` int64 [rows] or
    [B, rows] holds one 64-bit word per node with the bits of its ancestors and itself; None is a chain, or with
    `causal` false a block whose rows all see each other. Bit j is the key lengths + j: the first `first` of them are
    nodes that earlier passes left in the cache. With `window` a row sees the last so many of these keys, itself
    included; a node's position is its depth, not its number.
    """
    position = first + torch.arange(rows, device=lengths.device)[:, None]  # after lengths, as `node`
    node = (torch.arange(keys, device=lengths.device) - lengths[:, None])[:, None]  # negative: before the verify
    if ancestors is None:
        seen = node <= (position if causal else torch.full_like(position, first + rows - 1))
        return seen if window is None else seen & (node > position - window)
    words = ancestors.expand(lengths.shape[0], rows)
    old = node < 0
    if window is not None:
        depth = bits(words).sum(-1, keepdim=True) - 1
        old, words = old & (node > depth - window), last_ancestors(words, window)
    return old | (node >= 0) & ((words[:, :, None] >> node.clamp(0, 63)) & 1 == 1) & (node < first + rows)


def last_ancestors(words: torch.Tensor, window: int) -> torch.Tensor:
    """Ancestor words int64 [..., rows] of which only the `window` last nodes are left: parents have lower numbers than
    their children, so these are the highest bits."""
    if window >= 64:
        return words
    found = bits(words)
    kept = found * (found.flip(-1).cumsum(-1).flip(-1) <= window)
    return (kept << torch.arange(64, device=words.device)).sum(-1)


def bits(words: torch.Tensor) -> torch.Tensor:
    """int64 [...] -> its bits int64 [..., 64], the lowest first."""
    return (words[..., None] >> torch.arange(64, device=words.device)) & 1


def attention_bias(mask: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """What `paged_attention_ref` adds to its scores, once for all layers: 0 where `mask` (bool [B, rows, keys], from
    `attention_mask`) is true, else -inf; `dtype` [B, 1, group * rows, keys] for `group` query heads per KV head."""
    bias = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return bias.repeat(1, group, 1)[:, None]


def sink_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Attention of q [B, heads, rows, dim] to k, v [B, kv_heads, keys, dim] with a sink: a key with the score `sinks`
    [heads, rows], or [heads, 1] for all rows, and a value of 0. bias: added to the scores, [.., rows, keys]."""
    shape = *q.shape[:-1], 1
    column = sinks.to(q.dtype)[None, :, :, None].expand(shape)
    bias = torch.cat([bias.expand(*shape[:-1], -1), column], -1)
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=q.shape[1] != k.shape[1])


def paged_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    bias: torch.Tensor,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a few query rows per sequence over its pages.

    q [B, rows, heads, head_dim]; page_table [B, P]; bias from `attention_bias` over P * page_size keys; sinks [heads];
    scales: see `AttentionInputs`.
    Returns [B, rows, heads, head_dim]. The heads that share a KV head are rows of one GEMM, so K and V are read
    once.
    """
    batch, rows, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    pages = page_table.flatten()
    k = gather_stored(k_cache, pages, q.dtype, k_scale).view(batch, -1, kv_heads, dim).transpose(1, 2)
    v = gather_stored(v_cache, pages, q.dtype, v_scale).view(batch, -1, kv_heads, dim).transpose(1, 2)
    packed = q.view(batch, rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    if sinks is None:
        out = F.scaled_dot_product_attention(packed, k, v, attn_mask=bias)
    else:
        out = sink_attention(packed, k, v, bias, sinks.view(kv_heads, group).repeat_interleave(rows, 1))
    return out.view(batch, kv_heads, group, rows, dim).permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, dim)


def prefill_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one prompt chunk over its prefix and itself.

    q [T, heads, head_dim] at positions start..start+T-1, whose K and V are already in the cache; pages [P] covers
    them. A query sees `window` keys, itself included; 0 is all. sinks [heads]: see `QKVLayout`; scales: see
    `AttentionInputs`. Returns [T, heads, head_dim].
    """
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    end = start + rows
    k = gather_stored(k_cache, pages, q.dtype, k_scale).view(1, -1, kv_heads, dim)[:, :end].transpose(1, 2)
    v = gather_stored(v_cache, pages, q.dtype, v_scale).view(1, -1, kv_heads, dim)[:, :end].transpose(1, 2)
    mask = None
    if start or window or sinks is not None:
        position = torch.arange(end, device=q.device)
        distance = position[start:, None] - position
        mask = (distance >= 0) & (distance < (window or end))
    q = q[None].transpose(1, 2)
    if sinks is None:
        gqa = heads != kv_heads
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
    else:
        assert mask is not None
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        out = sink_attention(q, k, v, bias, sinks[:, None])
    return out[0].transpose(0, 1)
