"""Triton attention of prompt chunks over the paged cache.

Dao, "FlashAttention-2" (2023): a program keeps a tile of queries and walks over the keys with a running maximum and
sum. A tile holds the query heads that share a KV head as well (rows are token-major), so a short chunk fills it, and
the ragged edge of the causal mask is a few tokens wide. Where tiles are fewer than the chip's processors, the keys are
split too and a second kernel merges the parts in their order: the result does not depend on who ends first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from specbatch.kernels.spans import Spans

LOG2E = 1.4426950408889634
SPLIT_KEYS = 512  # no part is shorter: its merge would cost more than it saves


@dataclass(frozen=True)
class Tiling:
    """Query rows and keys of a tile, warps and pipeline stages of a program."""

    queries: int
    keys: int
    warps: int
    stages: int


def tiling(dtype: torch.dtype, dim: int) -> Tiling:
    """What was fastest on an H200 (`sweeps/prefill_speed.py`) for heads of 128; others by what registers allow."""
    if dtype == torch.float32:
        return Tiling(32, 32, 4, 1) if dim > 64 else Tiling(64, 32, 4, 2)
    if dim > 128:
        return Tiling(64, 32, 4, 2)
    return Tiling(128, 64, 8, 3)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    spans: Spans,
    window: int = 0,
    tile: Tiling | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, dim] over the caches [pages, page_size, kv, dim], which hold all keys already.

    `window`: a query sees that many keys, itself included; 0 is all. The caches may be float8_e4m3fn. float32 is
    exact (no tf32). Returns [T, heads, dim].
    """
    total, heads, dim = q.shape
    kv = k_cache.shape[2]
    group = heads // kv
    tile = tile or tiling(q.dtype, dim)
    tokens = max(1, tile.queries // triton.next_power_of_2(group))
    tiles = spans.tiles(tokens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    span = min(max(spans.ends), window + tokens) if window else max(spans.ends)
    splits = max(1, min(_processors(q.device) // (len(tiles) * kv), span // SPLIT_KEYS))
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(splits, total, heads, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, total, heads, dtype=torch.float32, device=q.device)
    block = max(16, triton.next_power_of_2(dim))
    _attend[(kv, len(tiles), splits)](
        q, k_cache, v_cache, partial, lse, spans.table, spans.table.stride(0), tiles, spans.page_table,
        spans.page_table.stride(0), q.stride(0), total, dim**-0.5 * LOG2E,
        GROUP=group, KV=kv, DIM=dim, BLOCK_D=block, PAGE=spans.page_size, WINDOW=window,
        TOKENS=tokens, QUERIES=tile.queries, KEYS=tile.keys, SPLIT=splits > 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        rows = max(1, 1024 // block)
        _merge[(triton.cdiv(total * heads, rows),)](
            partial, lse, out, total * heads, splits, DIM=dim, BLOCK_D=block, ROWS=rows, num_warps=4
        )
    return out


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


@triton.jit
def _walk(
    acc, top, total, q, k_cache, v_cache, pages, begin, end, seen, position,
    KV: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add keys begin..end - 1 (whole blocks where not MASKED) to a tile's running sums."""
    key = tl.arange(0, KEYS)
    column = tl.arange(0, BLOCK_D)
    inside = (column < DIM)[None, :]
    for at in tl.range(begin, end, KEYS):
        place = at + key
        if MASKED:
            page = tl.load(pages + place // PAGE, mask=place < seen, other=0)
        else:
            page = tl.load(pages + place // PAGE)
        offset = ((page * PAGE + place % PAGE) * (KV * DIM))[:, None] + column[None, :]
        if MASKED:
            real = (place < seen)[:, None] & inside
            k = tl.load(k_cache + offset, mask=real, other=0.0)
            v = tl.load(v_cache + offset, mask=real, other=0.0)
        elif DIM < BLOCK_D:
            k = tl.load(k_cache + offset, mask=inside, other=0.0)
            v = tl.load(v_cache + offset, mask=inside, other=0.0)
        else:
            k = tl.load(k_cache + offset)
            v = tl.load(v_cache + offset)
        scores = tl.dot(q, k.to(q.dtype).T, input_precision=PRECISION)
        if MASKED:
            visible = place[None, :] <= position[:, None]
            if WINDOW > 0:
                visible &= place[None, :] > position[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet has the peak -inf; any finite number does in its place.
        base = tl.where(peak == float("-inf"), 0.0, peak) if MASKED else peak
        p = tl.math.exp2(scores - base[:, None])
        shrink = tl.math.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        top = peak
    return acc, top, total


@triton.jit
def _attend(
    q, k_cache, v_cache, out, lse, table, table_stride, tiles, page_table, page_stride, q_stride, rows, scale,
    GROUP: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    part = tl.program_id(2)
    span = tl.load(tiles + 2 * tl.program_id(1))
    first = tl.load(tiles + 2 * tl.program_id(1) + 1).to(tl.int32)
    start = tl.load(table + span).to(tl.int32)
    stop = tl.load(table + table_stride + span).to(tl.int32)
    pages = page_table + tl.load(table + 2 * table_stride + span) * page_stride
    offset = tl.load(table + 3 * table_stride + span)

    row = tl.arange(0, QUERIES)
    token = first + row // GROUP
    position = start + token
    real = (row < TOKENS * GROUP) & (position < stop)
    column = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (column < DIM)[None, :]
    query_head = head * GROUP + row % GROUP
    source = q + ((offset + token) * q_stride + query_head * DIM)[:, None] + column[None, :]
    # The scale goes into the queries: one product less per score. Rounded once, as the scores' own scale would be.
    queries = tl.load(source, mask=mask, other=0.0)
    queries = (queries.to(tl.float32) * scale).to(queries.dtype)

    # Keys that some row of the tile sees, [low, seen); every row sees all of [low, full) when there is no window.
    seen = tl.minimum(start + first + TOKENS, stop)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(start + first - WINDOW + 1, 0) // KEYS * KEYS
    if SPLIT:
        share = tl.cdiv(tl.cdiv(seen - low, KEYS), tl.num_programs(2)) * KEYS
        low += part * share
        seen = tl.minimum(low + share, seen)
    full = low
    if WINDOW == 0:
        full = tl.maximum(low, tl.minimum(start + first + 1, seen) // KEYS * KEYS)

    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    k_cache += head * DIM
    v_cache += head * DIM
    if WINDOW == 0:
        acc, top, total = _walk(
            acc, top, total, queries, k_cache, v_cache, pages, low, full, seen, position,
            KV, DIM, BLOCK_D, PAGE, WINDOW, KEYS, False, PRECISION,
        )  # fmt: skip
    acc, top, total = _walk(
        acc, top, total, queries, k_cache, v_cache, pages, full, seen, seen, position,
        KV, DIM, BLOCK_D, PAGE, WINDOW, KEYS, True, PRECISION,
    )  # fmt: skip

    place = (offset + token) * (KV * GROUP) + query_head
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        place += part.to(tl.int64) * rows * (KV * GROUP)
        tl.store(lse + place, top + tl.math.log2(total), mask=real)
    tl.store(out + place[:, None] * DIM + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _merge(partial, lse, out, lines, splits, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Average the parts [splits, lines, DIM], each weighted by two to its lse [splits, lines]."""
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    real = line < lines
    mask = real[:, None] & (column < DIM)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for part in range(splits):
        base = part.to(tl.int64) * lines + line
        weight = tl.load(lse + base, mask=real, other=0.0)
        peak = tl.maximum(top, weight)
        base_peak = tl.where(peak == float("-inf"), 0.0, peak)
        shrink = tl.math.exp2(top - base_peak)
        weight = tl.math.exp2(weight - base_peak)
        values = tl.load(partial + base[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        acc = acc * shrink[:, None] + values * weight[:, None]
        total = total * shrink + weight
        top = peak
    tl.store(out + line.to(tl.int64)[:, None] * DIM + column[None, :],
             (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)  # fmt: skip
