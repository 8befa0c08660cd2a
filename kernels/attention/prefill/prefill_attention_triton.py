"""Triton attention of prompt chunks over the paged cache.

Dao, "FlashAttention-2" (2023): a program keeps a tile of queries and walks over the keys with a running maximum and
sum. A tile holds the query heads that share a KV head as well (rows are token-major), so a short chunk fills it, and
the ragged edge of the causal mask is a few tokens wide. Where tiles are fewer than the chip's processors, the keys are
split too and a second kernel merges the parts in their order: the result does not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from specbatch.kernels.attention.hopper import has_bulk_copies
from specbatch.kernels.attention.prefill.unpacked_cache_triton import unpacked
from specbatch.kernels.attention.queries import LOG2E, PrefillInputs
from specbatch.kernels.common.e4m3_triton import dequantize_e4m3
from specbatch.kernels.common.kv_slots_triton import kv_slot
from specbatch.kernels.common.sizes import cdiv, multiprocessors, next_power_of_2, tile_side

SPLIT_KEYS = 512  # no part is shorter: its merge would cost more than it saves
_LOG2E = tl.constexpr(LOG2E)
PROGRAMS = 2  # for each processor; with fewer tiles than that, keys are split
PAGE_STEP = 64  # pages of a multiple of it are copied in bulk: the keys of a tile divide it


@dataclass(frozen=True)
class Tiling:
    """Query rows and keys of a tile, warps and pipeline stages of a program, and the most registers of a thread."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def tiling(dtype: torch.dtype, dim: int, source: str) -> Tiling:
    """What was fastest on an H200 (`sweeps/microbench/prefill.py`) for heads of 64, 128 and 256. For those of 512 it is
    what the shared memory holds, not yet measured."""
    if dtype == torch.float32:
        return Tiling(32, 32, 4, 1) if dim > 64 else Tiling(64, 32, 4, 2)
    if dim > 256:
        return Tiling(64, 32, 8, 2)
    if dim > 128:
        return Tiling(128, 64, 8, 2 if source == "rows" else 3)
    if source == "slots":
        return Tiling(128, 64, 8, 3, 128)
    # Three blocks of keys on their way; where pages are looked up, the pipeline takes two stages more for it.
    return Tiling(64, 64, 4, 3 if source == "rows" else 5)


