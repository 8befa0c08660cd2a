"""Triton kernels from router logits to the order in which grouped GEMMs read their rows.

A token and one of its experts are a pair; pair t * width + j is token t's j-th choice. `Plan` has the pairs sorted by
expert, those of an expert in order of their tokens, and cut into blocks. Up to 16 tokens are routed and sorted in one
launch. More are routed in tiles of 16, which also count their pairs per expert; a second launch puts every pair in its
place. Each of its programs sums the counts itself or, with many tiles, reads the sums of a launch in between. As the
experts of a token differ, a tile is a matrix of tokens and experts, and the place of a pair is a sum down a column: no
atomics, no sorting network.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specbatch.kernels.common.pdl_triton import pdl, wait_for_previous_kernel
from specbatch.kernels.common.sizes import cdiv, next_power_of_2
from specbatch.kernels.dispatch import is_deterministic
from specbatch.kernels.moe.routing import Routing

TILE = 16  # tokens
FEW_TILES = 64  # up to this many, each program sums the counts itself, which is faster than another launch


class Plan(NamedTuple):
    """order int32 [pairs]: pairs sorted by expert. blocks int32 [bound, 3]: the expert of each block of rows, where it
    begins in `order` and where it ends; only the first `used` int32 [1] of them are filled, as the device knows."""

    order: torch.Tensor
    blocks: torch.Tensor
    used: torch.Tensor


def most_blocks(tokens: int, rule: Routing, rows: int) -> int:
    """Most blocks of `rows` rows that a routing of so many tokens can need."""
    pairs = tokens * rule.top_k
    hit = min(pairs, rule.experts)
    return hit + (pairs - hit) // rows + rule.shared * -(-tokens // rows)


def route(
    logits: torch.Tensor, rule: Routing, rows: int, few_tiles: int = FEW_TILES
) -> tuple[torch.Tensor, torch.Tensor, Plan]:
    """`route_ref` of logits [T, rule.logits], rows apart or not, and a plan in blocks of `rows` rows, 16 or more."""
    tokens, device = len(logits), logits.device
    assert logits.stride(1) == 1, "the logits of a token must be adjacent"
    assert rows >= TILE, f"blocks of {rows} rows are smaller than a tile"
    assert rule.top_k < 128, f"{rule.top_k} choices do not fit in an int8"
    weights = torch.empty(tokens, rule.width, device=device)
    experts = torch.empty(tokens, rule.width, device=device, dtype=torch.int32)
    plan = Plan(
        torch.empty(tokens * rule.width, device=device, dtype=torch.int32),
        torch.empty(most_blocks(tokens, rule, rows), 3, device=device, dtype=torch.int32),
        torch.empty(1, device=device, dtype=torch.int32),
    )
    # The order in which a softmax over all experts is summed depends on the shape of the tile.
    tile = TILE if is_deterministic() else min(TILE, next_power_of_2(tokens))
    tiles = cdiv(tokens, tile)
    columns = next_power_of_2(rule.experts)
    counts = torch.empty(tiles + 1 if tiles > 1 else 0, columns, device=device, dtype=torch.int32)
    slots = torch.empty(tiles if tiles > 1 else 0, columns, tile, device=device, dtype=torch.int8)
    settings = pdl(logits)
    sizes = {"E": rule.experts, "K": rule.top_k, "SHARED": rule.shared, "ROWS": rows, "COLUMNS": columns}
    _route_kernel[(tiles,)](
        logits, rule.bias, rule.factors, weights, experts, slots, counts, *plan, tokens, rule.scale,
        STRIDE=logits.stride(0), SIGMOID=rule.score == "sigmoid", BIASED=rule.bias is not None,
        NORMALISE=rule.normalise, GATED=rule.gated, GROUPS=rule.groups, TOP_GROUPS=rule.top_groups,
        BEST=rule.group_best, ALONE=tiles == 1, TILE=tile, PLACES=next_power_of_2(rule.width),
        WIDTH=min(columns, 32 * 16 // logits.element_size()), num_warps=min(8, tile), **sizes, **settings,
    )  # fmt: skip
    if tiles > few_tiles:
        _running_kernel[(cdiv(columns, 16),)](counts, tiles, COLUMNS=columns, BLOCK=128, num_warps=4, **settings)
    if tiles > 1:
        summed = tiles > few_tiles
        _place_kernel[(tiles,)](
            slots, counts, *plan, tokens, TILE=tile, SUMMED=summed, num_warps=8, **sizes, **settings
        )
    return weights, experts, plan


@triton.jit
def _ordered(x):
    """An int32 that orders like x, a NaN above all: rows of garbage choose valid experts, too."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(x == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def _unordered(key):
    """The float32 that `_ordered` makes this int32 of."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first_greatest(keys, ids, END: tl.constexpr):
    """The greatest key of each row, and the lowest of `ids` with it."""
    key = tl.max(keys, 1)
    return key, tl.min(tl.where(keys == key[:, None], ids[None, :], END), 1)


@triton.jit
def _in_best_groups(
    scores, ids, E: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, BEST: tl.constexpr, TILE: tl.constexpr
):
    """Is an expert in one of its token's TOP groups? By the sum of the BEST (1 or 2) greatest scores of a group; one
    with a NaN comes first."""
    SIZE: tl.constexpr = E // GROUPS
    ENDS: tl.constexpr = triton.next_power_of_2(GROUPS)
    LEAST: tl.constexpr = -2147483648
    names = tl.arange(0, ENDS)
    sums = tl.full([TILE, ENDS], -float("inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        inside = tl.where((ids // SIZE == group)[None, :], scores, -float("inf"))
        first = tl.max(inside, 1)
        total = first
        if BEST == 2:
            where_first = tl.min(tl.where(inside == first[:, None], ids[None, :], scores.shape[1]), 1)
            total += tl.max(tl.where(ids[None, :] == where_first[:, None], -float("inf"), inside), 1)
        broken = tl.max((inside != inside).to(tl.int32), 1) > 0  # the maxima hide it
        total = tl.where(broken, float("nan"), total)
        sums = tl.where(names[None, :] == group, total[:, None], sums)
    keys = tl.where((names < GROUPS)[None, :], _ordered(sums), LEAST)
    taken = tl.zeros(scores.shape, tl.int1)
    for _ in tl.static_range(TOP):
        _, best = _first_greatest(keys, names, ENDS)
        keys = tl.where(names[None, :] == best[:, None], LEAST, keys)
        taken = taken | (ids[None, :] // SIZE == best[:, None])
    return taken


@triton.jit
def _place(
    slot, totals, base, tile, order, blocks, used, tokens,
    E: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Write a tile's part of the order, and of the blocks.

    slot int32 [TILE, COLUMNS]: which choice of the token an expert is, or -1. totals and base int32 [COLUMNS]: the
    experts' pairs of all tiles and of those before this one.
    """
    row = tile * TILE + tl.arange(0, TILE)
    ids = tl.arange(0, COLUMNS)
    hit = (slot >= 0).to(tl.int32)
    before = tl.cumsum(hit, 0) - hit + base[None, :]
    # Pairs and blocks of each expert, summed at once; a tile alone has fewer pairs than 2 ** 15.
    HALF: tl.constexpr = 16 if ALONE else 32
    LOW: tl.constexpr = (1 << HALF) - 1
    sizes = (totals.to(tl.int32 if ALONE else tl.int64) << HALF) + tl.cdiv(totals, ROWS)
    ends = tl.cumsum(sizes, 0)
    starts = ends - sizes
    start, first = (starts >> HALF).to(tl.int32), (starts & LOW).to(tl.int32)
    end, last = (ends >> HALF).to(tl.int32), (ends & LOW).to(tl.int32)
    tl.store(order + start[None, :] + before, row[:, None] * (K + SHARED) + slot, slot >= 0)
    routed = tl.max(last, 0)
    shared = tl.cdiv(tokens, ROWS)  # blocks of each shared expert, and the most of another
    # A block has at least as many rows as a tile has tokens, so an expert has no more blocks than there are tiles: each
    # tile writes at most one block of each expert.
    mine, routed_block = first + tile < last, blocks + (first + tile) * 3
    begin = start + tile * ROWS
    tl.store(routed_block, ids, mine)
    tl.store(routed_block + 1, begin, mine)
    tl.store(routed_block + 2, tl.minimum(begin + ROWS, end), mine)
    if tile == 0:
        tl.store(used, routed + SHARED * shared)
    for j in tl.static_range(SHARED):
        pairs = (K + j) * tokens  # in `order` before those of this shared expert
        tl.store(order + pairs + row, row * (K + SHARED) + K + j, row < tokens)
        if tile < shared:
            block = blocks + (routed + j * shared + tile) * 3
            tl.store(block, E + j)
            tl.store(block + 1, pairs + tile * ROWS)
            tl.store(block + 2, pairs + tl.minimum((tile + 1) * ROWS, tokens))


