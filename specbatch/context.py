"""Where attention layers find their cache: the shapes of one forward pass, made once and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from specbatch.kernels.attention import (
    attention_bias,
    paged_attention_ref,
    prefill_attention_ref,
    visible,
    write_kv_ref,
)
from specbatch.memory.kv_cache import KVCache
from specbatch.memory.pages import pages_for
from specbatch.transfer import upload


class Context(Protocol):
    """What a layer asks of a forward pass over T tokens."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k, v [T, kv_heads, head_dim] and attend with q [T, heads, head_dim] -> [T, heads * head_dim]."""
        ...


class Verify:
    """A few rows per sequence: decoding is a verify with one row.

    page_table int64 [B, P]: the sequences' pages; lengths int64 [B]: KV length before the pass; `rows` per sequence,
    row i of a chain at position lengths + i. Rejected rows are computed and never looked at again.
    """

    def __init__(self, page_table: torch.Tensor, lengths: torch.Tensor, rows: int, page_size: int) -> None:
        self.rows = rows
        positions = lengths[:, None] + torch.arange(rows, device=lengths.device)
        pages = page_table.gather(1, positions // page_size)
        self.positions = positions.flatten()
        self._page_table = page_table
        self._slots = (pages * page_size + positions % page_size).flatten()
        self._mask = visible(lengths, rows, page_table.shape[1] * page_size)

    def on(self, cache: KVCache) -> Context:
        return _VerifyOn(self, cache, attention_bias(self._mask, cache.group, cache.dtype))


@dataclass(frozen=True)
class _VerifyOn:
    shape: Verify
    cache: KVCache
    bias: torch.Tensor

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shape, k_cache, v_cache = self.shape, self.cache.k[layer], self.cache.v[layer]
        write_kv_ref(k, v, k_cache, v_cache, shape._slots)
        rows = q.view(-1, shape.rows, *q.shape[1:])
        return paged_attention_ref(rows, k_cache, v_cache, shape._page_table, self.bias).flatten(0, 1).flatten(1)


@dataclass(frozen=True)
class Span:
    """One sequence's part of a prefill: tokens at positions start..end-1, on device row `slot`."""

    slot: int
    start: int
    end: int


class Prefill:
    """Prompt chunks of several sequences, one behind the other. Their bounds are known to the host."""

    def __init__(self, page_table: torch.Tensor, spans: list[Span], page_size: int) -> None:
        """page_table int64 [R, P]: of all device rows, one of which each span names."""
        device = page_table.device
        counts = torch.tensor([span.end - span.start for span in spans])
        starts = torch.tensor([span.start for span in spans])
        rows = torch.tensor([span.slot for span in spans])
        ends = counts.cumsum(0)
        owner = torch.repeat_interleave(torch.arange(len(spans)), counts)
        positions = starts[owner] + torch.arange(len(owner)) - (ends - counts)[owner]
        self.rows, self.positions = upload(torch.stack([rows[owner], positions]), device)  # of each of the T tokens
        self.last = upload(ends - 1, device)  # where each span's last token is among the T
        self._spans = spans
        self._page_table = page_table
        self._page_size = page_size
        self._slots = page_table[self.rows, self.positions // page_size] * page_size + self.positions % page_size

    def on(self, cache: KVCache) -> Context:
        return _PrefillOn(self, cache)


@dataclass(frozen=True)
class _PrefillOn:
    shape: Prefill
    cache: KVCache

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shape, k_cache, v_cache = self.shape, self.cache.k[layer], self.cache.v[layer]
        # All keys first: a sequence may read a page that another one of this very pass fills.
        write_kv_ref(k, v, k_cache, v_cache, shape._slots)
        parts, at = [], 0
        for span in shape._spans:
            count = span.end - span.start
            pages = shape._page_table[span.slot, : pages_for(span.end, shape._page_size)]
            parts.append(prefill_attention_ref(q[at : at + count], k_cache, v_cache, pages, span.start))
            at += count
        return torch.cat(parts).flatten(1)
