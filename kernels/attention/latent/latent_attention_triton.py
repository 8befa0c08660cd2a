"""Triton kernels of `latent_attention`: attention of all heads to the latents.

Queries of all heads see the same keys, so a tile of query rows is some tokens with all of their heads, and a step
reads a block of latents once for both products. The keys of a verify may be split over programs; `_merge` then adds the
parts. Those of the pass itself are written before, so that prompts, chains and trees differ in the mask alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.latent.attend_latents_triton import attend_latents
from specbatch.kernels.attention.latent.latent_attention_configs import (
    LEAST_SPLIT,
    MOST_QUERIES,
    LatentTile,
    prefix_launch,
    tile_for,
)
from specbatch.kernels.attention.latent.latent_prefix_triton import latent_prefix_attention
from specbatch.kernels.attention.qkv_triton import write_latent
from specbatch.kernels.attention.queries import LOG2E, AttentionInputs, DecodeQueries, LatentLayout, Mask
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.attention.verify.prefix_attention_configs import PrefixWork
from specbatch.kernels.attention.verify.prefix_attention_triton import divide, merge_prefixes
from specbatch.kernels.attention.verify.verify_attention_configs import splits_for
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.common.sizes import cdiv, tile_side
from specbatch.kernels.common.workspace import reserve


@triton.jit(do_not_specialize=["n", "first_node"])
def latent_attention_kernel(
    q, k_cache, v_cache, k_scale, v_scale, out, partials, logs, page_table, tiles, bounds, slots, lengths, ancestors,
    prefixes, sums, n, first_node, capacity, width, bounds_stride, scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Query rows are (token, head), the heads of a token in a row. A decode or verify pass has `n` tokens for each of
    `lengths`; a prompt pass has spans, given by `tiles` and `bounds` (see `RaggedBatch`), and TOKENS tokens a tile.

    It attends to what follows `prefixes`, if they are given, and stores base-2 logarithms of sums to `sums`, too.
    With several splits (the second axis), each writes its part to partials [splits, rows, BLOCK_R] float32, and the
    base-2 logarithms of its sums to logs [splits, rows]; q has HEADS + 1 rows a token, of which the last is the key."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    if tiles is not None:
        span = tl.load(tiles + tl.program_id(2) * 2)
        begin_token = tl.load(tiles + tl.program_id(2) * 2 + 1)
        start = tl.load(bounds + span)
        tokens = tl.load(bounds + bounds_stride + span) - start
        pages = page_table + tl.load(bounds + 2 * bounds_stride + span) * width
        first_token = tl.load(bounds + 3 * bounds_stride + span)
        length = start
        end_token = tl.minimum(begin_token + TOKENS, tokens)
    else:
        sequence = tl.program_id(2).to(tl.int64)
        length = tl.load(lengths + sequence)
        start = length + first_node
        pages = page_table + tl.load(slots + sequence) * width
        first_token = sequence * n
        begin_token = start * 0
        end_token = begin_token + n
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = begin_token + row // HEADS, row % HEADS
    live = token < end_token
    position = (start + token).to(tl.int32)
    last = tl.minimum(begin_token + (tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // HEADS, end_token - 1)
    column, turning = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    inside, turns = column < RANK, turning < ROPE
    query = q + ((first_token + token) * (HEADS + 1) + head)[:, None] * (RANK + ROPE)
    q_latent = tl.load(query + column[None, :], live[:, None] & inside[None, :], 0.0)
    q_turned = tl.load(query + RANK + turning[None, :], live[:, None] & turns[None, :], 0.0)
    keys = start + last + 1
    word = None
    if ancestors is not None:
        word = tl.load(ancestors + first_token + token, live, 0)
        keys = start + n
    keys = tl.where(begin_token < end_token, tl.minimum(keys, capacity), 0)
    oldest = keys * 0
    if prefixes is not None:
        oldest = tl.minimum(tl.load(prefixes + sequence), length)  # less: a row of padding
    share = tl.cdiv(tl.cdiv(keys - oldest, splits), BLOCK_N) * BLOCK_N
    begin = (oldest + split * share).to(tl.int32)
    end = tl.minimum(begin + share, keys).to(tl.int32)
    average, log = attend_latents(
        q_latent, q_turned, k_cache, v_cache, k_scale, v_scale, pages, begin, end, scale, position, length, word,
        RANK, ROPE, PAGE, BLOCK_N,
    )  # fmt: skip
    target = (first_token + token) * HEADS + head
    mask = live[:, None] & inside[None, :]
    if splits == 1:
        tl.store(out + target[:, None] * RANK + column[None, :], average.to(out.dtype.element_ty), mask)
        if sums is not None:
            tl.store(sums + target, log, live)
    else:
        rows = tl.num_programs(2).to(tl.int64) * n * HEADS
        cell = split * rows + target
        tl.store(partials + cell[:, None] * BLOCK_R + column[None, :], average, mask)
        tl.store(logs + cell, log, live)


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge(partials, logs, out, sums, rows, splits, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """The output of a row from its splits', and the base-2 logarithm of its sum of weights."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_R)
    whole = tl.zeros([BLOCK_R], tl.float32)
    top, mass = float("-inf"), 0.0
    for split in range(splits):
        cell = split * rows.to(tl.int64) + row
        log = tl.load(logs + cell)
        part = tl.load(partials + cell * BLOCK_R + column, column < RANK, 0.0)
        higher = tl.maximum(top, log)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, gain = tl.exp2(top - base), tl.exp2(log - base)
        whole = whole * fade + part * gain
        mass = mass * fade + gain
        top = higher
    whole = whole / tl.where(mass == 0.0, 1.0, mass)
    tl.store(out + row * RANK + column, whole.to(out.dtype.element_ty), column < RANK)
    if sums is not None:
        tl.store(sums + row, top + tl.log2(mass))


