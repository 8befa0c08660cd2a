"""Triton kernels of `latent_attention`: attention of all heads to the latents.

Queries of all heads see the same keys, so a tile of query rows is some tokens with all of their heads, and a step
reads a block of latents once for both products. The keys of a verify may be split over programs; `_merge` then adds the
parts. Those of the pass itself are written before, so that prompts, chains and trees differ in the mask alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specbatch.kernels.attention.qkv_triton import write_latent
from specbatch.kernels.attention.queries import AttentionInputs, DecodeQueries, LatentLayout, Mask
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.attention.stored_kv_triton import fp8_pairs, power_of_two
from specbatch.kernels.attention.verify.verify_attention_configs import splits_for
from specbatch.kernels.common.e4m3_triton import dequantize_e4m3
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.common.sizes import cdiv, tile_side
from specbatch.kernels.common.workspace import reserve

_LOG2E = tl.constexpr(1.4426950408889634)
_LEAST_SPLIT = 256  # keys that are worth a program of their own


@dataclass(frozen=True)
class LatentTile:
    """Query rows (tokens x heads) and keys of a step, warps of a program, stages of its pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# A row of the output is as wide as a latent: of 512 numbers, 64 rows take 128 registers of each of 256 threads.
FEW, MANY = LatentTile(16, 32, 4, 2), LatentTile(64, 32, 8, 2)
FP32 = LatentTile(32, 32, 8, 2)  # with 64 rows, shared memory would not hold the keys of an FP8 cache besides


def tile_for(rows: int, item: int) -> LatentTile:
    """For a sequence's `rows` query rows, of `item` bytes a value."""
    if rows <= FEW.block_m:
        return FEW
    return FP32 if item == 4 else MANY