def prefill_attention(inputs: PrefillInputs, tile: Tiling | None = None) -> torch.Tensor:
    """Causal attention over the caches, which hold all keys already: [T, heads, dim].

    Where no span has a prefix, `k_new` and `v_new` are read instead. The caches may be float8_e4m3fn. float32 is exact
    (no tf32). Values past the end of a sequence in its last page must be finite.
    """
    q, k_new, v_new, k_cache, v_cache, spans, window, out, sinks, k_scale, v_scale = unpacked(inputs)
    total, heads, dim = q.shape
    kv = k_cache.shape[2]
    group = heads // kv
    block = tile_side(dim)
    keys, values, source = k_cache, v_cache, "slots"
    if dim == block and q.dtype != torch.float32 and has_bulk_copies(q.device):
        if spans.fresh and k_new is not None and v_new is not None:
            keys, values, source = k_new.flatten(1), v_new.flatten(1), "rows"
            k_scale = v_scale = None  # these are not divided
        elif k_cache.dtype == q.dtype and spans.page_size % PAGE_STEP == 0:
            keys, values, source = k_cache.view(-1, kv * dim), v_cache.view(-1, kv * dim), "pages"
    tile = tile or tiling(q.dtype, dim, source)
    if source != "slots":
        keys, values = (TensorDescriptor.from_tensor(x, [tile.keys, dim]) for x in (keys, values))
    tokens = max(1, tile.queries // group)
    tiles = spans.tiles(tokens)
    longest = min(max(spans.ends), window + tokens) if window else max(spans.ends)
    splits = max(1, min(PROGRAMS * multiprocessors(q.device) // (spans.full_tiles(tokens) * kv), longest // SPLIT_KEYS))
    out, partial, lse = outputs(q, out, splits)
    prefill_attention_kernel[(kv, len(tiles), splits)](
        q, keys, values, k_scale, v_scale, sinks, partial, lse, spans.table, spans.table.stride(0), tiles,
        spans.page_table, spans.page_table.stride(0), q.stride(0), total, dim**-0.5 * LOG2E,
        GROUP=group, KV=kv, DIM=dim, BLOCK_D=block, PAGE=spans.page_size, SOURCE=source, WINDOW=window,
        TOKENS=tokens, QUERIES=max(tile.queries, next_power_of_2(group)), KEYS=tile.keys, SPLIT=splits > 1,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return merged(out, partial, lse, splits)


def outputs(q: torch.Tensor, out: torch.Tensor | None, splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`out`, allocated if it is None, and where the kernel writes: results of parts of the keys and the logarithms to
    base 2 of their sums of weights, or `out` if there is one part."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if splits == 1:
        return out, out, out
    partial = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    return out, partial, torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)


def merged(out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor, splits: int) -> torch.Tensor:
    """`out`, with what the kernel wrote to `outputs`."""
    if splits > 1:
        dim, lines = out.shape[2], out.shape[0] * out.shape[1]
        block = tile_side(dim)
        rows = max(1, 1024 // block)
        merge_parts[(cdiv(lines, rows),)](
            partial, lse, out, lines, splits, DIM=dim, BLOCK_D=block, ROWS=rows, num_warps=4
        )
    return out


@triton.jit
def _bulk(keys, values, pages, offset, at, head, DIM: tl.constexpr, PAGE: tl.constexpr, SOURCE: tl.constexpr):
    """Keys and values [KEYS, DIM] from place `at` of a sequence, by one bulk copy each."""
    line = kv_slot(pages, at, PAGE).to(tl.int32) if SOURCE == "pages" else offset.to(tl.int32) + at
    return keys.load([line, head * DIM]), values.load([line, head * DIM])


@triton.jit
def _step(queries, k, v, key, at, position, plain, full, acc, top, total, scale, WINDOW: tl.constexpr):
    """One block of keys: acc [QUERIES, BLOCK_D], top and total [QUERIES] of the softmax so far, base 2."""
    scores = tl.dot(queries, k.to(queries.dtype).T, input_precision="ieee")
    if (at + key.shape[0] > full) | (at < plain):
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    peak = tl.maximum(top, tl.max(scores, 1) * scale)
    # A row that has seen no key yet has the peak -inf; any finite number does in its place.
    base = tl.where(peak == float("-inf"), 0.0, peak)
    p = tl.math.exp2(scores * scale - base[:, None])
    shrink = tl.math.exp2(top - base)
    acc = tl.dot(p.to(queries.dtype), v.to(queries.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, peak, total * shrink + tl.sum(p, 1)


@triton.jit(do_not_specialize=["table_stride", "rows"])  # they change from pass to pass
def prefill_attention_kernel(
    q, keys, values, k_scale, v_scale, sinks, out, lse, table, table_stride, tiles, page_table, page_stride, q_stride,
    rows, scale,
    GROUP: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    SOURCE: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """SOURCE of keys and values: "slots", gathered from the caches; "pages", bulk copies of (parts of) pages; "rows",
    bulk copies of those of the pass itself."""
    head = tl.program_id(0)
    part = tl.program_id(2)
    if k_scale is not None:
        scale = scale * tl.load(k_scale + head)
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
    queries = tl.load(source, mask=mask, other=0.0)

    # Some row of the tile sees key low, low + 1, .., high - 1; every row sees plain, .., full - 1.
    low, high = 0, tl.minimum(start + first + TOKENS, stop)
    plain, full = 0, start + first + 1
    if WINDOW > 0:
        low = tl.maximum(start + first - WINDOW + 1, 0) // KEYS * KEYS
        plain = start + first + TOKENS - WINDOW
    if SPLIT:
        share = tl.cdiv(tl.cdiv(high - low, KEYS), tl.num_programs(2)) * KEYS
        low += part * share
        high = tl.minimum(low + share, high)

    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if sinks is not None:  # the first key, with a value of 0
        begins = part == 0
        top = tl.where(begins, tl.load(sinks + query_head) * _LOG2E, top)
        total = tl.where(begins, 1.0, total)
    # A bulk copy may reach past the end of the sequence, into values of another: that block comes last and masks them.
    # A weight of 0 would not be enough, as they may be NaN.
    inner = high
    if SOURCE != "slots":
        inner = tl.minimum(high, stop // KEYS * KEYS)
    for at in tl.range(low, inner, KEYS):
        key = at + tl.arange(0, KEYS)
        if SOURCE == "slots":
            held = tl.minimum(key, high - 1)  # the last block repeats the last key, out of every row's sight
            slot = kv_slot(pages, held, PAGE)
            place = (slot * (KV * DIM) + head * DIM)[:, None] + column[None, :]
            if DIM < BLOCK_D:
                k = tl.load(keys + place, mask=(column < DIM)[None, :], other=0.0)
                v = tl.load(values + place, mask=(column < DIM)[None, :], other=0.0)
            else:
                k = tl.load(keys + place)
                v = tl.load(values + place)
            if keys.dtype.element_ty == tl.float8e4nv:
                k, v = dequantize_e4m3(k, queries.dtype), dequantize_e4m3(v, queries.dtype)
        else:
            k, v = _bulk(keys, values, pages, offset, at, head, DIM, PAGE, SOURCE)
        acc, top, total = _step(queries, k, v, key, at, position, plain, full, acc, top, total, scale, WINDOW)
    if SOURCE != "slots":
        at = tl.maximum(inner, low)
        if at < high:
            key = at + tl.arange(0, KEYS)
            k, v = _bulk(keys, values, pages, offset, at, head, DIM, PAGE, SOURCE)
            v = tl.where((key < stop)[:, None], v, 0.0)
            acc, top, total = _step(queries, k, v, key, at, position, plain, full, acc, top, total, scale, WINDOW)

    place = (offset + token) * (KV * GROUP) + query_head
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if v_scale is not None:
        acc *= tl.load(v_scale + head)
    if SPLIT:
        place += part.to(tl.int64) * rows * (KV * GROUP)
        tl.store(lse + place, top + tl.math.log2(total), mask=real)
    tl.store(out + place[:, None] * DIM + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["lines", "splits"])
def merge_parts(partial, lse, out, lines, splits, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Average the parts [splits, lines, DIM], each weighted by two to its lse [splits, lines]."""
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    real = line < lines
    mask = real[:, None] & (column < DIM)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    base = line.to(tl.int64)
    for _ in range(splits):
        weight = tl.load(lse + base, mask=real, other=0.0)
        peak = tl.maximum(top, weight)
        base_peak = tl.where(peak == float("-inf"), 0.0, peak)
        shrink = tl.math.exp2(top - base_peak)
        weight = tl.math.exp2(weight - base_peak)
        values = tl.load(partial + base[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        acc = acc * shrink[:, None] + values * weight[:, None]
        total = total * shrink + weight
        top = peak
        base += lines
    tl.store(out + line.to(tl.int64)[:, None] * DIM + column[None, :],
             (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)  # fmt: skip