def token_slots(queries: DecodeQueries) -> torch.Tensor:
    """KV slots of the tokens of a pass, int64 [T], the same for all layers; 0 for those that no page is for."""
    size, capacity = queries.page_size, queries.page_table.shape[1] * queries.page_size
    places = queries.lengths[:, None] + queries.first_node
    places = places + torch.arange(queries.num_queries, device=places.device)
    slots = kv_slots(queries.page_table, queries.slots[:, None], places.clamp(max=capacity - 1), size)
    return torch.where(places < capacity, slots, 0).flatten()


def latent_verify(
    queries: DecodeQueries,
    slots: torch.Tensor,
    inputs: AttentionInputs,
    mask: Mask,
    *,
    splits: int | None = None,
    tile: LatentTile | None = None,
    works: dict[Any, PrefixWork] | None = None,
    prefix_tile: LatentTile | None = None,
) -> torch.Tensor:
    """`LatentDecodeRef` of `queries`, whose tokens have the KV `slots` (`token_slots`).

    splits: how many programs share the keys of a tile; tile: its configuration; both are chosen by the sizes if None,
    as is prefix_tile. works: where a pass with shared prefixes keeps how its work is divided, for all of its layers.
    """
    count, capacity = queries.num_queries, queries.page_table.shape[1] * inputs.k_cache.shape[1]
    q = write_latent(inputs, slots)
    rows, batch = count * inputs.heads.count, len(queries.lengths)
    fp8 = inputs.k_cache.element_size() == 1
    tile = tile or tile_for(rows, q.element_size(), q.device, fp8=fp8)
    tiles = cdiv(rows, tile.block_m)
    splits = splits or splits_for(batch * tiles, tile.block_m, cdiv(capacity, LEAST_SPLIT), q.device)
    grid = tiles, splits, batch
    out = torch.empty(len(q), inputs.heads.count * inputs.v_cache.shape[-1], dtype=q.dtype, device=q.device)
    if queries.prefixes is None:
        _attend(q, inputs, out, grid, tile, queries.page_table, count, capacity, queries=queries)
        return out
    launch = prefix_launch(queries, inputs.heads.count, q.element_size(), fp8=fp8, tile=prefix_tile)
    works = {} if works is None else works
    key = launch, inputs.heads.count
    if key not in works:
        works[key] = divide(queries, inputs.heads, launch)
    found = latent_prefix_attention(q, queries, inputs, launch, works[key])
    own = torch.empty_like(out, dtype=torch.float32)
    sums = torch.empty(len(q), inputs.heads.count, dtype=torch.float32, device=q.device)
    _attend(q, inputs, own, grid, tile, queries.page_table, count, capacity, queries=queries, sums=sums)
    merge_prefixes(queries, inputs.heads, works[key], found, own, sums, out)
    return out