@triton.jit(do_not_specialize=["n", "first_node"])
def latent_attention_kernel(
    q, k_cache, v_cache, k_scale, v_scale, out, partials, logs, page_table, tiles, bounds, slots, lengths, ancestors,
    n, first_node, capacity, width, bounds_stride, scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Query rows are (token, head), the heads of a token in a row. A decode or verify pass has `n` tokens for each of
    `lengths`; a prompt pass has spans, given by `tiles` and `bounds` (see `RaggedBatch`), and TOKENS tokens a tile.

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
    position = start + token
    last = tl.minimum(begin_token + (tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // HEADS, end_token - 1)
    column, turning = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    inside, turns = column < RANK, turning < ROPE
    query = q + ((first_token + token) * (HEADS + 1) + head)[:, None] * (RANK + ROPE)
    q_latent = tl.load(query + column[None, :], live[:, None] & inside[None, :], 0.0)
    q_turned = tl.load(query + RANK + turning[None, :], live[:, None] & turns[None, :], 0.0)
    keys = start + last + 1
    if ancestors is not None:
        word = tl.load(ancestors + first_token + token, live, 0)
        keys = start + n
    keys = tl.where(begin_token < end_token, tl.minimum(keys, capacity), 0)
    share = tl.cdiv(tl.cdiv(keys, splits), BLOCK_N) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, keys)
    latent_scale, turned_scale = scale, scale
    if v_scale is not None:  # latents are keys, too
        latent_scale = scale * tl.load(v_scale)
    if k_scale is not None:
        turned_scale = scale * tl.load(k_scale)
    ratio = latent_scale / turned_scale
    # In FP8, a warp's instructions take keys from registers in float16 (`stored_kv_triton`). Those of a warpgroup (64
    # rows) take them, and queries as they are, from shared memory.
    FP8: tl.constexpr = v_cache.dtype.element_ty == tl.float8e4nv
    PAIRS: tl.constexpr = FP8 and BLOCK_M == 16
    if PAIRS and q_latent.dtype == tl.bfloat16:
        largest = tl.max(tl.abs(q_turned.to(tl.float32)), 1)
        largest = tl.maximum(largest, tl.max(tl.abs(q_latent.to(tl.float32)), 1))
        power, inverse = power_of_two(largest[:, None])
        q_latent, q_turned = (q_latent * inverse).to(tl.float16), (q_turned * inverse).to(tl.float16)
        turned_scale *= power
    wide: tl.constexpr = q_latent.dtype
    if PAIRS:
        pair = tl.arange(0, BLOCK_R // 2)
        paired = pair < RANK // 2
        q_one, q_two = tl.split(tl.reshape(q_latent, (BLOCK_M, BLOCK_R // 2, 2)))
        one, two = tl.zeros([BLOCK_M, BLOCK_R // 2], tl.float32), tl.zeros([BLOCK_M, BLOCK_R // 2], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for at in range(begin, end, BLOCK_N):
        key = at + tl.arange(0, BLOCK_N)
        exists = key < end
        page = tl.load(pages + key // PAGE, exists, 0)
        slot = page * PAGE + key % PAGE
        turned = tl.load(k_cache + slot[:, None] * ROPE + turning[None, :], exists[:, None] & turns[None, :], 0.0)
        if PAIRS:
            place = v_cache.to(tl.pointer_type(tl.int16)) + slot[:, None] * (RANK // 2) + pair[None, :]
            first, second = fp8_pairs(tl.load(place, exists[:, None] & paired[None, :], 0), wide)
            scores = tl.dot(q_one, tl.trans(first), input_precision="ieee")
            scores = tl.dot(q_two, tl.trans(second), scores, input_precision="ieee")
        else:
            place = v_cache + slot[:, None] * RANK + column[None, :]
            latent = tl.load(place, exists[:, None] & inside[None, :], 0.0)
            if FP8:
                latent, turned = dequantize_e4m3(latent, wide), dequantize_e4m3(turned, wide)
            scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        if (k_scale is not None) | (v_scale is not None):
            scores *= ratio
        scores = tl.dot(q_turned, tl.trans(turned.to(wide)), scores, input_precision="ieee") * turned_scale
        if ancestors is not None:
            node = key - length
            bit = (word[:, None] >> tl.minimum(tl.maximum(node, 0), 63)[None, :]) & 1
            seen = exists[None, :] & ((node < 0)[None, :] | (bit == 1))
        else:
            seen = exists[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        weights = weights.to(wide)
        if PAIRS:
            one = tl.dot(weights, first, one * fade[:, None], input_precision="ieee")
            two = tl.dot(weights, second, two * fade[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights, latent, acc * fade[:, None], input_precision="ieee")
        peak = higher
    if PAIRS:
        acc = tl.reshape(tl.join(one, two), (BLOCK_M, BLOCK_R))
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale is not None:
        acc *= tl.load(v_scale)
    target = (first_token + token) * HEADS + head
    mask = live[:, None] & inside[None, :]
    if splits == 1:
        tl.store(out + target[:, None] * RANK + column[None, :], acc.to(out.dtype.element_ty), mask)
    else:
        rows = tl.num_programs(2).to(tl.int64) * n * HEADS
        cell = split * rows + target
        tl.store(partials + cell[:, None] * BLOCK_R + column[None, :], acc, mask)
        tl.store(logs + cell, peak + tl.log2(total), live)


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge(partials, logs, out, rows, splits, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """The output of a row from its splits'."""
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
) -> torch.Tensor:
    """`LatentDecodeRef` of `queries`, whose tokens have the KV `slots` (`token_slots`).

    splits: how many programs share the keys of a tile; tile: its configuration; both are chosen by the sizes if None.
    """
    count, capacity = queries.num_queries, queries.page_table.shape[1] * inputs.k_cache.shape[1]
    q = write_latent(inputs, slots)
    rows, batch = count * inputs.heads.count, len(queries.lengths)
    tile = tile or tile_for(rows, q.element_size())
    tiles = cdiv(rows, tile.block_m)
    splits = splits or splits_for(batch * tiles, tile.block_m, cdiv(capacity, _LEAST_SPLIT), q.device)
    grid = tiles, splits, batch
    return _attend(q, inputs, grid, tile, queries.page_table, count, capacity, queries=queries)


def latent_prefill(
    inputs: AttentionInputs, slots: torch.Tensor, spans: RaggedBatch, *, tile: LatentTile | None = None
) -> torch.Tensor:
    """`latent_prefill_ref`."""
    q, count = write_latent(inputs, slots), inputs.heads.count
    tile = tile or tile_for(MANY.block_m, q.element_size())
    tokens = max(1, tile.block_m // count)
    tiles = spans.tiles(tokens)
    grid = cdiv(tokens * count, tile.block_m), 1, len(tiles)
    capacity = spans.page_table.shape[1] * inputs.k_cache.shape[1]
    return _attend(q, inputs, grid, tile, spans.page_table, tokens, capacity, spans=(spans, tiles))


def _attend(
    q: torch.Tensor,
    inputs: AttentionInputs,
    grid: tuple[int, int, int],
    tile: LatentTile,
    page_table: torch.Tensor,
    tokens: int,
    capacity: int,
    *,
    queries: DecodeQueries | None = None,
    spans: tuple[RaggedBatch, torch.Tensor] | None = None,
) -> torch.Tensor:
    """q: from `inputs`, whose keys are written. tokens: of each sequence of `queries`, or of a tile of `spans`, which
    come with their tiles."""
    _, heads, _, k_cache, v_cache, k_scale, v_scale = inputs
    assert isinstance(heads, LatentLayout)
    rows, rank, rope = len(q) * heads.count, heads.rank, heads.dim - heads.rank
    out = torch.empty(len(q), heads.count * rank, dtype=q.dtype, device=q.device)
    block, splits = 2 * tile_side(rank // 2), grid[1]
    partials, logs = out, out
    if splits > 1:
        held, _ = reserve(q.device, splits * rows * (block + 1), 0)
        partials, logs = held, held[splits * rows * block :]
    table, tiles = (None, None) if spans is None else (spans[0].table, spans[1])
    slots, lengths, ancestors, first = (
        (None, None, None, 0)
        if queries is None
        else (queries.slots, queries.lengths, queries.ancestors, queries.first_node)
    )
    latent_attention_kernel[grid](
        q, k_cache, v_cache, k_scale, v_scale, out, partials, logs, page_table, tiles, table, slots, lengths,
        ancestors, tokens, first, capacity, page_table.shape[1], 0 if table is None else table.stride(0),
        heads.scale * _LOG2E.value, HEADS=heads.count, RANK=rank, ROPE=rope, BLOCK_R=block,
        BLOCK_P=tile_side(rope), PAGE=k_cache.shape[1], BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, TOKENS=tokens, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows,)](partials, logs, out, rows, splits, RANK=rank, BLOCK_R=block, num_warps=4)
    return out
