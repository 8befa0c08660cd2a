"""Prompt chunks in a paged cache, and their attention in float64."""

from __future__ import annotations

import math
import random

import torch

from specbatch.kernels.attention.queries import PrefillInputs
from specbatch.kernels.attention.ragged_batch import RaggedBatch

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class Case:
    """Sequences of random keys, their pages scattered; spans as (start, end). Pages that no sequence owns are NaN."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, spans: list[tuple[int, int]], heads: tuple[int, int, int],
        page_size: int = 16, stored: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.count, self.kv, self.dim = heads
        self.scales: list[torch.Tensor | None] = [None, None]
        self.spans = spans
        needed = [math.ceil(end / page_size) for _, end in spans]
        order = random.sample(range(1, sum(needed) + 3), sum(needed))
        table = torch.zeros(len(spans) + 2, max(needed) + 1, dtype=torch.int64)
        rows = random.sample(range(1, len(spans) + 2), len(spans))
        shape = (sum(needed) + 3, page_size, self.kv, self.dim)
        k_cache, v_cache = (torch.full(shape, torch.nan) for _ in range(2))
        self.keys, self.values = [], []
        for row, (_, end), count in zip(rows, spans, needed, strict=True):
            pages = torch.tensor([order.pop() for _ in range(count)])
            table[row, :count] = pages
            k, v = (torch.randn(end, self.kv, self.dim).to(stored or dtype).float() for _ in range(2))
            slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
            for cache, x in ((k_cache.flatten(0, 1), k), (v_cache.flatten(0, 1), v)):
                cache[slots[:end]] = x
                cache[slots[end:]] = 300  # stale, from another sequence
            self.keys.append(k)
            self.values.append(v)
        self.k_cache, self.v_cache = (cache.to(device, stored or dtype) for cache in (k_cache, v_cache))
        starts, ends = map(list, zip(*spans, strict=True))
        self.layout = RaggedBatch(starts, ends, rows, table.to(device), page_size)
        ends = self.layout.counts  # the pass's own keys and values, where every span is fresh
        self.new = [torch.cat([x[-n:] for x, n in zip(xs, ends, strict=True)]) for xs in (self.keys, self.values)]
        self.new = [x.to(device, dtype) for x in self.new]
        self.q = torch.randn(self.layout.offsets[-1], self.count, self.dim).to(device, dtype)

    def inputs(self, window: int = 0, sinks: torch.Tensor | None = None, *, own: bool = False) -> PrefillInputs:
        """own: with the keys and values of the pass itself."""
        new = self.new if own else (None, None)
        caches = self.k_cache, self.v_cache
        return PrefillInputs(self.q, *new, *caches, self.layout, window, None, sinks, *self.scales)

    def expected(self, window: int = 0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        parts = []
        queries = self.q.double().cpu().split(self.layout.counts)
        for q, k, v, (start, end) in zip(queries, self.keys, self.values, self.spans, strict=True):
            k, v = (x if by is None else x * by.cpu()[:, None] for x, by in zip((k, v), self.scales, strict=True))
            k, v = (x.double().repeat_interleave(self.count // self.kv, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim**-0.5
            distance = torch.arange(start, end)[:, None] - torch.arange(end)
            hidden = distance < 0
            if window:
                hidden |= distance >= window
            weights = scores.masked_fill(hidden, -torch.inf).exp()
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total += sinks.double().cpu().exp()[:, None, None]
            parts.append(torch.einsum("hqk,khd->qhd", weights / total, v))
        return torch.cat(parts)

    def check(self, out: torch.Tensor, window: int = 0, sinks: torch.Tensor | None = None) -> None:
        slack = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(out.double().cpu(), self.expected(window, sinks), rtol=slack, atol=slack)