def latent_prefill(
    inputs: AttentionInputs, slots: torch.Tensor, spans: RaggedBatch, *, tile: LatentTile | None = None
) -> torch.Tensor:
    """`latent_prefill_ref`."""
    q, count = write_latent(inputs, slots), inputs.heads.count
    tile = tile or tile_for(MOST_QUERIES, q.element_size(), q.device, fp8=inputs.k_cache.element_size() == 1)
    tokens = max(1, tile.block_m // count)
    tiles = spans.tiles(tokens)
    grid = cdiv(tokens * count, tile.block_m), 1, len(tiles)
    capacity = spans.page_table.shape[1] * inputs.k_cache.shape[1]
    out = torch.empty(len(q), count * inputs.v_cache.shape[-1], dtype=q.dtype, device=q.device)
    _attend(q, inputs, out, grid, tile, spans.page_table, tokens, capacity, spans=(spans, tiles))
    return out


def _attend(
    q: torch.Tensor,
    inputs: AttentionInputs,
    out: torch.Tensor,
    grid: tuple[int, int, int],
    tile: LatentTile,
    page_table: torch.Tensor,
    tokens: int,
    capacity: int,
    *,
    queries: DecodeQueries | None = None,
    spans: tuple[RaggedBatch, torch.Tensor] | None = None,
    sums: torch.Tensor | None = None,
) -> None:
    """Attention to all keys, in `out` [T, count * rank], or given `sums` float32 [T, count] to those after the shared
    prefixes: then the logarithms to base 2 of the sums of weights are stored there.

    q: from `inputs`, whose keys are written. tokens: of each sequence of `queries`, or of a tile of `spans`, which
    come with their tiles."""
    _, heads, _, k_cache, v_cache, k_scale, v_scale = inputs
    assert isinstance(heads, LatentLayout)
    rows, rank, rope = len(q) * heads.count, heads.rank, heads.dim - heads.rank
    block, splits = 2 * tile_side(rank // 2), grid[1]
    partials, logs = out, out
    if splits > 1:
        held, _ = reserve(q.device, splits * rows * (block + 1), 0)
        partials, logs = held, held[splits * rows * block :]
    prefixes = None if sums is None or queries is None or queries.prefixes is None else queries.prefixes.lengths
    table, tiles = (None, None) if spans is None else (spans[0].table, spans[1])
    slots, lengths, ancestors, first = (
        (None, None, None, 0)
        if queries is None
        else (queries.slots, queries.lengths, queries.ancestors, queries.first_node)
    )
    latent_attention_kernel[grid](
        q, k_cache, v_cache, k_scale, v_scale, out, partials, logs, page_table, tiles, table, slots, lengths,
        ancestors, prefixes, sums, tokens, first, capacity, page_table.shape[1],
        0 if table is None else table.stride(0), heads.scale * LOG2E, HEADS=heads.count, RANK=rank, ROPE=rope,
        BLOCK_R=block, BLOCK_P=tile_side(rope), PAGE=k_cache.shape[1], BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, TOKENS=tokens, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows,)](partials, logs, out, sums, rows, splits, RANK=rank, BLOCK_R=block, num_warps=4)
