"""Triton attention to latents whose bits depend on a query's own keys alone: prompts, chunks, verifies, single tokens.

`span_attention_triton` for multi-head latent attention: spans of SPAN keys, counted from key 0, with a running maximum
each, merged in order by the program that has all of them, or by a kernel of its own after programs that have some each.
A node of a tree is a sequence of its own, in which its ancestors take the places that they would have in a chain.

Products are transposed: keys, and then the columns of a latent, are the 64 rows of a warpgroup's instruction (`wgmma`),
and query rows (tokens x heads) its columns. So one kind of instruction serves a single token and a prompt, queries stay
in shared memory, and an accumulator as wide as a latent fits into registers twice: of a span and of all spans.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.deterministic import span_attention_triton
from specbatch.kernels.attention.deterministic.span_attention_triton import (
    PROGRAMS,
    WORKSPACE,
    Lineages,
    SpanPass,
    _merge,
    _slots,
    _tokens,
)
from specbatch.kernels.attention.qkv import write_latent
from specbatch.kernels.attention.queries import LOG2E, AttentionInputs, DecodeQueries, LatentLayout, Mask
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.attention.stored_kv_triton import latent_scales, power_of_two
from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, multiprocessors, next_power_of_2, tile_side
from specbatch.kernels.common.workspace import reserve

SPAN = 128
KEYS, ROWS = 64, 32  # of a tile; KEYS divides SPAN, and ROWS, tokens times heads, is the most
FP32_KEYS, FP32_ROWS = 16, 16  # without TF32, in registers
WARPS, STAGES = 8, 2
AT_ONCE = 8  # spans that are loaded before the first is merged


def span_latent_prefill(
    inputs: AttentionInputs, slots: torch.Tensor, spans: RaggedBatch, *, splits: int | None = None, span: int = SPAN
) -> torch.Tensor:
    """`latent_prefill_ref`. splits: programs that share the spans of a tile, chosen by the sizes if None; span: keys of
    a span."""
    return _launch(write_latent(inputs, slots), inputs, SpanPass.prompt(spans), splits, span)


def span_latent_verify(queries: DecodeQueries) -> partial[torch.Tensor]:
    """The attention of a decode or verify pass for all layers: `LatentDecodeRef` of `queries`."""
    return partial(_verify, queries, *span_attention_triton.prepare(queries))


def _verify(
    queries: DecodeQueries,
    slots: torch.Tensor,
    lineages: Lineages | None,
    inputs: AttentionInputs,
    mask: Mask,
    *,
    splits: int | None = None,
    span: int = SPAN,
) -> torch.Tensor:
    return _launch(write_latent(inputs, slots), inputs, SpanPass.decode(queries, lineages), splits, span)


def _launch(
    q: torch.Tensor, inputs: AttentionInputs, span_pass: SpanPass, splits: int | None, span: int
) -> torch.Tensor:
    """q: from `inputs`, whose keys are written. Returns [T, count * rank]."""
    _, heads, positions, k_cache, v_cache, k_scale, v_scale = inputs
    assert isinstance(heads, LatentLayout)
    bounds, spans, page_table, longest, count, lineages = span_pass
    rank, rope, total = heads.rank, heads.dim - heads.rank, len(q) * heads.count
    keys, most = (FP32_KEYS, FP32_ROWS) if q.element_size() == 4 else (KEYS, ROWS)
    group = max(size for size in range(1, most + 1) if heads.count % size == 0)  # heads of a tile
    if spans is not None:
        rows, sequences = most, 1
    else:
        together = count if lineages is None else 1  # tokens that see the same keys up to a place
        rows, sequences = min(most, tile_side(together * group)), len(bounds[0])
    tokens = rows // group if lineages is None else 1
    tiles = None if spans is None else spans.tiles(tokens)
    per_sequence = cdiv(count, tokens) if tiles is None else len(tiles)
    programs = heads.count // group * sequences * per_sequence
    block, parts = max(64, next_power_of_2(rank)), cdiv(longest, span)
    cells = parts * total * (block + 2)
    if splits is None:
        splits = max(1, min(PROGRAMS * multiprocessors(q.device) // programs, parts))
        splits = splits if 4 * cells <= WORKSPACE else 1
    nodes, seen, width = (None, None, 0) if lineages is None else (*lineages, lineages.nodes.shape[1])
    out = torch.empty(len(q), heads.count * rank, dtype=q.dtype, device=q.device)
    partials = reserve(q.device, cells, 0)[0] if splits > 1 else out
    span_latents_kernel[(heads.count // group, sequences * per_sequence, splits)](
        q, k_cache, v_cache, k_scale, v_scale, out, partials, *bounds, tiles, nodes, seen, page_table,
        page_table.stride(0), q.stride(0), width, total, parts, count, per_sequence, heads.scale * LOG2E,
        HEADS=heads.count, GROUP=group, RANK=rank, BLOCK_R=block, ROPE=rope,
        BLOCK_P=tile_side(rope), PAGE=k_cache.shape[1], TOKENS=tokens, ROWS=rows, KEYS=keys,
        SPAN=span, SPREAD=splits > 1, **pdl(q), num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        merge_spans_kernel[(total,)](
            partials, positions, v_scale, out, total, parts, HEADS=heads.count, RANK=rank, BLOCK_R=block, SPAN=span,
            AT_ONCE=AT_ONCE, **pdl(q), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["page_stride", "width", "total", "spans", "count", "per_sequence"])
def span_latents_kernel(
    q, k_cache, v_cache, k_scale, v_scale, out, partials, starts, ends, page_rows, offsets, tiles, lineages, seen,
    page_table, page_stride, q_stride, width, total, spans, count, per_sequence, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_P: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SPAN: tl.constexpr, SPREAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SPREAD: several programs share the spans of a tile, and write sums [spans, total, BLOCK_R], maxima [spans, total]
    and sums of weights [spans, total] to partials; total: query rows of the pass."""
    tile, index, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_previous_kernel(PDL)
    sequence, first, start, stop, offset = _tokens(index, starts, ends, offsets, tiles, count, per_sequence, TOKENS)
    pages = page_table + tl.load(page_rows + sequence) * page_stride
    row = tl.arange(0, ROWS)
    token, head = first + row // GROUP, tile * GROUP + row % GROUP
    real = (row < TOKENS * GROUP) & (start + token < stop)
    target = (offset + token) * HEADS + head
    column, turning = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    inside, turns = column < RANK, turning < ROPE
    source = q + ((offset + token) * q_stride + head * (RANK + ROPE))[None, :]
    queries = tl.load(source + column[:, None], inside[:, None] & real[None, :], 0.0)
    turned_queries = tl.load(source + RANK + turning[:, None], turns[:, None] & real[None, :], 0.0)
    newest = (start + token)[None, :]  # the last key that a row sees
    last = tl.minimum(start + first + TOKENS, stop)
    lineage = lineages
    if lineages is not None:  # a tile is one node
        lineage = lineages + (offset + first) * width
        last = start + tl.load(seen + offset + first)
        newest = last - 1
    low, high = 0, tl.minimum(last, page_stride * PAGE)
    if SPREAD:
        share = tl.cdiv(tl.cdiv(high, SPAN), tl.num_programs(2)) * SPAN
        low, high = split * share, tl.minimum((split + 1) * share, high)

    turned_scale, ratio = latent_scales(scale, k_scale, v_scale)
    if (k_cache.dtype.element_ty == tl.float8e4nv) & (queries.dtype == tl.bfloat16):  # see `stored_kv_triton`
        largest = tl.max(tl.abs(turned_queries.to(tl.float32)), 0)
        largest = tl.maximum(largest, tl.max(tl.abs(queries.to(tl.float32)), 0))
        power, inverse = power_of_two(largest[None, :])
        queries, turned_queries = (queries * inverse).to(tl.float16), (turned_queries * inverse).to(tl.float16)
        turned_scale *= power
    ones = tl.full([64, KEYS], 1.0, queries.dtype)  # 64 rows of an instruction
    acc, top = tl.zeros([BLOCK_R, ROWS], tl.float32), tl.full([1, ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([64, ROWS], tl.float32)  # in every row
    whole, whole_top = tl.zeros([BLOCK_R, ROWS], tl.float32), tl.full([1, ROWS], float("-inf"), tl.float32)
    whole_mass = tl.zeros([1, ROWS], tl.float32)
    # Pages are looked up a step before their keys are loaded, so that the pipeline fetches several steps ahead.
    slot = _slots(pages, lineage, low + tl.arange(0, KEYS), start, high, page_stride, PAGE)
    for at in tl.range(low, high, KEYS):
        key = at + tl.arange(0, KEYS)
        held = (key < high)[:, None]
        latent = tl.load(v_cache + (slot * RANK)[:, None] + column[None, :], held & inside[None, :], 0.0)
        turned = tl.load(k_cache + (slot * ROPE)[:, None] + turning[None, :], held & turns[None, :], 0.0)
        slot = _slots(pages, lineage, key + KEYS, start, high, page_stride, PAGE)
        latent, turned = latent.to(queries.dtype), turned.to(queries.dtype)
        scores = tl.dot(latent, queries, input_precision="ieee")
        if (k_scale is not None) | (v_scale is not None):
            scores *= ratio
        scores = tl.dot(turned, turned_queries, scores, input_precision="ieee") * turned_scale
        scores = tl.where(key[:, None] <= newest, scores, float("-inf"))
        # Keys that a row does not see change nothing: its maximum stays, and 0 is added.
        peak = tl.maximum(top, tl.max(scores, 0)[None, :])
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.math.exp2(scores - base).to(queries.dtype)
        shrink = tl.math.exp2(top - base)
        acc = tl.dot(latent.T, weights, acc * shrink, input_precision="ieee")
        mass = tl.dot(ones, weights, mass * shrink, input_precision="ieee")
        top = peak
        if ((at + KEYS) % SPAN == 0) | (at + KEYS >= high):
            sums = tl.max(mass, 0)[None, :]
            if SPREAD:
                cell = (at // SPAN) * total.to(tl.int64) + target
                rest = partials + spans.to(tl.int64) * total * BLOCK_R + cell[None, :]
                tl.store(partials + cell[None, :] * BLOCK_R + column[:, None], acc, real[None, :])
                tl.store(rest, top, real[None, :])
                tl.store(rest + spans.to(tl.int64) * total, sums, real[None, :])
            else:
                whole, whole_top, whole_mass = _merge(whole, whole_top, whole_mass, acc, top, sums)
            acc, top = tl.zeros([BLOCK_R, ROWS], tl.float32), tl.full([1, ROWS], float("-inf"), tl.float32)
            mass = tl.zeros([64, ROWS], tl.float32)
    if not SPREAD:
        whole = whole / tl.where(whole_mass > 0, whole_mass, 1.0)
        if v_scale is not None:
            whole *= tl.load(v_scale)
        place = out + target[None, :] * RANK + column[:, None]
        tl.store(place, whole.to(out.dtype.element_ty), inside[:, None] & real[None, :])


@triton.jit(do_not_specialize=["total", "spans"])
def merge_spans_kernel(
    partials, positions, v_scale, out, total, spans,
    HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, SPAN: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The output of a query row from its spans, by the operations of the program that has all of them. A token sees as
    many keys as its position says."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_R)
    inside, one = (column < RANK)[:, None], tl.zeros([1, 1], tl.int32)
    wait_for_previous_kernel(PDL)
    filled = tl.minimum(tl.load(positions + row // HEADS) // SPAN + 1, spans).to(tl.int32)
    rest = partials + spans.to(tl.int64) * total * BLOCK_R
    whole, top = tl.zeros([BLOCK_R, 1], tl.float32), tl.full([1, 1], float("-inf"), tl.float32)
    mass = tl.zeros([1, 1], tl.float32)
    for number in tl.range(0, filled, AT_ONCE, num_stages=1):
        accs, tops, masses = (), (), ()  # Triton knows no stars
        for step in tl.static_range(AT_ONCE):
            exists = one + number + step < filled
            cell = (number + step) * total.to(tl.int64) + row + one
            accs = accs + (tl.load(partials + cell * BLOCK_R + column[:, None], inside & exists, 0.0),)  # type: ignore[assignment]  # noqa: RUF005
            tops = tops + (tl.load(rest + cell, exists, float("-inf")),)  # type: ignore[assignment]  # noqa: RUF005
            masses = masses + (tl.load(rest + spans.to(tl.int64) * total + cell, exists, 0.0),)  # type: ignore[assignment]  # noqa: RUF005
        tl.debug_barrier()  # all are asked for before the first is waited for
        for step in tl.static_range(AT_ONCE):
            whole, top, mass = _merge(whole, top, mass, accs[step], tops[step], masses[step])
    whole = whole / tl.where(mass > 0, mass, 1.0)
    if v_scale is not None:
        whole *= tl.load(v_scale)
    tl.store(out + row * RANK + column[:, None], whole.to(out.dtype.element_ty), inside)