@triton.jit
def _cells(tile, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Where a tile's [TILE, COLUMNS] lies in [tiles, COLUMNS, TILE], an order in which one thread reads all tokens of
    an expert."""
    return (tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]) * TILE + tl.arange(0, TILE)[:, None]


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits, bias, factors, weights, experts, slots, counts, order, blocks, used, tokens, scale, STRIDE: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, NORMALISE: tl.constexpr, GATED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, ALONE: tl.constexpr, TILE: tl.constexpr,
    PLACES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    LEAST: tl.constexpr = -2147483648
    # A 16-bit number widened to float32 ends in 13 zero bits. They take the expert's id, inverted so that the lower id
    # wins a tie: one maximum finds the first of the greatest.
    LAST_ID: tl.constexpr = 0x1FFF
    PACKED: tl.constexpr = not SIGMOID and logits.dtype.element_ty.primitive_bitwidth == 16 and COLUMNS <= LAST_ID + 1
    tile = tl.program_id(0)
    row = tile * TILE + tl.arange(0, TILE)
    ids, place = tl.arange(0, COLUMNS), tl.arange(0, PLACES)
    real, exists = row < tokens, (ids < E)[None, :]
    mine = logits + row.to(tl.int64) * STRIDE
    # The threads of a warp read WIDTH logits at once, 16 bytes each. A warp then has all of a token, whose maxima need
    # no shared memory.
    column = tl.arange(0, COLUMNS // WIDTH)[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    wait_for_previous_kernel(PDL)
    read = tl.load(mine[:, None, None] + column, real[:, None, None] & (column < E), other=0.0)
    gate = tl.full([TILE], 1.0, tl.float32)
    if GATED:
        gate = tl.sigmoid(tl.load(mine + E, real, other=0.0).to(tl.float32))
    scores = tl.reshape(read, [TILE, COLUMNS]).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(scores)
        if BIASED:
            scores += tl.load(bias + ids, ids < E, other=0.0)[None, :]
    allowed = exists
    if GROUPS > 1:
        allowed = exists & _in_best_groups(scores, ids, E, GROUPS, TOP_GROUPS, BEST, TILE)
    keys = _ordered(scores)
    if PACKED:
        keys = (keys & ~LAST_ID) | (LAST_ID - ids)[None, :]
    keys = tl.where(allowed, keys, LEAST)
    chosen = tl.zeros([TILE, PLACES], tl.int32) + E - K + place[None, :]  # already right for the shared experts
    values = tl.zeros([TILE, PLACES], tl.float32)
    top = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for j in tl.static_range(K):
        if PACKED:
            key = tl.max(keys, 1)
            best = LAST_ID - (key & LAST_ID)
            is_best = keys == key[:, None]
        else:
            key, best = _first_greatest(keys, ids, COLUMNS)
            is_best = ids[None, :] == best[:, None]
        keys = tl.where(is_best, LEAST + 1 + j, keys)  # less than that of any number
        if BIASED:
            value = tl.sigmoid(tl.load(mine + best, real, other=0.0).to(tl.float32))
        else:
            if PACKED:
                key = tl.where(key < 0, key | LAST_ID, key & ~LAST_ID)
            value = _unordered(key)
        if not SIGMOID:
            if j == 0:
                top = value
            value = tl.exp(value - top)
        total += value
        chosen = tl.where(place[None, :] == j, best[:, None], chosen)
        values = tl.where(place[None, :] == j, value[:, None], values)
    slot = tl.where((keys <= LEAST + K) & real[:, None], (keys & 0x7FFFFFFF) - 1, -1)
    routed = (place < K)[None, :]
    if SIGMOID:
        total += 1e-20
    elif not NORMALISE:
        total = tl.sum(tl.where(exists, tl.exp(scores - top[:, None]), 0.0), 1)
    if NORMALISE or not SIGMOID:
        values = values / total[:, None]
    values *= scale
    if factors is not None:
        values *= tl.load(factors + chosen, routed, other=1.0)
    if SHARED:
        values = tl.where(routed, values, gate[:, None])
    at = row.to(tl.int64)[:, None] * (K + SHARED) + place[None, :]
    inside = real[:, None] & (place < K + SHARED)[None, :]
    tl.store(weights + at, values, inside)
    tl.store(experts + at, chosen, inside)
    hits = tl.sum((slot >= 0).to(tl.int32), 0)
    if ALONE:
        nothing = tl.zeros([COLUMNS], tl.int32)
        _place(slot, hits, nothing, tile, order, blocks, used, tokens, E, K, SHARED, ROWS, COLUMNS, TILE, ALONE)
    else:
        tl.store(counts + tile * COLUMNS + ids, hits)
        tl.store(slots + _cells(tile, COLUMNS, TILE), slot.to(tl.int8))


@triton.jit(do_not_specialize=["tiles"])
def _running_kernel(counts, tiles, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """counts int32 [tiles + 1, COLUMNS] -> the sums of the rows before each; the last row's are the totals."""
    column = tl.program_id(0) * 16 + tl.arange(0, 16)
    inside = (column < COLUMNS)[None, :]
    wait_for_previous_kernel(PDL)
    total = tl.zeros([16], tl.int32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        at = counts + tile[:, None] * COLUMNS + column[None, :]
        mask = (tile < tiles)[:, None] & inside
        values = tl.load(at, mask, other=0)
        tl.store(at, tl.cumsum(values, 0) - values + total[None, :], mask)
        total += tl.sum(values, 0)
    tl.store(counts + tiles * COLUMNS + column, total, column < COLUMNS)


@triton.jit(do_not_specialize=["tokens"])
def _place_kernel(
    slots, counts, order, blocks, used, tokens,
    E: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr, SUMMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Put the pairs of a tile in their places. SUMMED: `_running_kernel` has summed the counts up."""
    tile = tl.program_id(0)
    ids = tl.arange(0, COLUMNS)
    wait_for_previous_kernel(PDL)
    slot = tl.load(slots + _cells(tile, COLUMNS, TILE)).to(tl.int32)
    if SUMMED:
        base = tl.load(counts + tile * COLUMNS + ids)
        totals = tl.load(counts + tl.num_programs(0) * COLUMNS + ids)
    else:
        base, totals = _sums(counts, tile, tl.num_programs(0), COLUMNS)
    _place(slot, totals, base, tile, order, blocks, used, tokens, E, K, SHARED, ROWS, COLUMNS, TILE, False)


@triton.jit
def _sums(counts, tile, tiles, COLUMNS: tl.constexpr):
    """int32 [COLUMNS]: the sums of counts [tiles, COLUMNS], of the rows before `tile` and of all."""
    SOME: tl.constexpr = 32  # loads in flight at once
    ids = tl.arange(0, COLUMNS)
    both = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, tiles, SOME):
        for i in tl.static_range(SOME):
            row = tl.zeros([COLUMNS], tl.int32) + start + i
            # 64 tiles have at most 1,024 pairs of an expert: two sums in one.
            both += tl.load(counts + row * COLUMNS + ids, row < tiles, other=0) * tl.where(row < tile, 65537, 1)
    return both >> 16, both & 0xFFFF
