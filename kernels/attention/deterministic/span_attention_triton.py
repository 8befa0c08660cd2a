"""Triton attention whose bits depend on a query's own keys alone: prompts, chunks, verifies and single tokens.

The counterpart of `span_attention` on a CUDA device. Keys are read from the cache only, after the pass has written its
own. They are reduced in spans of SPAN keys, counted from key 0, and tiles of KEYS, each span with a running maximum of
its own; the spans are merged in order. One program may take all spans of its queries, or several programs some each.
Then the last one to arrive merges them by the same operations: how many programs share the spans changes no bit.

A node of a tree is a sequence of its own: its ancestors take the places that they would have in a chain. With a
sliding window a program begins with the span of the oldest key that its rows see; keys before a row's own window change
nothing.

All sums over keys are sums of a tensor core, that of the weights too, whose order does not depend on the tile (see
`gemm/deterministic/fixed_order`): 16 to 64 rows, tokens times the query heads that share a KV head. Those of float32
are added one by one, in the order of the keys. Multiplications and additions elsewhere are not fused
(`enable_fp_fusion`), because the compiler may choose differently in two places.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.qkv import split_qkv_rope
from specbatch.kernels.attention.queries import LOG2E, AttentionInputs, DecodeQueries, Mask, PrefillInputs
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.attention.stored_kv_triton import power_of_two
from specbatch.kernels.common.kv_slots_triton import kv_slot
from specbatch.kernels.common.pdl_triton import let_next_kernel_start, pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, multiprocessors, next_power_of_2, tile_side
from specbatch.kernels.common.workspace import reserve

SPAN = 128
KEYS = 32  # of a tile; divides SPAN
ROWS = 64  # of a tile of a prompt
# With FP8 caches: above, Hopper's `wgmma` multiplies, and Triton's `mma.sync` groups the columns of converted operands
# in another order.
FP8_ROWS = 32
WIDE_ROWS = 32  # of heads of more than 256 channels, whose sums fill the registers
FP32_ROWS, FP32_LAUNCH = 16, (8, 2)  # without TF32, in registers
LAUNCHES = {16: (2, 4), 32: (2, 4), 64: (4, 3)}  # by rows of a tile: warps and stages
SHARED_LAUNCH = 4, 3  # where programs share the spans of a tile
WIDE_LAUNCH = 8, 2  # of heads of more than 256 channels, whose keys fill the shared memory
_LOG2E = tl.constexpr(LOG2E)
PROGRAMS = 2  # for each processor; with fewer tiles than that, spans are shared out
WORKSPACE = 256 << 20  # bytes of partial results, at most


class Lineages(NamedTuple):
    """The nodes that each query of a tree sees: their numbers int32 [T, width], parents first, and how many, int32
    [T, 1]."""

    nodes: torch.Tensor
    seen: torch.Tensor


class SpanPass(NamedTuple):
    """The queries of a pass, and where their keys are.

    bounds      starts, ends, rows and offsets of a prompt's `spans`; else lengths and slots, twice each
    spans       of a prompt pass; None: `num_queries` for each sequence
    page_table  int64 [R, P]
    longest     no sequence has more keys
    lineages    of trees
    """

    bounds: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    spans: RaggedBatch | None
    page_table: torch.Tensor
    longest: int
    num_queries: int = 0
    lineages: Lineages | None = None

    @classmethod
    def prompt(cls, spans: RaggedBatch) -> SpanPass:
        table = spans.table
        return cls((table[0], table[1], table[2], table[3]), spans, spans.page_table, max(spans.ends))

    @classmethod
    def decode(cls, queries: DecodeQueries, lineages: Lineages | None) -> SpanPass:
        lengths, slots, table = queries.lengths, queries.slots, queries.page_table
        longest = table.shape[1] * queries.page_size if queries.bound is None else queries.bound
        return cls((lengths, lengths, slots, slots), None, table, longest, queries.num_queries, lineages)


def prefill_attention(inputs: PrefillInputs, keys: int = KEYS) -> torch.Tensor:
    """Causal attention over caches that hold all keys of the pass -> [T, heads, dim]. keys: of a tile."""
    q, _, _, k_cache, v_cache, spans, window, out, sinks, *scales = inputs
    span_pass = SpanPass.prompt(spans)
    return attend_to_spans(
        q, k_cache, v_cache, span_pass, *scales, out=out, window=window or None, sinks=sinks, keys=keys
    )


def decode_attention(queries: DecodeQueries) -> partial[torch.Tensor]:
    """The attention of a decode or verify pass for all layers, whose masks are causal: `DecodeAttentionRef` of
    `queries`."""
    return partial(_decode, queries, *prepare(queries))


def prepare(queries: DecodeQueries) -> tuple[torch.Tensor, Lineages | None]:
    """What is the same for all layers: the slots int64 [T] of a pass's keys, and the lineages of its nodes if it has
    trees."""
    table, count, first, ancestors = queries.page_table, queries.num_queries, queries.first_node, queries.ancestors
    tokens, device = len(queries.lengths) * count, table.device
    slots = torch.empty(tokens, dtype=torch.int64, device=device)
    _new_slots[(cdiv(tokens, 128),)](
        table, queries.slots, queries.lengths, slots, tokens, count, first, table.shape[1], PAGE=queries.page_size,
        BLOCK=128, **pdl(table),
    )  # fmt: skip
    if ancestors is None:
        assert not first, "a chain is computed in one pass"
        return slots, None
    width = first + count
    lineages = Lineages(*(torch.empty(tokens, n, dtype=torch.int32, device=device) for n in (width, 1)))
    _lineages[(tokens,)](ancestors, *lineages, width, BLOCK=next_power_of_2(width), num_warps=1, **pdl(table))
    return slots, lineages


@triton.jit(do_not_specialize=["width"])
def _lineages(ancestors, nodes, seen, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    wait_for_previous_kernel(PDL)
    sees = ((tl.load(ancestors + token) >> node.to(tl.int64)) & 1).to(tl.int32)
    sees = tl.where(node < width, sees, 0)
    tl.store(nodes + token * width + tl.cumsum(sees, 0) - 1, node, sees > 0)
    tl.store(seen + token, tl.sum(sees, 0))


@triton.jit(do_not_specialize=["tokens", "count", "first", "width"])
def _new_slots(
    page_table, rows, lengths, slots, tokens, count, first, width,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Where the key of each token goes; page 0, which is for padding, if there is no page for it."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    wait_for_previous_kernel(PDL)
    place = tl.load(lengths + token // count, inside, 0) + first + token % count
    fits = inside & (place < width * PAGE)
    row = tl.load(rows + token // count, inside, 0)
    tl.store(slots + token, tl.where(fits, kv_slot(page_table + row * width, place, PAGE, fits), 0), inside)


def _decode(
    queries: DecodeQueries,
    slots: torch.Tensor,
    lineages: Lineages | None,
    inputs: AttentionInputs,
    mask: Mask,
) -> torch.Tensor:
    assert mask.causal, "tokens of a target see no keys after them"
    _, heads, _, k_cache, v_cache, *scales = inputs
    q, span_pass = split_qkv_rope(inputs, slots)[0], SpanPass.decode(queries, lineages)
    return attend_to_spans(q, k_cache, v_cache, span_pass, *scales, window=mask.window, sinks=heads.sinks).flatten(1)


def warps_and_stages(rows: int, block: int, *, is_fp32: bool, is_spread: bool) -> tuple[int, int]:
    """Of a tile of `rows`, whose heads are padded to `block` channels; is_spread: programs share its spans."""
    if is_fp32:
        return FP32_LAUNCH
    if block > 256:
        return WIDE_LAUNCH
    return SHARED_LAUNCH if is_spread and rows <= 64 else LAUNCHES.get(rows, (8, 2))


def attend_to_spans(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    span_pass: SpanPass,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    splits: int | None = None,
    rows: int | None = None,
    keys: int = KEYS,
) -> torch.Tensor:
    """Attention of q [T, heads, dim], whose keys are in the caches -> [T, heads, dim].

    splits: programs that share the spans of a tile; rows: of a tile; both are chosen by the sizes if None. keys: of a
    tile."""
    bounds, prompt, page_table, longest, count, lineages = span_pass
    (_, heads, dim), (page_size, kv) = q.shape, k_cache.shape[1:3]
    group = heads // kv
    together = count if lineages is None else 1  # rows of a sequence that see the same keys up to a place
    if rows is None:
        most = _most_rows(q, k_cache)
        rows = most if prompt is not None else min(most, tile_side(together * group))
    rows = max(rows, next_power_of_2(group))
    tokens = max(1, rows // group) if lineages is None else 1
    tiles = None if prompt is None else prompt.tiles(tokens)
    sequences = len(bounds[0]) if tiles is None else 1
    per_sequence = cdiv(count, tokens) if tiles is None else len(tiles)
    programs = sequences * per_sequence * kv
    block = tile_side(dim)
    spans = cdiv(longest, SPAN)
    if window is not None:
        spans = min(spans, cdiv(window + tokens - 1, SPAN) + 1)
    few = rows if tiles is not None else min(rows, next_power_of_2(together * group))
    cells = programs * spans * few * (block + 2)
    if splits is None:
        splits = max(1, min(PROGRAMS * multiprocessors(q.device) // programs, spans))
        splits = splits if 4 * cells <= WORKSPACE else 1
    warps, stages = warps_and_stages(rows, block, is_fp32=q.element_size() == 4, is_spread=splits > 1)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    nodes, seen, width = (None, None, 0) if lineages is None else (*lineages, lineages.nodes.shape[1])
    partials, arrivals = out, out
    if splits > 1:
        partials, arrivals = reserve(q.device, cells, programs)
    span_attention_kernel[(kv, sequences * per_sequence, splits)](
        q, k_cache, v_cache, k_scale, v_scale, sinks, out, partials, arrivals, *bounds, tiles, nodes, seen, page_table,
        page_table.stride(0), q.stride(0), width, spans, count, per_sequence, window, dim**-0.5 * LOG2E,
        GROUP=group, KV=kv, DIM=dim, BLOCK_D=block, PAGE=page_size, TOKENS=tokens,
        ROWS=rows, FEW=few, KEYS=keys, SPAN=SPAN, SPREAD=splits > 1,
        AT_ONCE=max(1, min(16, 32 * warps // few)), **pdl(q), num_warps=warps, num_stages=stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _merge(acc, top, total, part, part_top, part_total):
    """Two partial softmaxes as one: weighted sums [M, D], maxima and sums of weights [M, 1], base 2."""
    peak = tl.maximum(top, part_top)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    fade, gain = tl.math.exp2(top - base), tl.math.exp2(part_top - base)
    return acc * fade + part * gain, peak, total * fade + part_total * gain


@triton.jit
def _finish_softmax(acc, top, total, sinks, query_head, v_scale):
    """The end of a softmax: a weighted sum [M, D] over the sum of its weights. The sinks of heads [M] come last.
    v_scale: of the values, or None."""
    if sinks is not None:
        acc, top, total = _merge(acc, top, total, 0.0, tl.load(sinks + query_head)[:, None] * _LOG2E, 1.0)
    acc = acc / tl.where(total > 0, total, 1.0)
    if v_scale is not None:
        acc = acc * v_scale
    return acc


@triton.jit
def _tokens(index, starts, ends, offsets, tiles, count, per_sequence, TOKENS: tl.constexpr):
    """Of a tile: its sequence, the first of its tokens among those of the pass, where the pass begins and ends in the
    sequence, and the row of q of its first token. See `_launch`."""
    if tiles is not None:
        sequence = tl.load(tiles + 2 * index)
        first = tl.load(tiles + 2 * index + 1).to(tl.int32)
        stop = tl.load(ends + sequence).to(tl.int32)
        offset = tl.load(offsets + sequence)
        start = tl.load(starts + sequence).to(tl.int32)
    else:
        sequence = (index // per_sequence).to(tl.int64)
        first = index % per_sequence * TOKENS
        start = tl.load(starts + sequence).to(tl.int32)
        stop = start + count
        offset = sequence * count
    return sequence, first, start, stop, offset


@triton.jit
def _slots(pages, lineage, key, start, high, page_stride, PAGE: tl.constexpr):
    """Where keys are stored; page 0, which is for padding, for keys from `high` on. lineage: of a node of a tree, whose
    keys from `start` on are its ancestors."""
    if lineage is None:
        slot = kv_slot(pages, key, PAGE, key < high)
    else:
        new = (key >= start) & (key < high)
        place = tl.where(new, start + tl.load(lineage + key - start, new, 0), key)
        slot = kv_slot(pages, place, PAGE, (key < high) & (place < page_stride * PAGE))
    return slot


@triton.jit(do_not_specialize=["page_stride", "q_stride", "width", "spans", "count", "per_sequence", "window"])
def span_attention_kernel(
    q, k_cache, v_cache, k_scale, v_scale, sinks, out, partials, arrivals, starts, ends, rows, offsets, tiles, lineages,
    seen, page_table, page_stride, q_stride, width, spans, count, per_sequence, window, scale,
    GROUP: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    SPREAD: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """spans: as many as a tile may have. FEW: rows of a tile that may be real. SPREAD: several programs share its
    spans; AT_ONCE: whose results are loaded before the first is used."""
    let_next_kernel_start(PDL)
    head, index, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_previous_kernel(PDL)
    sequence, first, start, stop, offset = _tokens(index, starts, ends, offsets, tiles, count, per_sequence, TOKENS)
    pages = page_table + tl.load(rows + sequence) * page_stride

    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    real = (row < TOKENS * GROUP) & (start + token < stop)
    query_head = head * GROUP + row % GROUP
    column = tl.arange(0, BLOCK_D)
    inside = (column < DIM)[None, :]
    source = q + ((offset + token) * q_stride + query_head * DIM)[:, None] + column[None, :]
    queries = tl.load(source, mask=real[:, None] & inside, other=0.0)
    if (k_cache.dtype.element_ty == tl.float8e4nv) & (queries.dtype == tl.bfloat16):  # see `stored_kv_triton`
        power, inverse = power_of_two(tl.max(tl.abs(queries.to(tl.float32)), 1)[:, None])
        queries, scale = (queries * inverse).to(tl.float16), scale * power
    newest = (start + token)[:, None]  # the last key that a row sees
    last = tl.minimum(start + first + TOKENS, stop)
    lineage = lineages
    if lineages is not None:  # a tile is one node
        lineage = lineages + (offset + first) * width
        last = start + tl.load(seen + offset + first)
        newest = last - 1
    low, high, oldest = 0, tl.minimum(last, page_stride * PAGE), 0
    if window is not None:  # pages before it may be others' by now
        oldest = tl.maximum((start + first if lineages is None else last - 1) - window + 1, 0)
        low = oldest // SPAN * SPAN
    skipped = low // SPAN
    filled = tl.cdiv(high, SPAN) - skipped
    if SPREAD:
        share = tl.cdiv(filled, tl.num_programs(2)) * SPAN
        low, high = low + split * share, tl.minimum(low + (split + 1) * share, high)

    v_by = v_scale
    if k_scale is not None:
        scale = scale * tl.load(k_scale + head)
    if v_scale is not None:
        v_by = tl.load(v_scale + head)
    size: tl.constexpr = FEW * (BLOCK_D + 2)
    program = index * KV + head
    parts = partials + program.to(tl.int64) * spans * size
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    top = tl.full([ROWS, 1], float("-inf"), tl.float32)
    ones = tl.full([KEYS, 16], 1.0, queries.dtype)
    total = tl.zeros([ROWS, 16], tl.float32)  # in every column
    whole = tl.zeros([ROWS, BLOCK_D], tl.float32)
    whole_top = tl.full([ROWS, 1], float("-inf"), tl.float32)
    whole_total = tl.zeros([ROWS, 1], tl.float32)
    # Pages are looked up a step before their keys are loaded, so that the pipeline fetches several steps ahead.
    slot = _slots(pages, lineage, low + tl.arange(0, KEYS), start, high, page_stride, PAGE)
    for at in tl.range(low, high, KEYS):
        key = at + tl.arange(0, KEYS)
        held = (key < high)[:, None]
        if window is not None:
            held = held & (key >= oldest)[:, None]
        place = (slot * (KV * DIM) + head * DIM)[:, None] + column[None, :]
        k = tl.load(k_cache + place, held & inside, 0.0)
        v = tl.load(v_cache + place, held & inside, 0.0)
        slot = _slots(pages, lineage, key + KEYS, start, high, page_stride, PAGE)
        scores = tl.dot(queries, k.to(queries.dtype).T, input_precision="ieee") * scale
        sees = key[None, :] <= newest
        if window is not None:
            sees = sees & (key[None, :] > newest - window)
        scores = tl.where(sees, scores, float("-inf"))
        # Keys that a row does not see change nothing: its maximum stays, and 0 is added.
        peak = tl.maximum(top, tl.max(scores, 1)[:, None])
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.math.exp2(scores - base).to(queries.dtype)
        shrink = tl.math.exp2(top - base)
        acc = tl.dot(weights, v.to(queries.dtype), acc * shrink, input_precision="ieee")
        total = tl.dot(weights, ones, total * shrink, input_precision="ieee")
        top = peak
        if ((at + KEYS) % SPAN == 0) | (at + KEYS >= high):
            sums = tl.max(total, 1)[:, None]
            if SPREAD:
                part = parts + (at // SPAN - skipped) * size
                tl.store(part + row[:, None] * BLOCK_D + column[None, :], acc, real[:, None])
                tl.store(part + FEW * BLOCK_D + row[:, None], top, real[:, None])
                tl.store(part + FEW * (BLOCK_D + 1) + row[:, None], sums, real[:, None])
            else:
                whole, whole_top, whole_total = _merge(whole, whole_top, whole_total, acc, top, sums)
            acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
            top = tl.full([ROWS, 1], float("-inf"), tl.float32)
            total = tl.zeros([ROWS, 16], tl.float32)

    if SPREAD:
        tl.debug_barrier()  # every thread has stored before one of them arrives
        if tl.atomic_add(arrivals + program, 1, sem="acq_rel") != tl.num_programs(2) - 1:
            return
        tl.store(arrivals + program, 0)
        few = tl.arange(0, FEW)
        token = first + few // GROUP
        real = (few < TOKENS * GROUP) & (start + token < stop)
        query_head = head * GROUP + few % GROUP
        cell, line, there = few[:, None] * BLOCK_D + column[None, :], few[:, None], real[:, None]
        mixed = tl.zeros([FEW, BLOCK_D], tl.float32)
        mixed_top = tl.full([FEW, 1], float("-inf"), tl.float32)
        mixed_total = tl.zeros([FEW, 1], tl.float32)
        for number in tl.range(0, filled, AT_ONCE, num_stages=1):
            accs, tops, totals = (), (), ()  # Triton knows no stars
            for step in tl.static_range(AT_ONCE):
                part, mask = parts + (number + step) * size, there & (line * 0 + number + step < filled)
                accs = accs + (tl.load(part + cell, mask, 0.0, cache_modifier=".cg"),)  # type: ignore[assignment]  # noqa: RUF005
                part += FEW * BLOCK_D
                tops = tops + (tl.load(part + line, mask, float("-inf"), cache_modifier=".cg"),)  # type: ignore[assignment]  # noqa: RUF005
                totals = totals + (tl.load(part + FEW + line, mask, 0.0, cache_modifier=".cg"),)  # type: ignore[assignment]  # noqa: RUF005
            tl.debug_barrier()  # all are asked for before the first is waited for
            for step in tl.static_range(AT_ONCE):
                mixed, mixed_top, mixed_total = _merge(
                    mixed, mixed_top, mixed_total, accs[step], tops[step], totals[step]
                )
        result = out + ((offset + token) * (KV * GROUP) + query_head)[:, None] * DIM + column[None, :]
        mixed = _finish_softmax(mixed, mixed_top, mixed_total, sinks, query_head, v_by)
        tl.store(result, mixed.to(out.dtype.element_ty), mask=there & inside)
    else:
        result = out + ((offset + token) * (KV * GROUP) + query_head)[:, None] * DIM + column[None, :]
        whole = _finish_softmax(whole, whole_top, whole_total, sinks, query_head, v_by)
        tl.store(result, whole.to(out.dtype.element_ty), mask=real[:, None] & inside)


def _most_rows(q: torch.Tensor, cache: torch.Tensor) -> int:
    if q.element_size() == 4:
        return FP32_ROWS
    if q.shape[2] > 256:
        return WIDE_ROWS
    return FP8_ROWS if cache.element_size() == 1 else ROWS
